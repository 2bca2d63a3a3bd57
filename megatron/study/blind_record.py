"""blind.json: the stored prediction of a run that had not been trained.

The file contains a sha256 of all its other fields and is rejected if the hash does not match. This detects
damage and manual edits. An edit that also recomputes the hash can only be detected with a copy of the hash
stored elsewhere.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_single_line
from megatron.io import write_json
from megatron.laws.law_file import is_number

BLIND = "blind.json"  # in the study's directory
HEX = frozenset("0123456789abcdef")
REMEDY = "Restore the file, or move it and the folder of its run away and predict again."


@dataclass(frozen=True, kw_only=True)
class BlindPrediction:
    """Prediction of one run.

    run, size, seed, identity   the run: its folder under runs/, its settings, and RunPlan.identity
    N, D, C        parameters, tokens, and FLOPs by flops_convention, as the run is planned
    budget         FLOPs before rounding to whole steps, which gives C: `compute` times the largest budget
    predicted      loss in nats per token; interval: predictive interval of the measured loss, at `level`
    N_optimum      the frontier's N* at `budget`, with its confidence interval
    time           time of the prediction: ISO 8601, UTC
    commit         git commit of the code, with `+` if the checkout was modified; None outside a checkout
    n_runs, rows_sha256   number and hash of the fitted runs (study_frontier.hash_rows)
    """

    objective: str
    run: str
    size: str
    seed: int
    identity: str
    flops_convention: str
    compute: float
    budget: float
    N: int
    D: int
    C: float
    predicted: float
    level: float
    interval: tuple[float, float]
    N_optimum: float
    N_optimum_interval: tuple[float, float]
    time: str
    commit: str | None
    n_runs: int
    rows_sha256: str

    @property
    def created_at(self) -> datetime:
        """`time` as a datetime with a time zone."""
        return datetime.fromisoformat(self.time)

    def sha256(self) -> str:
        """Return the hash of all fields."""
        return hash_record(asdict(self))

    def save(self, study_dir: str | Path) -> Path:
        """Write <study_dir>/blind.json, whole or not at all."""
        path = Path(study_dir) / BLIND
        write_json(path, asdict(self) | {"sha256": self.sha256()})
        return path


def hash_record(content: dict[str, Any]) -> str:
    """Return the sha256 of the canonical JSON of a record: sorted keys, no spaces, floats by repr."""
    # repr of a float64 is the shortest text that gives the same number, so reading the file and hashing
    # again reproduces the hash
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def load_blind(study_dir: str | Path) -> BlindPrediction | None:
    """Return the prediction of a study, or None without one. Raises ValueError if the file was modified."""
    path = Path(study_dir) / BLIND
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}). {REMEDY}") from error
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        # the hash cannot contain itself
        stored = content.pop("sha256", None)
        blind = _read_fields(content)
        # the hash is recomputed from the parsed fields: it does not depend on whitespace or key order of
        # the file
        expected = blind.sha256()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got an invalid prediction of a blind run ({error}). {REMEDY}") from error
    if stored != expected:
        raise ValueError(
            f"{path}: got fields with the sha256 {expected[:12]}, expected {str(stored)[:12]} as stored: "
            f"the file was modified. {REMEDY}"
        )
    return blind


def _read_fields(content: dict[str, Any]) -> BlindPrediction:
    """Return the prediction in a parsed file. Raises ValueError for keys or values of the wrong type."""
    names = {f.name for f in fields(BlindPrediction)}
    if set(content) != names:
        raise ValueError(f"its keys differ in {', '.join(map(str, sorted(names ^ set(content))[:3]))}")
    for name in ("objective", "run", "size", "identity", "flops_convention", "time", "rows_sha256"):
        value = content[name]
        if not (isinstance(value, str) and value and is_single_line(value)):
            raise ValueError(f"{name} is not a line of text")
    # `run` becomes a path under runs/, so it must not contain a separator or be a relative component
    if Path(content["run"]).name != content["run"] or content["run"] in (".", ".."):
        raise ValueError("run is not the name of a folder")
    for name in ("identity", "rows_sha256"):
        if not set(content[name]) <= HEX:
            raise ValueError(f"{name} is not a hash")
    for name in ("compute", "budget", "N", "D", "C", "predicted", "level", "N_optimum", "n_runs"):
        require_positive(name, content[name])
    for name in ("N", "D", "n_runs", "seed"):
        # bool is a subclass of int, so the type is compared exactly
        if type(content[name]) is not int:
            raise ValueError(f"{name} is not an integer")
    values = dict(content)
    for name in ("interval", "N_optimum_interval"):
        pair = content[name]
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ValueError(f"{name} is not a pair")
        for end in pair:
            require_positive(name, end)
        # JSON has lists and the dataclass tuples; json.dumps writes both alike, so the hash is the same
        values[name] = (pair[0], pair[1])
    if not (
        content["commit"] is None or isinstance(content["commit"], str) and is_single_line(content["commit"])
    ):
        raise ValueError("commit is not a line of text")
    # without a zone, `timestamp()` would use that of the machine that reads the file
    if datetime.fromisoformat(content["time"]).tzinfo is None:
        raise ValueError("time has no time zone")
    return BlindPrediction(**values)


def require_positive(name: str, value: Any) -> None:
    """Raise ValueError for a value in a file that is not a finite number above 0."""
    if not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} is not a number above 0")
