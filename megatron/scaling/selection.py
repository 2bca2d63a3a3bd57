"""The runs of a table that a law is fitted on."""

import hashlib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import nearest
from megatron.scaling.holdout import largest
from megatron.scaling.table import read_table

TRUNK = "trunk"  # column of our own tables that names rows which share their first steps
FEWEST_TOKENS = 1000  # a column with less everywhere counts something else
ROUNDED_DECIMALS = 2  # a loss of 3.14 has an error of 0.005, as large as the noise of a seed
CONDITION = re.compile(r"([^=!<>]+?)(==|!=|<=|>=|=|<|>)(.*)", re.DOTALL)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
YES = ("1", "1.0", "true", "yes")


@dataclass(frozen=True)
class Columns:
    """Where N, D, L and the unique tokens U stand in a table; with `C`, D = C / (6 N)."""

    N: str = "n_params"
    D: str = "train_tokens"
    L: str = "loss"
    C: str | None = None
    U: str = "unique_tokens"


@dataclass(frozen=True)
class Selection:
    """N, D, L float64 [n], and where they came from, in the words of law.json.

    U is None where the table does not know it.
    """

    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    columns: dict[str, str]
    filter: dict[str, Any]
    table: dict[str, str]
    warnings: list[str]
    U: np.ndarray | None = None
    rows: np.ndarray | None = None  # their places in the table
    marked: np.ndarray | None = None  # bool [n]: held out by the study, column `held_out`; None: not known
    names: list[str] | None = None  # column `run`
    groups: np.ndarray | None = None  # labels [n] of rows that are not independent; None: each stands alone

    def held_out(self, n_more: int = 0) -> np.ndarray:
        """Which runs [n] bool no law is fitted on: those marked, and the `n_more` largest of the others.

        Raises ValueError where that would leave none to fit on.
        """
        held = np.zeros(len(self.N), dtype=bool) if self.marked is None else self.marked.copy()
        if held.all():
            raise ValueError("held-out runs: the table marks all of them; wanted some to fit on (--fit-all)")
        if n_more:
            free = np.flatnonzero(~held)
            held[free[largest(self.N[free], self.D[free], n_more)]] = True
        return held

    def only(self, kept: np.ndarray) -> "Selection":
        """The runs `kept` [n] bool alone."""
        arrays = ("N", "D", "L", "U", "rows", "marked", "groups")
        held = {name: getattr(self, name)[kept] for name in arrays if getattr(self, name) is not None}
        if self.names is not None:
            held["names"] = [name for name, keep in zip(self.names, kept, strict=True) if keep]
        return replace(self, **held)

    def where(self, kept: np.ndarray) -> dict[str, np.ndarray | None]:
        """N, D, L, U and groups of the runs `kept` [n] bool."""
        return {
            "N": self.N[kept],
            "D": self.D[kept],
            "L": self.L[kept],
            "U": None if self.U is None else self.U[kept],
            "groups": None if self.groups is None else self.groups[kept],
        }


def compute_of(path: Path, runs: Selection, by: str) -> np.ndarray:
    """C [n] FLOPs of the runs of a table: 6 N D for "6nd", else the column of that name."""
    return 6 * runs.N * runs.D if by == "6nd" else column_of(path, runs, by)


def column_of(path: Path, runs: Selection, name: str) -> np.ndarray:
    """Another column of the table as positive numbers [n]. ValueError where there is none of that name."""
    return _numbers(path, _cells(path, name), name, runs.rows)


def known_of(path: Path, runs: Selection, name: str) -> np.ndarray:
    """A column that not all runs need to have, of any sign [n]: not a number where its cell is empty."""
    cells = _cells(path, name)
    try:
        return np.array([float(cells[i] or "nan") for i in runs.rows])
    except ValueError as error:
        raise ValueError(f"{path}, column '{name}': {error}; wanted numbers or empty cells") from error


def _cells(path: Path, name: str) -> list[str]:
    table = read_table(path)
    if name not in table:
        raise ValueError(f"{path}: no column '{name}'; {nearest(name, list(table))}")
    return table[name]


def select_runs(
    path: Path,
    columns: Columns,
    objective: str | None = None,
    max_loss: float | None = None,
    wants_unique: bool = False,
    group: str | None = None,
    where: Sequence[str] = (),
) -> Selection:
    """Read a table and keep its finished runs of one objective; with `wants_unique` also their unique tokens.

    `group` is a column whose equal cells mark rows that are not independent, "none" for no such column. None
    is `trunk` where runs of our own tables branch from one; repeated names of other tables raise a warning.
    `where` are conditions "COLUMN OPERATOR VALUE" that all must hold; OPERATOR is one of = != < <= > >=.

    Raises FileNotFoundError, and ValueError for what is no table, a column that is not there (the nearest is
    offered), a value that is not a positive number, no finished run, or runs of several objectives where
    none was asked for.
    """
    table = read_table(path)
    wanted = {"N": columns.N, "D": columns.C or columns.D, "L": columns.L}
    for letter, name in wanted.items():
        if name not in table:
            option = {"N": "--n-column", "D": "--flops-column" if columns.C else "--d-column"}.get(
                letter, "--loss-column"
            )
            raise ValueError(
                f"{path}: no column '{name}'; {nearest(name, list(table))}. Name another with {option}."
            )
    keep, told, warnings = _kept(path, table, objective, len(table[columns.N]))
    for condition in where:
        keep &= _matches(path, table, condition)
        if not keep.any():
            raise ValueError(f"{path}: no finished run is left by --where '{condition}'.")
    if where:
        told["where"] = list(where)
    rows = np.flatnonzero(keep)
    if max_loss is not None:
        kept = max_loss >= _numbers(path, table[columns.L], columns.L, rows)
        rows, told["max_loss"] = rows[kept], max_loss
        if not kept.all():
            warnings.append(
                f"{int((~kept).sum())} of {len(kept)} runs have a loss above {max_loss:g} and are left out."
            )
    N, D, L = (_numbers(path, table[name], name, rows) for name in wanted.values())
    D = D / (6 * N) if columns.C else D
    if len(D) and D.max() < FEWEST_TOKENS:
        raise ValueError(
            f"{path}, column '{wanted['D']}': got {D.max():g} at most, expected tokens of a whole run. Give "
            "a column of token counts (not of billions, steps or layers) with --d-column."
        )
    U = _unique(path, table, columns.U, rows) if wants_unique else None
    if wants_unique:
        wanted["U"] = columns.U
    else:
        warnings += _of_repetition(path, table, rows)
    warnings += _of_losses(table, wanted["L"], rows)
    sums = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    marks = table.get("held_out", [""] * len(keep))
    marked = np.array([marks[i].strip().lower() in YES for i in rows], dtype=bool)
    names = [table["run"][i] for i in rows] if "run" in table else None
    groups, more = _groups(path, table, group, rows)
    if groups is not None:
        wanted["group"] = group or TRUNK
    return Selection(N, D, L, wanted, told, sums, warnings + more, U, rows, marked, names, groups)


def _matches(path: Path, table: dict[str, list[str]], condition: str) -> np.ndarray:
    """Which rows [n] bool a condition holds for; two numbers compare as numbers, all else as text."""
    parts = CONDITION.fullmatch(condition)
    if parts is None:
        raise ValueError(f"--where '{condition}': expected COLUMN OPERATOR VALUE, as 'dataset = c4'")
    name, sign, value = (part.strip() for part in parts.groups())
    if name not in table:
        raise ValueError(f"{path}: no column '{name}' for --where; {nearest(name, list(table))}")
    compare = OPERATORS[sign]
    number = _number_of(value)

    def holds(cell: str) -> bool:
        own = _number_of(cell)
        if number is not None and own is not None:
            return compare(own, number)
        if sign not in ("=", "==", "!="):
            return False
        return compare(cell.strip(), value)

    return np.array([holds(cell) for cell in table[name]], dtype=bool)


def _number_of(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _groups(
    path: Path, table: dict[str, list[str]], name: str | None, rows: np.ndarray
) -> tuple[np.ndarray | None, list[str]]:
    """(labels [rows] or None, warnings); a row with an empty cell stands alone."""
    if name == "none":
        return None, []
    if name is not None and name not in table:
        raise ValueError(f"{path}: got no column '{name}' for --group; {nearest(name, list(table))}")
    column = name or (TRUNK if TRUNK in table else None)
    if column is not None:
        labels = np.array([table[column][i] or f"row {i}" for i in rows])
        if name is not None or len(np.unique(labels)) < len(labels):
            return labels, []
    names = [table["run"][i] for i in rows] if "run" in table else []
    n_repeated = len(names) - len(set(names))
    if not n_repeated:
        return None, []
    return None, [
        f"{n_repeated} rows repeat the name of another run: rows of one run are not independent, so the "
        "intervals are too narrow. Group them with --group run."
    ]


def _unique(path: Path, table: dict[str, list[str]], name: str, rows: np.ndarray) -> np.ndarray:
    """The unique tokens of each run, [rows]."""
    if name not in table:
        raise ValueError(
            f"{path}: no column '{name}' of unique tokens, which this form wants; "
            f"{nearest(name, list(table))}"
        )
    return _numbers(path, table[name], name, rows)


def _of_repetition(path: Path, table: dict[str, list[str]], rows: np.ndarray) -> list[str]:
    """That a form without a term for repetition is asked of runs that repeat."""
    if "epochs" not in table:
        return []
    known = np.array([i for i in rows if table["epochs"][i]], dtype=int)
    n_repeated = int((_numbers(path, table["epochs"], "epochs", known) > 1.01).sum())
    if not n_repeated:
        return []
    return [f"{n_repeated} runs saw some text more than once: this form has no term for repetition."]


def _kept(
    path: Path, table: dict[str, list[str]], objective: str | None, n_rows: int
) -> tuple[np.ndarray, dict[str, Any], list[str]]:
    """(which rows are finished runs of the objective [rows], the filter in words of law.json, warnings)."""
    keep = np.ones(n_rows, dtype=bool)
    told: dict[str, Any] = {}
    warnings = []
    if "status" in table:
        keep &= np.array([status == "done" for status in table["status"]], dtype=bool)
        told["status"] = "done"
        if not keep.any():
            raise ValueError(
                f"{path}: no run of {n_rows} has status 'done'; finish the sweep and collect again"
            )
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
    return keep, told, warnings


def _of_losses(table: dict[str, list[str]], name: str, rows: np.ndarray) -> list[str]:
    """What the losses themselves say against a fit: few digits, and a learning rate that never came down."""
    told = []
    cells = [table[name][i] for i in rows]
    decimals = max((len(cell.partition(".")[2]) for cell in cells if "e" not in cell.lower()), default=9)
    if decimals <= ROUNDED_DECIMALS:
        told.append(
            f"Losses are rounded to {10.0**-decimals:g} nats: as coarse as what a fit has to explain."
        )
    if "annealed" in table:
        loose = sum(table["annealed"][i].strip().lower() in ("0", "0.0", "false", "no") for i in rows)
        if loose:
            told.append(
                f"{loose} of {len(rows)} losses were taken before the learning rate came down: "
                "an un-annealed point lies above the law."
            )
    return told


def _numbers(path: Path, cells: list[str], name: str, rows: np.ndarray) -> np.ndarray:
    """Cells as positive numbers, float64 [rows]. NaN is refused here: to a limit it would be neither side."""
    values = []
    for i in rows:
        try:
            value = float(cells[i])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(
                f"{path}, row {i + 1}, {name}: found '{cells[i]}', wanted a positive number; mend it"
            )
        values.append(value)
    return np.array(values)
