"""softmax(scale q k^T) v, with the fastest implementation for the device, the dtype and the mask."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.kernels.cpu_attention import cpu_attention, is_cpu_attention_faster
from megatron.kernels.range_mask import RangeMask, attend_in_ranges

# Queries per block in `attend_in_query_blocks`: small enough to skip
# many masked keys, large enough for an efficient matrix product.
QUERY_BLOCK = 64

# Kernels for a dense mask. Flash attention reads none.
# The backward of cuDNN's returns NaN in the gradient of q
# where the last tile of 128 positions is half full.
MASKED_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

ATTENTION_OPERATORS = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.megatron.cpu_attention.default,  # registered by the import above
)


def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    mask: Tensor | RangeMask | None = None,
    *,
    scale: float,
) -> Tensor:
    """Return softmax(scale q k^T) v, [B, H, S, K], for q [B, H, S, K] and k, v [B, H / g, S, K].

    Query head h uses key and value head h // g (grouped-query attention).

    causal                   position p attends to positions 0..p only
    mask  [B, 1, S, S] bool  keys visible to each query, causality included; None: `causal` alone decides
    """
    if isinstance(mask, RangeMask):
        return attend_in_ranges(q, k, v, mask, scale)
    if mask is None and q.shape[1] != k.shape[1] and _can_share_heads(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    k, v = repeat_shared_heads(q, k, v)
    # On a CPU: blocks of queries without gradients, this project's
    # kernels with gradients. Otherwise torch's fused kernels.
    if causal and _should_split_queries(q, k):
        return attend_in_query_blocks(q, k, v, mask, scale)
    if mask is None and is_cpu_attention_faster(q, k):
        return cpu_attention(q, k, v, causal, scale)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    # torch refuses is_causal together with a
    # mask; a mask already contains causality
    if q.device.type == "cuda":
        return _attend_with_mask(q, k, v, mask, scale)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _can_share_heads(q: Tensor) -> bool:
    """Return whether torch's kernels read a shared key and value head several times instead of a copy."""
    # FlashAttention's and cuDNN's do; others need
    # float32 or wider heads, and would store all scores
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] <= 128


def _attend_with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return attention with a dense mask by the kernels of a GPU that read one correctly."""
    with sdpa_kernel(MASKED_BACKENDS):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def repeat_shared_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v with as many heads as q: each shared head is repeated for its query heads."""
    n_sharing = q.shape[1] // k.shape[1]
    if n_sharing == 1:
        return k, v
    return k.repeat_interleave(n_sharing, dim=1), v.repeat_interleave(n_sharing, dim=1)


def _should_split_queries(q: Tensor, k: Tensor) -> bool:
    """Return whether causal attention is faster in blocks of queries.

    torch's CPU kernel processes keys in tiles of 512 even if most of them are masked.
    Blocks are not used with gradients (another kernel covers that case),
    under a compiler (it would unroll the loop), or with fewer heads than threads.
    """
    if torch.compiler.is_compiling():
        return False
    # blocks require query i at position i: with a cache k is longer than q
    if q.device.type != "cpu" or torch.is_grad_enabled() or q.shape[2] != k.shape[2]:
        return False
    return q.shape[2] > QUERY_BLOCK and q.shape[0] * q.shape[1] >= torch.get_num_threads()


def attend_in_query_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Compute causal attention per block of queries, each over the keys up to its last query."""
    # memory layout [B, S, H, K], seen as [B, H, S,
    # K]: the caller transposes back without a copy
    output = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    for begin in range(0, q.shape[2], QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, q.shape[2])
        # queries begin..end - 1 see at most keys
        # 0..end - 1: keys after `end` are never read
        if mask is None:
            # row i is query begin + i, so tril(begin) keeps
            # keys 0 .. begin + i. With begin = 64 and end
            # = 128: [64, 128], and the first row sees keys 0..64.
            seen = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).tril(begin)
        else:
            seen = mask[:, :, begin:end, :end]
        # on average a block reads (S + 64) / 2 keys: for
        # large S half of the products of the S x S square
        output[:, :, begin:end] = F.scaled_dot_product_attention(
            q[:, :, begin:end], k[:, :, :end], v[:, :, :end], attn_mask=seen, scale=scale
        )
    return output
