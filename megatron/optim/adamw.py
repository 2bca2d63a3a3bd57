"""AdamW over a model's parameters."""

import torch
from torch import nn

from megatron.config.schema import OptimConfig


def adamw(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """torch's fused AdamW in two groups: matrices decay, gains of norms do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
