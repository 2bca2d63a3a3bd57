"""Full state: the layout-independent form of weights and optimizer state, on the CPU of rank 0.

    {"model": {name: tensor}, "optim": {"state": {name: {"exp_avg", "exp_avg_sq", "step"}}}}

`name` is the parameter name of the single-GPU model. The matrices that Muon updates
have `momentum_buffer` instead. Any layout can load the state of any other.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.torch.rank_weights import RankWeights
from megatron.optim.adamw import FusedAdamW, sync_step_counts
from megatron.parallel.world import World

# name -> kind -> full shape, of `weight` and of the optimizer's state
Shapes = dict[str, dict[str, torch.Size]]


def collect_state(
    weights: RankWeights, optimizer: FusedAdamW | torch.optim.Optimizer, shapes: Shapes
) -> dict[str, Any]:
    """Return the full state on rank 0, {} on the others. Collective."""
    world = weights.world
    weights.refresh()
    state: dict[str, Any] = {"model": {}, "optim": {"state": {name: {} for name in shapes}}}
    # `shapes` covers the whole model on every rank, including other
    # stages: all ranks enter the same collectives in the same order
    for name, kind, shape in _iterate_entries(shapes):
        tensor = _gather_entry(_get_local_entry(weights, optimizer, name, kind), name, weights, shape, world)
        if tensor is None:
            continue
        if kind == "weight":
            state["model"][name] = tensor
        else:
            state["optim"]["state"][name][kind] = tensor
    return state if world.is_first else {}


def _iterate_entries(shapes: Shapes) -> Iterator[tuple[str, str, torch.Size]]:
    for name, kinds in shapes.items():
        for kind, shape in kinds.items():
            yield name, kind, shape


def _get_local_entry(
    weights: RankWeights, optimizer: FusedAdamW | torch.optim.Optimizer, name: str, kind: str
) -> Tensor | None:
    """Return this rank's part of an entry; None if another pipeline stage holds the parameter."""
    if name not in weights.local_tensors:
        return None
    parameter = weights.local_tensors[name]
    return parameter.detach() if kind == "weight" else optimizer.state[parameter][kind]


def _gather_entry(
    local: Tensor | None, name: str, weights: RankWeights, shape: torch.Size, world: World
) -> Tensor | None:
    """Return a full entry on the CPU of rank 0, from the first stage that holds it; None elsewhere."""
    whole = None
    # first gather within the stage (FSDP and tensor
    # ranks), then send from the stage to rank 0
    if local is not None:
        whole = weights.gather_full(name, local) if len(shape) else local
    if world.layout.pipeline > 1:
        # in the only stage with the parameter; rank 0
        # for the tied embedding, which two stages have
        leader = _find_lowest_holder(local is not None, world)
        if leader != 0 and world.rank == leader:
            assert whole is not None, "the leader holds the entry"
            dist.send(whole.to(world.device, torch.float32).contiguous(), 0)
        elif leader != 0 and world.is_first:
            # gloo and NCCL receive into a tensor of known shape
            # and dtype: the sender has cast to float32
            whole = torch.empty(shape, device=world.device)
            dist.recv(whole, leader)
    # copy: on a CPU `to` would return the weight
    # itself, and the next step would change the state
    return whole.to("cpu", copy=True) if world.is_first and whole is not None else None


def _find_lowest_holder(holds: bool, world: World) -> int:
    """Return the lowest rank that holds an entry. Collective."""
    lowest = torch.tensor(world.rank if holds else world.n_ranks, device=world.device)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return int(lowest)


@torch.no_grad()
def distribute_state(
    state: dict[str, Any],
    weights: RankWeights,
    optimizer: FusedAdamW | torch.optim.Optimizer,
    shapes: Shapes,
) -> None:
    """Load the result of `collect_state` from rank 0's argument; every rank keeps its part. Collective.

    A state without `optim` does not change the optimizer.
    Raises ValueError on every rank for the state of another model or optimizer.
    """
    world = weights.world
    weights.refresh()
    problem, has_optim = _broadcast_check(_find_difference(state, shapes), bool(state.get("optim")), world)
    if problem is not None:
        raise ValueError(f"weights of another model: {problem}")
    for name, kind, shape in _iterate_entries(shapes):
        if kind != "weight" and not has_optim:
            continue
        local = _get_local_entry(weights, optimizer, name, kind)
        if world.is_first:
            entries = state["model"] if kind == "weight" else state["optim"]["state"][name]
            whole = entries[name if kind == "weight" else kind].to(world.device, torch.float32)
        else:
            whole = torch.empty(shape, device=world.device)
        # all ranks take part in every broadcast, also
        # for other stages, and keep only their part
        if world.n_ranks > 1:
            dist.broadcast(whole, 0)
        if local is not None:
            # into the existing memory: FSDP and the optimizer keep references to it
            local.copy_(weights.slice_local(name, whole) if len(shape) else whole)
    sync_step_counts(optimizer)


def _broadcast_check(problem: str | None, has_optim: bool, world: World) -> tuple[str | None, bool]:
    """Return rank 0's arguments on every rank, so that all ranks raise or continue together."""
    payload: list[Any] = [problem, has_optim]
    if world.n_ranks > 1:
        dist.broadcast_object_list(payload, 0, device=world.device)
    return payload[0], payload[1]


def _find_difference(state: dict[str, Any], shapes: Shapes) -> str | None:
    """Return an error text if a full state does not match this model and optimizer, otherwise None."""
    try:
        shapes_got = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
        moments = state["optim"]["state"] if state.get("optim") else shapes
        kinds_got = {name: set(kinds) for name, kinds in moments.items()}
    except (KeyError, TypeError, AttributeError) as error:
        return f"the state has no weights by name ({error})"
    for name, kinds in shapes.items():
        shape = tuple(kinds["weight"])
        if shapes_got.get(name) != shape or name not in moments:
            got = list(shapes_got[name]) if name in shapes_got else "none"
            return f"{name}: got {got}, expected {list(shape)}"
        missing = kinds.keys() - kinds_got[name] - {"weight"}
        if missing:
            return f"{name}: got a state of {', '.join(sorted(kinds_got[name]))}, expected {min(missing)} too"
    unexpected = sorted(set(shapes_got) - set(shapes))
    return f"{unexpected[0]} is not in this model" if unexpected else None
