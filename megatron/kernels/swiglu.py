"""SwiGLU (Shazeer, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, elementwise. Without gradients the result overwrites `gate`."""
    if torch.is_grad_enabled():
        return F.silu(gate) * up
    # in place: in a small model allocating the
    # intermediate tensors costs more than the arithmetic
    return F.silu(gate, inplace=True).mul_(up)
