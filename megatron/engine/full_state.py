"""One form of weights and optimizer state for every layout: whole tensors on the CPU of rank 0.

    {"model": {name: tensor}, "optim": {"state": {name: {"exp_avg", "exp_avg_sq", "step"}}}}

`name` is that of the one-GPU model's parameter. What any layout saved, any other loads.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.rank_weights import RankWeights
from megatron.optim.adamw import MOMENTS, FusedAdamW, tell_steps
from megatron.parallel.world import World

SCALARS = ("step",)


def collect(
    weights: RankWeights, optimizer: FusedAdamW | torch.optim.Optimizer, shapes: dict[str, torch.Size]
) -> dict[str, Any]:
    """The whole state on rank 0, {} on the others. Collective."""
    world = weights.world
    weights.refresh()
    state: dict[str, Any] = {"model": {}, "optim": {"state": {name: {} for name in shapes}}}
    for name, kind, shape in _entries(shapes):
        told = _tell(_mine(weights, optimizer, name, kind), name, weights, shape, world)
        if told is None:
            continue
        if kind == "weight":
            state["model"][name] = told
        else:
            state["optim"]["state"][name][kind] = told
    return state if world.is_first else {}


def _entries(shapes: dict[str, torch.Size]) -> Iterator[tuple[str, str, torch.Size]]:
    for name, shape in shapes.items():
        for kind in ("weight", *MOMENTS):
            yield name, kind, shape
        for kind in SCALARS:
            yield name, kind, torch.Size(())


def _mine(
    weights: RankWeights, optimizer: FusedAdamW | torch.optim.Optimizer, name: str, kind: str
) -> Tensor | None:
    """What this rank holds of an entry; None where the parameter is another stage's."""
    if name not in weights.own:
        return None
    own = weights.own[name]
    return own.detach() if kind == "weight" else optimizer.state[own][kind]


def _tell(
    mine: Tensor | None, name: str, weights: RankWeights, shape: torch.Size, world: World
) -> Tensor | None:
    """An entry in one piece on the CPU of rank 0, from the first stage that holds it; None elsewhere."""
    whole = None
    if mine is not None:
        whole = weights.whole(name, mine) if len(shape) else mine
    if world.layout.pipeline > 1:
        leader = _first_holder(mine is not None, world)
        if leader != 0 and world.rank == leader:
            dist.send(whole.to(world.device, torch.float32).contiguous(), 0)
        elif leader != 0 and world.is_first:
            whole = torch.empty(shape, device=world.device)
            dist.recv(whole, leader)
    return whole.to("cpu", copy=True) if world.is_first and whole is not None else None


def _first_holder(holds: bool, world: World) -> int:
    """The lowest rank that holds an entry. Collective."""
    lowest = torch.tensor(world.rank if holds else world.n_ranks, device=world.device)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return int(lowest)


@torch.no_grad()
def spread(
    state: dict[str, Any],
    weights: RankWeights,
    optimizer: FusedAdamW | torch.optim.Optimizer,
    shapes: dict[str, torch.Size],
) -> None:
    """Undo `collect`: rank 0 reads its argument, every rank takes its part. Collective.

    A state without `optim` leaves the optimizer as it is. ValueError on every rank for another model's state.
    """
    world = weights.world
    weights.refresh()
    wrong, with_optim = _agree(_differs(state, shapes), bool(state.get("optim")), world)
    if wrong is not None:
        raise ValueError(f"weights of another model: {wrong}")
    for name, kind, shape in _entries(shapes):
        if kind != "weight" and not with_optim:
            continue
        mine = _mine(weights, optimizer, name, kind)
        if world.is_first:
            held = state["model"] if kind == "weight" else state["optim"]["state"][name]
            whole = held[name if kind == "weight" else kind].to(world.device, torch.float32)
        else:
            whole = torch.empty(shape, device=world.device)
        if world.n_ranks > 1:
            dist.broadcast(whole, 0)
        if mine is not None:
            mine.copy_(weights.mine(name, whole) if len(shape) else whole)
    tell_steps(optimizer)


def _agree(wrong: str | None, with_optim: bool, world: World) -> tuple[str | None, bool]:
    """What rank 0 found, on every rank."""
    told: list[Any] = [wrong, with_optim]
    if world.n_ranks > 1:
        dist.broadcast_object_list(told, 0, device=world.device)
    return told[0], told[1]


def _differs(state: dict[str, Any], shapes: dict[str, torch.Size]) -> str | None:
    """In what a full state is not that of this model, in words."""
    try:
        found = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        moments = set(state["optim"]["state"]) if state.get("optim") else set(shapes)
    except (KeyError, TypeError, AttributeError) as error:
        return f"no weights under their names in it ({error})"
    for name, shape in shapes.items():
        if found.get(name) != tuple(shape) or name not in moments:
            return f"{name} wanted {list(shape)}, found {list(found[name]) if name in found else 'none'}"
    strange = sorted(set(found) - set(shapes))
    return f"{strange[0]} is not in this model" if strange else None
