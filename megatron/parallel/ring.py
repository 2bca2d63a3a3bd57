"""Ring attention: positions are split, keys and values pass a ring (Liu et al., arXiv 2310.01889)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.kernels.attention import repeat_shared_heads

aten = torch.ops.aten


class RingAttention(nn.Module):
    """Attention over the positions of all ranks; q, k, v [B, H, S / n, K] hold consecutive position ranges.

    The number of heads need not be divisible by the number of ranks, and no rank stores more than two parts
    of the keys. In causal attention the first ranks are idle for up to half of the hops. Ulysses in
    `context` does not have this imbalance.
    """

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # without annotations in torch
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None = None) -> Tensor:
        assert mask is None, "the layout check refuses options that need a mask"
        return _ring_attention(q, *repeat_shared_heads(q, k, v), self.group, causal)


class _RingAttentionFunction(torch.autograd.Function):
    """Attention over key blocks, merged by log-sum-exp.

    With outputs o_i and log-sum-exps l_i of the blocks: l = log sum_i exp(l_i), o = sum_i exp(l_i - l) o_i.
    The backward of a block needs only the merged o and l, not o_i and l_i.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, causal: bool) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        rank, n = group.rank(), group.size()
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        # hop 0 is the block of this rank's own keys, in which each query sees at least itself. lse is finite
        # from then on, so `lse - total_lse` is never -Inf - -Inf = NaN.
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
        # one message per hop for both
        kv = torch.stack([k, v])
        rest: tuple[object, ...] = ()
        for hop in range(n):
            # rank 1 of 4 computes the keys of ranks 1, 0, 3, 2; in causal attention only those of 1 and 0
            source = (rank - hop) % n  # rank whose keys are on this rank at this hop
            # causal: keys of later ranks are masked entirely, those of the same rank along the diagonal
            if not causal or source <= rank:
                block, block_lse, rest = _attend_block(q, kv[0], kv[1], causal and source == rank)
                # online softmax: both factors are <= 1, so the merge cannot overflow; in float32 throughout
                total_lse = torch.logaddexp(lse, block_lse)
                out = (
                    out * (lse - total_lse).exp()[..., None]
                    + block * (block_lse - total_lse).exp()[..., None]
                )
                lse = total_lse
            if hop < n - 1:
                # also after a skipped block: in every hop each rank has one send and one receive
                kv = _send_to_next_rank(kv, group)
        ctx.group, ctx.causal, ctx.beside = group, causal, rest
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].contiguous()
        rank, n = ctx.group.rank(), ctx.group.size()
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        kv = torch.stack([k, v])
        # the gradients of keys and values travel with them, and each rank adds its contribution
        grad_kv = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
        for hop in range(n):
            source = (rank - hop) % n
            if not ctx.causal or source <= rank:
                is_diagonal = ctx.causal and source == rank
                # With the merged l, exp(s - l) are the weights over all keys, restricted to this block. dS =
                # P (dP - rowsum(dO O)) needs the merged o only. The gradients of the blocks therefore add up
                # without a correction.
                block_grad_q, *block_grad_kv = _block_backward(
                    grad, q, kv[0], kv[1], out, lse, is_diagonal, ctx.beside
                )
                grad_q += block_grad_q
                grad_kv += torch.stack(block_grad_kv)
            if hop < n - 1:
                kv = _send_to_next_rank(kv, ctx.group)
            grad_kv = _send_to_next_rank(grad_kv, ctx.group)  # after n hops back on their own rank
        return grad_q.to(q.dtype), *grad_kv.to(k.dtype), None, None


_ring_attention: Callable[[Tensor, Tensor, Tensor, ProcessGroup, bool], Tensor] = _RingAttentionFunction.apply


def _send_to_next_rank(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send a tensor to the next rank of the ring and return the one received from the previous rank."""
    rank, n = group.rank(), group.size()
    next_rank, previous_rank = (dist.get_global_rank(group, (rank + way) % n) for way in (1, -1))
    incoming = torch.empty_like(x)
    # one batch: separate blocking sends would deadlock, since every rank sends first
    operations = [
        dist.P2POp(dist.isend, x, next_rank, group),
        dist.P2POp(dist.irecv, incoming, previous_rank, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return incoming


def _attend_block(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, tuple[object, ...]]:
    """Return (attention over these keys [B, H, S, K], log-sum-exp of the scores [B, H, S], rest).

    `rest` holds further arguments of the GPU backward: cumulative lengths of variable-length samples, maximum
    lengths, and the state of the random generator. The cumulative lengths must stay None: the kernel treats
    an empty tensor as variable-length input.
    """
    # no scale argument: the default 1 / sqrt(K) is that of the standard parametrization, and the layout check
    # refuses others with context parallelism
    if q.device.type == "cpu":
        return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal), ()
    out, lse, *rest, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse, tuple(rest)


def _block_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    rest: tuple[object, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v through these keys.

    out and lse are those of the attention over all keys. `rest` may come from any block: all have one shape.
    """
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    *lengths, seed, offset = rest
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, seed, offset
    )
