"""Rotary positions (Su et al., arXiv 2104.09864), halves laid out as in Llama checkpoints of Hugging Face."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def rotary_table(
    n_positions: int, d_head: int, theta: float, device: torch.device, first: int = 0
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions from `first` on, each float32 [S, K]; they are shared: read-only."""
    # a tensor made in inference mode could not be kept for a backward later
    table = _table if torch.is_inference_mode_enabled() else _cached_table
    return table(n_positions, d_head, theta, device, first)


def _table(
    n_positions: int, d_head: int, theta: float, device: torch.device, first: int
) -> tuple[Tensor, Tensor]:
    return rotary_at(torch.arange(first, first + n_positions, device=device), d_head, theta)


_cached_table = lru_cache(maxsize=4)(_table)  # a small model's step spends 0.2 ms on them


def rotary_at(positions: Tensor, d_head: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [..., K]: position p turns pair k by p / theta^(2k / K)."""
    # angles in float64: at position 8192 a float32 angle is off by 5e-4 radian
    frequency = theta ** -(torch.arange(0, d_head, 2, dtype=torch.float64, device=positions.device) / d_head)
    angle = positions.double()[..., None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [B, H, S, K] by their positions; cos and sin [S, K] or [B, 1, S, K]."""
    if torch.compiler.is_compiling():  # which makes one pass of it by itself
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return _Turn.apply(x, cos, sin)


class _Turn(torch.autograd.Function):
    """`rotate` with a third of the passes over memory; the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _turned(grads[0], *ctx.saved_tensors, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    """By the angle, or with -1 for `way` back."""
    wide, n = x.to(torch.promote_types(x.dtype, cos.dtype)), x.shape[-1] // 2
    turned = wide * cos
    turned[..., :n].addcmul_(wide[..., n:], sin[..., :n], value=-way)
    turned[..., n:].addcmul_(wide[..., :n], sin[..., n:], value=way)
    return turned.to(x.dtype)
