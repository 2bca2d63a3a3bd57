"""Selection of the runs of a table on which a law is fitted."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.config.presets import suggest_nearest
from megatron.laws.fitting.compute_trend import PRIOR
from megatron.laws.holdout import select_largest
from megatron.study.table import read_table

TRUNK = "trunk"  # column of tables of this project: rows with one trunk share their first steps
MIN_TOKENS = 1000  # a column with a smaller maximum does not count tokens


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

    frame   their rows of the table, with their numbers in the table as index
    groups  labels [n] of rows that are not independent;
            None: unknown, the fits decide by residuals
    U (unique tokens) and C (FLOPs, for a frontier) are None if they were not read.
    drift   of the frontier's slope, as of a study
    """

    frame: pd.DataFrame
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    columns: dict[str, str]
    filter: dict[str, Any]
    table: dict[str, str]
    warnings: list[str]
    U: np.ndarray | None = None
    C: np.ndarray | None = None
    groups: np.ndarray | None = None
    drift: float = PRIOR.drift

    @property
    def names(self) -> list[str] | None:
        """Column `run`; None without it."""
        return [str(name) for name in self.frame["run"]] if "run" in self.frame else None

    def held_out(self, n_more: int = 0) -> np.ndarray:
        """Return a mask [n] bool: runs that the study holds out, and the `n_more` largest of the others.

        Raises ValueError if no runs remain for the fit.
        """
        is_held_out = self.frame.reindex(columns=["held_out"])["held_out"].to_numpy(float) > 0
        if is_held_out.all():
            raise ValueError(
                "table: got all runs marked as held out, expected some for the fit. Clear held_out of some."
            )
        if n_more:
            free = np.flatnonzero(~is_held_out)
            # `select_largest` returns a mask over the free runs, [len(free)];
            # free[mask] are their indices among all runs
            is_held_out[free[select_largest(self.N[free], self.D[free], n_more)]] = True
        return is_held_out

    def subset(self, is_selected: np.ndarray) -> "Selection":
        """Return the runs of mask `is_selected` [n]."""
        values = {name: getattr(self, name) for name in ("frame", "N", "D", "L", "U", "C", "groups")}
        return replace(self, **{name: v[is_selected] for name, v in values.items() if v is not None})


def compute_of(path: Path, runs: Selection, by: str) -> np.ndarray:
    """Return C [n] FLOPs of the runs: 6 N D for `by` = "6nd", otherwise column `by` of the table."""
    return 6 * runs.N * runs.D if by == "6nd" else read_positive(path, runs.frame, by)


def optional_column_of(path: Path, runs: Selection, name: str) -> np.ndarray:
    """Return column `name` as numbers of any sign [n], NaN for unknown ones. Raises ValueError for text."""
    require_column(path, runs.frame, name)
    try:
        return pd.to_numeric(runs.frame[name]).to_numpy(float)
    except ValueError as error:
        raise ValueError(f"{path}, column '{name}': {error}. Expected numbers or empty cells.") from error


def select_runs(
    path: Path,
    columns: Columns,
    objective: str | None = None,
    needs_unique: bool = False,
    group: str | None = None,
    where: Sequence[str] = (),
) -> Selection:
    """Read a table and select its finished runs of one objective.

    With `needs_unique`, the unique tokens are read too.

    group     column whose equal cells mark rows that are not independent;
              "none": all rows are; None: `trunk` or `run` where
              several rows share one, the latter with a warning
    where     expressions of `pandas.DataFrame.query`,
              such as "dataset == 'c4' and loss < 3.4"

    Raises FileNotFoundError, and ValueError for a file
    that is not a table, a missing column (with the nearest name),
    a value that is not a positive number, no finished run,
    or runs of several objectives without `objective`.
    """
    table = read_table(path)
    letters = {"N": columns.N, "D": columns.C or columns.D, "L": columns.L}
    options = {"N": "--n-column", "D": "--flops-column" if columns.C else "--d-column"}
    for letter, name in letters.items():
        require_column(path, table, name, options.get(letter, "--loss-column"))
    # Filters come before parsing: a cell that is not a number is only an
    # error in a row that is fitted.
    runs, applied, warnings = filter_rows(path, table, objective, where)
    N, D, L = (read_positive(path, runs, name) for name in letters.values())
    D = D / (6 * N) if columns.C else D
    # billions (70.0), layers or epochs would fit as well as tokens and give a
    # B that is wrong by orders of magnitude
    if len(D) and D.max() < MIN_TOKENS:
        raise ValueError(
            f"{path}, column '{letters['D']}': got {D.max():g} at most, expected tokens of a whole run. "
            "Give a column of token counts, not of billions, steps or layers."
        )
    U = read_positive(path, runs, columns.U) if needs_unique else None
    if needs_unique:
        letters["U"] = columns.U
    warnings += _check_losses(runs, needs_unique)
    column, groups, more = _find_groups(path, runs, group)
    if column is not None:
        letters["group"] = column
    return Selection(runs, N, D, L, letters, applied, _identify(path), warnings + more, U, groups=groups)


def select_points(
    path: Path, flops_by: str | None, objective: str | None = None, where: Sequence[str] = ()
) -> Selection:
    """Select the finished runs of one objective from a table that needs no N and D, which are NaN.

    flops_by  column of the FLOPs C; default: train_flops

    Raises the errors of `select_runs`.
    """
    table, flops_column = read_table(path), flops_by or "train_flops"
    letters = {"C": flops_column, "L": Columns.L}
    require_column(path, table, flops_column, "--flops-by")
    runs, applied, warnings = filter_rows(path, table, objective, where)
    C, L = (read_positive(path, runs, name) for name in letters.values())
    unknown = np.full(len(L), math.nan)
    about = {**_identify(path), "flops_by": flops_column}
    return Selection(runs, unknown, unknown, L, letters, applied, about, warnings, C=C)


def _identify(path: Path) -> dict[str, str]:
    """Return name and hash of a table: the hash shows later whether a law is of this table."""
    return {"path": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def require_column(path: Path, table: pd.DataFrame, name: str, option: str = "") -> None:
    """Raise ValueError for a column that the table lacks, with the nearest name."""
    if name not in table:
        message = f"{path}: no column '{name}'; {suggest_nearest(name, list(table))}."
        raise ValueError(message.replace("?.", "?") + (f" Name another with {option}." if option else ""))


def _query(path: Path, runs: pd.DataFrame, condition: str) -> pd.DataFrame:
    """Return the runs that meet an expression. Raises ValueError for an invalid one, or if none is left."""
    try:
        selected = runs.query(condition, engine="python")
    # pandas raises what the expression raises: SyntaxError, NameError,
    # TypeError, KeyError, ...
    except Exception as error:
        raise ValueError(
            f'--where "{condition}": {error}. Expected an expression of pandas, such as "dataset == \'c4\'".'
        ) from error
    if selected.empty:
        raise ValueError(f'{path}: no finished run is left by --where "{condition}".')
    return selected


def read_positive(path: Path, runs: pd.DataFrame, name: str) -> np.ndarray:
    """Return a column as positive numbers, float64 [n]. Raises ValueError for other cells or no column."""
    require_column(path, runs, name)
    numbers = pd.to_numeric(runs[name], errors="coerce").to_numpy(float)
    is_valid = (numbers > 0) & (numbers < math.inf)
    if not is_valid.all():
        at = int(np.argmin(is_valid))
        got = runs[name].iloc[at]
        got = "no number" if pd.isna(got) else f"'{got}'"
        raise ValueError(f"{path}, row {runs.index[at] + 1}, {name}: got {got}, expected a positive number")
    return numbers


def filter_rows(
    path: Path, table: pd.DataFrame, objective: str | None, where: Sequence[str]
) -> tuple[pd.DataFrame, dict[str, Any], list[str]]:
    """Return (finished runs of the objective that meet `where`, applied filter for law.json, warnings)."""
    applied: dict[str, Any] = {}
    warnings = list(table.attrs["warnings"])
    runs = table
    if "status" in table:
        runs, applied["status"] = table[table["status"] == "done"], "done"
        if n_omitted := len(table) - len(runs):
            warnings.append(f"{n_omitted} of {len(table)} runs in the table are not done and are omitted.")
    if runs.empty:
        raise ValueError(
            f"{path}: got {len(table)} rows and no finished run. Finish the sweep and collect again."
        )
    if "objective" in table:
        objectives = sorted(set(runs["objective"].dropna()))
        objective = objective or (objectives[0] if len(objectives) == 1 else None)
        if objectives and objective not in objectives:
            fix = suggest_nearest(objective, objectives) if objective else "Choose it with --objective."
            names = ", ".join(objectives)
            raise ValueError(f"{path}: got runs of {names}, expected {objective or 'one objective'}. {fix}")
        # a bound on a loss and a loss do not fit one law
        if objective is not None:
            runs = runs[runs["objective"] == objective]
        applied["objective"] = objective
    for condition in where:
        runs = _query(path, runs, condition)
    if where:
        applied["where"] = list(where)
    return runs, applied, warnings


def _check_losses(runs: pd.DataFrame, needs_unique: bool) -> list[str]:
    """Return warnings about repeated text, and rates that were not annealed."""
    values = runs.reindex(columns=["epochs", "annealed"])
    # 1.01: rounding to whole steps can exceed one epoch slightly
    n_repeated, n_high = int((values["epochs"] > 1.01).sum()), int((values["annealed"] <= 0).sum())
    warnings = {
        f"{n_repeated} runs saw some text more than once, and this form has no term for repetition.": (
            n_repeated and not needs_unique
        ),
        f"{n_high} of {len(runs)} losses were measured before the learning rate was annealed: "
        "such points are above the law.": n_high,
    }
    return [warning for warning, is_needed in warnings.items() if is_needed]


def _find_groups(
    path: Path, runs: pd.DataFrame, name: str | None
) -> tuple[str | None, np.ndarray | None, list[str]]:
    """Return (column, labels [rows], warnings), None where nothing groups the rows.

    A row with an empty cell is a group of its own.
    """
    if name == "none":
        return None, np.arange(len(runs)), []
    if name is not None:
        require_column(path, runs, name, "--group")
    for column in [name] if name else [column for column in (TRUNK, "run") if column in runs]:
        numbered = pd.Series([f"row {i}" for i in runs.index], index=runs.index)
        labels = runs[column].astype(object).where(runs[column].notna(), numbered).astype(str).to_numpy()
        n_repeated = len(labels) - len(np.unique(labels))
        # trunks that are all different group nothing; a group column that the
        # caller names is used in any case
        if name is not None or n_repeated:
            warning = (
                f"{n_repeated} rows repeat the name of another run, and rows of one run are grouped. "
                "Independent rows need --group none."
            )
            return column, labels, [warning] if name is None and column != TRUNK else []
    return None, None, []
