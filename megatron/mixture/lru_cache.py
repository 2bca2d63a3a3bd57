"""Cache of the most recently used values: open files up to a number, row groups up to a number of bytes.

functools.lru_cache has neither weights nor a call for evicted values. cachetools.LRUCache refuses a value
that is heavier than its capacity, has no lock, and would save half of this class.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class LruCache:
    """Values by key, the most recently used ones up to a total weight. Safe to use from several threads."""

    def __init__(self, capacity: int, close: Callable[[Any], None] | None = None) -> None:
        """`close` is called with each value that is evicted."""
        self.capacity, self._close = capacity, close
        self._lock = threading.RLock()
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._weight = 0

    def get(self, key: Hashable, load: Callable[[], tuple[Any, int]]) -> Any:
        """Return the value of a key. A missing value is loaded as (value, weight).

        A value that is heavier than the capacity is returned, and evicted by the next one.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            # within the lock: two threads never load the same value, and loads of other keys wait
            value, weight = load()
            self._values[key] = value, weight
            self._weight += weight
            # the latest value always stays, so that the caller can use it even if it exceeds the capacity
            while self._weight > self.capacity and len(self._values) > 1:
                # the first key is the least recently used, because `get` moves keys to the end
                self._drop(next(iter(self._values)))
            return value

    def clear(self) -> None:
        """Evict all values."""
        with self._lock:
            for key in list(self._values):
                self._drop(key)

    def _drop(self, key: Hashable) -> None:
        value, weight = self._values.pop(key)
        self._weight -= weight
        if self._close is not None:
            self._close(value)
