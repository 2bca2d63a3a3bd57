"""Files that are complete or absent: atomic writes, JSON without NaN, and errors of a full disk."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota or size limit reached


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
