"""What a study's table supports: differences beyond the noise, which size is better, where a line turns up.

Every sentence that a page generates about runs is made here or from what is decided here. A difference is
called one only beyond the noise floor of differences.py: the scatter of runs that differ in their seed alone,
else the law's noise. The error of scores over samples of text is shared by runs that are scored on one text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from megatron.scaling import wording
from megatron.scaling.cells import Side
from megatron.scaling.differences import NoiseFloor, error_of, in_nats, noise_floors, quantile
from megatron.scaling.study import AUTOREGRESSIVE, Study
from megatron.scaling.table import Row

LEVEL = 0.95
Z = 2.0  # standard errors of a score


@dataclass(frozen=True)
class Noise:
    """The noise floors of a study by objective (differences.py); absent where nothing shows one."""

    floors: dict[str, NoiseFloor]

    def margin(self, a: Row, b: Row) -> float | None:
        """By how many nats the losses of two runs must differ to be called different; None: not known."""
        half = self._half_width(a, b)
        return None if half is None else in_nats(Side("", (a,)), Side("", (b,)), half)

    def is_lower(self, a: Row, b: Row) -> bool:
        """Whether the loss of `a` is below that of `b` by more than the noise; False where none is known."""
        half = self._half_width(a, b)
        return half is not None and math.log(b["loss"] / a["loss"]) > half

    def _half_width(self, a: Row, b: Row) -> float | None:
        """Of an interval for the difference of log loss."""
        error = error_of([a], [b], self.floors)
        return None if error is None else quantile(LEVEL, error[1]) * error[0]


def noise_of(study: Study) -> Noise:
    """The scatter of single runs: pooled over cells that differ in their seed alone, else the law's."""
    return Noise(noise_floors(study.done(), study.laws))


def best_of(rows: Sequence[Row], key: str) -> list[Row]:
    """The run of lowest loss for each value of a column, in the order of these values."""
    best: dict[float, Row] = {}
    for row in rows:
        if row[key] is not None and (row[key] not in best or row["loss"] < best[row[key]]["loss"]):
            best[row[key]] = row
    return [best[value] for value in sorted(best)]


def size_level(study: Study) -> list[Row]:
    """The best run of each size at the largest budget that has two sizes or more of one objective."""
    for objective in (AUTOREGRESSIVE, *study.objectives()):
        done = study.done(objective)
        for D in reversed(study.budgets(done)):
            level = best_of([row for row in done if row["train_tokens"] == D], "n_params")
            if len(level) > 1:
                return level
    return []


def size_claim(study: Study) -> str:
    """Which size is better at equal tokens; empty without two sizes to compare."""
    level = size_level(study)
    if not level:
        return ""
    noise = noise_of(study)
    best, worst = (choose(level, key=lambda row: row["loss"]) for choose in (min, max))
    margin = noise.margin(best, worst)
    after = f"fter {wording.count(level[0]['train_tokens'])} tokens"
    what = loss_name(study, best)
    if all(noise.is_lower(large, small) for small, large in zip(level, level[1:], strict=False)):
        return (
            f"Larger is better: a{after} the {what} falls with every size, from {level[0]['loss']:.2f} "
            f"({study.size_name(level[0]['n_params'])}) to {level[-1]['loss']:.2f} "
            f"({study.size_name(level[-1]['n_params'])})"
        )
    if best["loss"] == worst["loss"]:
        return f"A{after} all {len(level)} sizes have the same {what}, {best['loss']:.2f}"
    if margin is not None and not noise.is_lower(best, worst):
        return (
            f"A{after} no size is clearly better: the {what} of {len(level)} sizes is between "
            f"{best['loss']:.2f} and {worst['loss']:.2f}, within its noise of {wording.digits(margin, 2)}"
        )
    tied = [row for row in level if row is not best and margin is not None and not noise.is_lower(best, row)]
    names = wording.listed([study.size_name(row["n_params"]) for row in tied])
    more = f"; within the noise of the lowest: {names}" if tied else ""
    more = "; how noisy they are is not known" if margin is None else more
    return (
        f"A{after} the {study.size_name(best['n_params'])} model has the lowest {what}, {best['loss']:.2f}, "
        f"the {study.size_name(worst['n_params'])} model the highest, {worst['loss']:.2f}{more}"
    )


def loss_name(study: Study, row: Row) -> str:
    """'held-out loss', with its objective where the study has several."""
    if len(study.objectives()) < 2:
        return "held-out loss"
    return f"{wording.OBJECTIVES.get(row['objective'], row['objective'])} held-out loss"


def envelope_claim(study: Study, rows: Sequence[Row], lower: Sequence[Row]) -> str:
    """How the lowest loss of one objective falls with compute; empty for a single run.

    `lower` are those of `rows` that no cheaper or equally cheap run beats, cheap to dear.
    """
    if len(rows) < 2 or not lower:
        return ""
    objective = wording.OBJECTIVES.get(lower[0]["objective"], lower[0]["objective"])
    first, last = lower[0], lower[-1]
    start = f"{wording.exponent(first['train_flops'])}"
    if len(lower) < 2:
        return f"No {objective} run beats the cheapest, {first['loss']:.2f} at {start} FLOPs"
    noise = noise_of(study)
    ends = f"From {start} to {wording.exponent(last['train_flops'])} FLOPs the lowest {objective} loss"
    values = f"from {first['loss']:.2f} to {last['loss']:.2f}"
    if noise.margin(first, last) is not None and not noise.is_lower(last, first):
        return f"{ends} does not fall by more than the noise: {values}"
    decades = math.log10(last["train_flops"] / first["train_flops"])
    if decades < 1:
        return f"{ends} falls {values}"
    each = (first["loss"] - last["loss"]) / decades
    return f"{ends} falls {values}, {each:.2f} nats for each tenfold of compute"


def turn_claim(study: Study, lines: Sequence[Sequence[Row]]) -> str:
    """At how many epochs lines of loss against epochs are lowest; each line's runs by rising epochs."""
    noise = noise_of(study)
    lines = [best_of(rows, "epochs") for rows in lines]
    lines = [rows for rows in lines if len(rows) > 1]
    if not lines:
        return ""
    lowest = [min(rows, key=lambda row: row["loss"]) for rows in lines]
    turned = [
        low for rows, low in zip(lines, lowest, strict=True)
        if _rises(noise, low, rows[-1])
    ]  # fmt: skip
    if turned:
        first = min(row["epochs"] for row in turned)
        return (
            f"{len(turned)} of {wording.plural(len(lines), 'line')} turn up, the earliest after "
            f"{wording.digits(first, 2)} epochs"
        )
    last = wording.interval(
        [choose(rows[-1]["epochs"] for rows in lines) for choose in (min, max)],
        lambda value: wording.digits(value, 2),
    )
    falling = sum(_rises(noise, rows[-1], rows[-2]) for rows in lines)
    if falling == len(lines):
        return f"the loss still falls at {last} epochs in every line"
    return (
        f"to {last} epochs no line clearly turns up, and {falling} of {len(lines)} clearly fall to their end"
    )


def _rises(noise: Noise, low: Row, high: Row) -> bool:
    """Whether `high` has a loss above that of `low`, by more than the noise where one is known."""
    if noise.margin(low, high) is None:
        return high["loss"] > low["loss"]
    return noise.is_lower(low, high)


def gap_claim(study: Study, pairs: Sequence[tuple[Row, Row]]) -> str:
    """By how much the second of each pair (autoregressive, masked diffusion) lies above the first."""
    noise = noise_of(study)
    gaps = [second["loss"] - first["loss"] for first, second in pairs]
    apart = wording.interval([min(gaps), max(gaps)], "{:.2f}".format)
    if all(_rises(noise, first, second) for first, second in pairs):
        return f"At equal tokens the masked-diffusion bound is {apart} nats above the autoregressive loss"
    clear = sum(_rises(noise, *pair) or _rises(noise, *pair[::-1]) for pair in pairs)
    return (
        f"Masked-diffusion bound minus autoregressive loss at equal tokens: {apart} nats, beyond the noise "
        f"in {clear} of {wording.plural(len(pairs), 'pair')}"
    )


def follow_claim(task: str, L: np.ndarray, y: np.ndarray, falls: bool) -> str:
    """Whether a task's score [n] follows the loss [n], by Kendall's rank correlation at 5 %.

    `falls`: a lower loss should bring a higher score; else a lower one, as of an error.
    """
    from scipy.stats import kendalltau  # imports slowly

    rank, p_value = kendalltau(L, y)
    if not math.isfinite(rank):
        return f"{task} does not vary with the loss"
    expected = rank < 0 if falls else rank > 0
    verb = "follows" if expected and p_value < 1 - LEVEL else "does not clearly follow"
    return f"{task} {verb} the loss (rank correlation {rank:.2f}, {len(L)} runs)"


def trend_claim(x: dict[str, np.ndarray], y: np.ndarray) -> str:
    """Whether y [n] (%) rises with log10 of any x [n]: the steepest that passes a t test, 5 % over all."""
    found = {}
    for letter, values in x.items():
        if len(np.unique(values)) < 2 or len(y) < 4:
            continue
        along = np.log10(values) - np.log10(values).mean()
        slope = float(along @ y / (along @ along))
        left = y - y.mean() - slope * along
        error = math.sqrt(float(left @ left) / (len(y) - 2) / float(along @ along))
        if abs(slope) > float(stdtrit(len(y) - 2, 1 - (1 - LEVEL) / 2 / len(x))) * error:
            found[letter] = slope
    if not found:
        return f"no clear trend over {wording.listed(list(x))}"
    letter = max(found, key=lambda name: abs(found[name]))
    way = "rise" if found[letter] > 0 else "fall"
    return f"{way} by {abs(found[letter]):.2f} % for each tenfold {letter}"
