"""Background prefetching of the items of a pure function, in order.

Workers are threads, not processes: numpy releases the GIL,
and one thread prepares many more samples than a GPU
consumes (tools/bench/loader.py). A process would import all
modules again, map the corpus again and copy every batch.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

ItemT = TypeVar("ItemT")
PREFETCH_FACTOR = 2  # items per worker that may be pending or ready, as in torch's DataLoader


@contextmanager
def prefetch(
    make: Callable[[int], ItemT], n_items: int, n_workers: int, init_worker: Callable[[], None] | None = None
) -> Iterator[Iterator[ItemT]]:
    """Yield an iterator over make(0), make(1), ... make(n_items - 1), the same for any number of workers.

    n_workers     0: the calling thread runs `make`
    init_worker   called once in each worker thread

    An exception of `make` is raised when its item is requested. Leaving the
    `with` block waits for running calls, which read files that the caller may
    close, and discards their results.
    """
    if not n_workers:
        yield map(make, range(n_items))
        return
    with ThreadPoolExecutor(n_workers, "prefetch", init_worker) as pool:
        try:
            yield _iter_results(pool, make, n_items, PREFETCH_FACTOR * n_workers)
        finally:
            pool.shutdown(cancel_futures=True)


def _iter_results(
    pool: ThreadPoolExecutor, make: Callable[[int], ItemT], n_items: int, n_ahead: int
) -> Iterator[ItemT]:
    """Yield results in order. The number of pending items bounds memory for a slow consumer."""
    pending: deque[Future[ItemT]] = deque()
    for i in range(n_items):
        pending.append(pool.submit(make, i))
        if len(pending) > n_ahead:
            # the oldest item, even if later ones are ready
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
