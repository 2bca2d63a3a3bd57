"""Parallel map over processes."""

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest
from megatron.text.workers import map_unordered


def make_worker(secret: int) -> Callable[[int], tuple[int, int]]:
    def work(item: int) -> tuple[int, int]:
        if item == -1:
            raise ValueError("minus one")
        if item == -2:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == -3:
            time.sleep(600)
        return item * secret, os.getpid()

    return work


def test_every_item_is_processed_once_and_in_other_processes() -> None:
    results = list(map_unordered(functools.partial(make_worker, 3), range(100), 2))
    assert sorted(result for result, _ in results) == [3 * i for i in range(100)]
    assert os.getpid() not in {process for _, process in results}
    assert not multiprocessing.active_children()


def test_items_are_drawn_only_when_processes_are_free() -> None:
    sent = []
    results = map_unordered(functools.partial(make_worker, 1), (sent.append(i) or i for i in range(1000)), 2)
    next(results)
    assert len(sent) <= 4
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("item", "error", "sentence"),
    [(-1, ValueError, "minus one"), (-2, ChildProcessError, "a worker ended with exit code -9")],
)
def test_an_error_and_a_kill_end_the_map_at_once(item: int, error: type, sentence: str) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=sentence):
        list(map_unordered(functools.partial(make_worker, 1), [-3, item, 5], 2))  # -3 would take 10 minutes
    assert time.monotonic() - begun < 300
    assert not multiprocessing.active_children()
