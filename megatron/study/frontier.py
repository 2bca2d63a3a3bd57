"""Compute-optimal frontier of a study: its runs, the fit of their law, and the terminal output about it."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.cli import format_table
from megatron.laws.compute_law import FURTHEST, LEVEL, MAX_HALF_WIDTH, ComputeLaw, Optimum, fit_compute_law
from megatron.laws.fitting.compute_trend import PRIOR
from megatron.laws.isoflop import split_budgets
from megatron.laws.recipe_law import RecipeLaw, RecipePrediction, fit_recipe_law
from megatron.study.forecast import hash_record
from megatron.study.format import format_count, format_interval, format_loss
from megatron.study.ladder import FLOPS_COLUMN, STUDY, read_study_plan
from megatron.study.selection import Columns, Selection, compute_of, read_positive, select_runs
from megatron.study.table import read_runs, select_finished

COMPUTE_LAW = "compute_law.json"  # in the study's directory
RECIPE_LAW = "recipe_law.json"
EXACT = FLOPS_COLUMN["exact"]
HEAD = ("C (FLOPs)", "N*", "95 % confidence", "D*", "L*", "95 % of one new run", "")
ADVICE = {  # constant that is not identified -> runs to add
    "log_size": "add sizes on both sides of the least loss at each budget.",
    "size_exponent": "add budgets, until they span a factor of 30 in FLOPs or more, of three sizes each.",
    "alpha": "add to each budget a size smaller than the least loss's by a factor of 2 to 4.",
    "beta": "add to each budget a size larger than the least loss's by a factor of 2 to 4.",
}
WIDTH = 100  # columns of a terminal
CHECKED = 100.0  # times the largest budget, of the published runs in STUDY.md
FAR = (10.0, 100.0)  # last rows of the table, times the largest fitted budget
PLAN_SHARE, PLAN_RUNS = 0.5, 3  # runs to add: share of the FLOPs of the study so far, and number


def fit_frontier(runs: Selection) -> ComputeLaw:
    """Fit the law of runs whose C was read. Raises ValueError if there are too few."""
    assert runs.C is not None, "read_table_runs and make_frontier_runs set it"
    names = runs.names if runs.names is not None else [str(i) for i in runs.frame.index]
    law = fit_compute_law(runs.N, runs.D, runs.L, runs.C, names, runs.groups, runs.drift)
    return replace(law, table=runs.table)


def make_frontier_runs(table: pd.DataFrame, objective: str, flops_column: str, path: str) -> Selection:
    """Return the finished runs of an objective that no entry of the study holds out, in order of identity.

    `table` of the result: path and sha256 of the runs,
    objective, and the column of C; all as text.
    """
    runs = select_finished(table)
    runs = runs[(runs["objective"] == objective) & ~(runs["held_out"] > 0)]
    # duplicate directories of one identity count once
    runs = runs.drop_duplicates("identity", keep="last").sort_values("identity")
    letters = {"N": "n_params", "D": "train_tokens", "L": "loss", "C": flops_column}
    N, D, L, C = (read_positive(Path(path), runs, name) for name in letters.values())
    keys = ["identity", "n_params", "train_tokens", flops_column, "loss"]
    about = {"path": path, "objective": objective, "flops_by": flops_column}
    about["sha256"] = hash_record({"runs": runs[keys].to_numpy().tolist()})
    # 1.01: rounding to whole steps can exceed one epoch slightly
    n_repeated = int((runs["epochs"] > 1.01).sum())
    warnings = [f"{n_repeated} runs read some text more than once."] if n_repeated else []
    return Selection(runs, N, D, L, letters, {}, about, warnings, C=C, groups=group_trunks(runs))


def group_trunks(runs: pd.DataFrame) -> np.ndarray | None:
    """Return the trunks of runs, as labels of rows that are not independent; None if none share one."""
    trunks = runs["trunk"].fillna(runs["run"])
    return None if trunks.is_unique else trunks.to_numpy()


def read_study_runs(study_dir: str | Path, objective: str | None = None) -> Selection:
    """Read the runs of a study. The default `objective` is from `size: best`, or else the only one.

    Raises FileNotFoundError and ValueError as `table.read_runs`, and ValueError
    for several objectives.
    """
    folder = Path(study_dir)
    table = read_runs(folder)
    study = read_study_plan(folder / STUDY) if (folder / STUDY).is_file() else None
    objectives = sorted(set(select_finished(table)["objective"].dropna()))
    if objective is None and study is not None and study.best is not None:
        objective = study.best.objective[0]
    objective = objective or (objectives[0] if len(objectives) == 1 else None)
    if objective is None or objective not in objectives:
        raise ValueError(
            f"{folder}: got finished runs of {', '.join(objectives) or 'no objective'}, expected "
            f"{objective or 'one'}. Select one with --objective, or run tools/sweep.py first."
        )
    # C of the fit must be in the convention of the study's budgets
    convention = "exact" if study is None else study.flops_convention
    runs = make_frontier_runs(table, objective, FLOPS_COLUMN.get(convention, EXACT), str(folder))
    return runs if study is None else replace(runs, drift=study.slope_drift)


def read_table_runs(
    path: Path, objective: str | None = None, flops_by: str | None = None, where: Sequence[str] = ()
) -> Selection:
    """Read the runs of a table. C is the column `flops_by`, or 6 N D for "6nd".

    `flops_by` defaults to train_flops if the table has that column, else to
    6nd. The drift is that of a study beside the table. Raises the errors of `selection.select_runs`.
    """
    runs = select_runs(path, Columns(), objective, where=where)
    runs = runs.subset(~runs.held_out())
    by = flops_by or (EXACT if EXACT in runs.frame else "6nd")
    about = {**runs.table, "objective": str(runs.filter.get("objective", "")), "flops_by": by}
    return replace(runs, C=compute_of(path, runs, by), table=about, drift=read_drift(path))


def read_drift(path: Path) -> float:
    """Return the slope_drift of a study, or of the study beside a table; without one the default."""
    study = (path if path.is_dir() else path.parent) / STUDY
    return read_study_plan(study).slope_drift if study.is_file() else PRIOR.drift


def fit_recipe(points: Selection) -> RecipeLaw:
    """Fit the points of one recipe that are not held out. Raises the errors of `fit_recipe_law`."""
    fitted = points.subset(~points.held_out())
    assert fitted.C is not None, "select_points sets it"
    names = fitted.names or [str(i + 1) for i in fitted.frame.index]
    return replace(fit_recipe_law(fitted.C, fitted.L, names), table=points.table)


def describe_recipe(law: RecipeLaw, compute: Sequence[float], points: Selection) -> list[str]:
    """Return the table of losses at each compute, default: 1, 10 and 100 times the largest, and notes.

    Points that are not fitted are compared with their interval, but for those below the fitted ones.
    """
    rows = []
    for C in compute or (law.C[1] * times for times in (1.0, *FAR)):
        at = law.predict(C)
        losses = (format_interval(ends, format_loss) for ends in (at.confidence, at.predictive))
        rows.append((f"{C:.2e}", format_loss(at.loss), *losses, _refuse(at) or ""))
    low, high = law.trend.floor_interval(LEVEL)
    head = ("C (FLOPs)", "L", "95 % confidence", "95 % of one new run", "")
    return [
        f"{law.n_points} points of one recipe, C = {law.C[0]:.2e} to {law.C[1]:.2e} FLOPs",
        *(line.rstrip() for line in format_table(head, rows, ("",))),
        f"irreducible loss: {low:.2f} to {high:.2f}, 95 %",
        *(_describe_unseen(law, C, L) for C, L in list_unseen(points) if law.C[0] <= C),
        *textwrap.wrap(describe_reach(law), WIDTH),
        *(f"warning: {warning}" for warning in points.warnings),
    ]


def list_unseen(points: Selection) -> list[tuple[float, float]]:
    """Return (C, L) of the points that are held out."""
    unseen = points.subset(points.held_out())
    return [(C, L) for C, L in unseen.frame[list(points.columns.values())].to_numpy(float)]


def _describe_unseen(law: RecipeLaw, C: float, L: float) -> str:
    """Return the measured loss of a point that is not fitted, beside its prediction."""
    at = law.predict(C)
    predicted = f"{format_loss(at.loss)} ({format_interval(at.predictive, format_loss)})"
    verdict = "inside" if at.predictive[0] <= L <= at.predictive[1] else "outside"
    place = f"C = {C:.2e}, {C / law.C[1]:.3g} times the largest"
    return f"not fitted: {place}: predicted {predicted}, measured {format_loss(L)}, {verdict}"


def format_frontier_table(law: ComputeLaw, compute: Sequence[tuple[float, str]]) -> str:
    """Return a table with one line per (C, remark): N*, D*, L*; at most 100 columns wide."""

    def write_size(value: float) -> str:
        return format_count(value, 3)

    rows = []
    for C, remark in compute:
        at = law.optimum(C)
        sizes = (write_size(at.N), format_interval(at.N_interval, write_size), write_size(at.D))
        losses = (format_loss(at.loss), format_interval(at.predictive, format_loss))
        rows.append((f"{at.C:.2e}", *sizes, *losses, _refuse(at) or remark))
    return "\n".join(line.rstrip() for line in format_table(HEAD, rows, ("",)))


def _refuse(at: Optimum | RecipePrediction) -> str:
    """Return a remark on an interval that is too wide for a forecast, else ""."""
    return f"no forecast, +-{100 * at.half_width:.0f} %" if at.half_width > MAX_HALF_WIDTH else ""


def choose_compute(law: ComputeLaw, C: np.ndarray, next_budget: float | None) -> list[tuple[float, str]]:
    """Return (C, remark) of the table's rows: budgets of the runs, the forecast's budget, and FAR."""
    # the geometric mean of the FLOPs of each budget
    rows = [(float(np.exp(np.log(C[at]).mean())), "") for at in split_budgets(C)]
    if next_budget is not None:
        rows.append((next_budget, "forecast"))
    return sorted([*rows, *((times * law.C[1], f"{times:g} times") for times in FAR)])


def summarise_frontier(law: ComputeLaw, runs: Selection, path: Path, budgets: Sequence[float] = ()) -> str:
    """Return the table of optima with a heading and notes.

    path     the study's folder, whose cell `size: best` is listed too, or a table
    budgets  C to list, FLOPs; none: those of the runs, and of the forecast
    """
    budget = None
    if (path / STUDY).is_file() and (best := read_study_plan(path / STUDY).best) is not None:
        budget = best.flops[0]
    assert runs.C is not None, "runs of a frontier"
    compute = [(C, "") for C in budgets] or choose_compute(law, runs.C, budget)
    head = f"{law.n_runs} runs at {law.n_budgets} budgets, C = {law.C[0]:.2e} to {law.C[1]:.2e} FLOPs"
    return "\n".join([head, format_frontier_table(law, compute), *describe_frontier(law, runs)])


def describe_frontier(law: ComputeLaw, runs: Selection) -> list[str]:
    """Return lines on exponent, scatter, lack of fit, constants not identified, and runs to add."""
    low, high = law.interval("size_exponent")
    notes = [
        f"N* grows as C^{law.params['size_exponent']:.2f}, 95 % confidence [{low:.2f}, {high:.2f}]",
        f"scatter of single runs around the fit: {100 * law.spread:.2g} % of the loss, "
        f"{law.dof} degrees of freedom",
        _describe_noise(law),
        *textwrap.wrap(describe_reach(law), WIDTH),
    ]
    if law.not_identified:
        notes.append(f"NOT IDENTIFIED by these runs: {', '.join(law.not_identified)}")
        notes += [f"  {reason}" for reason in law.not_identified.values()]
        notes += [f"  to do: {step}" for step in suggest_next_steps(law)]
    return notes + [f"warning: {warning}" for warning in law.warnings + runs.warnings]


def describe_reach(law: ComputeLaw | RecipeLaw) -> str:
    """Return how far forecasts reach, and what would take them further."""
    # two digits, as 2,100 or 9.4; the search ends at FURTHEST
    reach = min(float(f"{law.furthest_forecast() / law.C[1]:.2g}"), FURTHEST)
    times = f"{reach:,.0f}" if reach >= 10 else f"{reach:g}"
    if reach <= 1:
        return f"No forecast beyond the largest budget is within {MAX_HALF_WIDTH:.0%}: add runs and seeds."
    start = f"Forecasts within {MAX_HALF_WIDTH:.0%} reach {times} times the largest budget"
    if reach > CHECKED:
        return f"{start}; such intervals were checked on published runs to {CHECKED:g} times."
    return f"{start}. One at C FLOPs needs runs at C / {times} or more."


def _describe_noise(law: ComputeLaw) -> str:
    tested = law.lack_of_fit
    if not tested:
        return "noise of seeds: unknown. To do: train two cells with several seeds, as seeds: [0, 1, 2]"
    verdict = "the form agrees with them" if tested["passes"] else "the form DOES NOT FIT them"
    return (
        f"noise of seeds: {100 * tested['noise']:.2g} %; {verdict} "
        f"(lack of fit: p = {tested['p_value']:.2g}, misfit {100 * tested['misfit']:.2g} %)"
    )


def suggest_plan(flops: float, table: Path, about: Mapping[str, Any]) -> str:
    """Return the command that chooses runs for a law that is not identified, at half of the FLOPs so far.

    about: `filter` of the law, for its objective
    """
    options = f"--budget {PLAN_SHARE * flops:.2g} --runs {PLAN_RUNS} --criterion D --done {table}"
    options += f" --objective {about['objective']}" if about.get("objective") else ""
    return f"choose runs to add with `scaling plan {options}`"


def suggest_next_steps(law: ComputeLaw) -> list[str]:
    """Return one sentence for each constant that the runs do not identify, with the runs to add."""
    return [ADVICE[name] for name in ADVICE if name in law.not_identified]
