"""What was used last is kept: open files up to a number, row groups up to a number of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


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
