"""Dynamic loss scaling for float16 (Micikevicius et al., arXiv 1710.03740, section 3.2)."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.world import World

# The smallest positive float16 is 2^-24 = 6e-8; a gradient below half of it rounds to 0. Scaled by 2^16,
# gradients down to 2^-40 = 9e-13 remain. An overflow costs one step, too small a scale costs digits in all.
INITIAL_SCALE, GROWTH, BACKOFF, GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000


class LossScale:
    """Factor on the loss: halved after a step with an overflow, doubled after 2000 steps without one.

    The scale stays on the device, so no step synchronizes with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(INITIAL_SCALE, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, is_finite: Tensor) -> None:
        """Update the scale after a step; the gradient overflowed unless `is_finite`."""
        # torch's kernel for GradScaler: updates scale and good_steps in place, without synchronization
        overflowed = 1.0 - is_finite.float()
        torch._amp_update_scale_(self.scale, self.good_steps, overflowed, GROWTH, BACKOFF, GROWTH_STEPS)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale.cpu(), "good_steps": self.good_steps.cpu()}

    def load(self, state: dict[str, Tensor] | None, world: World | None) -> None:
        """Load the result of `state_dict`; None leaves the scale unchanged.

        With a world, rank 0's is broadcast.
        """
        if state is not None:
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])
        if world is not None and world.n_ranks > 1:
            dist.broadcast(self.scale, 0)
            dist.broadcast(self.good_steps, 0)
