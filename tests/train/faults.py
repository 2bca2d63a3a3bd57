"""Changes of a training process that tests apply before it starts: delays, NaN losses and a kill."""

import hashlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
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


def kill_after_third_save() -> None:
    """SIGKILL the process as soon as its third checkpoint has appeared."""
    n_saved = 0

    def die_after(save: Callable[..., None]) -> Callable[..., None]:
        def save_and_die(*words: Any) -> None:
            nonlocal n_saved
            save(*words)
            n_saved += 1
            if n_saved == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        return save_and_die

    store.save_checkpoint = die_after(store.save_checkpoint)  # the full layout
    store.commit_checkpoint = die_after(store.commit_checkpoint)  # the sharded layout


def limit_file_size() -> None:
    """Make files above 32 KiB fail, as on a full disk; Python ignores SIGXFSZ."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 15, 1 << 15))


def limit_memory() -> None:
    """Make allocations above 6 GiB fail."""
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))


def ignore_hangup() -> None:
    """Ignore SIGHUP, as nohup does."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def prepend_path(folder: Path) -> None:
    """Import modules of a folder first, as with PYTHONPATH."""
    sys.path.insert(0, str(folder))


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
    take, step = MixtureSamples.take, TorchEngine.step

    def late_take(self: MixtureSamples, numbers: np.ndarray) -> np.ndarray:
        time.sleep(float(rng.uniform(0, 0.05)))
        windows = take(self, numbers)
        if record is not None:
            with (record / str(os.getpid())).open("a") as file:
                for number, window in zip(numbers.tolist(), windows, strict=True):
                    file.write(f"{number} {hashlib.sha256(window.tobytes()).hexdigest()}\n")
        return windows

    def late_step(self: TorchEngine, *words: object, **more: object) -> object:
        time.sleep(float(rng.uniform(0, 0.05)))
        return step(self, *words, **more)

    MixtureSamples.take, TorchEngine.step = late_take, late_step


def delay_operation(rank: int, seconds: float, operation: str) -> None:
    """Delay the first call of an operation on a rank: first_step, save or data."""
    owner, name = {
        "first_step": (TorchEngine, "step"),
        "save": (store, "save_checkpoint"),
        "data": (Autoregressive, "corrupt"),
    }[operation]
    function, waited = getattr(owner, name), []

    def run_slowly(*words: Any, **more: Any) -> Any:
        if not waited:
            waited.append(seconds)
            time.sleep(seconds)
        return function(*words, **more)

    if os.environ["RANK"] == str(rank):
        setattr(owner, name, run_slowly)


def print_timeouts() -> None:
    """Print the timeouts in seconds of all process groups after every step."""
    step = TorchEngine.step

    def step_and_print(self: TorchEngine, *words: Any, **more: Any) -> Any:
        report = step(self, *words, **more)
        print("limits", *read_timeouts(), file=sys.stderr, flush=True)
        return report

    TorchEngine.step = step_and_print
