"""Is run A better than run B? Differences of held-out loss with intervals against the noise floor.

Runs that differ in their seed alone show how far a run scatters. The variance of log loss is pooled over all
cells of several seeds of one objective (one variance for all: the assumption of an analysis of variance), or
it is the scatter around a fitted law where no cell is repeated. A difference of means of n_a and n_b seeds
has variance sigma^2 (1/n_a + 1/n_b) and Student's t with the degrees of freedom of sigma^2; variances of two
objectives, or of text, are added with the degrees of freedom of Welch and Satterthwaite.

Two runs scored on the same text share its sampling error: `loss_se`, the error over samples of text, is no
part of their difference, and says nothing of another seed. Where the texts differ it is added.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import chdtri, stdtr, stdtrit

from megatron.scaling.cells import (
    Side,
    cells_of,
    cost_of,
    find_side,
    groups_of,
    mean_loss,
    same_text,
    side_of,
)
from megatron.scaling.law import Law
from megatron.scaling.noise import pool_cells
from megatron.scaling.table import Row

LEVEL = 0.95
MOST_SEEDS = 50  # of one cell that are worth proposing


@dataclass(frozen=True)
class NoiseFloor:
    """Standard deviation of log loss of runs that differ in their seed alone, of one objective.

    sigma     of one run, relative to its loss
    dof       degrees of freedom of sigma^2; of cells that share trunks, trunks minus 1
    interval  of sigma by chi-square, at `level`
    source    "seeds": cells of several seeds; "law": the scatter around a fitted law, misfit included
    n_cells, n_runs  that it was estimated from; of a law n_cells is 0
    text_se   median standard error of a loss over samples of the held-out text, nats; None where not known.
              Shared by runs that were scored on the same text
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
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """A minus B. Below 0, A has the lower loss.

    difference, interval           nats a token
    relative, relative_interval    of B's loss: L_a / L_b - 1
    se, dof         standard error of log(L_a / L_b), and the degrees of freedom of Student's t
    p_value         two-sided, times n_comparisons, at most 1
    level           at which the intervals of all n_comparisons hold together (Bonferroni)
    verdict         "better" (A is), "worse" or "undecided"
    reason          why there is no interval; "" where there is one
    n_seeds_to_decide  seeds of each side that would decide a difference of this size; None where it is
                    decided, unknown, or more than MOST_SEEDS
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
        """For JSON."""
        return asdict(self)


def noise_floor(
    rows: Sequence[Row], objective: str, law: Law | None = None, level: float = LEVEL
) -> NoiseFloor | None:
    """The noise floor of one objective, from repeated seeds, else from the scatter around `law`.

    None where neither shows it: no cell with two seeds of different loss, and no law with residuals.
    """
    of_objective = [row for row in rows if row.get("objective") == objective]
    cells = [cell for cell in cells_of(of_objective) if len(cell) > 1]
    text = [row["loss_se"] for row in of_objective if row.get("loss_se")]
    text_se = float(np.median(text)) if text else None
    if cells:
        log_loss = np.log([row["loss"] for cell in cells for row in cell])
        pooled = pool_cells(log_loss, np.repeat(np.arange(len(cells)), [len(cell) for cell in cells]))
        if pooled.sum_squares > pooled.dof * 1e-24:  # equal losses are copies of a run, not repeats
            sigma, dof = math.sqrt(pooled.variance), _independent_dof(cells)
            ends = _sigma_interval(sigma, dof, level)
            return NoiseFloor(sigma, dof, ends, "seeds", pooled.n_cells, pooled.n_runs, text_se, level)
    if law is not None and law.spread > 0:
        dof = float(law.noise["dof"]) if law.noise else math.inf
        return NoiseFloor(
            law.spread, dof, _sigma_interval(law.spread, dof, level), "law", 0, law.n_runs, text_se, level
        )
    return None


def noise_floors(
    rows: Sequence[Row], laws: Mapping[str, Law] | None = None, level: float = LEVEL
) -> dict[str, NoiseFloor]:
    """The noise floor of each objective that has one."""
    found = {}
    for objective in dict.fromkeys(row.get("objective") for row in rows if row.get("objective")):
        floor = noise_floor(rows, objective, (laws or {}).get(objective), level)
        if floor is not None:
            found[objective] = floor
    return found


def _independent_dof(cells: Sequence[Sequence[Row]]) -> int:
    """Degrees of freedom of the pooled variance, where cells may share trunks.

    Branches of one trunk share most of its scatter. Cells that share trunks are counted together, as trunks
    minus 1, which is what they hold if they share all of it.
    """
    clusters: list[set[str]] = []
    alone = 0
    for cell in cells:
        trunks = {str(row.get("trunk") or row.get("run")) for row in cell}
        if len(trunks) < len(cell):  # a table without names
            alone += len(cell) - 1
            continue
        touching = [cluster for cluster in clusters if cluster & trunks]
        clusters = [cluster for cluster in clusters if not cluster & trunks]
        clusters.append(trunks.union(*touching))
    return alone + sum(len(cluster) - 1 for cluster in clusters)


def _sigma_interval(sigma: float, dof: float, level: float) -> tuple[float, float]:
    """Ends of an interval for a standard deviation: dof s^2 / sigma^2 is chi-square."""
    if math.isinf(dof):
        return sigma, sigma
    tails = ((1 - level) / 2, (1 + level) / 2)
    low, high = (sigma * math.sqrt(dof / float(chdtri(dof, tail))) for tail in tails)
    return low, high


def error_of(
    a: Sequence[Row],
    b: Sequence[Row],
    floors: Mapping[str, NoiseFloor],
    paired: tuple[float, float] | None = None,
) -> tuple[float, float] | None:
    """(standard error, degrees of freedom) of mean log loss of `a` minus that of `b`; None: not known.

    `paired`: standard error in nats of the difference over documents of text, and its degrees of freedom.
    """
    parts: list[tuple[float, float]] = []  # (variance, degrees of freedom)
    weights: dict[str, float] = {}
    for rows in (a, b):
        objective = str(rows[0].get("objective"))
        weights[objective] = weights.get(objective, 0.0) + 1 / len(rows)
    for objective, weight in weights.items():
        floor = floors.get(objective)
        if floor is None:
            return None
        parts.append((floor.sigma**2 * weight, floor.dof))
    mean = math.sqrt(mean_loss(a) * mean_loss(b))
    if paired is not None:
        parts.append(((paired[0] / mean) ** 2, paired[1]))
    elif not same_text(a, b):
        for rows in (a, b):
            errors = [row.get("loss_se") for row in rows]
            if not all(errors):
                return None
            parts.append(((max(errors) / mean_loss(rows)) ** 2, math.inf))
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / dof for part, dof in parts)
    return math.sqrt(variance), variance**2 / spread if spread else math.inf


def quantile(level: float, dof: float, n_comparisons: int = 1) -> float:
    """Of Student's t, two-sided, for `n_comparisons` intervals that hold together (Bonferroni)."""
    return float(stdtrit(min(dof, 1e9), 1 - (1 - level) / 2 / n_comparisons))


def compare_runs(
    rows: Sequence[Row],
    a: str | Side,
    b: str | Side,
    *,
    level: float = LEVEL,
    laws: Mapping[str, Law] | None = None,
    n_comparisons: int = 1,
    paired: tuple[float, float] | None = None,
) -> Difference:
    """The difference of two runs, or of two cells of several seeds, against the noise floor of `rows`.

    `a`, `b`: as for find_side. `n_comparisons` that are made at once: all intervals hold together at `level`.
    `paired`: of the two runs' losses document by document, the standard error of their mean difference (nats)
    and its degrees of freedom; the verdict is then about other text of the same kind too.
    Without a noise floor the verdict is "undecided", and `reason` names the seeds to train.

    Raises ValueError for a name that is no run's, for several cells' or for one side twice.
    """
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a share between 0 and 1.")
    one, two = (side if isinstance(side, Side) else find_side(rows, side) for side in (a, b))
    if {id(row) for row in one.rows} & {id(row) for row in two.rows}:
        raise ValueError(f"{one.name} and {two.name}: share a run, expected two different runs or cells.")
    return _difference(one, two, noise_floors(rows, laws, level), level, n_comparisons, paired)


def _difference(
    a: Side,
    b: Side,
    floors: Mapping[str, NoiseFloor],
    level: float,
    n_comparisons: int = 1,
    paired: tuple[float, float] | None = None,
) -> Difference:
    ratio = a.log_loss - b.log_loss
    common = {
        "a": a.name, "b": b.name, "n_a": a.n_seeds, "n_b": b.n_seeds, "loss_a": a.loss, "loss_b": b.loss,
        "difference": a.loss - b.loss, "relative": math.expm1(ratio), "level": level,
        "n_comparisons": n_comparisons,
    }  # fmt: skip
    error = error_of(a.rows, b.rows, floors, paired)
    if error is None:
        return Difference(**common, verdict="undecided", reason=_why_unknown(a, b, floors))
    se, dof = error
    half = quantile(level, dof, n_comparisons) * se
    verdict = "undecided" if abs(ratio) <= half else "better" if ratio < 0 else "worse"
    p_value = float(2 * stdtr(min(dof, 1e9), -abs(ratio) / se)) if se else float(ratio == 0)
    return Difference(
        **common,
        verdict=verdict,
        interval=(in_nats(a, b, ratio - half), in_nats(a, b, ratio + half)),
        relative_interval=(math.expm1(ratio - half), math.expm1(ratio + half)),
        se=se,
        dof=dof,
        p_value=min(1.0, p_value * n_comparisons),
        text_se=None if paired is None else paired[0],
        n_seeds_to_decide=None
        if verdict != "undecided"
        else _seeds_to_decide(a, b, ratio, floors, quantile(level, dof, n_comparisons), paired),
    )


def in_nats(a: Side, b: Side, ratio: float) -> float:
    """log(L_a / L_b) as a difference: L_a - L_b = 2 sqrt(L_a L_b) sinh(log(L_a / L_b) / 2)."""
    return 2 * math.sqrt(a.loss * b.loss) * math.sinh(ratio / 2)


def _seeds_to_decide(
    a: Side,
    b: Side,
    ratio: float,
    floors: Mapping[str, NoiseFloor],
    t: float,
    paired: tuple[float, float] | None,
) -> int | None:
    """Seeds of each side at which a difference of this size is beyond its interval, at today's t."""
    single = error_of(a.rows[:1], b.rows[:1], floors)
    text = 0.0 if paired is None else paired[0] ** 2 / (a.loss * b.loss)
    if single is None or not same_text(a.rows, b.rows):
        return None
    for n in range(max(a.n_seeds, b.n_seeds) + 1, MOST_SEEDS + 1):
        if t * math.sqrt(single[0] ** 2 / n + text) < abs(ratio):
            return n
    return None


def _why_unknown(a: Side, b: Side, floors: Mapping[str, NoiseFloor]) -> str:
    """Why a difference has no interval, and which runs give it one."""
    bare = [side for side in (a, b) if side.objective not in floors]
    if not bare:
        return "They were scored on different texts, and the error of each score (loss_se) is not known."
    words = []
    for side in {side.objective: side for side in sorted(bare, key=cost_of, reverse=True)}.values():
        known = {row.get("seed") for row in side.rows}
        fresh = [seed for seed in range(len(known) + 2) if seed not in known][:2]
        words.append(f"seeds {fresh[0]} and {fresh[1]} of {side.name}")
    return f"There is no noise floor: no cell has several seeds. Train {' and '.join(words)}."


def compare_best(
    rows: Sequence[Row],
    *,
    same: str = "compute",
    level: float = LEVEL,
    laws: Mapping[str, Law] | None = None,
) -> list[list[Difference]]:
    """The cell of lowest mean loss against every other: within each compute, or of each objective.

    A list for each group of two cells or more, by objective and rising compute. Which is best is read off the
    same losses, so each group is corrected for all of its pairs of cells.
    Raises ValueError for another `same`.
    """
    if same not in ("compute", "objective"):
        raise ValueError(f"same: got {same!r}, expected compute or objective.")
    floors = noise_floors(rows, laws, level)
    found = []
    for group in groups_of(rows, same):
        best = min(group, key=lambda side: side.log_loss)
        n_pairs = len(group) * (len(group) - 1) // 2
        others = sorted((side for side in group if side is not best), key=lambda side: side.log_loss)
        found.append([_difference(best, other, floors, level, n_pairs) for other in others])
    return found


def compare_repeated(
    rows: Sequence[Row], *, level: float = LEVEL, laws: Mapping[str, Law] | None = None
) -> list[Difference]:
    """Every pair of cells of several seeds of one objective, the lower loss first, corrected for all."""
    floors = noise_floors(rows, laws, level)
    sides = [side_of(cell) for cell in cells_of(rows) if len(cell) > 1]
    sides.sort(key=lambda side: side.log_loss)
    pairs = [(a, b) for a, b in combinations(sides, 2) if a.objective == b.objective]
    return [_difference(a, b, floors, level, len(pairs)) for a, b in pairs]
