"""Garbage collection in a run: never within a step, periodically between steps, and restored."""

import gc

import pytest

from megatron.train.collection import COLLECT_EVERY, scheduled_collection


class Cycle:
    """An object that only the collector frees."""

    n_alive = 0

    def __init__(self) -> None:
        self.self = self
        Cycle.n_alive += 1

    def __del__(self) -> None:
        Cycle.n_alive -= 1


def test_cycles_are_freed_between_steps_and_never_within_one() -> None:
    gc.collect()
    Cycle.n_alive = 0
    with scheduled_collection() as after_step:
        after_step()
        assert gc.get_freeze_count() > 1000  # torch alone has more objects
        for step in range(1, COLLECT_EVERY):
            Cycle()
            after_step()
            assert Cycle.n_alive == step
        after_step()
        assert Cycle.n_alive == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_restores_the_collector() -> None:
    with pytest.raises(ValueError, match="step"), scheduled_collection() as after_step:
        after_step()
        raise ValueError("step")
    assert gc.isenabled()
