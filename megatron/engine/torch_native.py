"""The torch engine: one step of any layout of ranks, in any precision."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import DistConfig, OptimConfig
from megatron.engine import full_state
from megatron.engine.base import StepReport
from megatron.engine.layouts import build_passes
from megatron.engine.loss_scale import LossScale
from megatron.engine.rank_weights import RankWeights
from megatron.model.gpt import Gpt
from megatron.objective.base import Task
from megatron.optim.adamw import fused_adamw, update
from megatron.parallel.dtensor import local
from megatron.parallel.mesh import build_mesh
from megatron.parallel.reduce import sum_over
from megatron.parallel.world import World


class TorchEngine:
    """Float32 weights and updates, products in `dist.dtype`, gradients added over ranks in float32."""

    def __init__(
        self, model: Gpt, *, causal: bool, dist: DistConfig, optim: OptimConfig, world: World
    ) -> None:
        """Spread a built and filled model over the ranks, in place. Collective."""
        self.world, self.grad_clip = world, optim.grad_clip
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # still whole
        self.mesh = build_mesh(world, sharded=is_sharded(dist, world))
        self.passes = build_passes(model, causal, dist, world, self.mesh)
        self.weights = RankWeights(self.passes.named_parameters(), world, self.passes.copied)
        self.optimizer = fused_adamw(self.weights.own, optim, model.config)
        self.loss_scale = LossScale(world.device) if dist.dtype == "float16" else None

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = self.passes.autocast
        return torch.autocast(self.world.device.type, dtype, enabled=dtype != torch.float32)

    def _part(self, task: Task) -> Task:
        """The positions of a task that this rank computes, on its device."""
        if self.world.layout.context > 1:
            width = task.inputs.shape[1] // self.world.layout.context
            begin = self.world.coordinate.context * width
            task = task.of_positions(begin, begin + width)
            task = task.pinned() if self.world.device.type == "cuda" else task
        return task.to(self.world.device)

    def step(self, microbatches: Sequence[Task], lr: float) -> StepReport:
        """One optimizer step; the gradient is that of the mean over all tokens of all ranks."""
        tasks = [self._part(task) for task in microbatches]
        count = sum(task.count for task in tasks)
        # filled there: a copy from ordinary memory would wait for all that the device has still to do
        tokens = torch.full((), count, dtype=torch.float64, device=self.world.device)
        share = 1.0 / sum_over(tokens, self.mesh.samples)
        if self.loss_scale is not None:
            share = share * self.loss_scale.scale
        with self._autocast():
            total = self.passes.backward(tasks, share)
        grad_norm = self._update(lr)
        counted = float(self.passes.has_loss)
        return StepReport(
            loss_sum=total * counted, count=count if self.passes.has_loss else 0, grad_norm=grad_norm
        )

    def _update(self, lr: float) -> Tensor:
        """Clip and step; gives the norm before clipping. Gradients that are no numbers move nothing."""
        gradients = self.weights.take_gradients()
        norm = self.weights.norm(gradients)
        is_finite = norm.isfinite()
        divisor = torch.ones_like(norm)
        if self.loss_scale is not None:
            divisor = self.loss_scale.scale.double()
            norm = norm / divisor
            self.loss_scale.after(is_finite)
        if self.grad_clip > 0:
            divisor = divisor * ((norm + 1e-6) / self.grad_clip).clamp(min=1.0)
        update(self.optimizer, lr, divisor, is_finite)
        self.weights.drop_gradients()
        return norm.float()

    @torch.no_grad()
    def score(self, task: Task) -> tuple[Tensor, int]:
        """(nats of each sample, float64 [B], tokens); the ranks of one model add up to the whole."""
        task = self._part(task)
        with self._autocast():
            nats = self.passes.score(task)
        counted = float(self.passes.has_loss)
        return nats * counted, task.count if self.passes.has_loss else 0

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The whole state on rank 0, {} elsewhere; see `full_state`. Collective."""
        state = full_state.collect(self.weights, self.optimizer, self.shapes)
        if state and self.loss_scale is not None:
            state["optim"]["loss_scale"] = self.loss_scale.state()
        return state

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over rank 0's whole state, of whatever layout. ValueError for another model's. Collective."""
        full_state.spread(state, self.weights, self.optimizer, self.shapes)
        if self.loss_scale is not None:
            self.loss_scale.load(state.get("optim", {}).get("loss_scale"), self.world)

    def sharded_state(self) -> dict[str, Any]:
        """What this rank holds, in the shape of `state_dict`; DTensors where it is a shard. For torch's DCP.

        The tensors are the engine's own: who writes to them changes the model.
        """
        self.weights.refresh()
        model = {name: self.weights.sharded(name, own.detach()) for name, own in self.weights}
        state = {
            name: {
                kind: self.weights.sharded(name, held) if held.ndim else held
                for kind, held in self.optimizer.state[own].items()
            }
            for name, own in self.weights
        }
        optim: dict[str, Any] = {"state": state}
        if self.loss_scale is not None:
            optim["loss_scale"] = self.loss_scale.state()
        return {"model": model, "optim": optim}

    @torch.no_grad()
    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Take over what `sharded_state` gave and DCP filled, or the like of another run of this layout."""
        own = self.sharded_state()
        for name, held in own["model"].items():
            _put(held, state["model"][name])
        for name, moments in own["optim"]["state"].items():
            for kind, held in moments.items():
                _put(held, state["optim"]["state"][name][kind])
        if self.loss_scale is not None:
            self.loss_scale.load(state["optim"].get("loss_scale"), None)


def _put(held: Tensor, told: Tensor) -> None:
    """Copy, unless both are the same memory."""
    held, told = local(held), local(told)
    if held.data_ptr() != told.data_ptr():
        held.copy_(told)


def is_sharded(config: DistConfig, world: World) -> bool:
    """Whether FSDP2 holds the weights: in all stages but zero0, and under DTensors, which DDP does not take.

    A pipeline adds its gradients up itself and needs neither. Offloading is FSDP2's, for one rank too.
    """
    if world.n_ranks == 1:
        return config.cpu_offload
    by_ddp = world.layout.tensor == 1 or world.layout.pipeline > 1
    return config.sharding_stage != "zero0" or not by_ddp
