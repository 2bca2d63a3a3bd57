"""tools/pretrain.py with random delays when samples are read and steps are taken.

With RECORD, a folder, each rank writes (number, SHA-256) of every sample that it reads.
"""

import hashlib
import os
import runpy
import time
from pathlib import Path

import numpy as np

from megatron.engine.torch.torch_native import TorchEngine
from megatron.mixture.source import MixtureSamples

rng = np.random.default_rng(int(os.environ.get("RANK", "0")) + 100 * os.getpid())
take, step = MixtureSamples.take, TorchEngine.step


def late_take(self: MixtureSamples, numbers: np.ndarray) -> np.ndarray:
    time.sleep(float(rng.uniform(0, 0.05)))
    windows = take(self, numbers)
    if record := os.environ.get("RECORD"):
        with open(f"{record}/{os.environ.get('RANK', '0')}-{os.getpid()}", "a") as file:
            for number, window in zip(numbers.tolist(), windows, strict=True):
                file.write(f"{number} {hashlib.sha256(window.tobytes()).hexdigest()}\n")
    return windows


def late_step(self: TorchEngine, *words: object, **more: object) -> object:
    time.sleep(float(rng.uniform(0, 0.05)))
    return step(self, *words, **more)


MixtureSamples.take, TorchEngine.step = late_take, late_step
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
