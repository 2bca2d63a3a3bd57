"""Names of checkpoints and of the files in them."""

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FILES = {
    "model": "model_state_dict.pt",
    "optim": "optim_state_dict.pt",
    "lr": "lr_state_dict.pt",
    "iter": "iter_state_dict.pt",
}
META = "meta.json"
METADATA = ".metadata"  # the index of torch's distributed checkpoint
RESTORE = "restore it from a copy, or delete the checkpoint"
PARTIAL = ".partial"  # suffix of a folder that is still being written
NAME = re.compile(r"(?P<prefix>.+)\.(?P<timestamp>\d{8}-\d{6}-\d{6})(?P<preempt>\.preempt)?")


OWN_SUM = "sha256"  # key of meta.json: of all its other keys


@dataclass(frozen=True)
class Found:
    """A checkpoint folder and what orders it; whether it is whole is for `store.load` to say.

    step        of the run; None where meta.json cannot be read or is damaged
    generation  how often before it the run was taken back to an earlier step
    """

    path: Path
    prefix: str
    timestamp: str
    is_preempt: bool
    step: int | None = None
    generation: int = 0


def new_name(prefix: str, preempt: bool, now: datetime | None = None) -> str:
    """`<prefix>.<timestamp>` in UTC to the microsecond. It does not order them: clocks are set back."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S-%f")
    return f"{prefix}.{stamp}" + (".preempt" if preempt else "")


def find(directory: Path, prefix: str | None = None) -> list[Found]:
    """The checkpoints in a directory, oldest first; folders still being written are not among them.

    The order is that of (generation, step); among equal ones, that of the time in the name. Those whose
    meta.json cannot be read have no step and come first.
    """
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if path.is_dir() and match and (prefix is None or match["prefix"] == prefix):
            preempt = match["preempt"] is not None
            found.append(Found(path, match["prefix"], match["timestamp"], preempt, *_read_order(path)))
    return sorted(found, key=lambda one: (one.step is not None, one.generation, one.step or 0, one.timestamp))


def _read_order(path: Path) -> tuple[int | None, int]:
    """(step, generation) that meta.json says, (None, 0) where it cannot be believed."""
    try:
        meta = read_meta_json(path)
    except ValueError:
        return None, 0
    step, generation = meta.get("step"), meta.get("generation", 0)
    if all(type(number) is int and number >= 0 for number in (step, generation)):
        return step, generation
    return None, 0


def read_meta_json(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint without its own sum, which is checked. ValueError in one sentence."""
    file = path / META
    try:
        meta = json.loads(file.read_text())
        if not isinstance(meta, dict):
            raise ValueError(f"got {type(meta).__name__}, expected an object")
        own_sum = meta.pop(OWN_SUM, None)  # older checkpoints have none
        is_own = own_sum is None or own_sum == sum_of(meta)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); the checkpoint is not whole") from error
    if not is_own:
        raise ValueError(f"{file}: not as it was written; {RESTORE}")
    return meta


def sum_of(meta: dict[str, Any]) -> str:
    """Of what meta.json says beside its own sum."""
    return hashlib.sha256(json.dumps(meta, indent=1).encode()).hexdigest()
