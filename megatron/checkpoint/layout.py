"""Names of checkpoints and of the files in them."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

FILES = {
    "model": "model_state_dict.pt",
    "optim": "optim_state_dict.pt",
    "lr": "lr_state_dict.pt",
    "iter": "iter_state_dict.pt",
}
META = "meta.json"
PARTIAL = ".partial"  # suffix of a folder that is still being written
NAME = re.compile(r"(?P<prefix>.+)\.(?P<timestamp>\d{8}-\d{6}-\d{6})(?P<preempt>\.preempt)?")


@dataclass(frozen=True)
class Found:
    """A checkpoint folder, by its name alone; whether it is whole is for `store.load` to say."""

    path: Path
    prefix: str
    timestamp: str
    is_preempt: bool


def new_name(prefix: str, preempt: bool, now: datetime | None = None) -> str:
    """`<prefix>.<timestamp>` in UTC to the microsecond, so that names sort by time and never collide."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%d-%H%M%S-%f")
    return f"{prefix}.{stamp}" + (".preempt" if preempt else "")


def find(directory: Path, prefix: str | None = None) -> list[Found]:
    """The checkpoints in a directory, oldest first; folders still being written are not among them."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        match = NAME.fullmatch(path.name)
        if path.is_dir() and match and (prefix is None or match["prefix"] == prefix):
            found.append(Found(path, match["prefix"], match["timestamp"], match["preempt"] is not None))
    return sorted(found, key=lambda one: one.timestamp)
