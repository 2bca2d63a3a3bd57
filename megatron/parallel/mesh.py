"""Process groups and device meshes of a parallel layout."""

from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.parallel.world import World, ensure_group

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class Mesh:
    """The groups of this rank; None for a group of one rank.

    samples    ranks with the same weights and different tokens:
               gradients and counts are summed over it
    context    ranks with different positions of the same samples
    pipeline   ranks with different blocks
    ends       first and last stage of this pipeline, which both hold the tied embedding
    fsdp       mesh over `samples` for sharding: 1-D, or 2-D with replicas
    tensor     1-D mesh of the ranks that split the matrices
    """

    samples: ProcessGroup | None
    context: ProcessGroup | None
    pipeline: ProcessGroup | None
    ends: ProcessGroup | None
    fsdp: DeviceMesh | None
    tensor: DeviceMesh | None


def build_mesh(world: World, *, sharded: bool) -> Mesh:
    """Build the groups of this rank. Collective: every rank creates every group, in the same order."""
    if world.n_ranks > 1 or sharded:
        ensure_group(world)
    layout = world.layout
    fsdp = tensor = None
    # ranks are numbered with the tensor axis fastest:
    # data x context = replicas x shards for FSDP pipeline 2,
    # data 2, context 1, tensor 2: ranks 0 1 | 2 3 | 4 5 | 6
    # 7 are the tensor groups, 0 2 | 1 3 | 4 6 | 5 7 have
    # equal weights, 0 4 | 1 5 | 2 6 | 3 7 are the pipelines
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
        samples=_build_group(world, "data", "context"),
        context=_build_group(world, "context"),
        pipeline=_build_group(world, "pipeline"),
        ends=_build_group(world, "pipeline", only_ends=True),
        fsdp=fsdp,
        tensor=tensor,
    )


def _build_group(world: World, *axes: str, only_ends: bool = False) -> ProcessGroup | None:
    """Return the group of the ranks that differ from this one along `axes` only.

    None if there is one rank.
    """
    places = [AXES.index(axis) for axis in axes]
    n = prod(world.layout.sizes[place] for place in places)
    if n == 1:
        return None
    # ranks [pipeline, data, context, tensor] -> [groups, n], each row sorted by
    # rank, so its ends are the first and last pipeline stage of the group
    ranks = torch.arange(world.n_ranks).reshape(world.layout.sizes)
    groups = ranks.movedim(places, list(range(-len(places), 0))).reshape(-1, n)
    # 2 stages: both ends are the whole group.
    # 4 stages of ranks 0 2 4 6: ranks 0 and 6.
    if only_ends:
        groups = groups[:, [0, -1]]
    # collective over all ranks: each rank creates the groups of the others as well
    group: ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=world.timeout)
    return group
