"""The local weights of a rank as plain tensors for the optimizer, and the gradient norm, for every layout."""

import logging
from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.dtensor import is_dtensor, match_placements, to_local
from megatron.parallel.world import World

# torch warns that consecutive collectives may round
# differently on each rank; `gather_full` only gathers
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# up to this many gradient elements the norms are
# computed in float64: fewer calls but more arithmetic
FLOAT64_NORM_ELEMENTS = 1 << 17


class RankWeights:
    """Parameters under the single-GPU model's names, each full or sharded on this rank.

    The optimizer updates `local_tensors`, plain tensors that share the memory of the
    parameters. Clipping and some fused kernels cannot mix DTensors with plain tensors.
    """

    @torch.no_grad()
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], world: World, duplicated: frozenset[str]
    ) -> None:
        """duplicated: names of parameters that are also on another pipeline stage and counted there."""
        self.parameters, self.world = dict(parameters), world
        self.local_tensors = {name: nn.Parameter(to_local(p).detach()) for name, p in self.parameters.items()}
        ranks_per_stage = world.n_ranks // world.layout.pipeline
        # A parameter in k shards over the n ranks of a stage is
        # on n / k ranks. Its squared norm is weighted by k / n,
        # so that the sum over all ranks counts each element once.
        # 8 ranks, 2 replicas of 4 shards: k = 4. Every shard
        # is on 2 ranks, so squares are weighted by 4 / 8.
        weights = [
            0.0 if n in duplicated else _count_shards(p) / ranks_per_stage for n, p in self.parameters.items()
        ]
        self.square_weights = torch.tensor(weights, dtype=torch.float64, device=world.device)
        self.is_split = world.layout.pipeline > 1 or any(is_dtensor(p) for p in self.parameters.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Refresh the references to the parameters' memory: FSDP may move it in its first forward."""
        for name, parameter in self.parameters.items():
            self.local_tensors[name].data = to_local(parameter).detach()

    @torch.no_grad()
    def move_gradients(self) -> list[Tensor]:
        """Move the gradients from the parameters to `local_tensors` and return them in order."""
        self.refresh()
        gradients = []
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            # Partial gradients must be summed before clipping:
            # the norm of a part is not the sum's norm
            match_placements(parameter)
            gradient = to_local(parameter.grad)
            # moved, not shared: FSDP accumulates
            # into parameter.grad if it is not None
            self.local_tensors[name].grad, parameter.grad = gradient, None
            gradients.append(gradient)
        return gradients

    def gradient_norm(self, gradients: list[Tensor]) -> Tensor:
        """Return the norm of the full gradient over all ranks, each element counted once: float64 scalar."""
        norms = _compute_norms(gradients).to(self.world.device)
        if not self.is_split:
            return norms.square().sum().sqrt()
        total = (norms.square() * self.square_weights).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for tensor in self.local_tensors.values():
            tensor.grad = None

    def wrap_as_dtensor(self, name: str, local: Tensor) -> Tensor:
        """Wrap a local weight or moment as a DTensor with the parameter's placements, if it has any."""
        parameter = self.parameters[name]
        if not is_dtensor(parameter):
            return local
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def gather_full(self, name: str, local: Tensor) -> Tensor:
        """Return the full tensor on every rank that holds a part of it. Collective over those ranks."""
        dtensor = self.wrap_as_dtensor(name, local.to(self.world.device))
        return dtensor.full_tensor() if is_dtensor(dtensor) else dtensor

    def slice_local(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, without communication: every rank has the full tensor."""
        parameter = self.parameters[name]
        if not is_dtensor(parameter):
            return full
        from torch.distributed.tensor import distribute_tensor

        # src_data_rank=None: no broadcast, each rank
        # cuts its part from its own full tensor
        return distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.local_tensors.items())


def _compute_norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, float64 [n]."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors)).double()
    # On the CPU torch accumulates the whole tensor in float32: for
    # an embedding of 50,304 x 512 the norm is 0.16 % too small.
    # Norms per row in float32, combined in float64, avoid that.
    if sum(t.numel() for t in tensors) <= FLOAT64_NORM_ELEMENTS:
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float64))
    # sqrt(sum over rows of (row norm)^2) is the
    # norm of the matrix; a vector has a single row
    return torch.stack([torch.linalg.vector_norm(t, dim=-1).double().norm() for t in tensors])


def _count_shards(parameter: Tensor) -> int:
    """Return the number of shards of a parameter."""
    if not is_dtensor(parameter):
        return 1
    sizes = parameter.device_mesh.shape
    return prod(
        size
        for size, placement in zip(sizes, parameter.placements, strict=True)
        if not placement.is_replicate()
    )
