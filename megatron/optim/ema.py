"""Exponential moving average (EMA) of the weights, stored in the optimizer's state of each parameter.

There it is sharded, saved and restored as the moments are.
"""

import torch

from megatron.optim.adamw import FusedAdamW

EMA = "ema"


def start_ema(optimizer: FusedAdamW | torch.optim.Optimizer) -> None:
    """Start the average at the present weights."""
    for parameter, state in optimizer.state.items():
        state[EMA] = parameter.detach().clone()


@torch.no_grad()
def update_ema(optimizer: FusedAdamW | torch.optim.Optimizer, decay: float) -> None:
    """Set each average to decay * average + (1 - decay) * weight, in float32."""
    # one kernel for all parameters of a device
    averages = [state[EMA] for state in optimizer.state.values()]
    torch._foreach_lerp_(averages, [*optimizer.state], 1.0 - decay)


@torch.no_grad()
def swap_ema(optimizer: FusedAdamW | torch.optim.Optimizer) -> None:
    """Exchange weights and averages in place; a second call restores both exactly."""
    for parameter, state in optimizer.state.items():
        # through a copy, so that the memory of both stays: FSDP and the optimizer keep references to it
        weight = parameter.clone()
        parameter.copy_(state[EMA])
        state[EMA].copy_(weight)
