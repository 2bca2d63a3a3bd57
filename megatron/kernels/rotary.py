"""Rotation of queries and keys by their positions (Su et al., arXiv 2104.09864)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
