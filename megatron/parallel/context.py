"""Context parallelism: positions are split over ranks, heads exchanged (Ulysses, arXiv 2309.14509)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.kernels.attention import repeat_shared_heads
from megatron.model.transformer import Block, Gpt


def apply_context_parallel(model: Gpt, group: ProcessGroup) -> None:
    """Replace the attention of every block, in place, by one over the positions of all ranks of the group."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.core_attention = UlyssesAttention(group, block.attention.core_attention)


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all: all heads of S / n positions <-> H / n heads of all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange_heads(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # the exchange permutes elements between ranks;
        # the transpose of a permutation is its inverse
        return _exchange_heads(grads[0], ctx.group, not ctx.to_heads), None, None


_all_to_all: Callable[[Tensor, ProcessGroup, bool], Tensor] = _AllToAll.apply


def _exchange_heads(x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
    """Map [B, H, S / n, K] -> [B, H / n, S, K] with `to_heads`, otherwise the inverse."""
    # To heads with n = 2: x [B, H, S / 2, K] is
    # cut into 2 groups of heads, group i is sent
    # to rank i, and the parts received are consecutive
    # ranges of positions: [B, H / 2, S, K].
    split_dim, cat_dim = (1, 2) if to_heads else (2, 1)
    outgoing = torch.stack(x.chunk(group.size(), dim=split_dim))  # [n, ...], one part per rank
    incoming = torch.empty_like(outgoing)  # part i comes from rank i, so concatenation restores the order
    dist.all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(), dim=cat_dim)


class UlyssesAttention(nn.Module):
    """Attention over the positions of all ranks; q, k, v [B, H, S / n, K] hold consecutive position ranges.

    Each rank computes H / n heads over the whole sequence with `local_attention`. H must be divisible by n.
    """

    def __init__(self, group: ProcessGroup, local_attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.group, self.local_attention = group, local_attention

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # without annotations in torch
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        assert mask is None, "the layout check refuses options that need a mask"
        # one all-to-all for the three tensors, concatenated
        # along the batch: k and v need as many heads as q
        k, v = repeat_shared_heads(q, k, v)
        q, k, v = _all_to_all(torch.cat([q, k, v]), self.group, True).chunk(3)
        return _all_to_all(self.local_attention(q, k, v, causal), self.group, False)
