"""Attention over positions cut over ranks: keys and values go round a ring (Liu et al., arXiv 2310.01889)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

aten = torch.ops.aten


class Ring(nn.Module):
    """Attention like `Mixing`, for q, k and v [B, H, S / n, K] of consecutive shares of the positions.

    Heads need not divide among the ranks, and no rank holds more than two shares of keys. Causal attention
    leaves the first ranks idle for up to half of the turns: the exchange of heads in `context` does not.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @torch.compiler.disable
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return _RingAttention.apply(q, k, v, self.group, causal)


class _RingAttention(torch.autograd.Function):
    """Blocks are joined by their log-sum-exp; the backward of each needs only the joined result and that."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, causal: bool) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        rank, n = group.rank(), group.size()
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
        travelling, beside = torch.stack([k, v]), ()
        for turn in range(n):
            source = (rank - turn) % n  # whose keys are here now
            if not causal or source <= rank:
                block, block_lse, beside = _block(q, *travelling, causal and source == rank)
                joined = torch.logaddexp(lse, block_lse)
                out = out * (lse - joined).exp()[..., None] + block * (block_lse - joined).exp()[..., None]
                lse = joined
            if turn < n - 1:
                travelling = _pass_on(travelling, group)
        ctx.group, ctx.causal, ctx.beside = group, causal, beside
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        rank, n = ctx.group.rank(), ctx.group.size()
        of_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        travelling = torch.stack([k, v])
        of_travelling = torch.zeros(travelling.shape, dtype=torch.float32, device=q.device)
        for turn in range(n):
            source = (rank - turn) % n
            if not ctx.causal or source <= rank:
                is_own = ctx.causal and source == rank
                by_q, *by_kv = _block_backward(grad, q, *travelling, out, lse, is_own, ctx.beside)
                of_q += by_q
                of_travelling += torch.stack(by_kv)
            if turn < n - 1:
                travelling = _pass_on(travelling, ctx.group)
            of_travelling = _pass_on(of_travelling, ctx.group)  # after n turns they are home
        return of_q.to(q.dtype), *of_travelling.to(k.dtype), None, None


def _pass_on(x: Tensor, group: ProcessGroup) -> Tensor:
    """Give a tensor to the next rank of the ring and take that of the one before."""
    mine, n = group.rank(), group.size()
    after, before = (dist.get_global_rank(group, (mine + way) % n) for way in (1, -1))
    incoming = torch.empty_like(x)
    swap = [dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, incoming, before, group)]
    for work in dist.batch_isend_irecv(swap):
        work.wait()
    return incoming


def _block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple]:
    """(attention over these keys alone [B, H, S, K], log of the sum of exponentials [B, H, S], rest).

    `rest` is what a GPU's backward wants beside: lengths of samples of unequal length (None: an empty tensor
    would make it take ours for such), the longest, and where its random numbers stood.
    """
    if q.device.type == "cpu":
        return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal), ()
    out, lse, *rest, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse, tuple(rest)


def _block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, rest: tuple
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these keys, of the attention over all keys with result out and lse.

    `rest` of any block: all are of one shape.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
    )
