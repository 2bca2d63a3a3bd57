"""Sealed forecasts: predictions that are stored before their runs exist, and scored after them.

A forecast is a file in `<study>/forecasts/`, with a sha256
of all its fields: the prediction and its intervals,
the law and its data, the time, the text of the study,
and the list of runs that decide it. It is never replaced,
and every reader of the study refuses one that was edited.
An edit that also recomputes the hash can only
be detected with a copy of the hash stored elsewhere.

When a sweep starts a run, it copies the hashes
of all forecasts to the run's folder (SEALS).
A run whose list contains a forecast was started after it:
no clock and no time of a file decides the order.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.io import code_revision, read_json, wait_for_lock, write_atomic, write_json
from megatron.laws.law_file import convert_fields
from megatron.plan.run_dir import CHECKPOINTS, LOCK, METRICS, PLAN, RESULT
from megatron.study.format import format_count, format_loss, format_plural, format_with_interval
from megatron.study.measured import FIRST, SECOND, find_text_runs, measure_study

FORECASTS = "forecasts"  # folder in the study's directory
FORECAST_TABLE = "forecasts.csv"
SEALS = "seals.json"  # in a run's folder: hashes of the forecasts before its start
LEVELS = (0.5, 0.8, 0.95)
RUN, BEST_LOSS, CROSSING = "run", "best_loss", "crossing"
Interval = tuple[float, float]
OUTCOME_COLUMNS = [  # in forecasts.csv
    *("name", "quantity", "predicted"),
    *(f"{end}_{level:g}" for level in LEVELS for end in ("low", "high")),
    *("measured", "measured_se"),
    *(f"inside_{level:g}" for level in LEVELS),
    *("order", "time", "sha256"),
]
REMEDY = "Restore the file, or move it and the folders of its runs away."
# fields that may differ between two equal forecasts
NOT_COMPARED: dict[str, Any] = {"time": "", "commit": None, "study": None, "sha256": ""}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A prediction of one number.

    name       of the forecast and its file: for a run the name of its folder
    quantity   RUN: held-out loss of a run; BEST_LOSS: least test loss of an objective on U
               unique tokens, both in nats per token; CROSSING: compute at which masked
               diffusion reaches autoregression on U unique tokens, in FLOPs
    objective  "" for a crossing
    identity   RunPlan.identity of a run, else ""
    U          unique tokens; None for a run whose law has no term for repetition
    predicted  and the predictive intervals at LEVELS, in the unit of the quantity
    method     the law's formula, or the model that was fitted, in words
    law        file name of the law or table that the forecast is computed from
    law_sha256, data_sha256   hashes of that law, and of the fitted runs
    time       ISO 8601, UTC; for readers only
    commit     of the code, with `+` if the checkout was modified; None outside a checkout
    study      text of the study; None in the first version of the format
    runs       {identity: 1 if it is held out} of all runs
               that decide the outcome; None as `study`
    sha256     of all other fields, as in the file
    """

    name: str
    quantity: str
    objective: str
    identity: str
    N: float | None
    D: float | None
    U: float | None
    predicted: float
    intervals: tuple[Interval, Interval, Interval]
    method: str
    law: str
    law_sha256: str
    data_sha256: str
    time: str
    commit: str | None
    study: str | None = None
    runs: dict[str, int] | None = None
    sha256: str = ""

    def list_identities(self) -> set[str]:
        """Return the identities of the runs that decide the outcome, as far as the file lists them."""
        return {*(self.runs or {}), *filter(None, [self.identity])}


def hash_record(content: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of a record: sorted keys, no spaces, floats by repr.

    The field sha256 is left out, as a hash cannot contain itself.
    """
    # repr of a float64 is the shortest text that gives the same number, so
    # reading the file and hashing again reproduces the hash
    content = {key: content[key] for key in content if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_forecast(**values: Any) -> Forecast:
    """Return a forecast with the present time and commit. Raises ValueError for values that are not valid."""
    time = datetime.now(UTC).isoformat(timespec="microseconds")
    content = asdict(Forecast(time=time, commit=code_revision(), **values))
    forecast = Forecast(**convert_fields(Forecast, json.loads(json.dumps(content, allow_nan=False))))
    return replace(forecast, sha256=hash_record(asdict(forecast)))


def seal_forecasts(study_dir: str | Path, forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Store forecasts and return those in the files: all of them, or none if one is refused.

    A forecast with the same numbers from the same data as a
    stored one is not written again. Raises ValueError for
    another forecast under a stored name.
    """
    folder = Path(study_dir) / FORECASTS
    folder.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(folder / LOCK):  # concurrent forecasts could use different laws
        stored = {forecast.name: forecast for forecast in read_forecasts(study_dir)}
        for forecast in forecasts:
            earlier = stored.get(forecast.name, forecast)
            if replace(earlier, **NOT_COMPARED) != replace(forecast, **NOT_COMPARED):
                raise ValueError(
                    f"{folder / forecast.name}.json: got another forecast than the sealed one of "
                    f"{earlier.time[:19]}, which is never replaced. Use another study directory."
                )
        for forecast in forecasts:
            if forecast.name not in stored:
                write_json(folder / f"{forecast.name}.json", asdict(forecast))
    return [stored.get(forecast.name, forecast) for forecast in forecasts]


def read_forecasts(study_dir: str | Path) -> list[Forecast]:
    """Return the forecasts of a study by name. Raises ValueError for a file that was modified."""
    folder = Path(study_dir) / FORECASTS
    return [_load(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")]


def _load(path: Path) -> Forecast:
    try:
        content = read_json(path) or {}
        forecast = Forecast(**convert_fields(Forecast, content))
        sha256 = hash_record(content)  # raises ValueError for NaN
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: got an invalid forecast ({error}). {REMEDY}") from error
    if forecast.sha256 != sha256 or path.stem != forecast.name:
        raise ValueError(f"{path}: got fields or a name that differ from the sealed ones. {REMEDY}")
    return forecast


def list_started_files(run_dir: Path) -> str:
    """Return the names of the files that show that a run was started; empty if it was not."""
    names = [name for name in (PLAN, METRICS, RESULT) if (run_dir / name).exists()]
    checkpoints = run_dir / CHECKPOINTS
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        names.append(CHECKPOINTS)
    return ", ".join(names)


def record_seals(run_dir: Path, forecasts: Sequence[Forecast]) -> None:
    """Write the hashes of the forecasts to the folder of a run, unless the run was started before."""
    if not list_started_files(run_dir):
        write_json(run_dir / SEALS, {"sha256": [forecast.sha256 for forecast in forecasts]})


def read_seals(run_dir: Path) -> list[str] | None:
    """Return the hashes of the forecasts that were sealed before a run started; None without a record."""
    try:
        content = read_json(run_dir / SEALS)
    except ValueError:
        return None
    hashes = (content or {}).get("sha256")
    return hashes if isinstance(hashes, list) else None


def score_forecasts(forecasts: Sequence[Forecast], table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each forecast, of runs, best losses and crossings, with its outcome.

    low_0.95, high_0.95    ends of the interval of each of LEVELS
    measured, measured_se  NaN until all runs that decide the forecast have ended
    order                  "before" the first of its runs, "after" it, "unknown"
                           for runs without a record of forecasts, "" without a run
    inside_0.95            1 if the interval contains the measured value, else 0; NA without
                           one, and for a forecast that was sealed after its runs

    table   of read_runs; without its `attrs["seals"]`, for example after read_table,
            the order is unknown

    The runs that a forecast lists decide it, even if the study
    does not contain them any more; runs that were added later
    do not count.
    """
    rows = []
    for forecast in forecasts:
        value, error, order = _score(forecast, table)
        row = asdict(forecast) | {"measured": value, "measured_se": error, "order": order}
        for level, (low, high) in zip(LEVELS, forecast.intervals, strict=True):
            is_inside = None if math.isnan(value) or order == "after" else int(low <= value <= high)
            row |= {f"low_{level:g}": low, f"high_{level:g}": high, f"inside_{level:g}": is_inside}
        rows.append(row)
    outcomes = pd.DataFrame(rows, columns=[*OUTCOME_COLUMNS, "objective", "identity", "N", "D", "U"])
    return outcomes.astype({f"inside_{level:g}": "Int64" for level in LEVELS})


def _score(forecast: Forecast, table: pd.DataFrame) -> tuple[float, float, str]:
    """Return the measured value of a forecast and its error, NaN if they are unknown, and the order."""
    runs = table[table["identity"].isin(forecast.list_identities())]
    if forecast.runs is None and not forecast.identity:  # first version of the format: all runs on the text
        runs = find_text_runs(table, forecast.U or math.nan)
    elif forecast.runs is not None and forecast.quantity != RUN:
        runs = runs.assign(held_out=runs["identity"].map(forecast.runs).astype(float))
    n_expected = len(forecast.list_identities()) or 1
    order = _find_order(forecast.sha256, runs, table.attrs.get("seals", {}))
    # a stale run is one that the study does
    # not contain any more; its loss counts
    has_ended = (runs["loss"] > 0) | (runs["status"] == "failed")
    if len(runs) < n_expected or not has_ended.all():
        return math.nan, math.nan, order
    if forecast.quantity != RUN:
        return *_measure(forecast, runs), order
    loss, error = runs[["loss", "loss_se"]].iloc[0]
    return float(loss), float(error), order


def _measure(forecast: Forecast, runs: pd.DataFrame) -> tuple[float, float]:
    """Return the observed best loss or crossing of ended runs on one text, and its error; NaN if unknown.

    Where the objectives do not cross up to the largest compute
    of masked diffusion and that is above every interval, the
    crossing is inf.
    """
    try:
        (at, *_), _ = measure_study(runs)
    except ValueError:
        return math.nan, math.nan
    if forecast.quantity == BEST_LOSS:
        best = at.first if forecast.objective == FIRST else at.second
        return best.loss, math.nan if best.seed_se is None else best.seed_se
    largest = runs.loc[runs["objective"] == SECOND, "train_flops"].max()
    is_beyond = largest > max(high for _, high in forecast.intervals)
    return at.C if at.C is not None else math.inf if is_beyond else math.nan, math.nan


def _find_order(sha256: str, runs: pd.DataFrame, seals: Mapping[str, list[str] | None]) -> str:
    """Return whether a forecast was sealed before all runs, and before the runs whose steps they continue."""
    started = runs[runs["path"].notna() & (runs["status"] != "missing")]
    names = {*started["run"], *started["trunk"].dropna()}
    if not names:
        return ""
    records = [seals.get(name) for name in names]
    if any(record is not None and sha256 not in record for record in records):
        return "after"
    return "unknown" if None in records else "before"


def list_forecasts(forecasts: Sequence[Forecast], digits: str, unit: str = "") -> list[str]:
    """Return a line with value, intervals and hash of each sealed forecast."""
    lines = []
    for sealed in forecasts:
        ends = ", ".join(
            f"{100 * level:g} % [{low:{digits}}, {high:{digits}}]"
            for level, (low, high) in zip(LEVELS, sealed.intervals, strict=True)
        )
        value = f"{sealed.predicted:{digits}}{unit}"
        lines.append(f"{sealed.name}: {value}; {ends}; sha256 {sealed.sha256[:12]}")
    return lines


def describe_outcome(outcome: pd.Series) -> str:
    """Return a row of `score_forecasts` of a run in one line."""
    write = format_count if outcome["quantity"] == CROSSING else format_loss
    low, high = outcome["low_0.95"], outcome["high_0.95"]
    predicted, measured = outcome["predicted"], outcome["measured"]
    text = f"{outcome['name']}: predicted {format_with_interval(predicted, (low, high), write)}"
    if math.isnan(measured):
        return f"{text}, not trained yet"
    where = "inside" if low <= measured <= high else "OUTSIDE"
    text += f", measured {write(measured)}: {where}, off by {100 * (measured / predicted - 1):+.1f} %"
    is_late = outcome["order"] == "after"
    return f"{text}; NOT BLIND: its runs started before the forecast" if is_late else text


def describe_calibration(outcomes: pd.DataFrame) -> str:
    """Return how many of the scored forecasts are inside their intervals, beside the numbers expected."""
    inside = {level: outcomes[f"inside_{level:g}"].dropna() for level in LEVELS}
    n_scored = len(inside[LEVELS[0]])
    if not n_scored:
        return "No forecast has been scored."
    parts = [
        f"the {100 * level:g} % interval {inside[level].sum()} ({level * n_scored:.3g} expected)"
        for level in LEVELS
    ]
    return f"Of {format_plural(n_scored, 'scored forecast')}, inside {', '.join(parts)}."


def write_forecast_table(outcomes: pd.DataFrame, study_dir: str | Path) -> Path:
    """Write <study>/forecasts.csv atomically: one row per forecast, empty cells for what is not known."""
    path = Path(study_dir) / FORECAST_TABLE
    write_atomic(path, outcomes[OUTCOME_COLUMNS].to_csv(index=False, lineterminator="\n"))
    return path
