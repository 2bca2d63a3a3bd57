"""Context parallelism: positions are split over ranks, heads exchanged (Ulysses, arXiv 2309.14509)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_to_all_single

from megatron.kernels.attention import repeat_shared_heads
from megatron.model.transformer import Block, Gpt


def apply_context_parallel(model: Gpt, group: ProcessGroup) -> None:
    """Replace the attention of every block, in place, by one over the positions of all ranks of the group."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.attention.core_attention = UlyssesAttention(group, block.attention.core_attention)


def _exchange_heads(x: Tensor, group: ProcessGroup, to_heads: bool) -> Tensor:
    """Map [B, H, S / n, K] -> [B, H / n, S, K] with `to_heads`, otherwise the inverse; differentiable."""
    # To heads with n = 2: x [B, H, S / 2, K] is cut
    # into 2 groups of heads, group i is sent to rank i,
    # and the parts received are consecutive
    # ranges of positions: [B, H / 2, S, K].
    split_dim, cat_dim = (1, 2) if to_heads else (2, 1)
    outgoing = torch.stack(x.chunk(group.size(), dim=split_dim))  # [n, ...], one part per rank
    incoming = torch.empty_like(outgoing)  # part i comes from rank i, so concatenation restores the order
    # its gradient is the inverse exchange, as the transpose of a permutation is its inverse
    incoming = all_to_all_single(incoming, outgoing, group=group)
    return torch.cat(incoming.unbind(), dim=cat_dim)


class UlyssesAttention(nn.Module):
    """Attention over the positions of all ranks; q, k, v [B, H, S / n, K] hold consecutive position ranges.

    Each rank computes H / n heads over the whole sequence with
    `local_attention`. H must be divisible by n.
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
        q, k, v = _exchange_heads(torch.cat([q, k, v]), self.group, True).chunk(3)
        return _exchange_heads(self.local_attention(q, k, v, causal), self.group, False)
