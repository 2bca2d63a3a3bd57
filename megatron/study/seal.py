"""Predictions of planned runs by a law, sealed as forecasts."""

import fnmatch
import hashlib
from pathlib import Path

from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.laws.prediction import predict_run
from megatron.study.blind import list_started_files
from megatron.study.forecast import LEVELS, RUN, Forecast, load_forecasts, make_forecast, seal_forecasts
from megatron.study.ladder import PlannedRun, StudyPlan, expand_study


def seal_runs(study: StudyPlan, law_path: str | Path, pattern: str | None = None) -> list[Forecast]:
    """Predict runs of a study with a law of its objective, and seal the predictions.

    pattern   of names of runs; default: the runs that the study holds out and that have not been started

    Raises FileNotFoundError for no law, ValueError for a law without replicates, for no run, for a run that
    has been started or whose trunk has, and as `seal_forecasts`.
    """
    law = Law.load(law_path)
    objective = str((law.filter or {}).get("objective", ""))
    needs_unique = FORM[law.form].needs_unique
    planned = expand_study(study)
    stored = {forecast.identity for forecast in load_forecasts(study.directory)}
    chosen = []
    for run in planned:
        if objective and run.plan.objective != objective:
            continue
        started = _list_started(run)
        # a sealed run is predicted again, and the forecast compared, unless it was chosen by default only
        if pattern is None and run.held_out and not started and run.plan.identity not in stored:
            chosen.append(run)
        elif pattern is not None and fnmatch.fnmatchcase(run.config.name, pattern):
            if started and run.plan.identity not in stored:
                raise ValueError(
                    f"{run.folder}: got a run that has been started ({started}), expected none. "
                    "A forecast is sealed before the run, and before a longer run that shares its steps."
                )
            chosen.append(run)
    if not chosen:
        expected_run = "held-out run that has not been started" if pattern is None else f"run named {pattern}"
        raise ValueError(
            f"{study.directory}: got no {expected_run}{f' of {objective}' if objective else ''} to predict. "
            "Name runs with --runs PATTERN, as tools/sweep.py --dry-run lists them."
        )
    forecasts = [_predict_planned_run(law, run, needs_unique, Path(law_path)) for run in chosen]
    seal_forecasts(study.directory, forecasts)
    return forecasts


def _list_started(run: PlannedRun) -> str:
    folders = [run.folder, *([run.branch.trunk] if run.branch else [])]
    return ", ".join(filter(None, map(list_started_files, folders)))


def _predict_planned_run(law: Law, run: PlannedRun, needs_unique: bool, path: Path) -> Forecast:
    plan = run.plan
    U = float(plan.unique_tokens) if needs_unique else None
    levels = [predict_run(law, plan.n_params, plan.train_tokens, U, level) for level in LEVELS]
    if any(at.predictive is None for at in levels):
        raise ValueError(
            f"{path}: got a law without bootstrap replicates, which has no intervals. Fit it again."
        )
    return make_forecast(
        name=run.folder.name,
        quantity=RUN,
        objective=plan.objective,
        identity=plan.identity,
        N=float(plan.n_params),
        D=float(plan.train_tokens),
        U=U,
        predicted=levels[0].loss,
        intervals=tuple(at.predictive for at in levels),
        method=law.formula(),
        law=path.name,
        law_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        data_sha256=str(law.table.get("sha256", "")),
    )
