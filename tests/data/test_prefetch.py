"""Prefetched batches: same items in the same order, errors at their item, no thread left running."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.data.batches import Batches
from megatron.data.indexed import IndexedTokens
from megatron.data.prefetch import PREFETCH_FACTOR, prefetch
from megatron.data.samples import Samples
from tests.datasets import write_dataset

WORKERS = (0, 1, 2, 4)


def list_workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("n_workers", WORKERS)
def test_items_come_in_order_however_long_each_takes(n_workers: int) -> None:
    def make(i: int) -> int:
        time.sleep(0.004 if i % 3 == 0 else 0)
        return i * i

    with prefetch(make, 40, n_workers) as feed:
        assert list(feed) == [i * i for i in range(40)]
    assert not list_workers()


@pytest.mark.parametrize("n_workers", WORKERS)
def test_batches_of_all_ranks_are_the_same_for_any_number_of_workers(tmp_path: Path, n_workers: int) -> None:
    tokens = IndexedTokens(write_dataset(tmp_path / "count", [np.arange(1003)]))
    samples = Samples(tokens, 10, seed=5)  # 100 samples per epoch
    for n_ranks in (1, 2, 4):
        rows = []
        for rank in range(n_ranks):
            batches = Batches(samples, 8, rank, n_ranks)
            with prefetch(lambda k, batches=batches: batches.batch_at(24 + 8 * k), 50, n_workers) as feed:
                rows.append([(batch.numbers, batch.tokens) for batch in feed])
        numbers, ids = (np.concatenate([rank[k][i] for k in range(50) for rank in rows]) for i in (0, 1))
        np.testing.assert_array_equal(numbers, np.arange(24, 424))
        np.testing.assert_array_equal(ids, samples.take(numbers))


@pytest.mark.parametrize("n_workers", WORKERS)
def test_an_exception_of_a_worker_is_raised_at_its_item_and_ends_all(n_workers: int) -> None:
    def make(i: int) -> int:
        if i == 5:
            raise OSError("the disk is gone")
        return i

    items: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"), prefetch(make, 100, n_workers) as feed:
        items.extend(feed)
    assert items == [0, 1, 2, 3, 4]
    assert not list_workers()


def test_a_worker_that_fails_to_start_is_an_error_not_a_deadlock() -> None:
    def fail_to_start() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError), prefetch(lambda i: i, 10, 2, fail_to_start) as feed:
        next(feed)
    assert not list_workers()


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_workers_stay_a_few_items_ahead_and_stop_at_once(n_workers: int) -> None:
    started: list[int] = []
    with prefetch(started.append, 10**9, n_workers) as feed:
        for _ in range(3):
            next(feed)
        time.sleep(0.1)
        assert len(started) <= 3 + PREFETCH_FACTOR * n_workers
    assert not list_workers()
