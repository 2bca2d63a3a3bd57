"""The runs of a table that a law is fitted on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import nearest
from megatron.scaling.table import read_table


@dataclass(frozen=True)
class Columns:
    """Where N, D and L stand in a table; with `C`, D = C / (6 N)."""

    N: str = "n_params"
    D: str = "train_tokens"
    L: str = "loss"
    C: str | None = None


@dataclass(frozen=True)
class Selection:
    """N, D, L float64 [n], and where they came from, in the words of law.json."""

    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    columns: dict[str, str]
    filter: dict[str, Any]
    table: dict[str, str]
    warnings: list[str]


def select_runs(
    path: Path, columns: Columns, objective: str | None = None, max_loss: float | None = None
) -> Selection:
    """Read a table and keep its finished runs of one objective.

    Raises FileNotFoundError, and ValueError for a column that is not there (the nearest is offered), a
    value that is no number, or runs of several objectives where none was asked for.
    """
    table = read_table(path)
    wanted = {"N": columns.N, "D": columns.C or columns.D, "L": columns.L}
    for name in wanted.values():
        if name not in table:
            raise ValueError(f"{path}: no column '{name}'; {nearest(name, list(table))}")
    n_rows = len(table[columns.N])
    keep = np.ones(n_rows, dtype=bool)
    told: dict[str, Any] = {}
    warnings = []
    if "status" in table:
        keep &= np.array([status == "done" for status in table["status"]], dtype=bool)
        told["status"] = "done"
        if not keep.all():
            warnings.append(
                f"{int((~keep).sum())} of {n_rows} runs in the table are not done and are left out."
            )
    if "objective" in table:
        found = sorted({o for o, kept in zip(table["objective"], keep, strict=True) if kept})
        if objective is None and len(found) > 1:
            raise ValueError(f"{path}: runs of {', '.join(found)}; say --objective which one to fit")
        objective = objective or (found[0] if found else None)
        if found and objective not in found:
            raise ValueError(
                f"{path}: no finished run of objective '{objective}'; {nearest(str(objective), found)}"
            )
        keep &= np.array([o == objective for o in table["objective"]], dtype=bool)
        told["objective"] = objective
    rows = np.flatnonzero(keep)
    N, D, L = (_numbers(path, table[name], name, rows) for name in wanted.values())
    D = D / (6 * N) if columns.C else D
    if max_loss is not None:
        kept = max_loss >= L
        N, D, L, rows = N[kept], D[kept], L[kept], rows[kept]
        told["max_loss"] = max_loss
    repeated = [
        i for i in rows if "epochs" in table and table["epochs"][i] and float(table["epochs"][i]) > 1.01
    ]
    if repeated:
        warnings.append(
            f"{len(repeated)} runs saw some text more than once: this form has no term for repetition."
        )
    sums = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return Selection(N, D, L, wanted, told, sums, warnings)


def _numbers(path: Path, cells: list[str], name: str, rows: np.ndarray) -> np.ndarray:
    values = []
    for i in rows:
        try:
            values.append(float(cells[i]))
        except ValueError as error:
            raise ValueError(f"{path}, row {i + 1}, {name}: found '{cells[i]}', wanted a number") from error
    return np.array(values)
