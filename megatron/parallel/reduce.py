"""Sums and agreements over ranks."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.parallel.watchdog import wait_for_first
from megatron.parallel.world import World

BUCKET_ELEMENTS = 1 << 24  # gradients joined to one message: 64 MiB of float32


def sum_over_ranks(values: Tensor, world: World) -> Tensor:
    """The sum of every rank's tensor, on all ranks, in float64; the argument is left alone."""
    total = values.detach().to(torch.float64, copy=True)
    if world.n_ranks > 1:
        dist.all_reduce(total)
    return total


def sum_over(values: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over one group, in place; no group: nothing to add."""
    if group is not None:
        dist.all_reduce(values, group=group)
    return values


def sum_gradients(gradients: Iterable[Tensor], group: ProcessGroup | None) -> None:
    """Add gradients over a group, in place, joined to few messages."""
    if group is None:
        return
    bucket: list[Tensor] = []
    waiting = list(gradients)
    while waiting:
        bucket.append(waiting.pop())
        if not waiting or sum(one.numel() for one in bucket) + waiting[-1].numel() > BUCKET_ELEMENTS:
            joined = torch.cat([one.flatten() for one in bucket])
            dist.all_reduce(joined, group=group)
            parts = joined.split([one.numel() for one in bucket])
            torch._foreach_copy_(bucket, [p.view_as(one) for p, one in zip(parts, bucket, strict=True)])
            bucket = []


def any_rank(flag: bool, world: World) -> bool:
    """Whether any rank says yes: the one collective by which all ranks decide the same."""
    if world.n_ranks == 1:
        return flag
    asked = torch.tensor([int(flag)])  # on the host: every group of open_world has gloo
    dist.all_reduce(asked, op=dist.ReduceOp.MAX)
    return bool(asked.item())


def wait_for_all(world: World) -> None:
    """Return when every rank has come here."""
    any_rank(False, world)


def first_says(text: str, world: World) -> str:
    """Rank 0's text, on all ranks; it may take its time to find it."""
    told = [text]
    if world.n_ranks > 1:
        wait_for_first()
        dist.broadcast_object_list(told, 0)
    return told[0]
