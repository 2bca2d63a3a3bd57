"""Forecasts of runs that do not exist yet: by a law, by the frontier, and by crossings of smaller texts."""

import fnmatch
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.laws.compute_law import ComputeLaw
from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.laws.power_law import PowerLaw, fit_power
from megatron.laws.prediction import predict_run
from megatron.study import forecast, ladder
from megatron.study.cell import BEST
from megatron.study.forecast import LEVELS, Forecast
from megatron.study.format import format_count
from megatron.study.frontier import COMPUTE_LAW, fit_frontier, make_frontier_runs
from megatron.study.ladder import STUDY, PlannedRun, StudyPlan
from megatron.study.measured import CROSSOVER, FIRST, SAME_U, SECOND, find_text_runs, measure_study
from megatron.study.table import read_runs, select_finished

MAX_SIZE_RATIO = 1.5  # factor between N* and the nearest candidate
REQUIRED_CONSTANTS = ("log_size", "size_exponent")  # constants without which there is no N* to train
MAX_NAMED_RUNS = 3  # runs in a sentence


def seal_runs(study: StudyPlan, law_path: str | Path, pattern: str | None = None) -> list[Forecast]:
    """Predict runs of a study with a law of its objective, and seal the predictions.

    pattern   of names of runs; default: the runs that the study holds out and that have
              not been started

    Raises FileNotFoundError for no law,
    ValueError for a law without replicates,
    for no run, for a run that has been started
    or whose trunk has, and as `seal_forecasts`.
    """
    path = Path(law_path)
    law = Law.load(path)
    objective = str(law.filter.get("objective", ""))
    stored = {sealed.identity for sealed in forecast.read_forecasts(study.directory)}
    chosen = [
        run for run in ladder.expand_study(study) if run.plan.objective == (objective or run.plan.objective)
    ]
    new = {run.folder for run in chosen if run.plan.identity not in stored}
    if pattern is None:
        chosen = [run for run in chosen if run.held_out and run.folder in new and not _list_started(run)]
    else:
        # a sealed run is predicted again, and the forecast compared
        chosen = [run for run in chosen if fnmatch.fnmatchcase(run.config.name, pattern)]
        for run in chosen:
            _check_not_started(run.folder, _list_started(run) if run.folder in new else "")
    if not chosen:
        expected_run = "held-out run that has not been started" if pattern is None else f"run named {pattern}"
        raise ValueError(
            f"{study.directory}: got no {expected_run}{f' of {objective}' if objective else ''} to predict. "
            "Name runs with --runs PATTERN, as tools/sweep.py --dry-run lists them."
        )
    new_forecasts = [_predict_by_law(law, run, study, path) for run in chosen]
    return forecast.seal_forecasts(study.directory, new_forecasts)


def _list_started(run: PlannedRun) -> str:
    folders = [run.folder, *([run.branch.trunk] if run.branch else [])]
    return ", ".join(filter(None, map(forecast.list_started_files, folders)))


def _check_not_started(folder: Path, started: str) -> None:
    if started:
        raise ValueError(
            f"{folder}: got a run that has been started ({started}), expected none. "
            "A forecast is sealed before the run, and before a longer run that shares its steps."
        )


def _predict_by_law(law: Law, run: PlannedRun, study: StudyPlan, path: Path) -> Forecast:
    plan = run.plan
    U = float(plan.unique_tokens) if FORM[law.form].needs_unique else None
    levels = [predict_run(law, plan.n_params, plan.train_tokens, U, level) for level in LEVELS]
    if any(at.predictive is None for at in levels):
        raise ValueError(
            f"{path}: got a law without bootstrap replicates, which has no intervals. Fit it again."
        )
    law_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    about = {"method": law.formula(), "law": path.name, "law_sha256": law_sha256}
    data = str(law.table.get("sha256", ""))
    return _make_run_forecast(study, run, levels, U=U, data_sha256=data, **about)


def _make_run_forecast(study: StudyPlan, run: PlannedRun, levels: Sequence[Any], **about: Any) -> Forecast:
    """Return the forecast of a run from its predictions at LEVELS, each with `loss` and `predictive`."""
    plan = run.plan
    about |= {"name": run.folder.name, "quantity": forecast.RUN, "study": study.text()}
    about |= {"objective": plan.objective, "N": float(plan.n_params), "D": float(plan.train_tokens)}
    about |= {"identity": plan.identity, "runs": {plan.identity: int(run.held_out)}}
    about |= {"predicted": levels[0].loss, "intervals": tuple(at.predictive for at in levels)}
    return forecast.make_forecast(**about)


def seal_best(study_dir: str | Path) -> Forecast:
    """Choose the size of the study's entry `size: best` by the frontier, and seal the forecast of its run.

    The same forecast as the stored one is returned unchanged.
    Raises FileNotFoundError if there is no study. Raises
    ValueError without such an entry, if listed runs are
    unfinished or too few, if the law does not identify N*, if
    no size is near N*, or if the run was started.
    """
    folder = Path(study_dir)
    study = ladder.read_study_plan(folder / STUDY, [f"directory={folder}"])
    if study.best is None:
        raise ValueError(
            f"{folder / STUDY}: got no cell of size {BEST}, expected the run to predict. Add "
            f"`- {{size: {BEST}, flops: ...}}` to the cells of STUDY.yaml and run tools/sweep.py again."
        )
    objective, column = study.best.objective[0], ladder.FLOPS_COLUMN[study.flops_convention]
    planned = ladder.expand_listed(study)
    identities = [r.plan.identity for r in planned if r.plan.objective == objective and not r.held_out]
    table = read_runs(folder)
    # the plan decides, not the marks in the table: a run of the cells is
    # fitted even if it was forecast
    runs = table[table["identity"].isin(identities)].assign(held_out=0.0)
    _check_finished(folder, runs)
    fitted = make_frontier_runs(runs, objective, column, str(folder))
    law = fit_frontier(replace(fitted, drift=study.slope_drift))
    reasons = [law.not_identified[name] for name in REQUIRED_CONSTANTS if name in law.not_identified]
    if reasons:
        raise ValueError(
            f"frontier: got no identified N*: {' '.join(reasons)} Add sizes on both sides of the best one at "
            "each budget to the cells, or budgets, then run tools/sweep.py and predict again."
        )
    run = _choose_candidate(study, law)
    if run.plan.identity in identities:
        raise ValueError(f"{run.folder}: got a run that the law is fitted on. Remove it from the cells.")
    if run.plan.identity not in {sealed.identity for sealed in forecast.read_forecasts(folder)}:
        _check_not_started(run.folder, forecast.list_started_files(run.folder))
    return forecast.seal_forecasts(folder, [_predict_by_frontier(study, law, run, column)])[0]


def _check_finished(folder: Path, runs: pd.DataFrame) -> None:
    lacking = runs[runs["status"] != "done"]
    if len(lacking):
        notes = "; ".join((lacking["run"] + ": " + lacking["status"]).head(MAX_NAMED_RUNS))
        raise ValueError(
            f"{folder}: got {len(lacking)} unfinished runs ({notes}), expected all {len(runs)} "
            "done. Run tools/sweep.py again, or remove runs that cannot be trained from the cells."
        )


def _choose_candidate(study: StudyPlan, law: ComputeLaw) -> PlannedRun:
    """Return the candidate nearest to N* in log N. Raises ValueError beyond a ratio of MAX_SIZE_RATIO."""
    assert study.best is not None
    budget = study.best.flops[0]
    optimum = law.optimum(budget)
    candidates = ladder.plan_candidates(study)

    # ratio, not difference: the cost of a wrong
    # size is symmetric in log N to second order
    distances = [abs(math.log(run.plan.n_params / optimum.N)) for run in candidates]
    if min(distances) > math.log(MAX_SIZE_RATIO):
        sizes = ", ".join(f"{run.plan.size} ({format_count(run.plan.n_params, 3)})" for run in candidates)
        raise ValueError(
            f"study {study.name}: sizes: got {sizes}, expected one within a factor of {MAX_SIZE_RATIO:g} of "
            f"N* = {format_count(optimum.N, 3)} at {budget:.3g} FLOPs. Add a size of about that many "
            "parameters to sizes, and run tools/sweep.py again."
        )
    return candidates[distances.index(min(distances))]


def _predict_by_frontier(study: StudyPlan, law: ComputeLaw, run: PlannedRun, column: str) -> Forecast:
    # C of the run itself, after rounding
    # to whole steps, and not the nominal budget
    C = float(getattr(run.plan, column))
    levels = [law.predict_run(run.plan.n_params, C, level) for level in LEVELS]
    data = law.table["sha256"]
    about = {"law": COMPUTE_LAW, "law_sha256": forecast.hash_record({"params": law.params, "data": data})}
    method = f"frontier of {law.n_runs} runs at {law.n_budgets} budgets, C by {column}"
    return _make_run_forecast(study, run, levels, U=None, method=method, data_sha256=data, **about)


def seal_text(study_dir: Path, U: float) -> list[Forecast]:
    """Seal forecasts for U unique tokens: each objective's best loss, and the crossing if it has a law.

    Each is a power law in U through the measured values, with
    the predictive interval of one new value. The runs that will
    decide it are the study's runs on this text. Raises
    ValueError if one of them has been started, without
    such runs, or with fewer than two texts.
    """
    study = ladder.read_study_plan(study_dir / STUDY, [f"directory={study_dir}"])
    table = read_runs(study_dir)
    for run in find_text_runs(table, U).itertuples():
        if run.path:
            _check_not_started(study_dir / run.path, forecast.list_started_files(study_dir / run.path))
    planned = [run for run in ladder.expand_study(study) if abs(run.plan.unique_tokens / U - 1) < SAME_U]
    if not planned:
        raise ValueError(f"{study_dir / STUDY}: got no run on {U:g} unique tokens. Add its cells first.")
    about: dict[str, Any] = {"study": study.text()}
    about["runs"] = {run.plan.identity: int(run.held_out) for run in planned}
    finished = select_finished(table)
    measured, law = measure_study(finished)
    texts = np.array([at.U for at in measured])
    if len(texts) < 2:
        raise ValueError(f"{study_dir}: got {len(texts)} unique text with both objectives, expected 2.")
    rows = finished[["identity", "train_flops", "loss", "test_loss"]].sort_values("identity").fillna(0)
    data = forecast.hash_record({"runs": rows.to_numpy().tolist()})
    powers: list[tuple[str, str, PowerLaw]] = []
    for objective, best in ((FIRST, [at.first for at in measured]), (SECOND, [at.second for at in measured])):
        losses = np.array([setting.loss for setting in best])
        errors = np.array([setting.seed_se for setting in best], dtype=float)  # None: NaN
        log_se = None if np.isnan(errors).any() else errors / losses
        powers.append((forecast.BEST_LOSS, objective, fit_power(texts, losses, log_se)))
    powers += [] if law is None else [(forecast.CROSSING, "", law)]
    about |= {"data_sha256": data, "U": float(U)}
    return forecast.seal_forecasts(study_dir, [_predict_by_power(*power, U, about) for power in powers])


def _predict_by_power(
    quantity: str, objective: str, power: PowerLaw, U: float, about: dict[str, Any]
) -> Forecast:
    name = "-".join(filter(None, (quantity, objective, f"{format_count(U, 3)}unique")))
    ends = np.array([power.predict(U, level) for level in LEVELS], dtype=float)  # value, low, high
    if not np.isfinite(ends).all():
        raise ValueError(
            f"{name}: got two measured values without errors, which have no interval. Train settings with "
            "several seeds, or a third text."
        )
    formula = f"{power.coefficient:.6g} U^{power.exponent:.6g}, {power.dof} degrees of freedom"
    law_sha256 = hashlib.sha256(f"{formula} {about['data_sha256']}".encode()).hexdigest()
    about = about | {"method": formula, "law": CROSSOVER, "law_sha256": law_sha256, "N": None, "D": None}
    intervals = tuple(map(tuple, ends[:, 1:].tolist()))
    about |= {"quantity": quantity, "objective": objective, "identity": ""}
    return forecast.make_forecast(name=name, predicted=float(ends[0, 0]), intervals=intervals, **about)


def find_outcome(study_dir: Path) -> pd.Series:
    """Return the outcome of the newest forecast of one run. Raise ValueError without a forecast."""
    forecasts = [sealed for sealed in forecast.read_forecasts(study_dir) if sealed.quantity == forecast.RUN]
    if not forecasts:
        raise ValueError(
            f"{study_dir / forecast.FORECASTS}: got no forecast of a run. Run scaling frontier {study_dir} "
            "--predict before training it."
        )
    return forecast.score_forecasts(forecasts[-1:], read_runs(study_dir)).iloc[0]
