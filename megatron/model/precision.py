"""Data types of a model in training; every engine and layout applies the same ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.schema import DistConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """dtypes of a model in training, the same in every parallel layout; norms are computed in float32.

    compute    weights are rounded to it for use,
               and products and the results of norms have it
    residual   residual stream
    """

    compute: torch.dtype
    residual: torch.dtype

    def to_residual(self, x: Tensor) -> Tensor:
        """Return rows of an embedding as residual stream: rounded as FSDP rounds the weights it gathers."""
        return x.to(self.compute).to(self.residual)


def choose_precision(config: DistConfig) -> Precision:
    """Return the dtypes of weights in use, of products and of the residual stream.

    Master weights, updates, sums of gradients over microbatches and ranks,
    norms, softmax and loss are float32 or float64 for every setting.
    """
    return Precision(DTYPES[config.dtype], DTYPES[config.residual_dtype or config.dtype])
