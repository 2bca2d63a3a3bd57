"""Spans of bytes of registered files, read and never mapped, while few of the files are open.

A mapped page of a file that was cut short ends the process by SIGBUS, whatever was checked before; a server
would take all its mixtures along. pread returns fewer bytes instead. Measured on documents of 280 bytes: no
slower than slices of a map, because the spans of a chunk are read by one call that makes no Python object for
each.
"""

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.libraries import pyarrow
from megatron.mixture.recent import Recent

MOST_FILES = 64  # open at a time; the usual limit of a process is 1,024


class SpanFiles:
    """Any number of files, of which at most `most` are open. Each must stay as it was when it was added."""

    def __init__(self, most: int = MOST_FILES) -> None:
        self._lock = threading.RLock()
        self._descriptors = Recent(most, os.close)
        self._states: dict[Path, tuple[int, int]] = {}

    def add(self, path: Path) -> None:
        """Remember size and modification time of a file. OSError for one that is not there."""
        state = path.stat()
        self._states[path] = state.st_size, state.st_mtime_ns

    def read(self, path: Path, begins: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return bytes [begin, begin + size) of each span, one after another: uint8 [sum of sizes].

        begins, sizes [n]   of an added file
        ValueError for a file that was changed or cut short since it was added; OSError where reading fails.
        """
        begins, sizes = (np.ascontiguousarray(one, dtype=np.int64) for one in (begins, sizes))
        with self._lock:  # a descriptor in use must not be closed
            descriptor = self._descriptors.get(path, lambda: (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1))
            n_bytes = self._check_state(descriptor, path)
            if len(begins) and (begins.min() < 0 or sizes.min() < 0 or (begins > n_bytes - sizes).any()):
                raise ValueError(
                    f"{path}: got a span outside of its {n_bytes:,} bytes. "
                    "Register the file again and restart."
                )
            content, lacking, failure = _csrc.read_spans(descriptor, begins, sizes)
        if failure:
            raise OSError(failure, os.strerror(failure), str(path))
        if lacking >= 0:  # it was cut between the check and the read
            end = int(begins[lacking] + sizes[lacking])
            raise ValueError(
                f"{path}: got its end before byte {end:,}, expected the size it was opened with. "
                "Restore the file, or register it again and restart."
            )
        return content

    def read_binary(self, path: Path, begins: np.ndarray, sizes: np.ndarray) -> Any:
        """`read` as an Arrow array of large_binary [n]."""
        arrow = pyarrow()
        content = arrow.py_buffer(self.read(path, begins, sizes))
        ends = arrow.py_buffer(np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))
        return arrow.Array.from_buffers(arrow.large_binary(), len(sizes), [None, ends, content])

    def close(self) -> None:
        """Close all files; a read opens them again."""
        with self._lock:
            self._descriptors.clear()

    def _check_state(self, descriptor: int, path: Path) -> int:
        """The file's size. ValueError where size or modification time are not those of `add`."""
        state = os.fstat(descriptor)
        if (state.st_size, state.st_mtime_ns) != self._states[path]:
            raise ValueError(
                f"{path}: got another size or modification time than when it was opened, expected the same. "
                "Restore the file, or register it again and restart."
            )
        return state.st_size
