"""Checkpoint folder names, file names inside a checkpoint, and the order of checkpoints."""

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
METADATA = ".metadata"  # pickled index of torch's distributed checkpoints, read for conversion only
RESTORE = "restore it from a copy, or delete the checkpoint"
NAME = re.compile(r"(?P<prefix>.+)\.(?P<timestamp>\d{8}-\d{6}-\d{6})(?P<preempt>\.preempt)?")
META_CHECKSUM = "sha256"  # key of meta.json: sha256 of all its other keys


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint folder and its sort keys. `store.verify_checkpoint` checks that it is complete.

    step        training step; None if meta.json is unreadable or damaged
    generation  number of times the run was rewound to an earlier step before this checkpoint
    """

    path: Path
    prefix: str
    timestamp: str
    is_preempt: bool
    step: int | None = None
    generation: int = 0


def new_checkpoint_name(prefix: str, preempt: bool, now: datetime | None = None) -> str:
    """Return `<prefix>.<timestamp>[.preempt]`, in UTC with microseconds.

    Checkpoints are not ordered by this time, because a clock can be set back.
    """
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S-%f")
    return f"{prefix}.{stamp}" + (".preempt" if preempt else "")


def find_checkpoints(directory: Path, prefix: str | None = None) -> list[CheckpointInfo]:
    """Return the checkpoints in a directory, oldest first, without folders that are still being written.

    The sort key is (generation, step), then the time in the name. Checkpoints
    with an unreadable meta.json have no step and come first.
    """
    if not directory.is_dir():
        return []
    infos = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if path.is_dir() and match and (prefix is None or match["prefix"] == prefix):
            preempt = match["preempt"] is not None
            infos.append(
                CheckpointInfo(path, match["prefix"], match["timestamp"], preempt, *_read_order(path))
            )
    return sorted(
        infos, key=lambda info: (info.step is not None, info.generation, info.step or 0, info.timestamp)
    )


def _read_order(path: Path) -> tuple[int | None, int]:
    """Return (step, generation) from meta.json, or (None, 0) if it is unreadable or has invalid values."""
    try:
        meta = read_meta_json(path)
    except ValueError:
        return None, 0
    step, generation = meta.get("step"), meta.get("generation", 0)
    if all(type(number) is int and number >= 0 for number in (step, generation)):
        return step, generation
    return None, 0


def read_meta_json(path: Path) -> dict[str, Any]:
    """Return meta.json of a checkpoint. Its checksum is verified and removed.

    Raises ValueError if the file is unreadable, does not match its checksum, or
    lists other files than the folder has.
    """
    file = path / META
    try:
        meta = json.loads(file.read_text())
        own_sum = meta.pop(META_CHECKSUM, None)  # absent in older checkpoints
        is_own = own_sum is None or own_sum == compute_meta_checksum(meta)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); the checkpoint is incomplete") from error
    if not is_own:
        raise ValueError(f"{file}: got content that does not match its checksum; {RESTORE}")
    records = meta.get("files")
    if not isinstance(records, dict) or not all(map(_is_file_record, records, records.values())):
        raise ValueError(f"{file}: expected `files` with a size and a sha256 for each file; {RESTORE}")
    return meta


def _is_file_record(name: str, record: Any) -> bool:
    """Return True if an entry of `files` names a file directly in the folder, with a size and a sha256."""
    fields = (record.get("bytes"), record.get("sha256")) if isinstance(record, dict) else ()
    # "../other.pt" and "/etc/passwd" differ from their last
    # part. type() and not isinstance(): True is an int.
    return name == Path(name).name and [type(value) for value in fields] == [int, str]


def compute_sha256(path: Path) -> str:
    """Return the sha256 of a file's content as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compute_meta_checksum(meta: dict[str, Any]) -> str:
    """Return the sha256 of meta.json's content without its checksum, as hex."""
    return hashlib.sha256(json.dumps(meta, indent=1).encode()).hexdigest()
