"""Sentences that a study's table supports: differences beyond noise, better sizes, where curves turn up.

Every sentence that a page generates about runs is made in this module or from its decisions. A difference is
reported only if it exceeds the noise floor of differences.py: the scatter of runs that differ only in their
seed, or else the law's noise. The sampling error of the held-out text is not part of it, because all runs are
scored on the same text.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron.report.study_data import AUTOREGRESSIVE, RepeatedRow, RunPoint, Study
from megatron.study.cells import Side
from megatron.study.differences import (
    NoiseFloor,
    bonferroni_quantile,
    estimate_error,
    estimate_noise_floors,
    log_ratio_to_nats,
)
from megatron.study.format import (
    OBJECTIVE_NAMES,
    format_count,
    format_digits,
    format_exponent,
    format_interval,
    format_plural,
    join_list,
)
from megatron.study.run_row import FinishedRow

LEVEL = 0.95
Z = 2.0  # standard errors of a score
AnyRow = TypeVar("AnyRow", bound=FinishedRow)


@dataclass(frozen=True)
class NoiseFloors:
    """Noise floors of a study by objective (differences.py); an objective without an estimate is absent."""

    floors: dict[str, NoiseFloor]

    def margin(self, a: FinishedRow, b: FinishedRow) -> float | None:
        """Return the smallest difference of two losses, in nats, that exceeds the noise; None if unknown."""
        # the interval is for log loss; log_ratio_to_nats converts its half width to nats at these losses
        half = self._half_width(a, b)
        return None if half is None else log_ratio_to_nats(Side("", (a,)), Side("", (b,)), half)

    def is_lower(self, a: FinishedRow, b: FinishedRow) -> bool:
        """Return whether the loss of `a` is below that of `b` by more than the noise; False if unknown."""
        half = self._half_width(a, b)
        # in log loss, where the noise floor is one number for all sizes: 3.00 and 3.03 differ by log(1.01) =
        # 0.00995
        return half is not None and math.log(b.loss / a.loss) > half

    def _half_width(self, a: FinishedRow, b: FinishedRow) -> float | None:
        """Return half the width of the interval of the log-loss difference; None if the noise is unknown."""
        error = estimate_error([a], [b], self.floors)
        # error = (standard error, degrees of freedom); with sigma = 0.2 % and 8 degrees of freedom the half
        # width is 2.31 x 0.2 % x sqrt(2) = 0.65 %
        return None if error is None else bonferroni_quantile(LEVEL, error[1]) * error[0]


def collect_noise_floors(study: Study) -> NoiseFloors:
    """Return the scatter of single runs: pooled over cells with several seeds, or else the law's noise."""
    return NoiseFloors(estimate_noise_floors(study.finished_rows(), study.laws))


def select_best(rows: Sequence[AnyRow], key: Callable[[AnyRow], float]) -> list[AnyRow]:
    """Return the run of lowest loss for each value of `key`, in ascending order of the value."""
    best: dict[float, AnyRow] = {}
    for row in rows:
        value = key(row)
        if value not in best or row.loss < best[value].loss:
            best[value] = row
    return [best[value] for value in sorted(best)]


def select_size_level(study: Study) -> list[FinishedRow]:
    """Return the best run of each size at the largest budget with at least two sizes of one objective."""
    for objective in (AUTOREGRESSIVE, *study.objectives()):
        done = study.finished_rows(objective)
        # from the largest budget down: its order of the sizes is the closest to that of larger budgets
        for D in reversed(study.budgets(done)):
            level = select_best([row for row in done if row.train_tokens == D], lambda row: row.n_params)
            if len(level) > 1:
                return level
    return []


def describe_sizes(study: Study) -> str:
    """Return a sentence on which size is better at equal tokens; empty without two sizes to compare."""
    level = select_size_level(study)
    if not level:
        return ""
    noise = collect_noise_floors(study)
    best, worst = (choose(level, key=lambda row: row.loss) for choose in (min, max))
    margin = noise.margin(best, worst)
    after = f"fter {format_count(level[0].train_tokens)} tokens"
    what = name_loss(study, best)
    # each size against the next smaller one: every step must exceed the noise
    if all(noise.is_lower(large, small) for small, large in zip(level, level[1:], strict=False)):
        return (
            f"Larger is better: a{after} the {what} falls with every size, from {level[0].loss:.2f} "
            f"({study.size_name(level[0].n_params)}) to {level[-1].loss:.2f} "
            f"({study.size_name(level[-1].n_params)})"
        )
    if best.loss == worst.loss:
        return f"A{after} all {len(level)} sizes have the same {what}, {best.loss:.2f}"
    if margin is not None and not noise.is_lower(best, worst):
        return (
            f"A{after} no size is clearly better: the {what} of {len(level)} sizes is between "
            f"{best.loss:.2f} and {worst.loss:.2f}, within its noise of {format_digits(margin, 2)}"
        )
    tied = [row for row in level if row is not best and margin is not None and not noise.is_lower(best, row)]
    names = join_list([study.size_name(row.n_params) for row in tied])
    more = f"; within the noise of the lowest: {names}" if tied else ""
    more = "; their noise is unknown" if margin is None else more
    return (
        f"A{after} the {study.size_name(best.n_params)} model has the lowest {what}, {best.loss:.2f}, "
        f"the {study.size_name(worst.n_params)} model the highest, {worst.loss:.2f}{more}"
    )


def name_loss(study: Study, row: FinishedRow) -> str:
    """Return 'held-out loss', with its objective if the study has several."""
    if len(study.objectives()) < 2:
        return "held-out loss"
    return f"{OBJECTIVE_NAMES.get(row.objective, row.objective)} held-out loss"


def describe_envelope(study: Study, rows: Sequence[RunPoint], lower: Sequence[RunPoint]) -> str:
    """Return a sentence on how the lowest loss of one objective falls with compute; empty for a single run.

    lower: the rows with a lower loss than every run of equal or less compute, in ascending order of compute
    """
    if len(rows) < 2 or not lower:
        return ""
    objective = OBJECTIVE_NAMES.get(lower[0].objective, lower[0].objective)
    first, last = lower[0], lower[-1]
    start = f"{format_exponent(first.C)}"
    if len(lower) < 2:
        return f"No {objective} run beats the cheapest, {first.loss:.2f} at {start} FLOPs"
    noise = collect_noise_floors(study)
    ends = f"From {start} to {format_exponent(last.C)} FLOPs the lowest {objective} loss"
    values = f"from {first.loss:.2f} to {last.loss:.2f}"
    if noise.margin(first, last) is not None and not noise.is_lower(last, first):
        return f"{ends} does not fall by more than the noise: {values}"
    decades = math.log10(last.C / first.C)
    # under one decade a slope per tenfold would be an extrapolation
    if decades < 1:
        return f"{ends} falls {values}"
    per_decade = (first.loss - last.loss) / decades
    return f"{ends} falls {values}, {per_decade:.2f} nats for each tenfold of compute"


def describe_turns(study: Study, lines: Sequence[Sequence[RepeatedRow]]) -> str:
    """Return a clause on the epochs at which the loss curves are lowest. `lines`: runs of each curve."""
    noise = collect_noise_floors(study)
    lines = [select_best(rows, lambda row: row.epochs) for rows in lines]
    lines = [rows for rows in lines if len(rows) > 1]
    if not lines:
        return ""
    lowest = [min(rows, key=lambda row: row.loss) for rows in lines]
    # a line turns up if its last point is above its minimum by more than the noise
    turned = [
        low for rows, low in zip(lines, lowest, strict=True)
        if _is_above(noise, low, rows[-1])
    ]  # fmt: skip
    if turned:
        first = min(row.epochs for row in turned)
        return (
            f"{len(turned)} of {format_plural(len(lines), 'line')} turn up, the earliest after "
            f"{format_digits(first, 2)} epochs"
        )
    last = format_interval(
        [choose(rows[-1].epochs for rows in lines) for choose in (min, max)],
        lambda value: format_digits(value, 2),
    )
    # the last two points: a line falls to its end if the last but one is above the last
    falling = sum(_is_above(noise, rows[-1], rows[-2]) for rows in lines)
    if falling == len(lines):
        return f"the loss still falls at {last} epochs in every line"
    return (
        f"to {last} epochs no line clearly turns up, and {falling} of {len(lines)} clearly fall to their end"
    )


def _is_above(noise: NoiseFloors, low: FinishedRow, high: FinishedRow) -> bool:
    """Return whether the loss of `high` is above that of `low`, by more than the noise if it is known."""
    if noise.margin(low, high) is None:
        return high.loss > low.loss
    return noise.is_lower(low, high)


def describe_gap(study: Study, pairs: Sequence[tuple[FinishedRow, FinishedRow]]) -> str:
    """Return a sentence on the loss gap of pairs (autoregressive, masked diffusion)."""
    noise = collect_noise_floors(study)
    gaps = [second.loss - first.loss for first, second in pairs]
    apart = format_interval([min(gaps), max(gaps)], "{:.2f}".format)
    if all(_is_above(noise, first, second) for first, second in pairs):
        return f"At equal tokens the masked-diffusion bound is {apart} nats above the autoregressive loss"
    # in either direction: a pair counts as clear also if the bound is below the loss
    clear = sum(_is_above(noise, *pair) or _is_above(noise, *pair[::-1]) for pair in pairs)
    return (
        f"Masked-diffusion bound minus autoregressive loss at equal tokens: {apart} nats, beyond the noise "
        f"in {clear} of {format_plural(len(pairs), 'pair')}"
    )


def describe_rank_correlation(task: str, L: np.ndarray, y: np.ndarray, falls: bool) -> str:
    """Return a clause on whether a task's score [n] follows the loss [n]: Kendall's tau at 5 %.

    falls: True if a score rises as the loss falls (accuracy), False if it falls with the loss (error)
    """
    from scipy.stats import kendalltau  # imports slowly

    # Kendall's tau uses ranks only, since the relation of loss and score is not linear
    rank, p_value = kendalltau(L, y)
    if not math.isfinite(rank):
        return f"{task} does not vary with the loss"
    expected = rank < 0 if falls else rank > 0
    verb = "follows" if expected and p_value < 1 - LEVEL else "does not clearly follow"
    return f"{task} {verb} the loss (rank correlation {rank:.2f}, {len(L)} runs)"


def describe_trend(x: dict[str, np.ndarray], y: np.ndarray) -> str:
    """Return a clause on the trend of y [n] (%) over log10 of each x [n]: the steepest significant slope.

    Slopes pass a two-sided t test at 5 % in total, Bonferroni-corrected for the number of x.
    """
    from scipy.special import stdtrit  # slow import

    slopes = {}
    for letter, values in x.items():
        # 3 runs leave one degree of freedom, whose t quantile of 12.7 hardly any slope exceeds
        if len(np.unique(values)) < 2 or len(y) < 4:
            continue
        # least squares through the mean: slope = <x, y> / <x, x> with centred x
        along = np.log10(values) - np.log10(values).mean()
        slope = float(along @ y / (along @ along))
        left = y - y.mean() - slope * along
        # n - 2 degrees of freedom: slope and mean are estimated
        error = math.sqrt(float(left @ left) / (len(y) - 2) / float(along @ along))
        # with 3 letters each test is at 5 / 3 %: p = 1 - 0.05 / 2 / 3 = 0.9917 in the quantile
        if abs(slope) > float(stdtrit(len(y) - 2, 1 - (1 - LEVEL) / 2 / len(x))) * error:
            slopes[letter] = slope
    if not slopes:
        return f"no clear trend over {join_list(list(x))}"
    letter = max(slopes, key=lambda name: abs(slopes[name]))
    way = "rise" if slopes[letter] > 0 else "fall"
    return f"{way} by {abs(slopes[letter]):.2f} % for each tenfold {letter}"
