"""Byte spans of registered files, read without mapping them, with few of the files open.

Access to a mapped page of a file that was truncated ends the process by SIGBUS, whatever was checked before;
a server would lose all its mixtures. pread returns fewer bytes instead. On documents of 280 bytes it measured
no slower than slices of a map: one call reads the spans of a chunk, without a Python object for each.
"""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.lazy_imports import import_pyarrow
from megatron.mixture.lru_cache import LruCache

MAX_FILES = 64  # open at a time; the usual limit per process is 1,024


class SpanFiles:
    """Any number of files, at most `most` of them open. Each must stay as it was when it was added."""

    def __init__(self, most: int = MAX_FILES) -> None:
        self._lock = threading.RLock()
        self._descriptors = LruCache(most, os.close)
        self._states: dict[Path, tuple[int, int]] = {}

    def add(self, path: Path) -> None:
        """Record size and modification time of a file. Raises OSError if it is missing."""
        state = path.stat()
        # the reference for all later reads, also after the file was closed and opened again
        self._states[path] = state.st_size, state.st_mtime_ns

    def read(self, path: Path, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return bytes [begin, begin + size) of each span, concatenated: uint8 [sum of sizes].

        begins, sizes [n]   of an added file

        Raises ValueError for a file that was changed or truncated since it was added; OSError if reading
        fails.
        """
        begins, sizes = (np.ascontiguousarray(array, dtype=np.int64) for array in (begins, sizes))
        with self._lock:  # another thread must not evict and close the descriptor in use
            descriptor = self._descriptors.get(path, lambda: (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1))
            n_bytes = self._check_state(descriptor, path)
            # not begins + sizes > n_bytes: the sum may overflow int64 if the catalog is damaged
            if len(begins) and (begins.min() < 0 or sizes.min() < 0 or (begins > n_bytes - sizes).any()):
                raise ValueError(
                    f"{path}: got a span outside of its {n_bytes:,} bytes. "
                    "Register the file again and restart."
                )
            content, cut_span, failure = _csrc.read_spans(descriptor, begins, sizes)
        if failure:
            raise OSError(failure, os.strerror(failure), str(path))
        if cut_span >= 0:  # the file was truncated between the check and the read
            end = int(begins[cut_span] + sizes[cut_span])
            raise ValueError(
                f"{path}: got its end before byte {end:,}, expected the size it was opened with. "
                "Restore the file, or register it again and restart."
            )
        return content

    def read_binary(self, path: Path, begins: np.ndarray, sizes: np.ndarray) -> Any:
        """Return the result of `read` as an Arrow array of large_binary [n]."""
        arrow = import_pyarrow()
        content = arrow.py_buffer(self.read(path, begins, sizes))
        # offsets int64 [n + 1]: span i is content[ends[i] : ends[i + 1]]; the bytes are not copied
        ends = arrow.py_buffer(np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
        return arrow.Array.from_buffers(arrow.large_binary(), len(sizes), [None, ends, content])

    def close(self) -> None:
        """Close all files. A later read opens them again."""
        with self._lock:
            self._descriptors.clear()

    def _check_state(self, descriptor: int, path: Path) -> int:
        """Return the size of the file. Raises ValueError if size or modification time differ from `add`."""
        # of the open file, not of the path, which may name another file by now
        state = os.fstat(descriptor)
        if (state.st_size, state.st_mtime_ns) != self._states[path]:
            raise ValueError(
                f"{path}: got another size or modification time than when it was opened, expected the same. "
                "Restore the file, or register it again and restart."
            )
        return state.st_size
