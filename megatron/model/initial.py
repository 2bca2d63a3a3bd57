"""Initial weights, by the role of each matrix."""

import math

import torch
from torch import nn

from megatron.model.gpt import Gpt

STD = 0.02  # GPT-2's; Llama's code draws with the same


@torch.no_grad()
def initialise(model: Gpt, seed: int) -> None:
    """Fill a built model, in place: std 0.02, and 0.02 / sqrt(2 L) where a branch joins the residual.

    The draw depends on the seed and the shapes alone, so that every rank and every device gets the same
    weights.
    """
    generator = torch.Generator().manual_seed(seed)
    joins = STD / math.sqrt(2 * len(model.blocks))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            nn.init.ones_(parameter)
            continue
        std = joins if name.endswith(("attention.out.weight", "mlp.down.weight")) else STD
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(drawn)
