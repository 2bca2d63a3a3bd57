"""Background prefetching of the items of a pure function, in order.

Workers are threads, not processes: numpy releases the GIL, and one thread prepares many more samples
than a GPU consumes (tools/bench/loader.py). A process would import all modules again, map the corpus
again and copy every batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

ItemT = TypeVar("ItemT")
PREFETCH_FACTOR = 2  # items per worker that may be pending or ready, as in torch's DataLoader


class Prefetcher(Generic[ItemT]):
    """Iterator over make(0), make(1), ... make(n_items - 1) for any number of workers; a context manager.

    An exception of `make` is raised when its item is requested. Leaving the `with` block waits
    for running calls and discards their results. To resume at item k, start a new prefetcher.
    """

    def __init__(
        self,
        make: Callable[[int], ItemT],
        n_items: int,
        n_workers: int,
        init_worker: Callable[[], None] | None = None,
    ) -> None:
        """`n_workers` 0: the calling thread runs `make`. `init_worker`: called once in each worker thread."""
        self.make, self.n_items, self.n_workers = make, n_items, n_workers
        self._next = 0
        self._pending: deque[Future[ItemT]] = deque()
        self._pool = ThreadPoolExecutor(n_workers, "prefetch", init_worker) if n_workers else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            # wait: a running call reads files that the
            # caller may close after the `with` block
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()

    def __iter__(self) -> Iterator[ItemT]:
        return self

    def __next__(self) -> ItemT:
        if self._pool is None:
            if self._next == self.n_items:
                raise StopIteration
            self._next += 1
            return self.make(self._next - 1)
        self._submit_items(self._pool)
        if not self._pending:
            raise StopIteration
        # The oldest item, even if later ones are ready. At most PREFETCH_FACTOR * n_workers
        # items exist, which bounds memory for a slow consumer.
        item = self._pending.popleft().result()
        self._submit_items(self._pool)  # start the next item before the caller uses this one
        return item

    def _submit_items(self, pool: ThreadPoolExecutor) -> None:
        # `_pending` is in item order, so results are
        # returned in order whichever worker finishes first
        while len(self._pending) < PREFETCH_FACTOR * self.n_workers and self._next < self.n_items:
            self._pending.append(pool.submit(self.make, self._next))
            self._next += 1
