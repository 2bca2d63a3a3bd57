"""Differences of held-out loss between runs, with intervals from the noise floor: is run A better than run B?

Runs that differ only in their seed show the scatter of a run.
The variance of log loss is pooled over all cells
of several seeds of one objective (one variance for all,
as in an analysis of variance). Where no cell is repeated,
it is the scatter around a fitted law. A difference of means of n_a
and n_b seeds has the variance sigma^2 (1/n_a + 1/n_b)
and Student's t with the degrees of freedom of sigma^2.
Variances of two objectives, or of text, are added
with the degrees of freedom of Welch and Satterthwaite.

Two runs scored on the same text share its sampling error:
`loss_se`, the error over samples of text, is not
part of their difference, and does not measure the scatter
between seeds. Runs scored on different numbers of tokens,
hence on different texts, have no interval.
"""

import fnmatch
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd

from megatron.laws.fitting.noise import count_independent, pool_cells, sigma_interval
from megatron.laws.isoflop import split_budgets
from megatron.laws.law import Law
from megatron.study.table import COLUMNS, read_runs, read_table, select_finished

SEED = re.compile(r"-seed\d+")  # in a run's name
LEVEL = 0.95  # intervals of several differences hold together at this level


@dataclass(frozen=True, eq=False)
class Side:
    """A run, or all runs of one cell, which differ only in their seed: rows of a table with all columns."""

    runs: pd.DataFrame

    @property
    def name(self) -> str:
        """A run's name without the hash, or the name that all seeds share."""
        # names may end with the first 8 digits of the identity
        ends = (f"-{str(identity)[:8]}" for identity in self.runs["identity"])
        names = [name.removesuffix(end) or name for name, end in zip(self.runs["run"], ends, strict=True)]
        if len(names) == 1:
            return names[0]
        # a label follows the seed: "...-seed0-muon" and "...-seed1-muon" are "...-muon"
        if len(same := {SEED.sub("", name) for name in names}) == 1:
            return same.pop()
        return os.path.commonprefix(names).rstrip("-_").removesuffix("seed").rstrip("-_") or names[0]

    @property
    def objective(self) -> str:
        """Objective of all runs."""
        return str(self.runs["objective"].iloc[0])

    @property
    def log_loss(self) -> float:
        """Mean of log loss over seeds."""
        return float(np.log(self.runs["loss"].to_numpy(float)).mean())

    @property
    def loss(self) -> float:
        """Geometric mean of the losses over seeds, in nats per token."""
        return math.exp(self.log_loss)

    @property
    def n_seeds(self) -> int:
        """Number of runs."""
        return len(self.runs)

    @property
    def flops(self) -> float:
        """Training FLOPs of a run; NaN if unknown."""
        return float(self.runs["train_flops"].iloc[0])


def _select_runs(table: pd.DataFrame) -> pd.DataFrame:
    """Return the finished runs with all columns of a table; a table of another program may lack some."""
    return select_finished(table.reindex(columns=list(dict.fromkeys([*table, *COLUMNS]))))


def group_cells(table: pd.DataFrame) -> list[Side]:
    """Group the finished runs by the column `cell`, the hash of all settings except the seed.

    A run of a table without this column is a cell of its own.
    """
    runs = _select_runs(table)
    cells = runs["cell"].fillna(runs["run"])
    # a copy of a run is not a repeat
    is_first = ~runs.assign(cell=cells).duplicated(["cell", "seed"])
    return [Side(same) for _, same in runs[is_first].groupby(cells[is_first], sort=False)]


def find_side(table: pd.DataFrame, name: str) -> Side:
    """Return the run with this name, or all seeds of the cell with this name.

    `name` may be a prefix of a run's name, or a pattern such as "*-seed?-muon-*";
    a prefix that ends before a dash takes precedence. A prefix of the names of all runs of one
    cell selects that cell. Raises ValueError if no finished run
    matches, or if runs of several cells match.
    """
    runs = _select_runs(table)
    # exact name first, then a prefix up to a dash, then any prefix: "s4" must
    # not match "s48" if "s4-..." exists
    masks = (
        runs["run"] == name,
        runs["run"].str.startswith(f"{name}-"),
        runs["run"].str.startswith(name),
        runs["run"].map(lambda run: fnmatch.fnmatchcase(run, name)).astype(bool),
    )
    matches = next((runs[mask] for mask in masks if mask.any()), None)
    if matches is None:
        raise ValueError(f"{name}: got no finished run of that name. Name one of {len(runs)} with a loss.")
    if len(matches) == 1:
        return Side(matches)
    # a prefix of several runs is valid only
    # if it selects exactly the runs of one cell
    for cell in group_cells(table):
        if set(cell.runs["run"]) == set(matches["run"]):
            return cell
    shown = ", ".join(matches["run"].head(4))
    raise ValueError(
        f"{name}: got {len(matches)} matching runs ({shown}), expected the seeds of one cell. "
        "Use a longer prefix."
    )


def group_sides(table: pd.DataFrame, same: str) -> list[list[Side]]:
    """Group cells by objective, or by objective and compute, and drop groups of a single cell."""
    sides = sorted(group_cells(table), key=lambda side: side.objective)
    groups = [list(group) for _, group in groupby(sides, lambda side: side.objective)]
    if same == "compute":
        sized = [[side for side in group if side.flops > 0] for group in groups]
        groups = [
            [group[i] for i in budget]
            for group in filter(None, sized)
            for budget in split_budgets(np.array([side.flops for side in group]))
        ]
    return [group for group in groups if len(group) > 1]


@dataclass(frozen=True)
class NoiseFloor:
    """Standard deviation of log loss of runs of one objective that differ only in their seed.

    sigma     standard deviation of one run, relative to its loss
    dof       degrees of freedom of sigma^2; for cells that share trunks, trunks minus 1
    interval  chi-square interval of sigma
    source    "seeds": cells of several seeds; "law": the
              scatter around a fitted law, misfit included
    n_cells, n_runs  numbers of cells and runs of the estimate; n_cells is 0 for a law
    text_se   median standard error of a loss over samples
              of the held-out text, nats; None if unknown.
              Runs scored on the same text share it
    """

    sigma: float
    dof: float
    interval: tuple[float, float]
    source: str
    n_cells: int
    n_runs: int
    text_se: float | None = None


@dataclass(frozen=True)
class Difference:
    """Difference A minus B. Below 0, A has the lower loss.

    difference, interval           nats per token
    relative, relative_interval    relative to the loss of B: L_a / L_b - 1
    se, dof         standard error of log(L_a / L_b), and the degrees of freedom of
                    Student's t
    n_comparisons   simultaneous comparisons, whose intervals hold together (Bonferroni)
    verdict         "better" (A is), "worse" or "undecided"
    reason          reason for a missing interval; "" with an interval
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
    n_comparisons: int = 1
    interval: tuple[float, float] | None = None
    relative_interval: tuple[float, float] | None = None
    se: float | None = None
    dof: float | None = None
    text_se: float | None = None
    reason: str = ""


def read_compared(path: Path, law: Path | None) -> tuple[pd.DataFrame, Mapping[str, Law]]:
    """Return the runs and the laws by objective. Raise ValueError for a table without names or losses."""
    table = read_runs(path) if path.is_dir() else read_table(path)
    files = [*([law] if law else []), *(sorted(path.glob("law*.json")) if path.is_dir() else [])]
    for name in ("run", "loss"):
        if name not in table:
            raise ValueError(f"{path}: got no column {name!r}. Write a table with tools/collect.py.")
    table = table.reindex(columns=list(dict.fromkeys([*table, "objective"])))
    laws: dict[str, Law] = {}
    for file in files:
        loaded = Law.load(file)
        # a law without a filter on the objective is one of autoregressive runs
        laws.setdefault(str(loaded.filter.get("objective", "autoregressive")), loaded)
    return table, laws


def estimate_noise_floors(
    table: pd.DataFrame, laws: Mapping[str, Law] | None = None
) -> dict[str, NoiseFloor]:
    """Estimate the noise floor of each objective from repeated seeds, else from the scatter around its law.

    An objective without a cell of two seeds of different loss
    and without a law with a scatter has none.
    """
    names = table["objective"].dropna().unique()
    floors = {
        name: _estimate_floor(table[table["objective"] == name], (laws or {}).get(name)) for name in names
    }
    return {name: floor for name, floor in floors.items() if floor is not None}


def _estimate_floor(runs: pd.DataFrame, law: Law | None) -> NoiseFloor | None:
    text = runs.reindex(columns=["loss_se"]).query("loss_se > 0")["loss_se"]
    text_se = float(text.median()) if len(text) else None
    cells = [cell for cell in group_cells(runs) if cell.n_seeds > 1]
    if cells:
        repeated = pd.concat([cell.runs for cell in cells])
        labels = np.repeat(np.arange(len(cells)), [cell.n_seeds for cell in cells])
        pooled = pool_cells(np.log(repeated["loss"].to_numpy(float)), labels)
        # equal losses are copies of a run, not repeats
        if pooled.sum_squares > pooled.dof * 1e-24:
            trunks = repeated["trunk"].astype(object).fillna(repeated["run"]).astype(str).to_numpy()
            sigma, dof = math.sqrt(pooled.variance), float(count_independent(labels, trunks))
            ends = sigma_interval(sigma, dof, LEVEL)
            return NoiseFloor(sigma, dof, ends, "seeds", pooled.n_cells, pooled.n_runs, text_se)
    if law is None or not law.spread > 0:
        return None
    ends = sigma_interval(law.spread, dof := float(law.noise.get("dof", math.inf)), LEVEL)
    return NoiseFloor(law.spread, dof, ends, "law", 0, law.n_runs, text_se)


def compare_sides(
    a: Side,
    b: Side,
    floors: Mapping[str, NoiseFloor],
    n_comparisons: int = 1,
    paired: tuple[float, float] | None = None,
) -> Difference:
    """Compare two runs, or two cells of several seeds, with the noise floors of their objectives.

    paired   (standard error in nats, degrees of freedom) of the mean
             difference of the two runs' losses over documents; the verdict
             then also holds for other text of the same distribution
    Without a noise floor the verdict is "undecided", and `reason` names the seeds to train.

    Raises ValueError for two sides that share a run.
    """
    from scipy.special import stdtrit  # slow import

    if set(a.runs["run"]) & set(b.runs["run"]):
        raise ValueError(f"{a.name} and {b.name} share a run, expected two different runs or cells.")
    ratio = a.log_loss - b.log_loss
    undecided = Difference(
        a=a.name, b=b.name, n_a=a.n_seeds, n_b=b.n_seeds, loss_a=a.loss, loss_b=b.loss,
        difference=a.loss - b.loss, relative=math.expm1(ratio), verdict="undecided",
        n_comparisons=n_comparisons, reason=explain_missing_interval(a, b, floors),
    )  # fmt: skip
    if undecided.reason:
        return undecided
    # sides of one objective share its sigma^2: variances of their means add to
    # sigma^2 (1/n_a + 1/n_b), with the degrees of freedom of sigma^2
    weights: dict[str, float] = {}
    for side in (a, b):
        weights[side.objective] = weights.get(side.objective, 0.0) + 1 / side.n_seeds
    parts = [(floors[name].sigma ** 2 * weight, floors[name].dof) for name, weight in weights.items()]
    # d log L = dL / L: an error in nats is divided by a loss
    text = 0.0 if paired is None else (paired[0] / math.sqrt(a.loss * b.loss)) ** 2
    parts += [] if paired is None else [(text, paired[1])]
    # Welch and Satterthwaite: dof = (sum v)^2 / sum(v^2 / dof_v)
    variance = sum(part for part, _ in parts)
    spread = sum(part**2 / dof for part, dof in parts)
    dof = variance**2 / spread if spread else math.inf
    # 1e9 degrees of freedom are numerically normal. Bonferroni: each of
    # n_comparisons intervals has a share of 1 - LEVEL.
    t = float(stdtrit(min(dof, 1e9), 1 - (1 - LEVEL) / 2 / n_comparisons))
    se = math.sqrt(variance)
    is_decided = abs(ratio) > t * se
    ends = (ratio - t * se, ratio + t * se)
    # L_a - L_b = 2 sqrt(L_a L_b) sinh(log(L_a / L_b) / 2) is antisymmetric in A
    # and B also at the ends of an interval, unlike L_b (exp(ratio) - 1)
    low, high = (2 * math.sqrt(a.loss * b.loss) * math.sinh(end / 2) for end in ends)
    return replace(
        undecided,
        verdict="undecided" if not is_decided else "better" if ratio < 0 else "worse",
        interval=(low, high),
        relative_interval=(math.expm1(ends[0]), math.expm1(ends[1])),
        se=se,
        dof=dof,
        text_se=None if paired is None else paired[0],
    )


def explain_missing_interval(a: Side, b: Side, floors: Mapping[str, NoiseFloor]) -> str:
    """Return why there is no interval, and the runs that would give one; empty if there is one."""
    n_tokens = [side.runs["n_tokens_scored"].max() for side in (a, b)]
    if min(n_tokens) < max(n_tokens):  # false for NaN, unknown
        return "The runs were scored on different texts. Score both on one with tools/validate.py."
    # if both have the same objective, the side with fewer FLOPs
    sides = {side.objective: side for side in sorted((a, b), key=lambda side: -side.flops)}
    words = [f"more seeds of {side.name}" for name, side in sorted(sides.items()) if name not in floors]
    if not words:
        return ""
    return f"There is no noise floor: no cell has several seeds. Train {' and '.join(words)}."


def compare_best(
    table: pd.DataFrame, floors: Mapping[str, NoiseFloor], same: str = "compute"
) -> list[list[Difference]]:
    """Compare the cell of lowest mean loss with every other one, within each compute or each objective.

    Returns a list for each group of two cells or more, by
    objective and increasing compute. The best cell is selected
    by the same losses, so each group is corrected for all of
    its pairs of cells.
    """
    groups = []
    for group in group_sides(table, same):
        best, *others = sorted(group, key=lambda side: side.log_loss)
        # the best of 4 cells may be any of them, so 6 pairs count although
        # only 3 are tested
        n_pairs = len(group) * (len(group) - 1) // 2
        groups.append([compare_sides(best, other, floors, n_pairs) for other in others])
    return groups
