"""Selection of the runs of a table on which a law is fitted."""

import hashlib
import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.laws.holdout import select_largest
from megatron.study.table import read_table

TRUNK = "trunk"  # column of tables of this project: rows with one trunk share their first steps
MIN_TOKENS = 1000  # a column with a smaller maximum does not count tokens
ROUNDED_DECIMALS = 2  # a loss of 3.14 has an error of 0.005, as large as the noise between seeds
# The name is matched lazily up to the first operator. Two-letter operators come first: "a <= 3" is not "a" <
# "= 3".
CONDITION = re.compile(r"([^=!<>]+?)(==|!=|<=|>=|=|<|>)(.*)", re.DOTALL)
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
TRUE_CELLS = ("1", "1.0", "true", "yes")


@dataclass(frozen=True)
class Columns:
    """Column names of N, D, L and the unique tokens U in a table; with `C`, D = C / (6 N)."""

    N: str = "n_params"
    D: str = "train_tokens"
    L: str = "loss"
    C: str | None = None
    U: str = "unique_tokens"


@dataclass(frozen=True)
class Selection:
    """Selected runs N, D, L float64 [n], and their origin as stored in law.json.

    rows    indices of the runs in the table
    marked  bool [n]: held out by the study, column `held_out`; None: unknown
    names   column `run`
    groups  labels [n] of rows that are not independent; None: unknown, the fits decide by residuals
    U is None if it was not read.
    """

    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    columns: dict[str, str]
    filter: dict[str, Any]
    table: dict[str, str]
    warnings: list[str]
    rows: np.ndarray
    U: np.ndarray | None = None
    marked: np.ndarray | None = None
    names: list[str] | None = None
    groups: np.ndarray | None = None

    def held_out(self, n_more: int = 0) -> np.ndarray:
        """Return a mask [n] bool of held-out runs: those marked, and the `n_more` largest of the others.

        Raises ValueError if no runs remain for the fit.
        """
        is_held_out = np.zeros(len(self.N), dtype=bool) if self.marked is None else self.marked.copy()
        if is_held_out.all():
            raise ValueError(
                "table: got all runs marked as held out, expected some for the fit. Use --fit-all."
            )
        if n_more:
            free = np.flatnonzero(~is_held_out)
            # `select_largest` returns a mask over the free runs, [len(free)]; free[mask] are their indices
            # among all runs
            is_held_out[free[select_largest(self.N[free], self.D[free], n_more)]] = True
        return is_held_out

    def subset(self, is_selected: np.ndarray) -> "Selection":
        """Return the runs of mask `is_selected` [n]."""
        arrays = ("N", "D", "L", "U", "rows", "marked", "groups")
        selected = {
            name: getattr(self, name)[is_selected] for name in arrays if getattr(self, name) is not None
        }
        if self.names is not None:
            selected["names"] = [name for name, keep in zip(self.names, is_selected, strict=True) if keep]
        return replace(self, **selected)

    def columns_where(self, is_selected: np.ndarray) -> dict[str, np.ndarray | None]:
        """Return N, D, L, U and groups of the runs of mask `is_selected` [n], as arguments of fits."""
        return {
            "N": self.N[is_selected],
            "D": self.D[is_selected],
            "L": self.L[is_selected],
            "U": None if self.U is None else self.U[is_selected],
            "groups": None if self.groups is None else self.groups[is_selected],
        }


def compute_of(path: Path, runs: Selection, by: str) -> np.ndarray:
    """Return C [n] FLOPs of the runs: 6 N D for `by` = "6nd", otherwise column `by` of the table."""
    return 6 * runs.N * runs.D if by == "6nd" else column_of(path, runs, by)


def column_of(path: Path, runs: Selection, name: str) -> np.ndarray:
    """Return column `name` of the table as positive numbers [n]. Raises ValueError if there is none."""
    return _parse_positive(path, _read_cells(path, name), name, runs.rows)


def optional_column_of(path: Path, runs: Selection, name: str) -> np.ndarray:
    """Return column `name` as numbers of any sign [n], NaN for empty cells.

    Raises ValueError for other text.
    """
    cells = _read_cells(path, name)
    try:
        return np.array([float(cells[i] or "nan") for i in runs.rows])
    except ValueError as error:
        raise ValueError(f"{path}, column '{name}': {error}. Expected numbers or empty cells.") from error


def _read_cells(path: Path, name: str) -> list[str]:
    table = read_table(path)
    if name not in table:
        raise ValueError(f"{path}: no column '{name}'; {suggest_nearest(name, list(table))}")
    return table[name]


def select_runs(
    path: Path,
    columns: Columns,
    objective: str | None = None,
    max_loss: float | None = None,
    needs_unique: bool = False,
    group: str | None = None,
    where: Sequence[str] = (),
) -> Selection:
    """Read a table and select its finished runs of one objective.

    With `needs_unique`, the unique tokens are read too.

    max_loss  runs of a larger loss are omitted
    group     column whose equal cells mark rows that are not independent; "none": all rows are; None:
              `trunk` or `run` where several rows share one, the latter with a warning
    where     conditions "COLUMN OPERATOR VALUE", all of which must hold; OPERATOR is one of = != < <= > >=

    Raises FileNotFoundError, and ValueError for a file that is no table, a missing column (with the nearest
    name), a value that is not a positive number, no finished run, or runs of several objectives without
    `objective`.
    """
    table = read_table(path)
    # with FLOPs instead of tokens, the letter D stands for column C until the division below
    column_of_letter = {"N": columns.N, "D": columns.C or columns.D, "L": columns.L}
    for letter, name in column_of_letter.items():
        if name not in table:
            option = {"N": "--n-column", "D": "--flops-column" if columns.C else "--d-column"}.get(
                letter, "--loss-column"
            )
            raise ValueError(
                f"{path}: no column '{name}'; {suggest_nearest(name, list(table))}. Name another with "
                f"{option}."
            )
    # Filters come before parsing: a cell that is not a number is only an error in a row that is fitted.
    is_selected, applied, warnings = _filter_rows(path, table, objective, len(table[columns.N]))
    for condition in where:
        # conditions are applied one by one, so that the error names the first that leaves no run
        is_selected &= _match_condition(path, table, condition)
        if not is_selected.any():
            raise ValueError(f"{path}: no finished run is left by --where '{condition}'.")
    if where:
        applied["where"] = list(where)
    rows = np.flatnonzero(is_selected)
    if max_loss is not None:
        # written so that a loss equal to the limit stays
        is_below = max_loss >= _parse_positive(path, table[columns.L], columns.L, rows)
        rows, applied["max_loss"] = rows[is_below], max_loss
        if not is_below.all():
            warnings.append(
                f"{int((~is_below).sum())} of {len(is_below)} runs have a loss above {max_loss:g} and are "
                "omitted."
            )
    N, D, L = (_parse_positive(path, table[name], name, rows) for name in column_of_letter.values())
    D = D / (6 * N) if columns.C else D
    # billions (70.0), layers or epochs would fit as well as tokens and give a B that is wrong by orders of
    # magnitude
    if len(D) and D.max() < MIN_TOKENS:
        raise ValueError(
            f"{path}, column '{column_of_letter['D']}': got {D.max():g} at most, expected tokens of a whole "
            "run. Give a column of token counts (not of billions, steps or layers) with --d-column."
        )
    U = _read_unique_tokens(path, table, columns.U, rows) if needs_unique else None
    if needs_unique:
        column_of_letter["U"] = columns.U
    else:
        warnings += _check_repetition(path, table, rows)
    warnings += _check_losses(table, column_of_letter["L"], rows)
    # the hash of the file's bytes shows later whether law.json is of this table
    sums = {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    marks = table.get("held_out", [""] * len(is_selected))
    marked = np.array([marks[i].strip().lower() in TRUE_CELLS for i in rows], dtype=bool)
    names = [table["run"][i] for i in rows] if "run" in table else None
    column, groups, more = _find_groups(path, table, group, rows)
    if column is not None:
        column_of_letter["group"] = column
    return Selection(
        N, D, L, column_of_letter, applied, sums, warnings + more, rows, U, marked, names, groups
    )


def _match_condition(path: Path, table: dict[str, list[str]], condition: str) -> np.ndarray:
    """Return a mask [n] of the rows that meet a condition.

    Two numbers compare as numbers, other cells as text.
    """
    parts = CONDITION.fullmatch(condition)
    if parts is None:
        raise ValueError(f"--where '{condition}': expected COLUMN OPERATOR VALUE, such as 'dataset = c4'")
    name, sign, value = (part.strip() for part in parts.groups())
    if name not in table:
        raise ValueError(f"{path}: no column '{name}' for --where; {suggest_nearest(name, list(table))}")
    compare = OPERATORS[sign]
    number = _parse_number(value)

    def holds(cell: str) -> bool:
        cell_number = _parse_number(cell)
        if number is not None and cell_number is not None:
            return compare(cell_number, number)
        # "12k" < "3k" is true as text, so texts have no order here: the row is not selected
        if sign not in ("=", "==", "!="):
            return False
        return compare(cell.strip(), value)

    return np.array([holds(cell) for cell in table[name]], dtype=bool)


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _find_groups(
    path: Path, table: dict[str, list[str]], name: str | None, rows: np.ndarray
) -> tuple[str | None, np.ndarray | None, list[str]]:
    """Return (column, labels [rows], warnings), None where nothing groups the rows.

    A row with an empty cell is a group of its own.
    """
    if name == "none":
        return None, np.arange(len(rows)), []
    if name is not None and name not in table:
        raise ValueError(f"{path}: got no column '{name}' for --group; {suggest_nearest(name, list(table))}")
    for column in [name] if name else [column for column in (TRUNK, "run") if column in table]:
        labels = np.array([table[column][i] or f"row {i}" for i in rows])
        n_repeated = len(labels) - len(np.unique(labels))
        # trunks that are all different group nothing; a group column that the caller names is used in any
        # case
        if name is not None or n_repeated:
            warning = (
                f"{n_repeated} rows repeat the name of another run, and rows of one run are grouped. "
                "Independent rows need --group none."
            )
            return column, labels, [warning] if name is None and column != TRUNK else []
    return None, None, []


def _read_unique_tokens(path: Path, table: dict[str, list[str]], name: str, rows: np.ndarray) -> np.ndarray:
    """Return the unique tokens of each run, [rows]."""
    if name not in table:
        raise ValueError(
            f"{path}: no column '{name}' of unique tokens, which this form needs; "
            f"{suggest_nearest(name, list(table))}"
        )
    return _parse_positive(path, table[name], name, rows)


def _check_repetition(path: Path, table: dict[str, list[str]], rows: np.ndarray) -> list[str]:
    """Return a warning if runs repeat text, for forms without a term for repetition."""
    if "epochs" not in table:
        return []
    has_epochs = np.array([i for i in rows if table["epochs"][i]], dtype=int)
    # 1.01: rounding to whole steps can exceed one epoch slightly
    n_repeated = int((_parse_positive(path, table["epochs"], "epochs", has_epochs) > 1.01).sum())
    if not n_repeated:
        return []
    return [f"{n_repeated} runs saw some text more than once, and this form has no term for repetition."]


def _filter_rows(
    path: Path, table: dict[str, list[str]], objective: str | None, n_rows: int
) -> tuple[np.ndarray, dict[str, Any], list[str]]:
    """Return (mask of finished runs of the objective [rows], applied filter for law.json, warnings)."""
    is_selected = np.ones(n_rows, dtype=bool)
    applied: dict[str, Any] = {}
    warnings = []
    if "status" in table:
        is_selected &= np.array([status == "done" for status in table["status"]], dtype=bool)
        applied["status"] = "done"
        if not is_selected.any():
            raise ValueError(
                f"{path}: got no run of {n_rows} with status 'done', expected some. Finish the sweep and "
                "collect again."
            )
        if not is_selected.all():
            warnings.append(
                f"{int((~is_selected).sum())} of {n_rows} runs in the table are not done and are omitted."
            )
    if "objective" in table:
        objectives = sorted(
            {o for o, is_done in zip(table["objective"], is_selected, strict=True) if is_done}
        )
        if objective is None and len(objectives) > 1:
            raise ValueError(
                f"{path}: got runs of {', '.join(objectives)}, expected one objective. Choose it with "
                "--objective."
            )
        objective = objective or (objectives[0] if objectives else None)
        if objectives and objective not in objectives:
            raise ValueError(
                f"{path}: no finished run of objective '{objective}'; "
                f"{suggest_nearest(str(objective), objectives)}"
            )
        # a bound on a loss and a loss do not fit one law
        is_selected &= np.array([o == objective for o in table["objective"]], dtype=bool)
        applied["objective"] = objective
    return is_selected, applied, warnings


def _check_losses(table: dict[str, list[str]], name: str, rows: np.ndarray) -> list[str]:
    """Return warnings about the losses: few digits, and learning rates that were not annealed."""
    warnings = []
    cells = [table[name][i] for i in rows]
    # "3.14" has 2 decimals and "3" has 0. The most precise cell counts, since trailing zeros are often
    # dropped. Exponents are skipped, and without any other cell 9 means no warning.
    decimals = max((len(cell.partition(".")[2]) for cell in cells if "e" not in cell.lower()), default=9)
    if decimals <= ROUNDED_DECIMALS:
        warnings.append(
            f"Losses are rounded to {10.0**-decimals:g} nats, about the size of the noise between runs."
        )
    if "annealed" in table:
        n_unannealed = sum(table["annealed"][i].strip().lower() in ("0", "0.0", "false", "no") for i in rows)
        if n_unannealed:
            warnings.append(
                f"{n_unannealed} of {len(rows)} losses were measured before the learning rate was annealed: "
                "such points are above the law."
            )
    return warnings


def _parse_positive(path: Path, cells: list[str], name: str, rows: np.ndarray) -> np.ndarray:
    """Return cells as positive numbers, float64 [rows].

    Raises ValueError for other cells. NaN is among them, since every comparison with a limit would be false.
    """
    values = []
    for i in rows:
        try:
            value = float(cells[i])
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ValueError(f"{path}, row {i + 1}, {name}: got '{cells[i]}', expected a positive number")
        values.append(value)
    return np.array(values)
