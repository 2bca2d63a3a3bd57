"""Sealed forecasts: predictions that are stored before their runs exist, and scored after them.

A forecast is a file in `<study>/forecasts/`, with a sha256 of all its fields:
the prediction and its intervals, the law and its data, the time, the text of
the study, and the list of runs that decide it. It is never replaced, and every
reader of the study refuses one that was edited. An edit that also recomputes
the hash can only be detected with a copy of the hash stored elsewhere.

When a sweep starts a run, it copies the hashes of all forecasts to the run's
folder (SEALS). A run whose list contains a forecast was started after it: no
clock and no time of a file decides the order.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from megatron.config.yaml_file import is_single_line
from megatron.io import code_revision, read_json, wait_for_lock, write_atomic_bytes, write_json
from megatron.laws.law_file import convert_fields
from megatron.plan.run_dir import CHECKPOINTS, LOCK, METRICS, PLAN, RESULT
from megatron.study.format import format_count, format_loss, format_plural, format_with_interval

FORECASTS = "forecasts"  # folder in the study's directory
FORECAST_TABLE = "forecasts.csv"
SEALS = "seals.json"  # in a run's folder: hashes of the forecasts before its start
LEVELS = (0.5, 0.8, 0.95)
RUN, BEST_LOSS, CROSSING = "run", "best_loss", "crossing"
# held-out loss of a run and least test loss of an objective on U unique tokens,
# in nats per token; compute at which masked diffusion reaches autoregression on
# U unique tokens, in FLOPs
QUANTITIES = (RUN, BEST_LOSS, CROSSING)
Interval = tuple[float, float]
TEXTS = ("name", "quantity", "objective", "identity", "method", "law", "law_sha256", "data_sha256", "time")
ADDED = ("study", "runs")  # fields that the first version of the format did not have
REMEDY = "Restore the file, or move it and the folders of its runs away."
SAME_ALWAYS = ("time", "commit", "study")  # may differ between two equal forecasts


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A prediction of one number.

    name       of the forecast and its file: for a run the name of its folder
    quantity   one of QUANTITIES
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
    runs       {identity: 1 if it is held out} of all runs that decide the outcome; None
               as `study`
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

    def content(self) -> dict[str, Any]:
        """Return the sealed fields, as in the file."""
        content = asdict(self)
        return {key: content[key] for key in content if key not in ADDED or content[key] is not None}

    def sha256(self) -> str:
        """Return the hash of all fields."""
        return hash_record(self.content())

    def list_identities(self) -> set[str]:
        """Return the identities of the runs that decide the outcome, as far as the file lists them."""
        return {*(self.runs or {}), *filter(None, [self.identity])}


@dataclass(frozen=True)
class Outcome:
    """A forecast and what was observed.

    observed   None until all runs that decide it have ended
    order      "before" the first of its runs, "after" it, "unknown" for runs without a
               record of forecasts, "" without a run
    """

    forecast: Forecast
    observed: float | None = None
    observed_se: float | None = None
    order: str = ""

    @property
    def intervals(self) -> dict[float, tuple[float, float]]:
        """Predictive intervals by level."""
        return dict(zip(LEVELS, self.forecast.intervals, strict=True))

    @property
    def is_scored(self) -> bool:
        """True if the outcome counts in the calibration: observed, and not known to be sealed too late."""
        return self.observed is not None and not math.isnan(self.observed) and self.order != "after"

    @property
    def inside(self) -> dict[float, bool]:
        """Whether the observed value is in the interval of each level; empty if it does not count."""
        if not self.is_scored or self.observed is None:
            return {}
        return {level: low <= self.observed <= high for level, (low, high) in self.intervals.items()}

    def describe(self) -> str:
        """Return the forecast of a run and its outcome in one line."""
        forecast = self.forecast
        text = f"{forecast.name}: predicted "
        write = format_count if forecast.quantity == CROSSING else format_loss
        low, high = forecast.intervals[-1]
        text += format_with_interval(forecast.predicted, (low, high), write)
        if self.observed is None:
            return f"{text}, not trained yet"
        off = 100 * (self.observed / forecast.predicted - 1)
        where = "inside" if low <= self.observed <= high else "OUTSIDE"
        text += f", measured {write(self.observed)}: {where}, off by {off:+.1f} %"
        return text if self.order != "after" else f"{text}; NOT BLIND: its runs started before the forecast"


def hash_record(content: Mapping[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of a record: sorted keys, no spaces, floats by repr."""
    # repr of a float64 is the shortest text that gives the same number, so
    # reading the file and hashing again reproduces the hash
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def make_forecast(**values: Any) -> Forecast:
    """Return a forecast with the present time and commit. Raises ValueError for values that are not valid."""
    time = datetime.now(UTC).isoformat(timespec="microseconds")
    forecast = Forecast(time=time, commit=code_revision(), **values)
    return _read_fields(json.loads(json.dumps(forecast.content())))


def seal_forecasts(study_dir: str | Path, forecasts: Sequence[Forecast]) -> list[Forecast]:
    """Store forecasts and return those in the files: all of them, or none if one is refused.

    A forecast with the same numbers from the same data as a stored one is not
    written again. Raises ValueError for another forecast under a stored name.
    """
    folder = Path(study_dir) / FORECASTS
    folder.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(folder / LOCK):  # concurrent forecasts could use different laws
        stored = {forecast.name: forecast for forecast in read_forecasts(study_dir)}
        for forecast in forecasts:
            earlier = stored.get(forecast.name)
            if earlier is not None and _numbers(earlier) != _numbers(forecast):
                raise ValueError(
                    f"{folder / forecast.name}.json: got another forecast than the sealed one of "
                    f"{earlier.time[:19]}, which is never replaced. Use another study directory."
                )
        for forecast in forecasts:
            if forecast.name not in stored:
                content = forecast.content() | {"sha256": forecast.sha256()}
                write_json(folder / f"{forecast.name}.json", content)
    return [stored.get(forecast.name, forecast) for forecast in forecasts]


def _numbers(forecast: Forecast) -> dict[str, Any]:
    return {key: value for key, value in forecast.content().items() if key not in SAME_ALWAYS}


def read_forecasts(study_dir: str | Path) -> list[Forecast]:
    """Return the forecasts of a study by name. Raises ValueError for a file that was modified."""
    folder = Path(study_dir) / FORECASTS
    return [_load(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")]


def _load(path: Path) -> Forecast:
    try:
        content = read_json(path) or {}
        # the hash cannot contain itself
        stored = content.pop("sha256", None)
        forecast = _read_fields(content)
        sha256 = forecast.sha256()  # raises ValueError for NaN
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: got an invalid forecast ({error}). {REMEDY}") from error
    if stored != sha256 or path.stem != forecast.name:
        raise ValueError(f"{path}: got fields or a name that differ from the sealed ones. {REMEDY}")
    return forecast


def _read_fields(content: dict[str, Any]) -> Forecast:
    """Return the forecast in a parsed file. Raises ValueError for keys or values of the wrong type."""
    names = {f.name for f in fields(Forecast)}
    if set(content) not in (names, names - set(ADDED)):
        raise ValueError(f"its keys differ in {', '.join(sorted(names ^ set(content))[:3])}")
    forecast = Forecast(**convert_fields(Forecast, content))
    # NaN or null
    if not all(0 < low <= high < math.inf for low, high in forecast.intervals):
        raise ValueError("the ends of an interval are not in order above 0")
    texts = [*(content[name] for name in TEXTS), content["commit"] or "", *(forecast.runs or {})]
    if not all(map(is_single_line, texts)):
        raise ValueError("a text is not one line")
    if content["quantity"] not in QUANTITIES:
        raise ValueError(f"quantity is not one of {', '.join(QUANTITIES)}")
    return forecast


def list_started_files(run_dir: Path) -> str:
    """Return the names of the files that show that a run was started; empty if there are none."""
    names = [name for name in (PLAN, METRICS, RESULT) if (run_dir / name).exists()]
    checkpoints = run_dir / CHECKPOINTS
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        names.append(CHECKPOINTS)
    return ", ".join(names)


def record_seals(run_dir: Path, forecasts: Sequence[Forecast]) -> None:
    """Write the hashes of the forecasts to the folder of a run, unless the run was started before."""
    if not list_started_files(run_dir):
        write_json(run_dir / SEALS, {"sha256": [forecast.sha256() for forecast in forecasts]})


def read_seals(run_dir: Path) -> list[str] | None:
    """Return the hashes of the forecasts that were sealed before a run started; None without a record."""
    try:
        content = read_json(run_dir / SEALS)
    except ValueError:
        return None
    hashes = (content or {}).get("sha256")
    return hashes if isinstance(hashes, list) else None


def score_forecasts(forecasts: Sequence[Forecast], table: pd.DataFrame) -> list[Outcome]:
    """Return the outcome of every forecast: of runs, best losses and crossings.

    table   of read_runs; without its `attrs["seals"]`, for example after read_table,
            the order is unknown

    The runs that a forecast lists decide it, even if the study does not contain
    them any more; runs that were added later do not count.
    """
    return [_score(forecast, table) for forecast in forecasts]


def _score(forecast: Forecast, table: pd.DataFrame) -> Outcome:
    if forecast.runs is None and not forecast.identity:  # first version of the format: all runs on the text
        from megatron.study.measured import find_text_runs  # slow import

        runs = find_text_runs(table, forecast.U or math.nan)
    else:
        runs = table[table["identity"].isin(forecast.list_identities())]
        if forecast.runs is not None and forecast.quantity != RUN:
            runs = runs.assign(held_out=[float(forecast.runs[identity]) for identity in runs["identity"]])
    n_expected = len(forecast.list_identities()) or 1
    order = _find_order(forecast.sha256(), runs, table.attrs.get("seals", {}))
    # a stale run is one that the study does not contain any more; its loss
    # counts
    has_ended = (runs["loss"] > 0) | (runs["status"] == "failed")
    if len(runs) < n_expected or not has_ended.all():
        return Outcome(forecast, order=order)
    if forecast.quantity != RUN:
        return Outcome(forecast, *_measure(forecast, runs), order)
    loss, error = (None if pd.isna(value) else float(value) for value in runs[["loss", "loss_se"]].iloc[0])
    return Outcome(forecast, loss, error, order)


def _measure(forecast: Forecast, runs: pd.DataFrame) -> tuple[float | None, float | None]:
    """Return the observed best loss or crossing of ended runs on one text, and its error; None if unknown.

    Where the objectives do not cross up to the largest compute of masked
    diffusion and that is above every interval, the crossing is inf.
    """
    from megatron.study.measured import FIRST, SECOND, measure_study  # slow import

    try:
        (at, *_), _ = measure_study(runs)
    except ValueError:
        return None, None
    if forecast.quantity == BEST_LOSS:
        best = at.first if forecast.objective == FIRST else at.second
        return best.loss, best.seed_se
    largest = runs.loc[runs["objective"] == SECOND, "train_flops"].max()
    is_beyond = largest > max(high for _, high in forecast.intervals)
    return at.C if at.C is not None else math.inf if is_beyond else None, None


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


def describe_calibration(outcomes: Sequence[Outcome]) -> str:
    """Return how many of the scored forecasts are inside their intervals, beside the numbers expected."""
    scored = [outcome.inside for outcome in outcomes if outcome.is_scored]
    if not scored:
        return "No forecast has been scored."
    parts = [
        f"the {100 * level:g} % interval {sum(inside[level] for inside in scored)} "
        f"({level * len(scored):.3g} expected)"
        for level in LEVELS
    ]
    return f"Of {format_plural(len(scored), 'scored forecast')}, inside {', '.join(parts)}."


def write_forecast_table(outcomes: Sequence[Outcome], study_dir: str | Path) -> Path:
    """Write <study>/forecasts.csv atomically: one row per forecast, empty cells for what is not known."""
    rows = []
    for outcome in outcomes:
        forecast = outcome.forecast
        row: dict[str, Any] = {name: getattr(forecast, name) for name in ("name", "quantity", "predicted")}
        for level, (low, high) in outcome.intervals.items():
            row |= {f"low_{level:g}": low, f"high_{level:g}": high}
        row |= {"measured": outcome.observed, "measured_se": outcome.observed_se}
        inside = outcome.inside
        row |= {f"inside_{level:g}": int(inside[level]) if inside else None for level in LEVELS}
        row |= {"order": outcome.order, "time": forecast.time, "sha256": forecast.sha256()}
        rows.append(row)
    buffer = io.BytesIO()
    pd.DataFrame(rows, dtype=object).to_csv(buffer, index=False, lineterminator="\n")
    path = Path(study_dir) / FORECAST_TABLE
    write_atomic_bytes(path, buffer.getvalue())
    return path
