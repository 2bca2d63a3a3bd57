"""Weights, gradients and optimizer states sharded over the data-parallel ranks (FSDP2's fully_shard)."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh


def shard_model(
    root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, stage: str, dtype: torch.dtype,
    cpu_offload: bool,
) -> None:  # fmt: skip
    """Shard a model in place: each block separately, then the remaining parameters with the root.

    In every stage, weights are stored as float32 shards, gathered in `dtype`
    for use, and their gradients are summed in float32. The stages differ in how
    long tensors stay unsharded:

    zero1   weights and gradients for the whole step: one gather and one reduction per step
    zero2   weights for the whole step; the gradients of
            each microbatch are reduced to shards immediately
    zero3   neither: weights are gathered for the forward
            of each block and again for its backward

    A 2-D mesh shards along its last axis and replicates along the first. zero0
    uses a last axis of size 1: replication only.
    """
    pins = mesh.device_type == "cuda"
    offload = fsdp.CPUOffloadPolicy(pin_memory=pins) if cpu_offload else fsdp.OffloadPolicy()
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # keeps the rotary tables in float32
    )
    shard = partial(fsdp.fully_shard, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # blocks first: fully_shard of the root then manages
    # only the parameters that no block has claimed
    for block in blocks:
        shard(block, reshard_after_forward=stage.startswith("zero3"))
    # The root group holds the embedding, which is also the
    # head: it is used first and last in the forward, so
    # resharding in between would only add a second gather.
    shard(root, reshard_after_forward=False)
    # Sum the gradients: a loss is a sum over all ranks, divided by their
    # tokens once. gloo sums in every torch, but averages in newer ones only.
    for module in root.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def prepare_microbatch(root: nn.Module, stage: str, last: bool) -> None:
    """Set what the next backward reduces and reshards, depending on the stage; see `shard_model`."""
    assert isinstance(root, fsdp.FSDPModule), "`shard_model` has made it one"
    keeps_gradients = stage in ("zero0", "zero1")
    # zero1 accumulates full gradients over microbatches
    # and reduces once; zero2 and zero3 reduce each time
    root.set_requires_gradient_sync(last or not keeps_gradients)
    root.set_requires_all_reduce(last)  # between the replicas of a hybrid mesh, once per step
    # except in zero3 the gathered weights stay between
    # microbatches: they do not change until the step
    root.set_reshard_after_backward(last or stage.startswith("zero3"))


def reshard(root: nn.Module) -> None:
    """Free the gathered weights that a forward without a backward leaves in memory."""
    for module in root.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
