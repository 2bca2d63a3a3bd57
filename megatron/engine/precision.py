"""The dtypes of a run, from its settings; every engine and layout applies the same ones."""

import torch

from megatron.config.schema import DistConfig
from megatron.model.precision import Precision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_precision(config: DistConfig) -> Precision:
    """Return the dtypes of weights in use, of products and of the residual stream.

    Master weights, updates, sums of gradients over microbatches and ranks, norms, softmax and loss are
    float32 or float64 for every setting.
    """
    return Precision(DTYPES[config.dtype], DTYPES[config.residual_dtype or config.dtype])
