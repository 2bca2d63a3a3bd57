"""Compute-optimal frontier of a study: selection of the runs, and the fit of their law."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron.laws.compute_law import ComputeLaw, fit_compute_law
from megatron.study.blind_plan import FLOPS_COLUMN
from megatron.study.ladder import STUDY, read_study_plan
from megatron.study.run_row import FinishedRow, RunRow, select_finished
from megatron.study.selection import Columns, compute_of, select_runs
from megatron.study.table import read_runs, read_table

COMPUTE_LAW = "compute_law.json"  # in the study's directory
EXACT = FLOPS_COLUMN["exact"]


@dataclass(frozen=True)
class FrontierRuns:
    """Runs that a frontier is fitted on: N parameters, D tokens, L nats per token, C FLOPs, each float64 [n].

    groups [n] as in selection.Selection.
    table: path and sha256 of their source, objective, and the column of C; all as text
    """

    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    C: np.ndarray
    names: list[str]
    table: dict[str, str]
    warnings: list[str]
    groups: np.ndarray | None = None

    def fit(self) -> ComputeLaw:
        """Fit the law of these runs. Raises ValueError if there are too few."""
        law = fit_compute_law(self.N, self.D, self.L, self.C, self.names, self.groups)
        return replace(law, table=self.table)


def select_rows(rows: Sequence[RunRow], objective: str, flops_column: str) -> list[FinishedRow]:
    """Return the finished runs of an objective that no grid holds out, sorted by identity."""
    # duplicate directories of one identity count once
    by_identity = {
        str(row.identity): row
        for row in select_finished(rows)
        if row.objective == objective and not row.held_out
    }
    for row in by_identity.values():
        if row.number(flops_column) is None:
            raise ValueError(
                f"run {row.run}: got no {flops_column}, expected FLOPs. Train the run again, or fit a table."
            )
    # a fixed order, on which hash_rows depends: rows come in the order of the plan (blind.py) or of the table
    return [by_identity[identity] for identity in sorted(by_identity)]


def hash_rows(rows: Sequence[FinishedRow], flops_column: str) -> str:
    """Return the sha256 of identity, N, D, C and loss of each run, in the order of `select_rows`."""
    keys = ("identity", "n_params", "train_tokens", flops_column, "loss")
    # separators and allow_nan fix the text, so that the hash is reproducible
    cells = [[row.value(key) for key in keys] for row in rows]
    text = json.dumps(cells, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_frontier_runs(
    rows: Sequence[FinishedRow], objective: str, flops_column: str, path: str
) -> FrontierRuns:
    """Convert the rows of `select_rows` to arrays."""
    columns = ("n_params", "train_tokens", "loss", flops_column)
    N, D, L, C = (np.array([row.number(name) for row in rows], dtype=float) for name in columns)
    table = {"path": path, "objective": objective, "flops_by": flops_column}
    table["sha256"] = hash_rows(rows, flops_column)
    # 1.01: rounding to whole steps can exceed one epoch slightly
    n_repeated = sum((row.epochs or 0) > 1.01 for row in rows)
    warnings = [f"{n_repeated} runs read some text more than once."] if n_repeated else []
    return FrontierRuns(N, D, L, C, [row.run for row in rows], table, warnings, group_trunks(rows))


def group_trunks(rows: Sequence[FinishedRow]) -> np.ndarray | None:
    """Return the trunks of rows, as labels of rows that are not independent; None if none share one."""
    trunks = np.array([row.trunk or row.run for row in rows])
    return trunks if len(np.unique(trunks)) < len(trunks) else None


def read_study_runs(study_dir: str | Path, objective: str | None = None) -> FrontierRuns:
    """Read the runs of a study. `objective` defaults to that of the key `blind`, or else to the only one.

    Raises FileNotFoundError and ValueError as `table.read_runs`, and ValueError for several objectives.
    """
    folder = Path(study_dir)
    rows = read_runs(folder)
    blind = read_study_plan(folder / STUDY).blind if (folder / STUDY).is_file() else None
    objectives = sorted({row.objective for row in select_finished(rows)})
    if objective is None and blind is not None:
        objective = blind.objective
    if objective is None:
        if len(objectives) != 1:
            raise ValueError(
                f"{folder}: got finished runs of {', '.join(objectives) or 'no objective'}, expected one. "
                "Select it with --objective."
            )
        objective = objectives[0]
    if objective not in objectives:
        raise ValueError(
            f"{folder}: got finished runs of {', '.join(objectives) or 'no objective'}, expected "
            f"{objective}. Run tools/sweep.py first."
        )
    # C of the fit must be in the convention of the blind run's budget, or law and prediction would use two
    # scales
    column = blind.flops_column if blind is not None else EXACT
    return make_frontier_runs(select_rows(rows, objective, column), objective, column, str(folder))


def read_table_runs(
    path: Path,
    columns: Columns,
    objective: str | None = None,
    flops_by: str | None = None,
    where: Sequence[str] = (),
    group: str | None = None,
) -> FrontierRuns:
    """Read the runs of a table. C is the column `flops_by`, or 6 N D for "6nd"; `group` as in select_runs.

    `flops_by` defaults to train_flops if the table has that column, else to 6nd.
    Raises the errors of `selection.select_runs`.
    """
    runs = select_runs(path, columns, objective, where=where, group=group)
    runs = runs.subset(~runs.held_out())
    by = flops_by or (EXACT if EXACT in read_table(path) else "6nd")
    table = {**runs.table, "objective": str(runs.filter.get("objective", "")), "flops_by": by}
    names = runs.names if runs.names is not None else [str(i) for i in runs.rows]
    C = compute_of(path, runs, by)
    return FrontierRuns(runs.N, runs.D, runs.L, C, names, table, runs.warnings, runs.groups)
