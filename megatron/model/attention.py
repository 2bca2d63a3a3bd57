"""Multi-head self-attention."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.config.parametrization import attention_multiplier
from megatron.config.schema import ModelConfig
from megatron.model.cache import LayerCache
from megatron.model.cpu_attention import cpu_attention, is_worth_it
from megatron.model.dropout import attend_with_dropout
from megatron.model.norm import RmsNorm
from megatron.model.rotary import rotate

# queries read at a time where that spares keys: few enough to skip much, enough to fill a product
QUERIES = 64


class Mixing(nn.Module):
    """softmax(scale q k^T) v, each [B, H, S, K]; causal: position p sees 0..p only. It has no weights."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        """mask [B, 1, S, S] bool: what each position sees, causality in it already; None: `causal` says."""
        if causal and _worth_blocks(q, k):
            return self._in_blocks(q, k, v, mask)
        if mask is None and is_worth_it(q, k):
            return cpu_attention(q, k, v, causal, self.scale)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=self.scale
        )

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The same for causal sight, a block of queries after another, each over the keys up to its last."""
        mixed = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        for begin in range(0, q.shape[2], QUERIES):
            end = min(begin + QUERIES, q.shape[2])
            if mask is None:
                seen = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).tril(begin)
            else:
                seen = mask[:, :, begin:end, :end]
            mixed[:, :, begin:end] = F.scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, :end], v[:, :, :end], attn_mask=seen, scale=self.scale
            )
        return mixed


def _worth_blocks(q: Tensor, k: Tensor) -> bool:
    """Whether to read causally in blocks: torch's kernel for the CPU reads 512 keys whatever is hidden.

    Not where gradients are wanted, which it has in one piece, where a compiler would unroll the blocks, or
    where heads are fewer than threads.
    """
    if torch.compiler.is_compiling():
        return False
    if q.device.type != "cpu" or torch.is_grad_enabled() or q.shape[2] != k.shape[2]:
        return False
    return q.shape[2] > QUERIES and q.shape[0] * q.shape[1] >= torch.get_num_threads()


def taken(x: Tensor, asked: Tensor) -> Tensor:
    """Of each sequence the positions asked for: x [B, S, ...], asked int64 [B, Q] -> [B, Q, ...]."""
    return x[torch.arange(len(asked), device=x.device)[:, None], asked]


class Attention(nn.Module):
    """Attention over the whole sequence, causal or from both sides, [B, S, D] -> [B, S, D].

    With fewer heads of keys and values than of queries, neighbouring query heads share one (grouped-query
    attention, Ainslie et al., arXiv 2305.13245).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        heads, shared = config.n_heads * config.d_head, config.kv_heads * config.d_head
        self.d_head = config.d_head
        self.n_sharing = heads // shared
        self.scale = attention_multiplier(config)
        self.dropout = config.attention_dropout
        self.query = nn.Linear(config.d_model, heads, bias=config.biases)
        self.key = nn.Linear(config.d_model, shared, bias=config.biases)
        self.value = nn.Linear(config.d_model, shared, bias=config.biases)
        self.out = nn.Linear(heads, config.d_model, bias=config.biases)
        # on each head by itself, before the positions, as Qwen3 has it (arXiv 2505.09388)
        self.query_norm = RmsNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RmsNorm(config.d_head, config.norm_eps) if config.qk_norm else nn.Identity()
        self.mixing: nn.Module = Mixing(self.scale)  # ranks that share positions put theirs here

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
        asked: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, D]; cos, sin [S, K] or [B, 1, S, K], None: positions are in x; causal: p sees 0..p only.

        mask         [B, 1, S, S] bool  what each position sees, causality in it already; None: `causal` says
        dropout_key  [B] int64          the sample's key in this block; drops attention weights
        cache        x holds the positions that follow those in it, which are seen too; causal only
        asked        [B, Q] int64       positions whose result is wanted, [B, Q, D]; None: all
        """
        asking = x if asked is None else taken(x, asked)
        q, k, v = (
            project(of).unflatten(-1, (-1, self.d_head))  # [B, S, H, K]
            for project, of in ((self.query, asking), (self.key, x), (self.value, x))
        )
        q, k, v = (of.transpose(1, 2) for of in (self.query_norm(q), self.key_norm(k), v))  # [B, H, S, K]
        if cos is not None and sin is not None:
            turns = (cos, sin) if asked is None else (_turns(cos, asked), _turns(sin, asked))
            q, k = rotate(q, *turns), rotate(k, cos, sin)
        if asked is not None:
            assert cache is None and dropout_key is None, "all positions are wanted there"
            mask, causal = _sight(mask, causal, asked, x.shape[1]), False
        if cache is not None:
            assert causal and mask is None, "what was read without sight of what follows is kept as it is"
            causal, mask = cache.n_read == 0, cache.sight(x.shape[1])
            k, v = cache.extend(k, v)
        if self.n_sharing > 1:
            k, v = (of.repeat_interleave(self.n_sharing, dim=1) for of in (k, v))
        if dropout_key is not None:
            mixed = attend_with_dropout(q, k, v, self.scale, causal, mask, dropout_key, self.dropout)
        elif mask is not None:
            mixed = self.mixing(q, k, v, causal, mask)
        else:
            mixed = self.mixing(q, k, v, causal)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def _turns(table: Tensor, asked: Tensor) -> Tensor:
    """The rows of cos or sin [S, K] or [B, 1, S, K] of the positions asked for, [B, 1, Q, K]."""
    return (table[asked] if table.ndim == 2 else taken(table[:, 0], asked))[:, None]


def _sight(mask: Tensor | None, causal: bool, asked: Tensor, n_positions: int) -> Tensor | None:
    """What the positions asked for see, bool [B, 1, Q, S]; None: everything."""
    if mask is not None:
        return taken(mask[:, 0], asked)[:, None]
    if not causal:
        return None
    return (asked[:, :, None] >= torch.arange(n_positions, device=asked.device))[:, None]
