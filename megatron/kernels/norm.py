"""RMSNorm of float32 rows; on a CPU in one pass forward and one pass backward (csrc/rms_norm.h).

On a CPU torch's RMSNorm runs five operations forward and about twelve backward.
In a model of d_model 24 they took a quarter of a training step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron import _csrc


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last axis; x [..., D] and gain [D] of one dtype."""
    if can_use_cpu_rms_norm(x, gain):
        return cpu_rms_norm(x, gain, eps)
    return F.rms_norm(x, gain.shape, gain, eps)


def can_use_cpu_rms_norm(x: Tensor, gain: Tensor) -> bool:
    """Return whether `cpu_rms_norm` supports the arguments.

    Plain float32 CPU tensors, not under a compiler.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or not x.numel():
        return False
    if type(x) is not Tensor or type(gain) not in (Tensor, nn.Parameter):  # for example DTensors
        return False
    return x.dtype == gain.dtype == torch.float32


def cpu_rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * gain over the last axis; x [..., D] and gain [D] float32."""
    return _apply_rms_norm(x, gain, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        out, inverse = torch.empty_like(rows), rows.new_empty(len(rows))
        # copy: a storage shared with numpy cannot be resized,
        # and FSDP frees its weights by resizing them
        gain = gain.detach().clone()
        _csrc.rms_norm(
            rows.detach().numpy(),
            gain.numpy(),
            eps,
            out.numpy(),
            inverse.numpy(),
            torch.get_num_threads(),
        )
        # `inverse` [N] is r = 1 / sqrt(mean(x^2) + eps): with it the
        # backward needs no second reduction of x^2. With g = grad * gain:
        # dx = r (g - x r^2 mean(g x)), dgain = sum over rows of grad x r.
        ctx.save_for_backward(rows, gain, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():  # create_graph
            raise RuntimeError("cpu_rms_norm: its gradient has no gradient. Use F.rms_norm instead.")
        rows, gain, inverse = ctx.saved_tensors
        grad_x, grad_gain = torch.empty_like(rows), torch.empty_like(gain)
        _csrc.rms_norm_backward(
            rows.numpy(),
            gain.numpy(),
            inverse.numpy(),
            grads[0].contiguous().view(rows.shape).numpy(),
            grad_x.numpy(),
            grad_gain.numpy(),
            torch.get_num_threads(),
        )
        return grad_x.view(grads[0].shape), grad_gain, None


_apply_rms_norm: Callable[[Tensor, Tensor, float], Tensor] = _RmsNorm.apply
