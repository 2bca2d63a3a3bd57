"""The learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from megatron.config.schema import LrSchedulerConfig

# remaining fraction of the rate after a fraction `done` in [0, 1] of the decay
DESCENT: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    # Haegele et al., arXiv 2405.18392, section 3
    "sqrt": lambda done: 1 - math.sqrt(done),
    # Loshchilov and Hutter, arXiv 1608.03983, eq. 5, without restarts
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
}


@dataclass(frozen=True, kw_only=True)
class LearningRateSchedule:
    """Learning rate of steps 0..n_steps - 1: linear warm-up to `peak`, then decay to lr_min_ratio * peak.

    Step k of the warm-up has the rate peak (k + 1) / warmup_steps: never 0, and the peak at its last step
    only. `cosine` and `linear` decay from the end of the warm-up to the last step, or over `decay_steps` and
    then stay at the minimum. `wsd` (warm-up, stable,
    decay: Hu et al., arXiv 2404.06395) stays at the peak until the last `decay_steps`, so that runs of all
    lengths share their steps up to the decay of the shortest.
    """

    kind: str
    decay_shape: str
    peak: float
    lr_min_ratio: float
    n_steps: int
    warmup_steps: int
    decay_steps: int

    def __call__(self, step: float) -> float:
        """Return the rate; a step is a fraction if the batch size has grown (train/build.py)."""
        if step < self.warmup_steps:
            # warmup_steps = 4: 0.25, 0.5, 0.75, 1 of the peak
            return self.peak * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        if self.kind == "wsd":
            first = self.n_steps - self.decay_steps
            if step < first:
                return self.peak
            # + 1: the first decay step is already below the
            # peak, and the last one reaches the minimum
            # n_steps = 10, decay_steps = 4: steps
            # 6..9 have done = 0.25, 0.5, 0.75, 1
            shape, done = self.decay_shape, (step - first + 1) / self.decay_steps
        else:
            descent = self.decay_steps or max(1, self.n_steps - 1 - self.warmup_steps)
            shape, done = self.kind, (step - self.warmup_steps) / descent
        # min(1, done): first_difference also evaluates steps
        # after the end, for a trunk longer than this run
        low = self.lr_min_ratio * self.peak
        return low + (self.peak - low) * DESCENT[shape](min(1.0, done))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings for lr_state_dict.pt; `LearningRateSchedule(**...)` restores the schedule."""
        return asdict(self)

    def first_difference(self, other: "LearningRateSchedule", n_steps: int) -> int | None:
        """Return the first step below `n_steps` at which the two rates differ, or None."""
        return next((step for step in range(n_steps) if self(step) != other(step)), None)


def build_lr_schedule(
    config: LrSchedulerConfig, peak: float, n_steps: int, warmup_steps: int, decay_steps: int = 0
) -> LearningRateSchedule:
    """Build the schedule of a run, with lengths in steps."""
    return LearningRateSchedule(
        kind=config.kind,
        decay_shape=config.decay_shape,
        peak=peak,
        lr_min_ratio=config.lr_min_ratio,
        n_steps=n_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
    )
