"""Arrays that all processes of a machine share: one file, mapped by each, whose pages are in memory once.

The file is computed again when it is missing, so that it may be deleted at any time.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from megatron.io import atomic_path, wait_for_lock
from megatron.log import get_logger

ALIGNMENT = 64  # bytes, so that elements of every type are aligned
SHARED_BYTES = 1 << 20  # smaller arrays are computed in each process, without a file

Arrays = dict[str, np.ndarray]
Layout = Mapping[str, tuple[str, int]]  # dtype and number of elements of each array

log = get_logger(__name__)


def open_shared_arrays(path: Path, layout: Layout, fill: Callable[[Arrays], None]) -> Arrays:
    """Return the arrays of a file, mapped and read-only. The first process calls `fill` to write them.

    path   its name must change with everything that the content follows from

    Arrays of less than SHARED_BYTES, and those of a folder that cannot be written, are computed in the memory
    of this process.
    """
    n_bytes = _measure(layout)
    if n_bytes < SHARED_BYTES:
        return _compute(layout, fill)
    try:
        if not _has_size(path, n_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            with wait_for_lock(path.with_name(path.name + ".lock")):
                # another process may have written it meanwhile
                if not _has_size(path, n_bytes):
                    with atomic_path(path) as partial:
                        with partial.open("wb") as file:
                            # written pages belong to the page cache, not to the memory of this process
                            os.posix_fallocate(file.fileno(), 0, n_bytes)
                        fill(_split(np.memmap(partial, np.uint8, mode="r+"), layout))
        return _split(np.memmap(path, np.uint8, mode="r"), layout)
    except OSError as error:
        log.warning("%s: cannot be written (%s); each process keeps the arrays in its memory.", path, error)
        return _compute(layout, fill)


def delete_stale_arrays(folder: Path, pattern: str, keep: str) -> None:
    """Delete the files that match `pattern`, except those whose name begins with `keep`.

    Processes that map them keep them.
    """
    for path in folder.glob(pattern):
        if not path.name.startswith(keep):
            with suppress(OSError):
                path.unlink()


def _compute(layout: Layout, fill: Callable[[Arrays], None]) -> Arrays:
    arrays = _split(np.zeros(_measure(layout), np.uint8), layout)
    fill(arrays)
    return arrays


def _measure(layout: Layout) -> int:
    return sum(_count_bytes(dtype, n) for dtype, n in layout.values())


def _count_bytes(dtype: str, n: int) -> int:
    return -(-np.dtype(dtype).itemsize * n // ALIGNMENT) * ALIGNMENT


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.is_file() and path.stat().st_size == n_bytes


def _split(content: np.ndarray, layout: Layout) -> Arrays:
    # views as plain arrays: slicing a np.memmap is several times slower
    plain, arrays, begin = content.view(np.ndarray), {}, 0
    for name, (dtype, n) in layout.items():
        arrays[name] = plain[begin : begin + np.dtype(dtype).itemsize * n].view(dtype)
        begin += _count_bytes(dtype, n)
    return arrays
