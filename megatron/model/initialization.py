"""Weight initialization by the role of each matrix."""

import torch
from torch import nn

from megatron.model.transformer import Gpt
from megatron.plan.parametrization import find_parameter_rule


@torch.no_grad()
def init_weights(model: Gpt, seed: int) -> None:
    """Initialize a model in place: gains 1, biases 0, matrices normal with the std of their rule.

    The default std is 0.02, and 0.02 / sqrt(2 L) for matrices that write
    to the residual stream, as in GPT-2. The values depend on the seed
    and the shapes only: every rank and every device gets the same weights.
    """
    # drawn on the CPU in float32, in the order of
    # named_parameters, for any device and dtype of the model
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            # vectors draw no numbers: models with and
            # without biases get equal matrices from a seed
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
            continue
        std = find_parameter_rule(model.config, name, parameter.ndim).std
        values = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(values)
