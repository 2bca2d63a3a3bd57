"""Multi-head self-attention."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.schema import ModelConfig
from megatron.kernels.cpu_attention import cpu_attention, is_cpu_attention_faster
from megatron.kernels.dropout import attend_with_dropout
from megatron.model.kv_cache import LayerCache
from megatron.model.norm import RmsNorm
from megatron.model.rotary import apply_rotary
from megatron.plan.parametrization import attention_multiplier

# Queries per block in `_attend_in_blocks`: small enough to skip many masked keys, large enough for an
# efficient matrix product.
QUERY_BLOCK = 64


class ScaledDotProductAttention(nn.Module):
    """softmax(scale q k^T) v with q, k, v [B, H, S, K]. The module has no weights.

    causal: position p attends to positions 0..p only.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        """Return the attention output [B, H, S, K].

        mask [B, 1, S, S] bool   keys visible to each query, causality included; None: `causal` alone decides
        """
        # Three implementations of one function. On a CPU: blocks of queries without gradients, this project's
        # kernels with gradients. Otherwise torch's fused kernels.
        if causal and _should_split_queries(q, k):
            return self._attend_in_blocks(q, k, v, mask)
        if mask is None and is_cpu_attention_faster(q, k):
            return cpu_attention(q, k, v, causal, self.scale)
        # torch refuses is_causal together with a mask; a mask already contains causality
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=self.scale
        )

    def _attend_in_blocks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Compute causal attention per block of queries, each over the keys up to its last query."""
        # memory layout [B, S, H, K], seen as [B, H, S, K]: the caller transposes back without a copy
        output = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        for begin in range(0, q.shape[2], QUERY_BLOCK):
            end = min(begin + QUERY_BLOCK, q.shape[2])
            # queries begin..end - 1 see at most keys 0..end - 1: keys after `end` are never read
            if mask is None:
                # row i is query begin + i, so tril(begin) keeps keys 0 .. begin + i. With begin = 64 and end
                # = 128: [64, 128], and the first row sees keys 0..64.
                seen = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).tril(begin)
            else:
                seen = mask[:, :, begin:end, :end]
            # on average a block reads (S + 64) / 2 keys: for large S half of the products of the S x S square
            output[:, :, begin:end] = F.scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, :end], v[:, :, :end], attn_mask=seen, scale=self.scale
            )
        return output


def _should_split_queries(q: Tensor, k: Tensor) -> bool:
    """Return whether causal attention is faster in blocks of queries.

    torch's CPU kernel processes keys in tiles of 512 even if most of them are masked. Blocks are not used
    with gradients (another kernel covers that case), under a compiler (it would unroll the loop), or with
    fewer heads than threads.
    """
    if torch.compiler.is_compiling():
        return False
    # blocks require query i at position i: with a cache k is longer than q
    if q.device.type != "cpu" or torch.is_grad_enabled() or q.shape[2] != k.shape[2]:
        return False
    return q.shape[2] > QUERY_BLOCK and q.shape[0] * q.shape[1] >= torch.get_num_threads()


def gather_positions(x: Tensor, query_positions: Tensor) -> Tensor:
    """Select positions of each sequence: x [B, S, ...], query_positions int64 [B, Q] -> [B, Q, ...]."""
    # advanced indexing with [B, 1] and [B, Q] broadcasts to [B, Q]
    return x[torch.arange(len(query_positions), device=x.device)[:, None], query_positions]


class Attention(nn.Module):
    """Causal or bidirectional multi-head self-attention, [B, S, D] -> [B, S, D].

    With fewer key/value heads than query heads, adjacent query heads share one key/value head
    (grouped-query attention, Ainslie et al., arXiv 2305.13245).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, shared = config.n_heads * config.d_head, config.kv_heads * config.d_head
        self.d_head = config.d_head
        # 8 query heads and 2 key/value heads: n_sharing = 4; multi-head attention has n_sharing = 1
        self.n_sharing = heads // shared
        self.scale = attention_multiplier(config)
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.d_model, heads, bias=config.biases)
        self.key = nn.Linear(config.d_model, shared, bias=config.biases)
        self.value = nn.Linear(config.d_model, shared, bias=config.biases)
        self.out = nn.Linear(heads, config.d_model, bias=config.biases)
        # per head, before the rotary embedding, as in Qwen3 (arXiv 2505.09388)
        self.query_norm = RmsNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RmsNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()
        self.core_attention: nn.Module = ScaledDotProductAttention(
            self.scale
        )  # replaced by context parallelism

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        causal: bool,
        *,
        mask: Tensor | None = None,
        dropout_key: Tensor | None = None,
        cache: LayerCache | None = None,
        query_positions: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, S, D], or [B, Q, D] for `query_positions`.

        x                [B, S, D]
        cos, sin         [S, K] or [B, 1, S, K]  rotary tables; None: x already contains learned positions
        causal           position p attends to positions 0..p only
        mask             [B, 1, S, S] bool  visible keys, causality included; None: `causal` alone decides
        dropout_key      [B] int64          key of each sample in this block; enables attention dropout
        cache            x continues the cached positions and attends to them as well; causal only
        query_positions  [B, Q] int64       positions to compute; None: all
        """
        query_input = x if query_positions is None else gather_positions(x, query_positions)
        # -1 and not n_heads: under tensor parallelism the projections return the heads of this rank only
        q, k, v = (
            project(inputs).unflatten(-1, (-1, self.d_head))  # [B, S, H, K]
            for project, inputs in ((self.query, query_input), (self.key, x), (self.value, x))
        )
        q, k, v = (x.transpose(1, 2) for x in (self.query_norm(q), self.key_norm(k), v))  # [B, H, S, K]
        if cos is not None and sin is not None:
            query_rotary = (
                (cos, sin)
                if query_positions is None
                else (_gather_rotary(cos, query_positions), _gather_rotary(sin, query_positions))
            )
            q, k = apply_rotary(q, *query_rotary), apply_rotary(k, cos, sin)
        if query_positions is not None:
            assert cache is None and dropout_key is None, "a cache and dropout require all positions"
            # the mask of Q rows contains causality: row i is query_positions[i], not i
            mask, causal = attention_mask_for(mask, causal, query_positions, x.shape[1]), False
        if cache is not None:
            assert causal and mask is None, "cached keys and values are valid for causal attention only"
            # the first positions are plain causal attention; later ones need the offset mask of the cache
            # k is cached after its rotation: q . k depends on the difference of two positions only, so a
            # cached key never needs another rotation
            causal, mask = cache.n_read == 0, cache.build_mask(x.shape[1])
            k, v = cache.extend(k, v)
        if self.n_sharing > 1:
            # query head h uses key head h // n_sharing; the cache above stores the shared heads only
            k, v = (x.repeat_interleave(self.n_sharing, dim=1) for x in (k, v))
        # two calls below: under context parallelism the replacements of core_attention have no parameter for
        # a mask, and the layout check refuses the settings that need one
        if dropout_key is not None:
            attended = attend_with_dropout(q, k, v, self.scale, causal, mask, dropout_key, self.dropout)
        elif mask is not None:
            attended = self.core_attention(q, k, v, causal, mask)
        else:
            attended = self.core_attention(q, k, v, causal)
        # [B, H, S, K] -> [B, S, H, K] -> [B, S, H K]
        return self.out(attended.transpose(1, 2).flatten(-2))


def _gather_rotary(table: Tensor, query_positions: Tensor) -> Tensor:
    """Select the rows of cos or sin, [S, K] or [B, 1, S, K], at the query positions -> [B, 1, Q, K]."""
    # [S, K] is one table for all samples: indexed with [B, Q] it gives [B, Q, K], as the other branch does
    return (table[query_positions] if table.ndim == 2 else gather_positions(table[:, 0], query_positions))[
        :, None
    ]


def attention_mask_for(
    mask: Tensor | None, causal: bool, query_positions: Tensor, n_positions: int
) -> Tensor | None:
    """Return the attention mask of the given queries, bool [B, 1, Q, S]; None: every key is visible."""
    if mask is not None:
        return gather_positions(mask[:, 0], query_positions)[:, None]
    if not causal:
        return None
    # [B, Q, 1] >= [S] -> [B, Q, S]: query at position p sees keys 0..p
    return (query_positions[:, :, None] >= torch.arange(n_positions, device=query_positions.device))[:, None]
