"""Cells of a study: runs that differ only in their seed, their names, and groups of equal compute."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.study.run_row import RunRow, ScoredRow, select_scored

CELL_COLUMNS = ("objective", "n_params", "train_tokens", "unique_tokens", "seq_len")
MAX_COMPUTE_RATIO = 1.05  # ratio of FLOPs within a group: budgets are rounded to whole steps


@dataclass(frozen=True)
class Side:
    """A run, or all runs of one cell."""

    name: str
    rows: tuple[ScoredRow, ...] = field(repr=False)

    @property
    def loss(self) -> float:
        """Geometric mean of the losses over seeds, in nats per token."""
        return math.exp(self.log_loss)

    @property
    def log_loss(self) -> float:
        """Mean of log loss over seeds."""
        return math.log(mean_loss(self.rows))

    @property
    def n_seeds(self) -> int:
        """Number of runs."""
        return len(self.rows)

    @property
    def objective(self) -> str:
        """Objective of the runs."""
        return str(self.rows[0].objective)


def group_cells(rows: Sequence[RunRow]) -> list[list[ScoredRow]]:
    """Group the scored runs into cells: runs that differ only in their seed.

    Runs are grouped by the column `cell`, the hash of all settings except the seed. Without this column they
    are grouped by CELL_COLUMNS. Runs of such a group with equal or missing seeds must differ in another
    setting, so each of them is a cell.
    """
    named: dict[tuple[object, ...], list[ScoredRow]] = {}
    for row in select_scored(rows):
        key = (row.cell,) if row.cell else tuple(row.value(name) for name in CELL_COLUMNS)
        named.setdefault(key, []).append(row)
    cells = []
    for same in named.values():
        # seeds 0, 1, 2: one cell of three; seeds 0, 0, 1: three cells of one run
        seeds = {row.seed for row in same}
        is_cell = len(same) == 1 or len(seeds) == len(same) and None not in seeds
        cells += [same] if is_cell else [[row] for row in same]
    return cells


def find_side(rows: Sequence[RunRow], name: str) -> Side:
    """Return the run with this name, or all seeds of the cell with this name.

    `name` may be a prefix of a run's name; a prefix that ends before a dash takes precedence. A prefix of
    the names of all runs of one cell selects that cell.
    Raises ValueError if no scored run matches, or if runs of several cells match.
    """
    scored = [row for cell in group_cells(rows) for row in cell]
    # exact name first, then a prefix up to a dash, then any prefix: "s4" must not match "s48" if "s4-..."
    # exists
    matches = [row for row in scored if row.run == name]
    matches = matches or [row for row in scored if row.run.startswith(f"{name}-")]
    matches = matches or [row for row in scored if row.run.startswith(name)]
    if not matches:
        other = [row.run for row in rows if row.run.startswith(name)]
        why = f"; {other[0]} has no held-out loss" if other else ""
        raise ValueError(
            f"{name}: got no finished run of that name{why}, expected one of {len(scored)} runs with a loss."
        )
    if len(matches) == 1:
        return make_side(matches)
    cell = next(cell for cell in group_cells(rows) if matches[0] in cell)
    # a prefix of several runs is valid only if it selects exactly the runs of one cell
    if len(cell) == len(matches) and all(row in cell for row in matches):
        return make_side(cell)
    shown = ", ".join(row.run for row in matches[:4])
    raise ValueError(
        f"{name}: got {len(matches)} matching runs ({shown}), expected the seeds of one cell. "
        "Use a longer prefix."
    )


def make_side(cell: Sequence[ScoredRow]) -> Side:
    """Return a cell with its name: a run's name without the hash, or the common prefix of all seeds."""
    names = [row.run for row in cell]
    # names may end with the first 8 digits of the identity
    if len(names) == 1:
        return Side(names[0].removesuffix(f"-{str(cell[0].identity)[:8]}"), tuple(cell))
    # "...-seed0" and "...-seed1" share "...-seed": the suffix is removed
    stem = os.path.commonprefix(names).rstrip("-_").removesuffix("seed").rstrip("-_")
    return Side(stem or names[0], tuple(cell))


def group_sides(rows: Sequence[RunRow], same: str) -> list[list[Side]]:
    """Group cells by objective, or by objective and compute, and drop groups of a single cell."""
    sides = [make_side(cell) for cell in group_cells(rows)]
    groups = []
    for objective in sorted({side.objective for side in sides}):
        cells_of_objective = [side for side in sides if side.objective == objective]
        if same == "objective":
            groups.append(cells_of_objective)
            continue
        cells_of_objective = sorted(
            (side for side in cells_of_objective if math.isfinite(cell_flops(side))), key=cell_flops
        )
        # greedy groups over ascending FLOPs: a group ends where FLOPs exceed MAX_COMPUTE_RATIO of its first
        # cell
        start = 0
        for end in range(1, len(cells_of_objective) + 1):
            if end == len(cells_of_objective) or cell_flops(
                cells_of_objective[end]
            ) > MAX_COMPUTE_RATIO * cell_flops(cells_of_objective[start]):
                groups.append(cells_of_objective[start:end])
                start = end
    return [group for group in groups if len(group) > 1]


def cell_flops(side: Side) -> float:
    """Return the FLOPs of one run of the cell; Inf if unknown."""
    return side.rows[0].train_flops or math.inf


def mean_loss(rows: Sequence[ScoredRow]) -> float:
    """Return the geometric mean of the losses of `rows`."""
    return math.exp(float(np.mean([math.log(row.loss) for row in rows])))


def is_same_text(a: Sequence[ScoredRow], b: Sequence[ScoredRow]) -> bool:
    """Return whether all rows were scored on the same number of tokens; unknown numbers are ignored."""
    return len({row.n_tokens_scored for row in (*a, *b) if row.n_tokens_scored}) < 2
