"""What was used last stays open: files up to a number, row groups up to a number of bytes."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

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
        with self._lock:  # a descriptor in use must not be closed
            descriptor = self._descriptors.get(path, lambda: (os.open(path, os.O_RDONLY | os.O_CLOEXEC), 1))
            n_bytes = os.fstat(descriptor).st_size
            if begin < 0 or size < 0 or begin + size > n_bytes:
                raise ValueError(
                    f"{path}: got a file of {n_bytes:,} bytes, expected at least {begin + size:,}. Put the "
                    "file back that was registered, or register it again."
                )
            parts: list[bytes] = []
            while size:
                part = os.pread(descriptor, size, begin)
                if not part:
                    raise ValueError(f"{path}: was cut while it was read. Register it again.")
                parts.append(part)
                begin, size = begin + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close all files; a read opens them again."""
        with self._lock:
            self._descriptors.clear()
