"""Feed-forward layer: SwiGLU (Shazeer, arXiv 2002.05202), or two matrices around a GELU as in GPT-2."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.schema import ModelConfig


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), or without a gate down(gelu(up(x))), [B, S, D] -> [B, S, D] via F."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        gated = config.feed_forward == "swiglu"
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.biases) if gated else None
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.biases)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.biases)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            # the tanh approximation of GPT-2: with the exact GELU its published weights give other logits
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        if torch.is_grad_enabled():
            return self.down(F.silu(self.gate(x)) * self.up(x))
        # in place: in a small model allocating the intermediate tensors costs more than the arithmetic
        return self.down(F.silu(self.gate(x), inplace=True).mul_(self.up(x)))
