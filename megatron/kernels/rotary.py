"""Rotary position embedding: angles, and the rotation of queries and keys (Su et al., arXiv 2104.09864)."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import ModelConfig

Rotary = tuple[Tensor, Tensor]  # cos and sin, each float32 [S, R] or [B, 1, S, R]


def compute_frequencies(model: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Return the angle per position of each pair of channels, float64 [rotary_dims / 2].

    Pair k of R rotated channels has the frequency theta^(-2k / R).
    `rope_scaling` stretches them for longer texts:

    linear   all are divided by rope_factor (Chen et al., arXiv 2306.15595)
    llama3   with n = rope_original_positions x frequency / 2 pi, the turns of a pair
             in the original length: unchanged from rope_high_factor turns on,
             divided by rope_factor below rope_low_factor turns, and interpolated
             linearly in n between the two (Llama 3.1, arXiv 2407.21783)
    """
    dims = model.rotary_channels
    # in float64: at position 8192 a float32 angle has an error of 5e-4 radian
    frequency = model.rope_theta ** -(torch.arange(0, dims, 2, dtype=torch.float64, device=device) / dims)
    if model.rope_scaling == "linear":
        return frequency / model.rope_factor
    if model.rope_scaling == "llama3":
        assert model.rope_original_positions is not None, "set by the reader, checked by check.py"
        turns = model.rope_original_positions * frequency / (2 * math.pi)
        low, high = model.rope_low_factor, model.rope_high_factor
        unchanged = ((turns - low) / (high - low)).clamp(0, 1)  # share; the rest is divided
        return frequency * (unchanged + (1 - unchanged) / model.rope_factor)
    return frequency


def rotary_at_positions(positions: Tensor, model: ModelConfig) -> Rotary:
    """Return cos and sin, each float32 [..., R]: position p rotates pair k by p x its frequency.

    Su et al., arXiv 2104.09864, with pair k in columns
    k and k + R / 2 as in Hugging Face's Llama.
    """
    angle = positions.double()[..., None] * compute_frequencies(model, positions.device)
    angle = torch.cat([angle, angle], dim=-1)  # [..., R]: both columns of a pair rotate by the same angle
    return angle.cos().float(), angle.sin().float()


@lru_cache(maxsize=4)
def rotary_table(n_positions: int, model: ModelConfig, device: torch.device, first: int = 0) -> Rotary:
    """Return cos and sin of consecutive positions from `first`, each float32 [S, R]; cached, so read-only."""
    # not as inference tensors: autograd could not
    # save a cached one in a later training step
    with torch.inference_mode(False):
        return rotary_at_positions(torch.arange(first, first + n_positions, device=device), model)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of queries or keys [B, H, S, K]; cos and sin [S, R] or [B, 1, S, R].

    With x = (first, second), the halves of these channels: x cos + (-second, first) sin.
    """
    if (n := cos.shape[-1]) < x.shape[-1]:
        return torch.cat([apply_rotary(x[..., :n], cos, sin), x[..., n:]], dim=-1)
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
        # a rotation is orthogonal: its transpose, which
        # maps the gradient back, is the rotation by -angle
        cos, sin = ctx.saved_tensors
        return _rotate_halves(grads[0], cos, sin, -1), None, None


_rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = _RotaryFunction.apply


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate by the angle (sign 1), or by the negative angle (sign -1)."""
    # pair k is (x[k], x[k + K/2]): first' = first cos
    # - second sin, second' = second cos + first sin
    wide, n = x.to(torch.promote_types(x.dtype, cos.dtype)), x.shape[-1] // 2
    # a new tensor: both lines below still read the unrotated halves from `wide`
    rotated = wide * cos
    rotated[..., :n].addcmul_(wide[..., n:], sin[..., :n], value=-sign)
    rotated[..., n:].addcmul_(wide[..., :n], sin[..., n:], value=sign)
    return rotated.to(x.dtype)
