"""Who talks to whom: process groups and device meshes of a layout."""

from dataclasses import dataclass
from itertools import product

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.parallel.world import World, ensure_group

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The groups that this rank belongs to; None where it is alone.

    samples    ranks that compute the same weights on other tokens: gradients and counts are added over it
    context    ranks that hold other positions of the same samples
    pipeline   ranks that hold other blocks
    ends       first and last stage of this pipeline, which both hold the tied embedding
    fsdp       1-D or, with copies, 2-D mesh over `samples`, for sharding
    tensor     1-D mesh of the ranks that share matrices
    """

    samples: ProcessGroup | None
    context: ProcessGroup | None
    pipeline: ProcessGroup | None
    ends: ProcessGroup | None
    fsdp: DeviceMesh | None
    tensor: DeviceMesh | None


def build_mesh(world: World, *, sharded: bool) -> Mesh:
    """The groups of this rank. Collective: every rank makes every group, in the same order."""
    if world.n_ranks == 1 and not sharded:
        return Mesh(None, None, None, None, None, None)
    ensure_group(world)
    layout = world.layout
    fsdp = tensor = None
    if sharded or layout.tensor > 1:
        copies = layout.data * layout.context // layout.shard
        whole = init_device_mesh(
            world.device.type,
            (layout.pipeline, copies, layout.shard, layout.tensor),
            mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
        )
        if sharded:
            fsdp = whole["shard"] if copies == 1 else whole["replicate", "shard"]
        tensor = whole["tensor"] if layout.tensor > 1 else None
    return Mesh(
        samples=_group(world, ("data", "context")),
        context=_group(world, ("context",)),
        pipeline=_group(world, ("pipeline",)),
        ends=_group(world, ("pipeline",), only_ends=True),
        fsdp=fsdp,
        tensor=tensor,
    )


def _group(world: World, axes: tuple[str, ...], only_ends: bool = False) -> ProcessGroup | None:
    """The group of the ranks that differ from this one along `axes` only."""
    sizes = dict(zip(AXES, world.layout.sizes, strict=True))
    if all(sizes[axis] == 1 for axis in axes):
        return None
    mine = None
    others = [axis for axis in AXES if axis not in axes]
    for fixed in product(*(range(sizes[axis]) for axis in others)):
        at = dict(zip(others, fixed, strict=True))
        ranks = [
            rank
            for rank in range(world.n_ranks)
            if all(getattr(world.layout.coordinate(rank), axis) == at[axis] for axis in others)
        ]
        if only_ends:
            ranks = [ranks[0], ranks[-1]]
        group = dist.new_group(ranks, timeout=world.timeout)
        if world.rank in ranks:
            mine = group
    return mine
