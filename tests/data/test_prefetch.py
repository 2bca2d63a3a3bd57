"""Prefetched batches: same items in the same order, errors at their item, no thread left running."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.batches import Batches
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.prefetch import PREFETCH_FACTOR, Prefetcher
from megatron.data.samples import Samples

WORKERS = (0, 1, 2, 4)


def list_workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("n_workers", WORKERS)
def test_items_come_in_order_however_long_each_takes(n_workers: int) -> None:
    def make(i: int) -> int:
        time.sleep(0.004 if i % 3 == 0 else 0)
        return i * i

    with Prefetcher(make, 40, n_workers) as feed:
        assert list(feed) == [i * i for i in range(40)]
    assert not list_workers()


@pytest.mark.parametrize("n_workers", WORKERS)
def test_batches_of_all_ranks_are_the_same_for_any_number_of_workers(tmp_path: Path, n_workers: int) -> None:
    with IndexedWriter(tmp_path / "count", np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(1003))
    samples = Samples(IndexedTokens(tmp_path / "count"), 10, seed=5)  # 100 samples per epoch
    ranks = [Batches(samples, 8, rank, 2) for rank in range(2)]
    for rank, batches in enumerate(ranks):
        with Prefetcher(lambda k, batches=batches: batches.batch_at(24 + 8 * k), 50, n_workers) as feed:
            for k, batch in enumerate(feed):
                numbers = 24 + 8 * k + 4 * rank + np.arange(4)
                np.testing.assert_array_equal(batch.numbers, numbers)
                np.testing.assert_array_equal(batch.tokens, np.stack([samples[i] for i in numbers.tolist()]))


@pytest.mark.parametrize("n_workers", WORKERS)
def test_an_exception_of_a_worker_is_raised_at_its_item_and_ends_all(n_workers: int) -> None:
    def make(i: int) -> int:
        if i == 5:
            raise OSError("the disk is gone")
        return i

    items = []
    with pytest.raises(OSError, match="the disk is gone"), Prefetcher(make, 100, n_workers) as feed:
        for item in feed:
            items.append(item)
    assert items == [0, 1, 2, 3, 4]
    assert not list_workers()


def test_a_worker_that_fails_to_start_is_an_error_not_a_deadlock() -> None:
    def fail_to_start() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError), Prefetcher(lambda i: i, 10, 2, fail_to_start) as feed:
        next(feed)
    assert not list_workers()


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_workers_stay_a_few_items_ahead_and_stop_at_once(n_workers: int) -> None:
    started: list[int] = []
    make: Callable[[int], None] = started.append
    with Prefetcher(make, 10**9, n_workers) as feed:
        for _ in range(3):
            next(feed)
        time.sleep(0.1)
        assert len(started) <= 3 + PREFETCH_FACTOR * n_workers
    assert not list_workers()
