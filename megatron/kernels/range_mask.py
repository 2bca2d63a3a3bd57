"""Attention masks as the first and last visible key of each position: documents, sliding windows, causality.

On a GPU FlexAttention (arXiv 2412.05496) skips the blocks of keys
outside of these ranges; no mask of S x S is in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Heads that FlexAttention supports; wider ones exceed the registers of a GPU.
MIN_D_HEAD, MAX_D_HEAD = 16, 256


@dataclass(frozen=True)
class RangeMask:
    """Position p attends to positions first[p]..last[p].

    first, last [B, S] int32   causality is included: then last[p] <= p
    blocks                     the same in FlexAttention's form
    """

    first: Tensor
    last: Tensor
    blocks: "BlockMask"

    def select_rows(self, query_positions: Tensor) -> Tensor:
        """Return the visible keys of chosen queries [B, Q], bool [B, 1, Q, S]."""
        keys = torch.arange(self.first.shape[1], device=self.first.device)
        first, last = (bounds.gather(1, query_positions)[:, :, None] for bounds in (self.first, self.last))
        return ((keys >= first) & (keys <= last))[:, None]

    def to_dense(self) -> Tensor:
        """Return the visible keys of every query, bool [B, 1, S, S]."""
        positions = torch.arange(self.first.shape[1], device=self.first.device)
        return self.select_rows(positions.expand(self.first.shape))


@cache
def has_triton() -> bool:
    """Return whether Triton, which FlexAttention compiles to, is installed."""
    return find_spec("triton") is not None  # the CUDA and ROCm builds of torch for Linux bring it along


def can_use_ranges(device: torch.device, d_head: int) -> bool:
    """Return whether FlexAttention supports heads of a width on a device."""
    # its backward is not implemented on a CPU
    return device.type == "cuda" and MIN_D_HEAD <= d_head <= MAX_D_HEAD and has_triton()


def build_range_mask(
    shape: torch.Size, device: torch.device, causal: bool, documents: Tensor | None, window: int | None
) -> RangeMask:
    """Return the mask of positions [B, S] with any of three limits.

    documents [B, S]   document numbers, which rise by one from document to document
    window             number of keys of a position, the last of them its own
    """
    n = shape[1]
    positions = torch.arange(n, device=device).expand(shape)
    first, last = torch.zeros_like(positions), torch.full_like(positions, n - 1)
    if documents is not None:
        borders = documents[:, 1:] != documents[:, :-1]
        starts = torch.where(torch.nn.functional.pad(borders, (1, 0), value=True), positions, 0)
        ends = torch.where(torch.nn.functional.pad(borders, (0, 1), value=True), positions, n - 1)
        # documents 0 0 0 1 1: starts 0 0 0 3 0, carried forward
        # 0 0 0 3 3; ends 4 4 2 4 4, carried back 2 2 2 4 4
        first = starts.cummax(1).values
        last = ends.flip(1).cummin(1).values.flip(1)
    if window is not None:
        first = torch.maximum(first, positions - window + 1)
    if causal:
        last = torch.minimum(last, positions)
    return RangeMask(first.int(), last.int(), _build_blocks(first, last))


def _build_blocks(first: Tensor, last: Tensor) -> "BlockMask":
    from torch.nn.attention.flex_attention import create_block_mask  # imports the compiler for a second

    def is_visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[sample, query]) & (key <= last[sample, query])

    n_samples, n = first.shape
    return create_block_mask(is_visible, n_samples, None, n, n, device=str(first.device))


def attend_in_ranges(q: Tensor, k: Tensor, v: Tensor, mask: RangeMask, scale: float) -> Tensor:
    """Return attention [B, H, S, K] of q [B, H, S, K] and k, v [B, H / g, S, K]."""
    return _get_flex_attention(q.is_cuda)(
        q, k, v, block_mask=mask.blocks, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@cache
def _get_flex_attention(compiled: bool) -> Callable[..., Any]:
    """Return FlexAttention; uncompiled it computes all scores, which only tests on a CPU do."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else partial(flex_attention)
