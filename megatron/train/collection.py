"""Python's garbage collection between steps instead of inside of them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

COLLECT_EVERY = 500  # steps; equal on all ranks, which then pause together


@contextmanager
def scheduled_collection() -> Iterator[Callable[[], None]]:
    """Disable automatic collection in a `with` block; yield a function to call after every step.

    Its first call freezes all objects of the start, which live as long as the run: collections then skip
    them. An automatic collection may take hundreds of milliseconds, on one rank while the others wait.
    """
    was_enabled, n_steps = gc.isenabled(), 0

    def after_step() -> None:
        nonlocal n_steps
        if n_steps == 0:
            gc.collect()
            gc.freeze()
        elif n_steps % COLLECT_EVERY == 0:
            gc.collect()
        n_steps += 1

    gc.disable()
    try:
        yield after_step
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
