"""Norms of the residual stream and of heads."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.model import cpu_norm


class RmsNorm(nn.Module):
    """x / rms(x) * gain over the last axis (Zhang and Sennrich, arXiv 1910.07467), any shape -> the same.

    `multiplier` is a constant that the result is multiplied by, and no parameter.
    """

    def __init__(self, d_model: int, eps: float, multiplier: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        # in float32 whatever the matrices are in: the mean square of a wide bf16 row loses digits. The gain
        # too, which FSDP gathers in bf16: torch's one-pass kernels want both of one kind, and layer_norm must
        wide, gain = x.float(), self.weight.float()
        if cpu_norm.is_worth_it(wide, gain):
            normed = cpu_norm.cpu_rms_norm(wide, gain, self.eps)
        else:
            normed = F.rms_norm(wide, gain.shape, gain, self.eps)
        return (normed if self.multiplier == 1 else normed * self.multiplier).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * gain (+ bias) over the last axis (Ba et al., arXiv 1607.06450); else as RmsNorm."""

    def __init__(self, d_model: int, eps: float, bias: bool, multiplier: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None
        self.eps = eps
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps)
        return (normed if self.multiplier == 1 else normed * self.multiplier).to(x.dtype)


def residual_norm(config: ModelConfig, multiplier: float = 1.0) -> RmsNorm | LayerNorm:
    """The norm of the residual stream that a shape asks for."""
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, config.biases, multiplier)
    return RmsNorm(config.d_model, config.norm_eps, multiplier)
