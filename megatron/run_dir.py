"""Files of a run directory, and functions that read and write them.

config.yaml    the resolved configuration
plan.json      quantities derived from it (config/plan.py)
metrics.jsonl  one line per log point and per evaluation
checkpoints/   <prefix>.<timestamp>/
tensorboard/   the same scalars; wandb/ too if enabled
profile/       trace and table of logging.profile_steps
downstream/    <checkpoint>/<method>/results.json, the scores of tools/evaluate_downstream.py
result.json    written last; its presence means that the run is done
exit.json      written by the launcher for a failed run: its exit status and its last output
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

from megatron.io import FileLock, LockedError, acquire_lock, open_locked

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota or size limit reached
CONFIG, PLAN, METRICS, RESULT = "config.yaml", "plan.json", "metrics.jsonl", "result.json"
EXIT, LOCK = "exit.json", ".lock"
DOWNSTREAM, DOWNSTREAM_RESULTS = "downstream", "results.json"
CHECKPOINTS, TENSORBOARD, PROFILE = "checkpoints", "tensorboard", "profile"


def write_atomic(path: Path, text: str) -> None:
    """Write a text file atomically: write beside it, sync, rename."""
    write_atomic_bytes(path, text.encode())


def write_atomic_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_path(path) as partial:
        partial.write_bytes(content)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write and close; sync and rename it to `path` on success."""
    # in the same folder, hence on the same file system, where a rename is atomic: readers get the old or the
    # new file
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        # fsync writes all of the file's pages, also those written through the caller's descriptor. Without it
        # some file systems store the rename before the content, and a power loss leaves an empty file.
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.rename(path)
    except BaseException:
        # the rename is the last statement above: after it, the partial name may belong to another writer
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Add the folder, its free space and the required space to a disk-full error of a `with` block.

    The operating system names no path in these errors. The required space is reported if the OSError has the
    attribute `n_bytes`, the number of additional bytes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise OSError(
            f"{folder.resolve()}: {error.strerror}{_describe_free_space(folder, error)}; "
            "make room and run the same command again"
        ) from error


def _describe_free_space(folder: Path, error: OSError) -> str:
    details = []
    with suppress(OSError):
        details.append(f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free")
    if (n_bytes := getattr(error, "n_bytes", None)) is not None:
        details.append(f"about {n_bytes / 1e6:,.1f} MB more are needed")
    return f" ({', '.join(details)})" if details else ""


def open_exclusive(path: Path, name: Path | None = None) -> IO[bytes]:
    """Open a file, created if missing, and lock it for this process until it is closed (see megatron/io.py).

    Raises ValueError, with `name` in the message, if another process has the lock.
    """
    try:
        return open_locked(path)
    except LockedError as error:
        raise ValueError(
            f"{name or path}: in use by {error.holder}. Wait until it has ended, or choose another name."
        ) from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON atomically. Raises ValueError for NaN and Inf, and then writes nothing."""
    try:
        # serialized before the file is opened: a value that is not JSON leaves the old file as it is
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        nonfinite_keys = ", ".join(_find_nonfinite(content)) or str(error)
        raise ValueError(f"{path}: got NaN or Inf in {nonfinite_keys}, expected finite numbers.") from error
    write_atomic(path, text + "\n")


def replace_nonfinite(content: Any) -> Any:
    """Return a copy with None (JSON's null) for every float that is NaN or Inf."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: replace_nonfinite(value) for key, value in content.items()}
    return [replace_nonfinite(value) for value in content] if isinstance(content, list | tuple) else content


def _find_nonfinite(content: Any, key_path: str = "") -> Iterator[str]:
    """Yield the path of each float that is NaN or Inf, its keys joined by dots."""
    if isinstance(content, float) and not math.isfinite(content):
        yield key_path
    pairs = content.items() if isinstance(content, dict) else ()
    pairs = enumerate(content) if isinstance(content, list | tuple) else pairs
    for key, value in pairs:
        yield from _find_nonfinite(value, f"{key_path}.{key}".lstrip("."))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing. ValueError for other content."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got invalid JSON ({error}), expected a JSON object. Delete the file and run again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got {type(content).__name__}, expected a JSON object. Delete the file and run again."
        )
    return content


def read_metrics(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl. Raises ValueError for a damaged line.

    A last line without a line end is skipped: it is still being written.
    """
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


def read_last_metrics(run: Path, tail_bytes: int = 4096) -> dict[str, Any] | None:
    """Return the last complete record of metrics.jsonl, or None. Reads only the end of the file."""
    path = run / METRICS
    if not path.is_file():
        return None
    with path.open("rb") as file:
        # The first line of the tail is usually cut. Its rest is not a JSON object and is skipped.
        file.seek(max(0, path.stat().st_size - tail_bytes))
        lines = file.read().split(b"\n")[:-1]  # the part after the last line end is incomplete
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            return record
    return None


def truncate_metrics(run: Path, step: int) -> None:
    """Drop the records after `step`, which a resumed run will log again."""
    # Python's json reads NaN, which JSON does not have: it is written back as null
    lines = [json.dumps(replace_nonfinite(line)) for line in read_metrics(run) if line["step"] <= step]
    write_atomic(run / METRICS, "".join(line + "\n" for line in lines))


def lock_run(run: Path, wait_s: float = 0.0, watch: bool = True) -> FileLock | None:
    """Lock a run for this process until the returned lock is closed; None if another process trains it.

    The lock ends with the process in any case. Arguments as in `io.acquire_lock`.
    """
    # The lock is on a file of its own, since files of the run are replaced by renames, and a lock belongs to
    # an inode.
    run.mkdir(parents=True, exist_ok=True)
    return acquire_lock(run / LOCK, wait_s, watch)


def is_done(run: Path, identity: str | None = None) -> bool:
    """Return whether the run is done and, if `identity` is given, has that identity."""
    result = read_json(run / RESULT)
    return result is not None and (identity is None or result.get("identity") == identity)
