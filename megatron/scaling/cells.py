"""Cells of a study: runs that differ in their seed alone, how they are named, and which share a compute."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.scaling.table import Row

SAME_CELL = ("objective", "n_params", "train_tokens", "unique_tokens", "seq_len")
SAME_COMPUTE = 1.05  # ratio of FLOPs: budgets are rounded to whole steps


@dataclass(frozen=True)
class Side:
    """A run, or the runs of one cell: `loss` is the geometric mean of their losses, nats a token."""

    name: str
    rows: tuple[Row, ...] = field(repr=False)

    @property
    def loss(self) -> float:
        """Geometric mean over seeds."""
        return math.exp(self.log_loss)

    @property
    def log_loss(self) -> float:
        """Mean over seeds."""
        return math.log(mean_loss(self.rows))

    @property
    def n_seeds(self) -> int:
        """Runs."""
        return len(self.rows)

    @property
    def objective(self) -> str:
        """Of its runs."""
        return str(self.rows[0].get("objective"))


def cells_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The scored runs by cell: those that differ in their seed alone.

    By the column `cell`, the hash of all settings but the seed; without it by SAME_CELL, where runs of one
    seed or of none are cells of their own, since they must differ in something else.
    """
    named: dict[tuple, list[Row]] = {}
    for row in rows:
        if row.get("loss") is not None and row["loss"] > 0 and row.get("status") in (None, "done"):
            key = (row["cell"],) if row.get("cell") else tuple(row.get(name) for name in SAME_CELL)
            named.setdefault(key, []).append(row)
    cells = []
    for same in named.values():
        seeds = {row.get("seed") for row in same}
        is_cell = len(same) == 1 or len(seeds) == len(same) and None not in seeds
        cells += [same] if is_cell else [[row] for row in same]
    return cells


def find_side(rows: Sequence[Row], name: str) -> Side:
    """The run of this name, or the cell: all its seeds.

    `name` may be the beginning of a run's name, up to a dash before any other place; where it begins the
    names of all runs of one cell, it is that cell.
    Raises ValueError where it fits no scored run, or several cells.
    """
    scored = [row for cell in cells_of(rows) for row in cell]
    matches = [row for row in scored if row["run"] == name]
    matches = matches or [row for row in scored if str(row["run"]).startswith(f"{name}-")]
    matches = matches or [row for row in scored if str(row["run"]).startswith(name)]
    if not matches:
        other = [row["run"] for row in rows if str(row["run"]).startswith(name)]
        why = f"; {other[0]} has no held-out loss" if other else ""
        raise ValueError(
            f"{name}: no finished run of that name{why}. The table lists {len(scored)} with a loss."
        )
    if len(matches) == 1:
        return side_of(matches)
    cell = next(cell for cell in cells_of(rows) if matches[0] in cell)
    if len(cell) == len(matches) and all(row in cell for row in matches):
        return side_of(cell)
    shown = ", ".join(str(row["run"]) for row in matches[:4])
    raise ValueError(
        f"{name}: fits {len(matches)} runs that are not the seeds of one cell ({shown}). "
        "Write more of the name."
    )


def side_of(cell: Sequence[Row]) -> Side:
    """A run without the hash at the end of its name, or a cell: named as its runs are up to their seeds."""
    names = [str(row["run"]) for row in cell]
    if len(names) == 1:
        return Side(names[0].removesuffix(f"-{str(cell[0].get('identity'))[:8]}"), tuple(cell))
    stem = os.path.commonprefix(names).rstrip("-_").removesuffix("seed").rstrip("-_")
    return Side(stem or names[0], tuple(cell))


def groups_of(rows: Sequence[Row], same: str) -> list[list[Side]]:
    """Cells of one objective, and of one compute where that is asked; two or more."""
    sides = [side_of(cell) for cell in cells_of(rows)]
    groups = []
    for objective in sorted({side.objective for side in sides}):
        of = [side for side in sides if side.objective == objective]
        if same == "objective":
            groups.append(of)
            continue
        of = sorted((side for side in of if math.isfinite(cost_of(side))), key=cost_of)
        start = 0
        for end in range(1, len(of) + 1):
            if end == len(of) or cost_of(of[end]) > SAME_COMPUTE * cost_of(of[start]):
                groups.append(of[start:end])
                start = end
    return [group for group in groups if len(group) > 1]


def cost_of(side: Side) -> float:
    """FLOPs of one of its runs; infinite where not known."""
    return side.rows[0].get("train_flops") or math.inf


def mean_loss(rows: Sequence[Row]) -> float:
    """Geometric mean of their losses."""
    return math.exp(float(np.mean([math.log(row["loss"]) for row in rows])))


def same_text(a: Sequence[Row], b: Sequence[Row]) -> bool:
    """Whether all were scored on as many tokens, as far as that is known."""
    return len({row["n_tokens_scored"] for row in (*a, *b) if row.get("n_tokens_scored")}) < 2
