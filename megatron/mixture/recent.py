"""What was used last stays open: files up to a number, row groups up to a number of bytes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import numpy as np

MOST_FILES = 64  # open at a time; the usual limit of a process is 1,024


class Recent:
    """Values by key, the latest used of them, up to a total weight. Safe to use from several threads."""

    def __init__(self, most: int, close: Callable[[Any], None] | None = None) -> None:
        """`close` is called with each value that is dropped."""
        self.most, self._close = most, close
        self._lock = threading.RLock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._weight = 0

    def get(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
        """The value of a key, made as (value, weight) where it is not there. A value that is heavier than all
        together may be is returned and dropped with the next."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            value, weight = make()
            self._values[key] = value, weight
            self._weight += weight
            while self._weight > self.most and len(self._values) > 1:
                self._drop(next(iter(self._values)))
            return value

    def clear(self) -> None:
        """Drop all values."""
        with self._lock:
            for key in list(self._values):
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        value, weight = self._values.pop(key)
        self._weight -= weight
        if self._close is not None:
            self._close(value)


class OpenFiles:
    """Reads parts of any number of files while at most `MOST_FILES` are open.

    Nothing is mapped: a file that is cut while it is read is an error, and no signal.
    """

    def __init__(self, most: int = MOST_FILES) -> None:
        self._lock = threading.RLock()
        self._descriptors = Recent(most, os.close)

    def read(self, path: Path, begin: int, size: int) -> bytes:
        """Bytes begin to begin + size. ValueError where the file does not hold them."""
        return self.read_parts(path, np.array([begin]), np.array([size]))[0]

    def read_parts(self, path: Path, begins: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        """The bytes from begins[i] to begins[i] + sizes[i], int [n] each. ValueError as `read`."""
        if not len(begins):
            return []
        with self._lock:  # a descriptor in use must not be closed
            descriptor = self._descriptors.get(path, lambda: (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1))
            n_bytes, end = os.fstat(descriptor).st_size, int((begins.astype(np.int64) + sizes).max())
            if begins.min() < 0 or sizes.min() < 0 or max(end, int(begins.max()), int(sizes.max())) > n_bytes:
                raise ValueError(
                    f"{path}: got a file of {n_bytes:,} bytes, expected at least {end:,}. Put the "
                    "file back that was registered, or register it again."
                )
            spans = list(zip(sizes.tolist(), begins.tolist(), strict=True))
            parts = [os.pread(descriptor, *span) for span in spans]
            for i, (size, begin) in enumerate(spans):
                while len(parts[i]) < size:  # a read gives 2 GiB at most
                    rest = os.pread(descriptor, size - len(parts[i]), begin + len(parts[i]))
                    if not rest:
                        raise ValueError(f"{path}: was cut while it was read. Register it again.")
                    parts[i] += rest
        return parts

    def close(self) -> None:
        """Close all files; a read opens them again."""
        with self._lock:
            self._descriptors.clear()
