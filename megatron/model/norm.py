"""Root-mean-square norm."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class RmsNorm(nn.Module):
    """x / rms(x) * gain over the last axis (Zhang and Sennrich, arXiv 1910.07467), any shape -> the same."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # in float32 whatever the matrices are in: the mean square of a wide bf16 row loses digits
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
