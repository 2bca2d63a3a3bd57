"""The measured crossover of a study: settings by unique text, forecasts for the next text, their scores."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import replace_nonfinite, write_json
from megatron.laws.measured_crossover import (
    LEVEL,
    CrossoverLaw,
    MeasuredCrossover,
    Setting,
    fit_crossover_law,
    measure_crossover,
)
from megatron.laws.power_law import PowerLaw, fit_power
from megatron.study.blind import list_started_files
from megatron.study.forecast import (
    BEST_LOSS,
    CROSSING,
    LEVELS,
    Forecast,
    ForecastOutcome,
    is_newer,
    make_forecast,
    score_runs,
    seal_forecasts,
)
from megatron.study.format import OBJECTIVE_NAMES, format_count
from megatron.study.run_row import FinishedRow, RunRow, select_finished

CROSSOVER = "crossover.json"
FIRST, SECOND = "autoregressive", "masked_diffusion"
SAME_U = (
    0.01  # relative difference of unique tokens that counts as the same text: whole windows differ by less
)


def collect_settings(rows: Sequence[RunRow]) -> dict[float, dict[str, list[Setting]]]:
    """Return the settings of finished runs with a test loss, by unique tokens and objective.

    Runs of one column `cell` differ only in their seed. Those that are held out are fresh seeds, which report
    a setting and do not select it; a setting of fresh seeds only cannot be selected, and is skipped.
    """
    cells: dict[tuple[float, str, str], list[FinishedRow]] = defaultdict(list)
    for row in select_finished(rows):
        if row.test_loss is not None and row.unique_tokens and row.train_flops:
            cells[row.unique_tokens, row.objective, row.cell or row.run].append(row)
    settings: dict[float, dict[str, list[Setting]]] = defaultdict(lambda: defaultdict(list))
    for (U, objective, _), group in sorted(cells.items()):
        selecting = sorted((row for row in group if not row.held_out), key=lambda row: row.run)
        if not selecting:
            continue
        settings[U][objective].append(
            Setting(
                selecting[0].run,
                float(selecting[0].train_flops or math.nan),
                np.array([row.loss for row in selecting]),
                np.array([row.test_loss for row in selecting]),
                np.array([row.test_loss for row in group if row.held_out], dtype=float),
            )
        )
    return settings


def measure_study(rows: Sequence[RunRow]) -> tuple[list[MeasuredCrossover], CrossoverLaw | None]:
    """Return the comparison of both objectives on each text, by U, and the power law through its crossings.

    Texts with runs of one objective only are left out. Raises ValueError if there is no other text.
    """
    measured = [
        measure_crossover(U, objectives[FIRST], objectives[SECOND])
        for U, objectives in sorted(collect_settings(rows).items())
        if FIRST in objectives and SECOND in objectives
    ]
    if not measured:
        raise ValueError(
            "got no unique text with finished runs of both objectives and a test loss. Set dataset.path_test "
            "and unique_tokens in the study, and run tools/sweep.py."
        )
    return measured, fit_crossover_law(measured)


def write_crossover(study_dir: Path, measured: Sequence[MeasuredCrossover], law: CrossoverLaw | None) -> Path:
    """Write <study>/crossover.json atomically; null stands for a crossing that was not measured."""
    path = study_dir / CROSSOVER
    points = []
    for at in measured:
        fields = asdict(at)
        del fields["draws"]
        points.append(fields)
    power = None if law is None else _describe_power(law.power) | {"U": list(law.U)}
    write_json(path, replace_nonfinite({"level": LEVEL, "crossovers": points, "C_crit": power}))
    return path


def _describe_power(power: PowerLaw) -> dict[str, Any]:
    return {
        "coefficient": power.coefficient, "exponent": power.exponent,
        "exponent_interval": list(power.interval), "dof": power.dof,
    }  # fmt: skip


def seal_next(study_dir: Path, rows: Sequence[RunRow], U: float) -> list[Forecast]:
    """Seal forecasts for U unique tokens: each objective's best loss, and the crossing if it has a law.

    Each is a power law in U through the measured values, with the predictive interval of one new value.
    Raises ValueError if a run on this text has been started, or with fewer than two measured texts.
    """
    started = [
        row.run for row in rows if is_text(row, U) and row.path and list_started_files(study_dir / row.path)
    ]
    if started:
        raise ValueError(
            f"{study_dir / 'runs' / started[0]}: got a run on {U:g} unique tokens that has been started, "
            "expected none. A forecast is sealed before its runs."
        )
    measured, law = measure_study(rows)
    texts = np.array([at.U for at in measured])
    if len(texts) < 2:
        raise ValueError(
            f"{study_dir}: got {len(texts)} unique text with both objectives, expected two or more."
        )
    data = hash_losses(rows)
    forecasts = []
    for objective, best in ((FIRST, [at.first for at in measured]), (SECOND, [at.second for at in measured])):
        losses = np.array([setting.loss for setting in best])
        errors = [setting.seed_se for setting in best]
        log_se = None if None in errors else np.array([error or 0.0 for error in errors]) / losses
        forecasts.append(_forecast_power(BEST_LOSS, objective, fit_power(texts, losses, log_se), U, data))
    if law is not None:
        forecasts.append(_forecast_power(CROSSING, "", law.power, U, data))
    seal_forecasts(study_dir, forecasts)
    return forecasts


def _forecast_power(quantity: str, objective: str, power: PowerLaw, U: float, data: str) -> Forecast:
    name = "-".join(filter(None, (quantity, objective, f"{format_count(U, 3)}unique")))
    ends = [power.predict(U, level) for level in LEVELS]
    if not all(math.isfinite(float(end)) for at in ends for end in at):
        raise ValueError(
            f"{name}: got two measured values without errors, which have no interval. Train settings with "
            "several seeds, or a third text."
        )
    formula = f"{power.coefficient:.6g} U^{power.exponent:.6g}, {power.dof} degrees of freedom"
    return make_forecast(
        name=name,
        quantity=quantity,
        objective=objective,
        identity="",
        N=None,
        D=None,
        U=float(U),
        predicted=float(ends[0][0]),
        intervals=tuple((float(low), float(high)) for _, low, high in ends),
        method=formula,
        law=CROSSOVER,
        law_sha256=hashlib.sha256(f"{formula} {data}".encode()).hexdigest(),
        data_sha256=data,
    )


def hash_losses(rows: Sequence[RunRow]) -> str:
    """Return the sha256 of identity, FLOPs and both losses of the finished runs."""
    cells = sorted((str(r.identity), r.train_flops, r.loss, r.test_loss) for r in select_finished(rows))
    return hashlib.sha256(repr(cells).encode()).hexdigest()


def is_text(row: RunRow, U: float) -> bool:
    """Return whether a run is on U unique tokens, within the windows of a sample."""
    return row.unique_tokens is not None and abs(row.unique_tokens / U - 1) < SAME_U


def score_forecasts(study_dir: str | Path, rows: Sequence[RunRow]) -> list[ForecastOutcome]:
    """Return the outcome of every forecast of a study: of runs, best losses and crossings.

    Best losses and crossings are measured when every planned run on their text has ended. Where the
    objectives do not cross up to the largest compute of masked diffusion and that is above every interval,
    the measured crossing is inf.
    """
    folder = Path(study_dir)
    return [
        outcome if outcome.forecast.identity else _score_text(folder, rows, outcome)
        for outcome in score_runs(folder, rows)
    ]


def _score_text(folder: Path, rows: Sequence[RunRow], outcome: ForecastOutcome) -> ForecastOutcome:
    forecast = outcome.forecast
    assert forecast.U is not None, "forecasts of texts have U"
    runs = [row for row in rows if is_text(row, forecast.U) and row.status != "stale"]
    flags = [is_newer(folder / row.path, forecast) for row in runs if row.path]
    decided = [flag for flag in flags if flag is not None]
    in_order = all(decided) if decided else None
    if not runs or any(row.status not in ("done", "failed") for row in runs):
        return replace(outcome, in_order=in_order)
    try:
        (at, *_), _ = measure_study(runs)
    except ValueError:
        return replace(outcome, in_order=in_order)
    if forecast.quantity == BEST_LOSS:
        best = at.first if forecast.objective == FIRST else at.second
        return replace(outcome, measured=best.loss, measured_se=best.seed_se, in_order=in_order)
    largest = max((row.train_flops or 0.0 for row in runs if row.objective == SECOND), default=0.0)
    beyond = math.inf if largest > max(high for _, high in forecast.intervals) else None
    return replace(outcome, measured=at.C if at.C is not None else beyond, in_order=in_order)


def format_measured(at: MeasuredCrossover) -> str:
    """State one comparison in one line."""
    sides = []
    for objective, best in ((FIRST, at.first), (SECOND, at.second)):
        error = "" if best.seed_se is None else f" +- {best.seed_se:.4f}"
        sides.append(f"{OBJECTIVE_NAMES[objective]} {best.loss:.4f}{error} at {best.C:.2e} FLOPs")
    text = f"U {format_count(at.U, 3)}: {', '.join(sides)}; "
    reused = [best.name for best in (at.first, at.second) if not best.is_fresh]
    if reused:
        text += f"{' and '.join(reused)} reported by the seeds that selected: biased, without interval; "
    if at.C is None:
        error = "" if at.gap_se is None else f" +- {at.gap_se:.4f}"
        return f"{text}no crossing measured, best losses differ by {at.gap:+.4f}{error}"
    text += f"C_crit {at.C:.3g} FLOPs"
    if at.interval is not None:
        low, high = ("not bounded" if end is None else f"{end:.3g}" for end in at.interval)
        text += f" ({low} to {high})"
    return text
