"""Rotary position embedding: angles, and the rotation of queries and keys (Su et al., arXiv 2104.09864)."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Rotary = tuple[Tensor, Tensor]  # cos and sin, each float32 [S, K] or [B, 1, S, K]


def rotary_at_positions(positions: Tensor, d_head: int, theta: float) -> Rotary:
    """Return cos and sin, each float32 [..., K]: position p rotates pair k by p / theta^(2k / K).

    Su et al., arXiv 2104.09864, with pair k in columns k and k + K / 2 as in Hugging Face's Llama.
    """
    # angles in float64: at position 8192 a float32 angle has an error of 5e-4 radian
    frequency = theta ** -(torch.arange(0, d_head, 2, dtype=torch.float64, device=positions.device) / d_head)
    angle = positions.double()[..., None] * frequency
    angle = torch.cat([angle, angle], dim=-1)  # [..., K]: both columns of a pair rotate by the same angle
    return angle.cos().float(), angle.sin().float()


@lru_cache(maxsize=4)
def rotary_table(n_positions: int, d_head: int, theta: float, device: torch.device, first: int = 0) -> Rotary:
    """Return cos and sin of consecutive positions from `first`, each float32 [S, K]; cached, so read-only."""
    # not as inference tensors: autograd could not save a cached one in a later training step
    with torch.inference_mode(False):
        return rotary_at_positions(torch.arange(first, first + n_positions, device=device), d_head, theta)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, S, K] by their positions; cos and sin [S, K] or [B, 1, S, K].

    With x = (first, second), the halves of the last axis: x cos + (-second, first) sin.
    """
    if torch.compiler.is_compiling():  # the compiler fuses this into one pass
        first, second = x.chunk(2, dim=-1)
        return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    return _rotate(x, cos, sin)


class _RotaryFunction(torch.autograd.Function):
    """`apply_rotary` with a third of the passes over memory.

    The gradient is rotated by the negative angle.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_halves(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # a rotation is orthogonal: its transpose, which maps the gradient back, is the rotation by -angle
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, sin, -1), None, None


_rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _RotaryFunction.apply


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate by the angle (sign 1), or by the negative angle (sign -1)."""
    # pair k is (x[k], x[k + K/2]): first' = first cos - second sin, second' = second cos + first sin
    wide, n = x.to(torch.promote_types(x.dtype, cos.dtype)), x.shape[-1] // 2
    # a new tensor: both lines below still read the unrotated halves from `wide`
    rotated = wide * cos
    rotated[..., :n].addcmul_(wide[..., n:], sin[..., :n], value=-sign)
    rotated[..., n:].addcmul_(wide[..., :n], sin[..., n:], value=sign)
    return rotated.to(x.dtype)
