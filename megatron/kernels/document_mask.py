"""Attention masks of documents as two numbers per position, for kernels that need no mask of S x S."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.kernels.softmax_nll import has_triton
from megatron.plan.memory import MAX_FUSED_D_HEAD


@dataclass(frozen=True)
class DocumentMask:
    """Positions attend within their document only, and if `causal` not to later positions.

    first, last [B, S] int32   first and last position of the document of each position
    """

    first: Tensor
    last: Tensor
    causal: bool

    def select_rows(self, query_positions: Tensor) -> Tensor:
        """Return the visible keys of chosen queries [B, Q], bool [B, 1, Q, S]."""
        keys = torch.arange(self.first.shape[1], device=self.first.device)
        first, last = (bounds.gather(1, query_positions)[:, :, None] for bounds in (self.first, self.last))
        seen = (keys >= first) & (keys <= last)
        return (seen & (keys <= query_positions[:, :, None]) if self.causal else seen)[:, None]

    def to_dense(self) -> Tensor:
        """Return the visible keys of every query, bool [B, 1, S, S]."""
        positions = torch.arange(self.first.shape[1], device=self.first.device)
        return self.select_rows(positions.expand(self.first.shape))


def build_document_mask(documents: Tensor, causal: bool) -> DocumentMask:
    """Return the mask of document numbers [B, S], which rise by one from document to document."""
    n = documents.shape[1]
    positions = torch.arange(n, device=documents.device).expand_as(documents)
    borders = documents[:, 1:] != documents[:, :-1]
    starts = torch.where(torch.nn.functional.pad(borders, (1, 0), value=True), positions, 0)
    ends = torch.where(torch.nn.functional.pad(borders, (0, 1), value=True), positions, n - 1)
    # documents 0 0 0 1 1: starts 0 0 0 3 0, carried forward 0 0 0 3 3; ends 4 4 2 4 4, carried back 2 2 2 4 4
    first = starts.cummax(1).values
    last = ends.flip(1).cummin(1).values.flip(1)
    return DocumentMask(first.int(), last.int(), causal)


def can_use_triton_attention(device: torch.device, d_head: int) -> bool:
    """Return whether `triton_attention` supports heads of a width on a device."""
    return device.type == "cuda" and d_head <= MAX_FUSED_D_HEAD and has_triton()
