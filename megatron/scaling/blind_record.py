"""blind.json: the prediction of a run that had not been trained, as it was made.

The file ends in a sha256 over all the rest of it, and is refused where the two disagree. That finds damage
and an edit by hand; a file with a new hash differs only from a copy of the hash that is kept elsewhere.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.config.yaml_file import is_one_line
from megatron.run_dir import write_json
from megatron.scaling.law_fields import is_number

BLIND = "blind.json"  # in the study's directory
HEX = frozenset("0123456789abcdef")
REMEDY = "Restore the file, or move it away together with the folder of its run and predict again."


@dataclass(frozen=True, kw_only=True)
class Blind:
    """The prediction of one run.

    run, size, seed, identity   the run: its folder under runs/, and RunPlan.identity
    N, D, C        parameters, tokens, and FLOPs by flops_convention, as the run is planned
    budget         the FLOPs that C was rounded from, to whole steps: `compute` times the largest budget
    predicted      loss in nats a token; interval: predictive, of the measured loss, at `level`
    N_optimum      the frontier's N* at `budget`, with its confidence interval
    time           when it was made: ISO 8601, UTC
    commit         of the code, `+` where the checkout was changed; None outside a checkout
    n_runs, rows_sha256   the runs that were fitted (study_frontier.hash_rows)
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
    def made_at(self) -> datetime:
        """`time`, with its zone."""
        return datetime.fromisoformat(self.time)

    def sha256(self) -> str:
        """Over the canonical JSON of all fields: sorted keys, no spaces, floats by repr."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, study_dir: str | Path) -> Path:
        """Write <study_dir>/blind.json, whole or not at all."""
        path = Path(study_dir) / BLIND
        write_json(path, asdict(self) | {"sha256": self.sha256()})
        return path


def load_blind(study_dir: str | Path) -> Blind | None:
    """The prediction of a study, None where it has none. ValueError for a file that was changed."""
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
            raise ValueError("it is no JSON object")
        stored = content.pop("sha256", None)
        blind = _read_fields(content)
        expected = blind.sha256()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got no prediction of a blind run ({error}). {REMEDY}") from error
    if stored != expected:
        raise ValueError(
            f"{path}: got fields with the sha256 {expected[:12]}, expected {str(stored)[:12]} as stored: "
            f"the file was changed. {REMEDY}"
        )
    return blind


def _read_fields(content: dict[str, Any]) -> Blind:
    """A Blind of fields of the right types, else ValueError."""
    names = {f.name for f in fields(Blind)}
    if set(content) != names:
        raise ValueError(f"its keys differ in {', '.join(map(str, sorted(names ^ set(content))[:3]))}")
    for name in ("objective", "run", "size", "identity", "flops_convention", "time", "rows_sha256"):
        value = content[name]
        if not (isinstance(value, str) and value and is_one_line(value)):
            raise ValueError(f"{name} is no word")
    if Path(content["run"]).name != content["run"] or content["run"] in (".", ".."):
        raise ValueError("run is no name of a folder")
    for name in ("identity", "rows_sha256"):
        if not set(content[name]) <= HEX:
            raise ValueError(f"{name} is no hash")
    for name in ("compute", "budget", "N", "D", "C", "predicted", "level", "N_optimum", "n_runs"):
        _check_positive(name, content[name])
    for name in ("N", "D", "n_runs", "seed"):
        if type(content[name]) is not int:
            raise ValueError(f"{name} is no whole number")
    values = dict(content)
    for name in ("interval", "N_optimum_interval"):
        pair = content[name]
        if not (isinstance(pair, list) and len(pair) == 2):
            raise ValueError(f"{name} is no pair")
        for end in pair:
            _check_positive(name, end)
        values[name] = (pair[0], pair[1])
    if not (
        content["commit"] is None or isinstance(content["commit"], str) and is_one_line(content["commit"])
    ):
        raise ValueError("commit is no word")
    if datetime.fromisoformat(content["time"]).tzinfo is None:
        raise ValueError("time has no zone")
    return Blind(**values)


def _check_positive(name: str, value: Any) -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} is no number above 0")
