"""Dropout keyed by the sample: the same entries are dropped on any device and number of ranks."""

import math

import torch
from torch import Tensor

from megatron.kernels.document_mask import DocumentMask, can_use_triton_attention

MASK32 = 0xFFFFFFFF


def scramble_bits(x: Tensor) -> Tensor:
    """Hash 32-bit integers stored in int64, with the finalizer of MurmurHash3."""
    # masked after every product: int64 would keep the high bits that uint32 arithmetic discards
    # two 32-bit factors can overflow int64, which wraps modulo 2^64: the low 32 bits are still correct
    x = x & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def derive_layer_key(key: Tensor, layer: int) -> Tensor:
    """Return the dropout key of each sample in one block, [B] int64."""
    # keys have 62 bits and scramble_bits reads 32, so both halves are hashed. 0x9E3779B9 = 2^32 / golden
    # ratio spreads consecutive layers over all 32 bits.
    return scramble_bits(scramble_bits(key >> 32) ^ scramble_bits(key + 0x9E3779B9 * (layer + 1)))


def draw_keep_mask(key: Tensor, n_heads: int, n_queries: int, n_keys: int, rate: float) -> Tensor:
    """Return which attention weights to keep, bool [B, H, S, S]; each is dropped with probability `rate`.

    Each weight has a draw of its own: a hash of (sample key, head and query, key position).
    """
    device = key.device
    # two rounds of hashing: (sample key, head and query), then the key position
    rows = torch.arange(n_heads * n_queries, device=device).view(1, n_heads, n_queries, 1)
    columns = torch.arange(n_keys, device=device)
    # int64: 8 bytes per weight, twice the memory of the float32 weights
    draws = scramble_bits(
        scramble_bits(key.view(-1, 1, 1, 1) ^ scramble_bits(rows + 1)) + 0x9E3779B9 * (columns + 1)
    )
    # draws are uniform in 0 .. 2^32 - 1
    # the probability is exact to 2^-32: rate 0.1 drops draws below 429,496,730
    return draws >= round(rate * 2**32)


def drop_hidden(x: Tensor, key: Tensor, place: int, rate: float) -> Tensor:
    """Return x [B, S, D] with features dropped; the others are scaled by 1 / (1 - rate).

    key    [B] int64, of each sample in this block
    place  number of the tensor within the block, so that its tensors are dropped independently
    """
    if rate == 0:
        return x
    _, n_positions, width = x.shape
    # features are the "keys" of one head: a draw for each (sample, position, feature)
    keep = draw_keep_mask(derive_layer_key(key, place), 1, n_positions, width, rate)[:, 0]
    return x * keep / (1 - rate)


def attend_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | DocumentMask | None,
    key: Tensor,
    rate: float,
) -> Tensor:
    """Return attention with dropout after the softmax; remaining weights are scaled by 1 / (1 - rate).

    q, k, v [B, H, S, K]; mask as in Attention.forward. torch's fused kernels draw from the device's
    generator, which other ranks and devices cannot reproduce. On a GPU this project's kernel hashes the
    numbers of `draw_keep_mask`. On a CPU or with a dense mask the [B, H, S, S] weights are materialized.
    """
    if not isinstance(mask, Tensor) and can_use_triton_attention(q.device, q.shape[3]):
        from megatron.kernels.triton_attention import triton_attention  # imported on demand: slow

        first, last = (None, None) if mask is None else (mask.first, mask.last)
        return triton_attention(q, k, v, key, first, last, causal, scale, rate)
    if isinstance(mask, DocumentMask):
        mask = mask.to_dense()
    scores = (q @ k.transpose(-1, -2)).float() * scale  # float32 softmax, as in fused kernels
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    # a weight is kept with probability 1 - rate: after the division its expectation is that without dropout
    _, n_heads, n_queries, n_keys = weights.shape
    weights = weights * draw_keep_mask(key, n_heads, n_queries, n_keys, rate) / (1 - rate)
    return weights.to(v.dtype) @ v
