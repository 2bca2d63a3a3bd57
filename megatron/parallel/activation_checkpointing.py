"""Activation checkpointing: recompute activations in the backward (Chen et al., arXiv 1604.06174)."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megatron.kernels.attention import ATTENTION_OPERATORS

# Operators whose results `selective` saves: products
# and attention take nearly all of the forward's time.
SAVED_OPERATORS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,  # float8's
    *ATTENTION_OPERATORS,
]


def apply_activation_checkpointing(blocks: Iterable[nn.Module], mode: str) -> None:
    """Make each block, in place, save its input (`full`) or also products and attention (`selective`)."""
    if mode == "none":
        return
    select = partial(create_selective_checkpoint_contexts, SAVED_OPERATORS)
    contexts: dict[str, Any] = {"context_fn": select} if mode == "selective" else {}
    recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, **contexts)
    for block in blocks:
        # `forward` is replaced instead of the module,
        # so that the parameters keep their names.
        # Only the variant without reentrant autograd
        # accepts keyword arguments and a context_fn.
        # the forward draws no random numbers (dropout
        # is keyed by sample): no generator state to restore
        block.forward = partial(recompute, block.forward)
