"""The weights that a rank owns: plain tensors for the optimizer and one norm, whatever the layout."""

import logging
from collections.abc import Iterator, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.parallel.dtensor import is_dtensor, lay_as_weight, local
from megatron.parallel.world import World

# torch warns that several collectives in a row may round otherwise on each rank; `whole` only gathers
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

# elements of all gradients up to which their norms are taken in float64: fewer calls, and more arithmetic
SMALL = 1 << 17


class RankWeights:
    """Parameters under the one-GPU model's names, of which this rank holds all or a shard.

    The optimizer works on `own`, plain tensors that share the memory of the parameters: it need not know of
    DTensors, which neither clipping nor every fused kernel can mix with plain ones.
    """

    @torch.no_grad()
    def __init__(self, named: Mapping[str, nn.Parameter], world: World, copied: frozenset[str]) -> None:
        """copied: names that another stage of the pipeline holds too, and counts."""
        self.named, self.world = dict(named), world
        self.own = {name: nn.Parameter(local(p).detach()) for name, p in self.named.items()}
        of_stage = world.n_ranks // world.layout.pipeline
        # how many ranks of the stage hold what this one holds: its squares are counted so many times
        counted = [0.0 if n in copied else _pieces(p) / of_stage for n, p in self.named.items()]
        self.share = torch.tensor(counted, dtype=torch.float64, device=world.device)
        self.split = world.layout.pipeline > 1 or any(is_dtensor(p) for p in self.named.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the parameters' memory again: FSDP may have moved it when it first ran."""
        for name, parameter in self.named.items():
            self.own[name].data = local(parameter).detach()

    @torch.no_grad()
    def take_gradients(self) -> list[Tensor]:
        """Hand the gradients from the parameters to `own`; gives them, in order."""
        self.refresh()
        for name, parameter in self.named.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            lay_as_weight(parameter)
            mine = self.own[name]
            mine.grad, parameter.grad = local(parameter.grad), None
        return [mine.grad for mine in self.own.values()]

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole gradient over all ranks, each element counted once: float64 scalar."""
        norms = _norms(gradients).to(self.world.device)
        if not self.split:
            return norms.square().sum().sqrt()
        total = (norms.square() * self.share).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def drop_gradients(self) -> None:
        """Free them."""
        for mine in self.own.values():
            mine.grad = None

    def sharded(self, name: str, mine: Tensor) -> Tensor:
        """What belongs to a parameter and lies as it does (a moment, say), as a DTensor where that is one."""
        parameter = self.named[name]
        if not is_dtensor(parameter):
            return mine
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            mine,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """The same in one piece, on every rank that holds a part of it. Collective over those."""
        lies = self.sharded(name, mine.to(self.world.device))
        return lies.full_tensor() if is_dtensor(lies) else lies

    def mine(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of something in one piece. No communication: every rank has the whole."""
        parameter = self.named[name]
        if not is_dtensor(parameter):
            return whole
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        ).to_local()

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self.own.items())


def _norms(tensors: list[Tensor]) -> Tensor:
    """Of each tensor, float64 [n]."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(tensors)).double()
    # on the CPU torch adds a whole tensor up in float32: an embedding of 50,304 x 512 comes out 0.16 % short
    if sum(t.numel() for t in tensors) <= SMALL:
        return torch.stack(torch._foreach_norm(tensors, dtype=torch.float64))
    return torch.stack([torch.linalg.vector_norm(t, dim=-1).double().norm() for t in tensors])


def _pieces(parameter: Tensor) -> int:
    """Into how many shards a parameter is cut."""
    if not is_dtensor(parameter):
        return 1
    sizes = parameter.device_mesh.shape
    return prod(
        size for size, lies in zip(sizes, parameter.placements, strict=True) if not lies.is_replicate()
    )
