"""Work spread over processes."""

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable

import pytest

from megatron.data.workers import as_finished


def begin(secret: int) -> Callable[[int], tuple[int, int]]:
    def work(item: int) -> tuple[int, int]:
        if item == -1:
            raise ValueError("minus one")
        if item == -2:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == -3:
            time.sleep(600)
        return item * secret, os.getpid()

    return work


def test_every_item_is_worked_on_once_and_in_other_processes() -> None:
    found = list(as_finished(functools.partial(begin, 3), range(100), 2))
    assert sorted(result for result, _ in found) == [3 * i for i in range(100)]
    assert os.getpid() not in {process for _, process in found}
    assert not multiprocessing.active_children()


def test_items_are_taken_only_as_processes_come_free() -> None:
    taken = []
    results = as_finished(functools.partial(begin, 1), (taken.append(i) or i for i in range(1000)), 2)
    next(results)
    assert len(taken) <= 4
    results.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("item", "error", "sentence"),
    [(-1, ValueError, "minus one"), (-2, ChildProcessError, "a worker ended with exit code -9")],
)
def test_an_error_and_a_kill_end_the_whole_at_once(item: int, error: type, sentence: str) -> None:
    begun = time.monotonic()
    with pytest.raises(error, match=sentence):
        list(as_finished(functools.partial(begin, 1), [-3, item, 5], 2))  # -3 would take 10 minutes
    assert time.monotonic() - begun < 300
    assert not multiprocessing.active_children()
