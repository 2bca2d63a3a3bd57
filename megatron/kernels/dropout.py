"""Dropout keyed by the sample: the same entries are dropped on any device and number of ranks."""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron.kernels.attention import repeat_shared_heads
from megatron.kernels.range_mask import RangeMask
from megatron.plan.memory import ATTENTION_PER_BLOCK

MASK32 = 0xFFFFFFFF


def scramble_bits(x: Tensor) -> Tensor:
    """Hash 32-bit integers stored in int64, with the finalizer of MurmurHash3."""
    # masked after every product: int64 would keep
    # the high bits that uint32 arithmetic discards.
    # Two 32-bit factors can overflow int64, which wraps
    # modulo 2^64: the low 32 bits are still correct
    x = x & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def derive_layer_key(key: Tensor, layer: int) -> Tensor:
    """Return the dropout key of each sample in one block, [B] int64."""
    # keys have 62 bits and scramble_bits reads 32, so both halves are hashed.
    # 0x9E3779B9 = 2^32 / golden ratio spreads consecutive layers over all 32 bits.
    return scramble_bits(scramble_bits(key >> 32) ^ scramble_bits(key + 0x9E3779B9 * (layer + 1)))


def draw_keep_mask(
    key: Tensor,
    n_heads: int,
    n_queries: int,
    n_keys: int,
    rate: float,
    queries: slice = slice(None),
    part: int = 0,
) -> Tensor:
    """Return which attention weights to keep, bool [B, H, S, S]; each is dropped with probability `rate`.

    Each weight has a draw of its own: a hash of (sample key, head and query,
    key position). `queries` selects some of the `n_queries` rows.
    `part` is the number of this rank among ranks that have equal parts of the heads.
    """
    device = key.device
    # two rounds of hashing: (sample key, head and query), then the key position
    # 2 heads of 3 queries on rank 1 of 2: rows 6 to 11, as on one rank with 4 heads
    first = part * n_heads * n_queries
    rows = torch.arange(first, first + n_heads * n_queries, device=device)
    rows = rows.view(1, n_heads, n_queries, 1)[:, :, queries]
    columns = torch.arange(n_keys, device=device)
    # int64: 8 bytes per weight, twice the memory of the float32 weights
    draws = scramble_bits(
        scramble_bits(key.view(-1, 1, 1, 1) ^ scramble_bits(rows + 1)) + 0x9E3779B9 * (columns + 1)
    )
    # draws are uniform in 0 .. 2^32 - 1
    # the probability is exact to 2^-32: rate 0.1 drops draws below 429,496,730
    return draws >= round(rate * 2**32)


def drop_hidden(x: Tensor, key: Tensor | None, place: int, rate: float, part: int = 0) -> Tensor:
    """Return x [B, S, D] with features dropped; the others are scaled by 1 / (1 - rate).

    key    [B] int64, of each sample in this block; None: nothing is dropped
    place  number of the tensor within the block,
           so that its tensors are dropped independently
    part   number of this rank among ranks that have equal parts of the positions
    """
    if rate == 0 or key is None:
        return x
    _, n_positions, width = x.shape
    # features are the "keys" of one head: a
    # draw for each (sample, position, feature)
    keep = draw_keep_mask(derive_layer_key(key, place), 1, n_positions, width, rate, part=part)[:, 0]
    return x * keep / (1 - rate)


def attend_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | RangeMask | None,
    key: Tensor,
    rate: float,
    part: int = 0,
) -> Tensor:
    """Return attention with dropout after the softmax; remaining weights are scaled by 1 / (1 - rate).

    q, k, v as in `scaled_dot_product_attention`; mask as in Attention.forward; part as in
    `draw_keep_mask`. The fused kernels of torch draw from the device's generator, which other
    ranks and devices cannot reproduce; FlexAttention has no dropout. Here the weights are
    materialized, for as many queries at a time as have
    ATTENTION_PER_BLOCK of them; of more, the backward computes each block of queries again.
    """
    k, v = repeat_shared_heads(q, k, v)
    n_samples, n_heads, n, _ = q.shape
    if isinstance(mask, RangeMask):
        mask = mask.to_dense()
    if mask is None and causal:
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()[None, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, queries: slice) -> Tensor:
        scores = (q[:, :, queries] @ k.transpose(-1, -2)).float() * scale  # float32 softmax, as fused kernels
        if mask is not None:
            scores = scores.masked_fill(~mask[:, :, queries], -math.inf)
        # a weight is kept with probability 1 - rate: after
        # the division its expectation is that without dropout
        keep = draw_keep_mask(key, n_heads, n, n, rate, queries, part)
        return (scores.softmax(-1) * keep / (1 - rate)).to(v.dtype) @ v

    size = ATTENTION_PER_BLOCK // (n_samples * n_heads * n)
    if size >= n:
        return attend(q, k, v, slice(None))
    blocks = [slice(begin, begin + max(1, size)) for begin in range(0, n, max(1, size))]
    # no generator is used, so no state of one must be restored
    parts = [
        checkpoint(attend, q, k, v, block, use_reentrant=False, preserve_rng_state=False) for block in blocks
    ]
    return torch.cat(parts, dim=2)
