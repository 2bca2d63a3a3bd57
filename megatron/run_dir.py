"""What a run leaves on disk, and how to read it.

config.yaml    the configuration as it ran
plan.json      what followed from it (config/plan.py)
metrics.jsonl  a line for each log point and each evaluation
checkpoints/   <prefix>.<timestamp>/
tensorboard/   the same scalars; wandb/ too where asked for
profile/       trace and table of logging.profile_steps
downstream/    <checkpoint>/<method>/results.json, what tools/evaluate_downstream.py found
result.json    written last; its presence means that the run is done
exit.json      written by the launcher for a run that failed: its exit status and its last words
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megatron.io import FileLock, LockedError, open_locked, take_lock

FULL = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
)  # of an OSError: no room, or no leave to take it
CONFIG, PLAN, METRICS, RESULT = "config.yaml", "plan.json", "metrics.jsonl", "result.json"
EXIT, LOCK = "exit.json", ".lock"
DOWNSTREAM, DOWNSTREAM_RESULTS = "downstream", "results.json"
CHECKPOINTS, TENSORBOARD, PROFILE = "checkpoints", "tensorboard", "profile"


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears under its name only when whole: beside, synced, renamed."""
    write_whole_bytes(path, text.encode())


def write_whole_bytes(path: Path, content: bytes) -> None:
    """`write_whole` of what is no text."""
    with written_whole(path) as partial:
        partial.write_bytes(content)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside `path` for a `with` to write and close: synced and renamed when it ends in order."""
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:  # not after the renaming: what has the name then is another's
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def room_in(folder: Path) -> Iterator[None]:
    """Name the folder that is full, where the system names none, its free space, and what is needed if known.

    OSError in two sentences. An OSError with the attribute `n_bytes` tells how many bytes more are needed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise OSError(
            f"{folder.resolve()}: {error.strerror}{_room_left(folder, error)}; "
            "make room and run the same command again"
        ) from error


def _room_left(folder: Path, error: OSError) -> str:
    words = []
    with suppress(OSError):
        words.append(f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free")
    if (n_bytes := getattr(error, "n_bytes", None)) is not None:
        words.append(f"about {n_bytes / 1e6:,.1f} MB more are needed")
    return f" ({', '.join(words)})" if words else ""


def open_alone(path: Path, name: Path | None = None) -> IO[bytes]:
    """Open a file, made if it is not there, for this process alone until it is closed.

    ValueError, which says `name`, where another process has it; see megatron/io.py for the lock.
    """
    try:
        return open_locked(path)
    except LockedError as error:
        raise ValueError(
            f"{name or path}: {error.holder} is at work on it; let that one end, or choose another name"
        ) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`write_whole` of indented JSON. ValueError for NaN and Inf, which JSON has not; nothing is written."""
    try:
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        odd = ", ".join(_not_finite(content)) or str(error)
        raise ValueError(f"{path}: got NaN or Inf in {odd}, expected finite numbers.") from error
    write_whole(path, text + "\n")


def with_null(content: Any) -> Any:
    """The same with None, JSON's null, for every float that is NaN or Inf."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: with_null(value) for key, value in content.items()}
    return [with_null(value) for value in content] if isinstance(content, list | tuple) else content


def _not_finite(content: Any, at: str = "") -> Iterator[str]:
    """Where floats are NaN or Inf: keys joined by dots."""
    if isinstance(content, float) and not math.isfinite(content):
        yield at
    pairs = content.items() if isinstance(content, dict) else ()
    pairs = enumerate(content) if isinstance(content, list | tuple) else pairs
    for key, value in pairs:
        yield from _not_finite(value, f"{at}.{key}".lstrip("."))


def read_json(path: Path) -> dict[str, Any] | None:
    """The content, or None where there is no such file. ValueError for what is not a JSON object."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); delete the file and run again") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got {type(content).__name__}, expected a JSON object. Delete the file and run again."
        )
    return content


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that is still being written is left out. ValueError for a line
    that is damaged."""
    path = run / METRICS
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not (
                isinstance(record, dict)
                and isinstance(record.get("kind"), str)
                and isinstance(record.get("step"), int)
            ):
                raise ValueError(
                    f"{path}, line {number}: got {line[:40]!r}, expected a JSON object with kind and step. "
                    "Remove the line."
                )
            yield record


def last_metrics(run: Path, tail_bytes: int = 4096) -> dict[str, Any] | None:
    """The newest whole line of metrics.jsonl, read from the end; None where there is none."""
    path = run / METRICS
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - tail_bytes))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return None


def forget_metrics_after(run: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run will take again, so that no step is told twice."""
    kept = [json.dumps(with_null(line)) for line in read_metrics(run) if line["step"] <= step]
    write_whole(run / METRICS, "".join(line + "\n" for line in kept))


def lock(run: Path, wait_s: float = 0.0, watch: bool = True) -> FileLock | None:
    """Take a run for this process until what is given is closed; None where another process trains it.

    The lock ends with the process, however it ends. Arguments as in `io.take_lock`.
    """
    run.mkdir(parents=True, exist_ok=True)
    return take_lock(run / LOCK, wait_s, watch)


def is_done(run: Path, identity: str | None = None) -> bool:
    """Whether the run ended; with an identity, whether it was that run."""
    result = read_json(run / RESULT)
    return result is not None and (identity is None or result.get("identity") == identity)
