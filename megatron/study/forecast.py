"""Sealed forecasts: predictions that are stored before the run exists, and scored after it.

A forecast is a file in `<study>/forecasts/`, with a sha256 of all its fields. It is never replaced, and every
reader of the study refuses one that was edited. An edit that also recomputes the hash can only be detected
with a copy of the hash stored elsewhere.
"""

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_single_line
from megatron.io import code_revision, write_atomic, write_json
from megatron.study.blind_record import hash_record, require_positive
from megatron.study.run_row import RunRow

FORECASTS = "forecasts"  # folder in the study's directory
FORECAST_TABLE = "forecasts.csv"
LEVELS = (0.5, 0.8, 0.95)
RUN, BEST_LOSS, CROSSING = "run", "best_loss", "crossing"
QUANTITIES = {
    RUN: "held-out loss of a run, nats per token",
    BEST_LOSS: "least test loss of an objective on U unique tokens, nats per token",
    CROSSING: "compute at which masked diffusion reaches autoregression on U unique tokens, FLOPs",
}
REMEDY = "Restore the file, or move it and the folder of its run away."
CSV_COLUMNS = (
    "name", "quantity", "predicted", *(f"{end}_{level:g}" for level in LEVELS for end in ("low", "high")),
    "measured", "measured_se", *(f"inside_{level:g}" for level in LEVELS), "in_order", "time", "sha256",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A prediction of one number.

    name       of the forecast and its file: for a run the name of its folder
    quantity   a key of QUANTITIES
    objective  "" for a crossing
    identity   RunPlan.identity of a run, else ""
    U          unique tokens; None for a run whose law has no term for repetition
    predicted  and the predictive intervals at LEVELS, in the unit of the quantity
    method     the law's formula, or the model that was fitted, in words
    law        file name of the law or table that the forecast is computed from
    law_sha256, data_sha256   hashes of that file, and of the table of the fitted runs
    time       ISO 8601, UTC
    commit     of the code, with `+` if the checkout was modified; None outside a checkout
    """

    name: str
    quantity: str
    objective: str
    identity: str
    N: float | None
    D: float | None
    U: float | None
    predicted: float
    intervals: tuple[tuple[float, float], ...]
    method: str
    law: str
    law_sha256: str
    data_sha256: str
    time: str
    commit: str | None

    @property
    def created_at(self) -> datetime:
        """`time` as a datetime with a time zone."""
        return datetime.fromisoformat(self.time)

    def sha256(self) -> str:
        """Return the hash of all fields."""
        return hash_record(asdict(self))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the predictive interval at one of LEVELS."""
        return self.intervals[LEVELS.index(level)]


@dataclass(frozen=True, kw_only=True)
class ForecastOutcome:
    """A forecast and what was measured.

    measured     None until the run, or all runs that a quantity depends on, have finished
    in_order     whether every file of the run is newer than the forecast; None without a run
    """

    forecast: Forecast
    measured: float | None = None
    measured_se: float | None = None
    in_order: bool | None = None

    @property
    def is_scored(self) -> bool:
        """True if the outcome counts in the calibration: measured, and sealed in time."""
        return self.measured is not None and not math.isnan(self.measured) and self.in_order is not False

    def inside(self, level: float) -> bool | None:
        """Return whether the measured value is in the interval at a level; None if it does not count."""
        if not self.is_scored:
            return None
        low, high = self.forecast.interval(level)
        assert self.measured is not None
        return low <= self.measured <= high


@dataclass(frozen=True)
class Calibration:
    """Number of scored forecasts, and of those inside the interval at each of LEVELS."""

    n_scored: int
    n_inside: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """State the counts beside the expected ones."""
        if not self.n_scored:
            return "No forecast has been scored."
        parts = [
            f"the {100 * level:g} % interval {n} ({level * self.n_scored:.1f} expected)"
            for level, n in zip(LEVELS, self.n_inside, strict=True)
        ]
        n = f"{self.n_scored} scored forecast{'s' if self.n_scored > 1 else ''}"
        return f"Of {n}, inside {', '.join(parts)}."


def current_time() -> str:
    """Return the time of a forecast that is made now."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def make_forecast(**values: Any) -> Forecast:
    """Return a forecast with the present time and commit. Raises ValueError for values that are not valid."""
    forecast = Forecast(time=current_time(), commit=code_revision(), **values)
    return _read_fields(json.loads(json.dumps(asdict(forecast))))


def seal_forecasts(study_dir: str | Path, forecasts: Sequence[Forecast]) -> list[Path]:
    """Store forecasts and return their files: all of them, or none if one is refused.

    A forecast with the same numbers from the same data as a stored one is not written again. Raises
    ValueError for another forecast under a stored name.
    """
    folder = Path(study_dir) / FORECASTS
    stored = {forecast.name: forecast for forecast in load_forecasts(study_dir)}
    for forecast in forecasts:
        earlier = stored.get(forecast.name)
        if earlier is not None and _content(earlier) != _content(forecast):
            raise ValueError(
                f"{folder / forecast.name}.json: got another forecast than the sealed one of "
                f"{earlier.time[:19]}, which is never replaced. Use another study directory."
            )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for forecast in forecasts:
        path = folder / f"{forecast.name}.json"
        if forecast.name not in stored:
            _write_new(path, asdict(forecast) | {"sha256": forecast.sha256()})
        paths.append(path)
    return paths


def _content(forecast: Forecast) -> dict[str, Any]:
    """Return what makes a forecast: everything except when and by which commit it was made."""
    return {key: value for key, value in asdict(forecast).items() if key not in ("time", "commit")}


def _write_new(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all, only if there is none of this name."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    write_json(new, dict(content))
    try:
        # a hard link fails if the name exists, unlike a rename: a concurrent forecast is not replaced
        os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def load_forecasts(study_dir: str | Path) -> list[Forecast]:
    """Return the forecasts of a study by name. Raises ValueError for a file that was modified."""
    folder = Path(study_dir) / FORECASTS
    return [_load(path) for path in sorted(folder.glob("*.json")) if not path.name.startswith(".")]


def _load(path: Path) -> Forecast:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        stored = content.pop("sha256", None)
        forecast = _read_fields(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got an invalid forecast ({error}). {REMEDY}") from error
    if stored != forecast.sha256() or path.stem != forecast.name:
        raise ValueError(f"{path}: got fields or a name that differ from the sealed ones. {REMEDY}")
    return forecast


def _read_fields(content: dict[str, Any]) -> Forecast:
    """Return the forecast in a parsed file. Raises ValueError for keys or values of the wrong type."""
    names = {f.name for f in fields(Forecast)}
    if set(content) != names:
        raise ValueError(f"its keys differ in {', '.join(sorted(names ^ set(content))[:3])}")
    for name in (
        "name",
        "quantity",
        "objective",
        "identity",
        "method",
        "law",
        "law_sha256",
        "data_sha256",
        "time",
    ):
        value = content[name]
        required = name not in ("objective", "identity", "data_sha256")
        if not (isinstance(value, str) and is_single_line(value) and (value or not required)):
            raise ValueError(f"{name} is not a line of text")
    # the name becomes a file
    if Path(content["name"]).name != content["name"] or content["name"].startswith("."):
        raise ValueError("name is not the name of a file")
    if content["quantity"] not in QUANTITIES:
        raise ValueError(f"quantity is not one of {', '.join(QUANTITIES)}")
    if (content["quantity"] == RUN) != bool(content["identity"]):
        raise ValueError("a run, and nothing else, has an identity")
    for name in ("N", "D", "U"):
        if content[name] is not None:
            require_positive(name, content[name])
    require_positive("predicted", content["predicted"])
    intervals = content["intervals"]
    if not (isinstance(intervals, list) and len(intervals) == len(LEVELS)):
        raise ValueError(f"intervals are not those of {len(LEVELS)} levels")
    for pair in intervals:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ValueError("an interval is not a pair")
        for end in pair:
            require_positive("the end of an interval", end)
        if pair[0] > pair[1]:
            raise ValueError("an interval ends below its beginning")
    if not (
        content["commit"] is None or isinstance(content["commit"], str) and is_single_line(content["commit"])
    ):
        raise ValueError("commit is not a line of text")
    if datetime.fromisoformat(content["time"]).tzinfo is None:
        raise ValueError("time has no time zone")
    return Forecast(**content | {"intervals": tuple((pair[0], pair[1]) for pair in intervals)})


def check_sealed_runs(study_dir: str | Path, identities: Iterable[str]) -> None:
    """Raise ValueError if a forecast was modified, or is of a run that the study no longer contains."""
    planned = set(identities)
    for forecast in load_forecasts(study_dir):
        if forecast.identity and forecast.identity not in planned:
            raise ValueError(
                f"{Path(study_dir) / FORECASTS / forecast.name}.json: sealed for a run that the study no "
                "longer contains: its text, seed or a setting has changed. Restore it, or use another "
                "directory=..."
            )


def score_runs(study_dir: str | Path, rows: Sequence[RunRow]) -> list[ForecastOutcome]:
    """Return the outcome of every forecast; quantities other than a run's loss are not measured here."""
    by_identity = {row.identity: row for row in rows if row.path}
    runs = Path(study_dir) / "runs"
    outcomes = []
    for forecast in load_forecasts(study_dir):
        row = by_identity.get(forecast.identity) if forecast.identity else None
        if row is None:
            outcomes.append(ForecastOutcome(forecast=forecast))
            continue
        # a branch continues the steps of its trunk
        folders = {Path(study_dir) / str(row.path)} | ({runs / row.trunk} if row.trunk else set())
        flags = [flag for folder in folders if (flag := is_newer(folder, forecast)) is not None]
        in_order = all(flags) if flags else None
        done = row.status == "done"
        outcomes.append(
            ForecastOutcome(
                forecast=forecast,
                measured=row.loss if done else None,
                measured_se=row.loss_se if done else None,
                in_order=in_order,
            )
        )
    return outcomes


def is_newer(run_dir: Path, forecast: Forecast) -> bool | None:
    """Return whether every file of a run is newer than a forecast; None for an empty or absent folder."""
    times = [path.stat().st_mtime for path in run_dir.iterdir() if path.is_file()] if run_dir.is_dir() else []
    return min(times) >= forecast.created_at.timestamp() if times else None


def calibrate(outcomes: Sequence[ForecastOutcome]) -> Calibration:
    """Count the scored forecasts that are inside their intervals."""
    scored = [outcome for outcome in outcomes if outcome.is_scored]
    return Calibration(len(scored), tuple(sum(bool(o.inside(level)) for o in scored) for level in LEVELS))


def write_forecast_table(outcomes: Sequence[ForecastOutcome], study_dir: str | Path) -> Path:
    """Write <study>/forecasts.csv atomically: one row per forecast, empty cells for what is not known."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(CSV_COLUMNS)
    for outcome in outcomes:
        forecast = outcome.forecast
        ends = [end for level in LEVELS for end in forecast.interval(level)]
        inside = [outcome.inside(level) for level in LEVELS]
        cells = [
            forecast.name,
            forecast.quantity,
            forecast.predicted,
            *ends,
            outcome.measured,
            outcome.measured_se,
        ]
        cells += [None if flag is None else int(flag) for flag in (*inside, outcome.in_order)]
        table.writerow("" if cell is None else cell for cell in [*cells, forecast.time, forecast.sha256()])
    path = Path(study_dir) / FORECAST_TABLE
    write_atomic(path, text.getvalue())
    return path
