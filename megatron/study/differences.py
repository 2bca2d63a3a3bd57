"""Differences of held-out loss between runs, with intervals from the noise floor: is run A better than run B?

Runs that differ only in their seed show the scatter of a run. The variance of log loss is pooled over all
cells of several seeds of one objective (one variance for all, as in an analysis of variance). Where no cell
is repeated, it is the scatter around a fitted law. A difference of means of n_a and n_b seeds has the
variance sigma^2 (1/n_a + 1/n_b) and Student's t with the degrees of freedom of sigma^2. Variances of two
objectives, or of text, are added with the degrees of freedom of Welch and Satterthwaite.

Two runs scored on the same text share its sampling error: `loss_se`, the error over samples of text, is no
part of their difference, and does not measure the scatter between seeds. Where the texts differ it is added.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from megatron.laws.fitting.noise import pool_cells
from megatron.laws.law import Law
from megatron.study.cells import (
    Side,
    cell_flops,
    find_side,
    group_cells,
    group_sides,
    is_same_text,
    make_side,
    mean_loss,
)
from megatron.study.run_row import RunRow, ScoredRow

LEVEL = 0.95
MAX_SEEDS = 50  # largest number of seeds per cell that is proposed


@dataclass(frozen=True)
class NoiseFloor:
    """Standard deviation of log loss of runs of one objective that differ only in their seed.

    sigma     standard deviation of one run, relative to its loss
    dof       degrees of freedom of sigma^2; for cells that share trunks, trunks minus 1
    interval  chi-square interval of sigma, at `level`
    source    "seeds": cells of several seeds; "law": the scatter around a fitted law, misfit included
    n_cells, n_runs  numbers of cells and runs of the estimate; n_cells is 0 for a law
    text_se   median standard error of a loss over samples of the held-out text, nats; None if unknown.
              Runs scored on the same text share it
    """

    sigma: float
    dof: float
    interval: tuple[float, float]
    source: str
    n_cells: int
    n_runs: int
    text_se: float | None = None
    level: float = LEVEL

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """Difference A minus B. Below 0, A has the lower loss.

    difference, interval           nats per token
    relative, relative_interval    relative to the loss of B: L_a / L_b - 1
    se, dof         standard error of log(L_a / L_b), and the degrees of freedom of Student's t
    p_value         two-sided, times n_comparisons, at most 1
    level           at which the intervals of all n_comparisons hold together (Bonferroni)
    verdict         "better" (A is), "worse" or "undecided"
    reason          reason for a missing interval; "" with an interval
    n_seeds_to_decide  seeds of each side that would decide a difference of this size; None if it is decided,
                    unknown, or more than MAX_SEEDS
    """

    a: str
    b: str
    n_a: int
    n_b: int
    loss_a: float
    loss_b: float
    difference: float
    relative: float
    verdict: str
    level: float
    n_comparisons: int = 1
    interval: tuple[float, float] | None = None
    relative_interval: tuple[float, float] | None = None
    se: float | None = None
    dof: float | None = None
    p_value: float | None = None
    text_se: float | None = None
    n_seeds_to_decide: int | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self)


def estimate_noise_floor(
    rows: Sequence[RunRow], objective: str, law: Law | None = None, level: float = LEVEL
) -> NoiseFloor | None:
    """Estimate the noise floor of one objective from repeated seeds, otherwise from the scatter around `law`.

    None if there is no cell with two seeds of different loss and no law with a scatter.
    """
    of_objective = [row for row in rows if row.objective == objective]
    cells = [cell for cell in group_cells(of_objective) if len(cell) > 1]
    text = [row.loss_se for row in of_objective if row.loss_se]
    text_se = float(np.median(text)) if text else None
    if cells:
        log_loss = np.log([row.loss for cell in cells for row in cell])
        pooled = pool_cells(log_loss, np.repeat(np.arange(len(cells)), [len(cell) for cell in cells]))
        if pooled.sum_squares > pooled.dof * 1e-24:  # equal losses are copies of a run, not repeats
            sigma = math.sqrt(pooled.variance)
            dof: float = _independent_dof(cells)
            ends = _sigma_interval(sigma, dof, level)
            return NoiseFloor(sigma, dof, ends, "seeds", pooled.n_cells, pooled.n_runs, text_se, level)
    if law is not None and law.spread > 0:
        dof = float(law.noise["dof"]) if law.noise else math.inf
        return NoiseFloor(
            law.spread, dof, _sigma_interval(law.spread, dof, level), "law", 0, law.n_runs, text_se, level
        )
    return None


def estimate_noise_floors(
    rows: Sequence[RunRow], laws: Mapping[str, Law] | None = None, level: float = LEVEL
) -> dict[str, NoiseFloor]:
    """Estimate the noise floor of each objective that has one."""
    floors = {}
    for objective in dict.fromkeys(row.objective for row in rows if row.objective):
        floor = estimate_noise_floor(rows, objective, (laws or {}).get(objective), level)
        if floor is not None:
            floors[objective] = floor
    return floors


def _independent_dof(cells: Sequence[Sequence[ScoredRow]]) -> int:
    """Return the degrees of freedom of the pooled variance, where cells may share trunks.

    Branches of one trunk share most of its scatter. Cells that share trunks are counted together as trunks
    minus 1, the degrees of freedom if branches share all of it.
    """
    # Trunks {a, b}, {b, c} and {x, y} of three cells of two runs: clusters {a, b, c} and {x, y}, so 2 + 1
    # degrees of freedom. Trunks are merged transitively.
    clusters: list[set[str]] = []
    alone = 0
    for cell in cells:
        trunks = {row.trunk or row.run for row in cell}
        if len(trunks) < len(cell):  # a table without names
            alone += len(cell) - 1
            continue
        # merge all clusters that share a trunk with this cell
        touching = [cluster for cluster in clusters if cluster & trunks]
        clusters = [cluster for cluster in clusters if not cluster & trunks]
        clusters.append(trunks.union(*touching))
    return alone + sum(len(cluster) - 1 for cluster in clusters)


def _sigma_interval(sigma: float, dof: float, level: float) -> tuple[float, float]:
    """Return an interval for a standard deviation: dof s^2 / sigma^2 is chi-square."""
    from scipy.special import chdtri  # slow import

    if math.isinf(dof):
        return sigma, sigma
    tails = ((1 - level) / 2, (1 + level) / 2)
    # chdtri(dof, p) is the value above which chi-square has probability p: the smaller p gives the lower end
    low, high = (sigma * math.sqrt(dof / float(chdtri(dof, tail))) for tail in tails)
    return low, high


def estimate_error(
    a: Sequence[ScoredRow],
    b: Sequence[ScoredRow],
    floors: Mapping[str, NoiseFloor],
    paired: tuple[float, float] | None = None,
) -> tuple[float, float] | None:
    """Estimate (standard error, degrees of freedom) of mean log loss of `a` minus that of `b`.

    Returns None if it is unknown.

    `paired` is (standard error in nats of the difference over documents of text, its degrees of freedom).
    """
    parts: list[tuple[float, float]] = []  # (variance, degrees of freedom)
    weights: dict[str, float] = {}
    # sides of one objective share its sigma^2: variances of their means add to sigma^2 (1/n_a + 1/n_b)
    for rows in (a, b):
        objective = str(rows[0].objective)
        weights[objective] = weights.get(objective, 0.0) + 1 / len(rows)
    for objective, weight in weights.items():
        floor = floors.get(objective)
        if floor is None:
            return None
        parts.append((floor.sigma**2 * weight, floor.dof))
    # d log L = dL / L: an error in nats is divided by a loss
    mean = math.sqrt(mean_loss(a) * mean_loss(b))
    if paired is not None:
        parts.append(((paired[0] / mean) ** 2, paired[1]))
    elif not is_same_text(a, b):
        for rows in (a, b):
            errors = [row.loss_se or 0.0 for row in rows]  # 0: unknown
            if not all(errors):
                return None
            # Seeds of one side share their text, so its error does not shrink with their number. It is a mean
            # over many samples of text: its degrees of freedom count as Inf.
            parts.append(((max(errors) / mean_loss(rows)) ** 2, math.inf))
    # Welch and Satterthwaite: dof = (sum v)^2 / sum(v^2 / dof_v)
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / dof for part, dof in parts)
    return math.sqrt(variance), variance**2 / spread if spread else math.inf


def bonferroni_quantile(level: float, dof: float, n_comparisons: int = 1) -> float:
    """Return the two-sided t quantile for `n_comparisons` simultaneous intervals (Bonferroni)."""
    from scipy.special import stdtrit  # slow import

    # 1e9 degrees of freedom are numerically normal; dof may be Inf
    return float(stdtrit(min(dof, 1e9), 1 - (1 - level) / 2 / n_comparisons))


def compare_runs(
    rows: Sequence[RunRow],
    a: str | Side,
    b: str | Side,
    *,
    level: float = LEVEL,
    laws: Mapping[str, Law] | None = None,
    n_comparisons: int = 1,
    paired: tuple[float, float] | None = None,
) -> Difference:
    """Compare two runs, or two cells of several seeds, with the noise floor of `rows`.

    a, b           runs or cells, as for find_side
    n_comparisons  number of simultaneous comparisons: all their intervals hold together at `level`
    paired         (standard error in nats, degrees of freedom) of the mean difference of the two runs' losses
                   over documents; the verdict then also holds for other text of the same distribution
    Without a noise floor the verdict is "undecided", and `reason` names the seeds to train.

    Raises ValueError for a name that fits no run or several cells, or for two sides that share a run.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1.")
    first, second = (side if isinstance(side, Side) else find_side(rows, side) for side in (a, b))
    if set(first.rows) & set(second.rows):
        raise ValueError(f"{first.name} and {second.name} share a run, expected two different runs or cells.")
    return _compute_difference(
        first, second, estimate_noise_floors(rows, laws, level), level, n_comparisons, paired
    )


def _compute_difference(
    a: Side,
    b: Side,
    floors: Mapping[str, NoiseFloor],
    level: float,
    n_comparisons: int = 1,
    paired: tuple[float, float] | None = None,
) -> Difference:
    from scipy.special import stdtr  # slow import

    ratio = a.log_loss - b.log_loss
    undecided = Difference(
        a=a.name, b=b.name, n_a=a.n_seeds, n_b=b.n_seeds, loss_a=a.loss, loss_b=b.loss,
        difference=a.loss - b.loss, relative=math.expm1(ratio), verdict="undecided", level=level,
        n_comparisons=n_comparisons,
    )  # fmt: skip
    error = estimate_error(a.rows, b.rows, floors, paired)
    if error is None:
        return replace(undecided, reason=_explain_missing_interval(a, b, floors))
    se, dof = error
    half = bonferroni_quantile(level, dof, n_comparisons) * se
    verdict = "undecided" if abs(ratio) <= half else "better" if ratio < 0 else "worse"
    p_value = float(2 * stdtr(min(dof, 1e9), -abs(ratio) / se)) if se else float(ratio == 0)
    return replace(
        undecided,
        verdict=verdict,
        interval=(log_ratio_to_nats(a, b, ratio - half), log_ratio_to_nats(a, b, ratio + half)),
        relative_interval=(math.expm1(ratio - half), math.expm1(ratio + half)),
        se=se,
        dof=dof,
        p_value=min(1.0, p_value * n_comparisons),
        text_se=None if paired is None else paired[0],
        n_seeds_to_decide=None
        if verdict != "undecided"
        else _seeds_to_decide(a, b, ratio, floors, bonferroni_quantile(level, dof, n_comparisons), paired),
    )


def log_ratio_to_nats(a: Side, b: Side, ratio: float) -> float:
    """Convert log(L_a / L_b) to nats: L_a - L_b = 2 sqrt(L_a L_b) sinh(log(L_a / L_b) / 2)."""
    # L_b (exp(ratio) - 1) is equal at the estimate but not at the ends of an interval: it is not
    # antisymmetric in A and B, and this is.
    return 2 * math.sqrt(a.loss * b.loss) * math.sinh(ratio / 2)


def _seeds_to_decide(
    a: Side,
    b: Side,
    ratio: float,
    floors: Mapping[str, NoiseFloor],
    t: float,
    paired: tuple[float, float] | None,
) -> int | None:
    """Return the seeds per side that would decide a difference of this size, at the present t quantile."""
    # variance of one run against one, divided by n below; the error over text stays
    single = estimate_error(a.rows[:1], b.rows[:1], floors)
    text = 0.0 if paired is None else paired[0] ** 2 / (a.loss * b.loss)
    if single is None or not is_same_text(a.rows, b.rows):
        return None
    for n in range(max(a.n_seeds, b.n_seeds) + 1, MAX_SEEDS + 1):
        if t * math.sqrt(single[0] ** 2 / n + text) < abs(ratio):
            return n
    return None


def _explain_missing_interval(a: Side, b: Side, floors: Mapping[str, NoiseFloor]) -> str:
    """Return the reason for a missing interval, and the runs that would give one."""
    without_floor = [side for side in (a, b) if side.objective not in floors]
    if not without_floor:
        return "The runs were scored on different texts, and the error of each score (loss_se) is unknown."
    words = []
    # The last value of a key remains: of two sides of one objective, seeds of the one with fewer FLOPs are
    # named.
    for side in {
        side.objective: side for side in sorted(without_floor, key=cell_flops, reverse=True)
    }.values():
        used_seeds = {row.seed for row in side.rows}
        new_seeds = [seed for seed in range(len(used_seeds) + 2) if seed not in used_seeds][:2]
        words.append(f"seeds {new_seeds[0]} and {new_seeds[1]} of {side.name}")
    return f"There is no noise floor: no cell has several seeds. Train {' and '.join(words)}."


def compare_best(
    rows: Sequence[RunRow],
    *,
    same: str = "compute",
    level: float = LEVEL,
    laws: Mapping[str, Law] | None = None,
) -> list[list[Difference]]:
    """Compare the cell of lowest mean loss with every other one, within each compute or each objective.

    Returns a list for each group of two cells or more, by objective and increasing compute. The best cell is
    selected by the same losses, so each group is corrected for all of its pairs of cells.
    Raises ValueError for another `same`.
    """
    if same not in ("compute", "objective"):
        raise ValueError(f"same: got {same!r}, expected compute or objective.")
    floors = estimate_noise_floors(rows, laws, level)
    groups = []
    for group in group_sides(rows, same):
        best = min(group, key=lambda side: side.log_loss)
        # the best of 4 cells may be any of them, so 6 pairs count although only 3 are tested
        n_pairs = len(group) * (len(group) - 1) // 2
        others = sorted((side for side in group if side is not best), key=lambda side: side.log_loss)
        groups.append([_compute_difference(best, other, floors, level, n_pairs) for other in others])
    return groups


def compare_repeated(
    rows: Sequence[RunRow], *, level: float = LEVEL, laws: Mapping[str, Law] | None = None
) -> list[Difference]:
    """Compare all pairs of cells of several seeds of one objective, lower loss first, with correction."""
    floors = estimate_noise_floors(rows, laws, level)
    sides = [make_side(cell) for cell in group_cells(rows) if len(cell) > 1]
    sides.sort(key=lambda side: side.log_loss)
    pairs = [(a, b) for a, b in combinations(sides, 2) if a.objective == b.objective]
    return [_compute_difference(a, b, floors, level, len(pairs)) for a, b in pairs]
