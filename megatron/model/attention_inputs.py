"""Inputs of attention besides the hidden states, and their selection for some of the queries."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.kernels.range_mask import RangeMask
from megatron.kernels.rotary import Rotary
from megatron.model.kv_cache import LayerCache


def gather_positions(x: Tensor, query_positions: Tensor) -> Tensor:
    """Select positions of each sequence: x [B, S, ...], query_positions int64 [B, Q] -> [B, Q, ...]."""
    # advanced indexing with [B, 1] and [B, Q] broadcasts to [B, Q]
    return x[torch.arange(len(query_positions), device=x.device)[:, None], query_positions]


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of a block's attention besides the hidden states x [B, S, D]."""

    causal: bool  # position p attends to positions 0..p only
    rotary: Rotary | None = None  # cos and sin of the positions; None: x contains learned positions
    mask: Tensor | RangeMask | None = None  # bool [B, 1, S, S], causality included; None: `causal` decides
    dropout_key: Tensor | None = None  # int64 [B], key of each sample in this block; enables dropout
    tensor_rank: int = 0  # this rank's part of the heads, and of the positions of x, which dropout depends on
    cache: LayerCache | None = None  # earlier positions, which x continues and attends to as well
    query_positions: Tensor | None = None  # int64 [B, Q], positions to compute; None: all
    query_rotary: Rotary | None = None  # cos and sin of the query positions

    def select_queries(self, query_positions: Tensor, n_positions: int) -> "AttentionInputs":
        """Return the inputs that compute `query_positions` [B, Q] out of S = `n_positions`."""
        assert self.cache is None and self.dropout_key is None, "a cache and dropout require all positions"
        rotary, mask = self.rotary, self.mask
        if rotary is not None:
            tables = (table.expand(len(query_positions), 1, -1, -1)[:, 0] for table in rotary)  # [B, S, K]
            cos, sin = (gather_positions(table, query_positions)[:, None] for table in tables)  # [B, 1, Q, K]
            rotary = cos, sin
        # the mask of Q rows contains causality: row i is query_positions[i], not i
        if isinstance(mask, RangeMask):
            mask = mask.select_rows(query_positions)
        elif mask is not None:
            mask = gather_positions(mask[:, 0], query_positions)[:, None]
        elif self.causal:
            # [B, Q, 1] >= [S] -> [B, Q, S]: query at position p sees keys 0..p
            keys = torch.arange(n_positions, device=query_positions.device)
            mask = (query_positions[:, :, None] >= keys)[:, None]
        return replace(self, causal=False, mask=mask, query_positions=query_positions, query_rotary=rotary)
