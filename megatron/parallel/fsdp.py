"""Weights, gradients and optimizer states in shards over the data-parallel ranks (FSDP2's fully_shard)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    stage: str,
    dtype: torch.dtype,
    cpu_offload: bool,
) -> None:
    """Shard a built model in place: each block by itself, then what is left with the root.

    Weights rest as float32 shards in every stage, are gathered in `dtype` for use, and their gradients are
    added in float32. The stages differ in how long things stay whole:

    zero1   weights and gradients through the whole step: one gather and one reduction a step
    zero2   weights through the step; each microbatch's gradients are reduced to shards at once
    zero3   neither: weights are gathered for each block's forward and again for its backward

    On a 2-D mesh the shards lie along its last axis and are copied along the first. zero0 comes here with a
    last axis of 1: copies only.
    """
    offload = (
        {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")} if cpu_offload else {}
    )
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the rotary angles stay float32
    )
    for block in blocks:
        again = stage.startswith("zero3")
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again, **offload)
    # the embedding is also the head: what the root holds is used at both ends of the forward
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False, **offload)


def divisor(mesh: DeviceMesh) -> int:
    """What FSDP divides the summed gradients by: how many ranks, unless gloo adds what it should average.

    That of torch 2.7 does so, without a word, where it reduces to shards, and refuses to between copies.
    Collective over the mesh. ValueError where copies cannot be averaged.
    """
    shards, device = mesh.get_group(mesh.ndim - 1), mesh.device_type
    if device != "cpu" and dist.get_backend(shards) != dist.Backend.GLOO:
        return mesh.size()
    share = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(share, torch.ones(shards.size(), device=device), dist.ReduceOp.AVG, shards)
    if mesh.ndim > 1:
        try:
            dist.all_reduce(torch.ones(1, device=device), dist.ReduceOp.AVG, mesh.get_group(0))
        except RuntimeError as error:
            if "AVG" not in str(error):  # a rank that is gone
                raise
            raise ValueError(
                f"dist.sharding_stage: gloo of torch {torch.__version__} cannot average copies of shards or "
                "of cut matrices; install torch 2.11 or newer, or take zero1, zero2 or zero3 without copies"
            ) from error
    return mesh.size() // int(share)


def prepare_microbatch(root: FSDPModule, stage: str, last: bool) -> None:
    """Say before a backward what it is to reduce and to let go of, by the stage; see `shard`."""
    keeps_gradients = stage in ("zero0", "zero1")
    root.set_requires_gradient_sync(last or not keeps_gradients)
    root.set_requires_all_reduce(last)  # between the copies of a hybrid, once a step
    root.set_reshard_after_backward(last or stage.startswith("zero3"))


def let_go(root: nn.Module) -> None:
    """Drop the gathered weights that a forward without backward leaves behind."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
