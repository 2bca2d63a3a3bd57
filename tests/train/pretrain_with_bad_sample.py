"""tools/pretrain.py with a NaN loss for sample 110, on any rank."""

import runpy
from pathlib import Path

import numpy as np

from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Task

BAD_SAMPLE = 110
corrupt = MaskedDiffusion.corrupt


def corrupt_with_nan(
    self: MaskedDiffusion, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None
) -> Task:
    task = corrupt(self, tokens, numbers, draw)
    if draw is None and BAD_SAMPLE in numbers and task.scale is not None:
        task.scale.fill_(float("nan"))
    return task


MaskedDiffusion.corrupt = corrupt_with_nan
tool = Path(__file__).resolve().parents[2] / "tools" / "pretrain.py"
runpy.run_path(str(tool), run_name="__main__")
