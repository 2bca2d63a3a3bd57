"""Norms of the residual stream and of attention heads."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.kernels import cpu_norm


class RmsNorm(nn.Module):
    """x / rms(x) * gain over the last axis, for any shape (Zhang and Sennrich, arXiv 1910.07467).

    `multiplier` is a constant factor of the result, not a parameter.
    """

    def __init__(self, d_model: int, eps: float, multiplier: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps
        self.multiplier = multiplier

    def forward(self, x: Tensor) -> Tensor:
        # Always float32: the mean square of a wide bf16 row loses digits. The gain is converted as well,
        # since FSDP gathers it in bf16: torch's fused rms_norm expects one dtype, and layer_norm requires it.
        wide, gain = x.float(), self.weight.float()
        if cpu_norm.can_use_cpu_rms_norm(wide, gain):
            normed = cpu_norm.cpu_rms_norm(wide, gain, self.eps)
        else:
            normed = F.rms_norm(wide, gain.shape, gain, self.eps)
        return (normed if self.multiplier == 1 else normed * self.multiplier).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * gain (+ bias) over the last axis (Ba et al., arXiv 1607.06450); see RmsNorm."""

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


def build_residual_norm(config: ModelConfig, multiplier: float = 1.0) -> RmsNorm | LayerNorm:
    """Build the residual-stream norm of a configuration."""
    if config.norm == "layernorm":
        return LayerNorm(config.d_model, config.norm_eps, config.biases, multiplier)
    return RmsNorm(config.d_model, config.norm_eps, multiplier)
