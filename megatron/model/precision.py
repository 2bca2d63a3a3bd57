"""Data types of a model in training."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Precision:
    """dtypes of a model in training, the same in every parallel layout; norms are computed in float32.

    compute    weights are rounded to it for use, and products and the results of norms have it
    residual   residual stream
    """

    compute: torch.dtype
    residual: torch.dtype

    def to_residual(self, x: Tensor) -> Tensor:
        """Return rows of an embedding as residual stream: rounded as FSDP rounds the weights it gathers."""
        return x.to(self.compute).to(self.residual)
