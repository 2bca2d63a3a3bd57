"""Activations that are computed again in the backward instead of kept (Chen et al., arXiv 1604.06174)."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import megatron.model.cpu_attention  # noqa: F401  it makes an operator that is named here

# what `selective` keeps: matrix products and attention, nearly all of the forward's time
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,  # float8's
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.megatron.cpu_attention.default,
]


def recompute(blocks: Iterable[nn.Module], what: str) -> None:
    """Let each block, in place, keep its input only (`full`) or also the results of KEPT (`selective`)."""
    if what == "none":
        return
    contexts = {}
    if what == "selective":
        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, KEPT)}
    for block in blocks:
        # the model draws no random numbers, so there is no state of generators to put back
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **contexts
        )
