"""Batches made ahead: the same in the same order, errors where they are due, nothing left running."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.data.ahead import AHEAD, Ahead
from megatron.data.batches import Batches
from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.samples import Samples

WORKERS = (0, 1, 2, 4)


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ahead")]


@pytest.mark.parametrize("n_workers", WORKERS)
def test_items_come_in_order_however_long_each_takes(n_workers: int) -> None:
    def make(i: int) -> int:
        time.sleep(0.004 if i % 3 == 0 else 0)
        return i * i

    with Ahead(make, 40, n_workers) as feed:
        assert list(feed) == [i * i for i in range(40)]
    assert not running()


@pytest.mark.parametrize("n_workers", WORKERS)
def test_batches_are_the_same_for_any_number_of_workers(tmp_path: Path, n_workers: int) -> None:
    with IndexedWriter(tmp_path / "count", np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(1003))
    samples = Samples(IndexedTokens(tmp_path / "count"), 10, seed=5)  # 100 an epoch
    plain = Batches(samples, 8, 0, 1, 24)
    batches = Batches(samples, 8, 0, 1, 24)
    with Ahead(lambda k: batches.beginning_at(24 + 8 * k), 50, n_workers) as feed:
        for batch in feed:
            expected = next(plain)
            np.testing.assert_array_equal(batch.numbers, expected.numbers)
            np.testing.assert_array_equal(batch.tokens, expected.tokens)
    assert plain.next_sample == 24 + 50 * 8


@pytest.mark.parametrize("n_workers", WORKERS)
def test_what_a_worker_raises_is_raised_at_its_item_and_ends_all(n_workers: int) -> None:
    def make(i: int) -> int:
        if i == 5:
            raise OSError("the disk is gone")
        return i

    taken = []
    with pytest.raises(OSError, match="the disk is gone"), Ahead(make, 100, n_workers) as feed:
        for item in feed:
            taken.append(item)
    assert taken == [0, 1, 2, 3, 4]
    assert not running()


def test_a_worker_that_cannot_begin_is_an_error_and_no_wait() -> None:
    def begin() -> None:
        raise RuntimeError("no such device")

    with pytest.raises(RuntimeError), Ahead(lambda i: i, 10, 2, begin) as feed:
        next(feed)
    assert not running()


@pytest.mark.parametrize("n_workers", [1, 2, 4])
def test_workers_stay_a_few_items_ahead_and_stop_at_once(n_workers: int) -> None:
    made: list[int] = []
    make: Callable[[int], None] = made.append
    with Ahead(make, 10**9, n_workers) as feed:
        for _ in range(3):
            next(feed)
        time.sleep(0.1)
        assert len(made) <= 3 + AHEAD * n_workers
    assert not running()


def test_workers_make_items_while_the_last_one_is_used() -> None:
    begun = threading.Event()

    def make(i: int) -> int:
        if i == 1:
            begun.set()
        return i

    with Ahead(make, 2, 1) as feed:
        assert next(feed) == 0
        assert begun.wait(60)
