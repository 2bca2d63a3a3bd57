"""Rotary positions (Su et al., arXiv 2104.09864), halves laid out as in Llama checkpoints of Hugging Face."""

import torch
from torch import Tensor


def rotary_table(
    n_positions: int, d_head: int, theta: float, device: torch.device, first: int = 0
) -> tuple[Tensor, Tensor]:
    """cos and sin of positions from `first` on, each float32 [S, K]."""
    return rotary_at(torch.arange(first, first + n_positions, device=device), d_head, theta)


def rotary_at(positions: Tensor, d_head: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each float32 [..., K]: position p turns pair k by p / theta^(2k / K)."""
    # angles in float64: at position 8192 a float32 angle is off by 5e-4 radian
    frequency = theta ** -(torch.arange(0, d_head, 2, dtype=torch.float64, device=positions.device) / d_head)
    angle = positions.double()[..., None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys [B, H, S, K] by their positions; cos and sin [S, K] or [B, 1, S, K]."""
    first, second = x.chunk(2, dim=-1)
    if not torch.is_grad_enabled() and x.dtype == cos.dtype:  # the same with half the passes over memory
        n = first.shape[-1]
        turned = x * cos
        turned[..., :n].addcmul_(second, sin[..., :n], value=-1)
        turned[..., n:].addcmul_(first, sin[..., n:])
        return turned
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)
