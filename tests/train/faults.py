"""Changes of a training process that tests apply before it starts: delays, NaN losses and a kill."""

import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import numpy as np

from megatron.checkpoint import store
from megatron.engine.torch.torch_native import TorchEngine
from megatron.mixture.source import MixtureSamples
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Task
from tests.rank_processes import read_timeouts

BAD_SAMPLE = 110


def run_before(owner: Any, name: str, action: Callable[[], None]) -> None:
    """Change a function or method: it calls `action` first."""
    function = getattr(owner, name)

    def run(*words: Any, **more: Any) -> Any:
        action()
        return function(*words, **more)

    setattr(owner, name, run)


def kill_after_third_save() -> None:
    """SIGKILL the process as soon as its third checkpoint has appeared."""
    calls = count(1)

    def die_after(save: Callable[..., None]) -> Callable[..., None]:
        def save_and_die(*words: Any) -> None:
            save(*words)
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        return save_and_die

    store.save_checkpoint = die_after(store.save_checkpoint)  # the full layout
    store.commit_checkpoint = die_after(store.commit_checkpoint)  # the sharded layout


# files above 32 KiB fail, as on a full disk (Python ignores SIGXFSZ); allocations above 6 GiB fail
limit_file_size = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))
limit_memory = partial(resource.setrlimit, resource.RLIMIT_AS, (6 << 30, 6 << 30))
ignore_hangup = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)  # as nohup does


def spoil_sample() -> None:
    """Make the loss of BAD_SAMPLE NaN, on any rank."""
    corrupt = MaskedDiffusion.corrupt

    def corrupt_with_nan(
        self: MaskedDiffusion, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None
    ) -> Task:
        task = corrupt(self, tokens, numbers, draw)
        if draw is None and BAD_SAMPLE in numbers and task.scale is not None:
            task.scale.fill_(float("nan"))
        return task

    MaskedDiffusion.corrupt = corrupt_with_nan


def wait_at_random(record: Path | None = None) -> None:
    """Delay reads and steps at random, and record (number, SHA-256) of every sample that a rank reads."""
    rng = np.random.default_rng(int(os.environ.get("RANK", "0")) + 100 * os.getpid())
    take = MixtureSamples.take

    def take_and_record(self: MixtureSamples, numbers: np.ndarray) -> np.ndarray:
        windows = take(self, numbers)
        if record is not None:
            with (record / str(os.getpid())).open("a") as file:
                for number, window in zip(numbers.tolist(), windows, strict=True):
                    file.write(f"{number} {hashlib.sha256(window.tobytes()).hexdigest()}\n")
        return windows

    MixtureSamples.take = take_and_record
    for owner, name in ((MixtureSamples, "take"), (TorchEngine, "step")):
        run_before(owner, name, lambda: time.sleep(float(rng.uniform(0, 0.05))))


def delay_operation(rank: int, seconds: float, operation: str) -> None:
    """Delay the first call of an operation on a rank: first_step, save or data."""
    owner, name = {
        "first_step": (TorchEngine, "step"),
        "save": (store, "save_checkpoint"),
        "data": (Autoregressive, "corrupt"),
    }[operation]
    waits = chain([seconds], repeat(0.0))
    if os.environ["RANK"] == str(rank):
        run_before(owner, name, lambda: time.sleep(next(waits)))


def print_timeouts() -> None:
    """Print the timeouts in seconds of all process groups after every step."""
    step = TorchEngine.step

    def step_and_print(self: TorchEngine, *words: Any, **more: Any) -> Any:
        report = step(self, *words, **more)
        print("limits", *read_timeouts(), file=sys.stderr, flush=True)
        return report

    TorchEngine.step = step_and_print
