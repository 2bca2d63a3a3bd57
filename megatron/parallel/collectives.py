"""Collectives: sums, logical OR, broadcast and barrier over ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.watchdog import wait_for_rank_0
from megatron.parallel.world import World

BUCKET_ELEMENTS = 1 << 24  # gradients per all-reduce: 64 MiB of float32


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """Return the float64 sum of the tensors of all ranks, on every rank; the argument is not modified."""
    # float64: the sum of counts is exact up to 2^53,
    # and losses differ between layouts by rounding only
    total = values.detach().to(torch.float64, copy=True)
    if world.n_ranks > 1:
        dist.all_reduce(total)
    return total


def sum_over_group(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum over one group in place and return the tensor; without a group it is returned unchanged."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def sum_gradients(gradients: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Sum gradients over a group in place, concatenated into few messages of up to BUCKET_ELEMENTS."""
    if group is None:
        return
    bucket: list[Tensor] = []
    # a message costs latency per rank, so many small gradients are concatenated;
    # the copy needs 64 MiB at most, or the size of one larger gradient
    remaining = list(gradients)
    while remaining:
        bucket.append(remaining.pop())
        n_elements = sum(gradient.numel() for gradient in [*bucket, *remaining[-1:]])
        if not remaining or n_elements > BUCKET_ELEMENTS:
            # popped from the end on every rank: the buckets are the same everywhere
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=group)
            parts = flat.split([gradient.numel() for gradient in bucket])
            views = [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)]
            torch._foreach_copy_(bucket, views)
            bucket = []


def any_rank(flag: bool, world: World) -> bool:
    """Return the logical OR of `flag` over all ranks (all-reduce MAX); all ranks get the same result."""
    return bool(_reduce_number(flag, dist.ReduceOp.MAX, world))


def min_over_ranks(value: int, world: World) -> int:
    """Return the smallest value of all ranks."""
    return _reduce_number(value, dist.ReduceOp.MIN, world)


def _reduce_number(value: int, op: dist.ReduceOp.RedOpType, world: World) -> int:
    values = torch.tensor([int(value)])  # on the CPU: every group of open_world has a gloo backend
    if world.n_ranks > 1:
        dist.all_reduce(values, op=op)
    return int(values.item())


def barrier(world: World) -> None:
    """Wait until every rank has called this."""
    # dist.barrier would use NCCL on a GPU and wait for all kernels in the queue
    any_rank(False, world)


def broadcast_string(text: str, world: World) -> str:
    """Return rank 0's text on all ranks. Rank 0 may call this later than dist.timeout_s after the others."""
    payload = [text]
    if world.n_ranks > 1:
        wait_for_rank_0()
        dist.broadcast_object_list(payload, 0)
    return payload[0]
