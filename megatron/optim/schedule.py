"""The learning rate as a function of the step."""

import math
from collections.abc import Callable

from megatron.config.schema import LrSchedulerConfig


def lr_schedule(
    config: LrSchedulerConfig, peak: float, n_steps: int, warmup_steps: int
) -> Callable[[int], float]:
    """Rate of step 0, 1, ..., n_steps - 1: warm-up to `peak`, then the shape down to lr_min_ratio * peak.

    Step k of the warm-up runs at peak (k + 1) / warmup_steps, so that no step has rate 0 and none before
    its end has the full rate. Cosine: Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts.
    """
    low = config.lr_min_ratio * peak

    def rate(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        if config.kind == "constant":
            return peak
        done = (step - warmup_steps) / max(1, n_steps - 1 - warmup_steps)
        return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return rate
