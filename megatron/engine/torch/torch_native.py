"""The torch engine: training steps for every parallel layout and precision."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import broadcast

from megatron.config.schema import DistConfig, OptimConfig
from megatron.engine.interface import StepReport
from megatron.engine.torch import full_state
from megatron.engine.torch.compilation import choose_compilation
from megatron.engine.torch.passes import build_passes
from megatron.engine.torch.rank_weights import RankWeights
from megatron.model.transformer import Gpt
from megatron.objective.task import Task
from megatron.optim.adamw import set_lr, step_optimizer
from megatron.optim.ema import start_ema, swap_ema, update_ema
from megatron.optim.muon import build_optimizer, list_shapes
from megatron.parallel.collectives import sum_over_group
from megatron.parallel.dtensor import to_local
from megatron.parallel.mesh import build_mesh
from megatron.parallel.world import World

# The smallest positive float16 is 2^-24 = 6e-8; a gradient below half of
# it rounds to 0. Scaled by 2^16, gradients down to 2^-40 = 9e-13 remain.
# An overflow costs one step, too small a scale costs digits in all.
INITIAL_SCALE, GROWTH, BACKOFF, GROWTH_STEPS = 2.0**16, 2.0, 0.5, 2000


class TorchEngine:
    """Float32 weights and updates, products in `dist.dtype`, gradients summed over ranks in float32."""

    def __init__(
        self, model: Gpt, *, causal: bool, dist: DistConfig, optim: OptimConfig, world: World
    ) -> None:
        """Parallelize an initialized model in place. Collective."""
        self.world, self.grad_clip, self.shape = world, optim.grad_clip, model.config
        # full shapes: sharding changes the parameters' shapes
        self.shapes = {name: list_shapes(optim, name, p.shape) for name, p in model.named_parameters()}
        self.mesh = build_mesh(world, sharded=uses_fsdp(dist, world))
        self.is_compiled = choose_compilation(dist, world)
        self.passes = build_passes(model, causal, dist, world, self.mesh, self.is_compiled)
        self.weights = RankWeights(self.passes.named_parameters(), world, self.passes.duplicated)
        self.optimizer = build_optimizer(self.weights.local_tensors, optim, model.config, self.weights)
        self.ema_decay = optim.ema_decay
        if self.ema_decay is not None:
            start_ema(self.optimizer)
        self.loss_scale = LossScale(world.device) if dist.dtype == "float16" else None

    def _autocast_context(self) -> AbstractContextManager[None]:
        dtype = self.passes.autocast
        return torch.autocast(self.world.device.type, dtype, enabled=dtype != torch.float32)

    def _slice_task(self, task: Task) -> Task:
        """Return the positions of a task that this rank computes, on its device."""
        if self.world.layout.context > 1:
            width = task.inputs.shape[1] // self.world.layout.context
            begin = self.world.coordinate.context * width
            task = task.slice_positions(begin, begin + width)
            # slices are new tensors in pageable memory,
            # whose copy to the GPU would block the host
            task = task.pin_memory() if self.world.device.type == "cuda" else task
        return task.to(self.world.device)

    def step(self, microbatches: Sequence[Task], lr: float) -> StepReport:
        """Take one optimizer step; the loss is the mean over all tokens of all ranks."""
        count = sum(task.count for task in microbatches) // self.world.layout.context
        # created on the device: a copy from pageable
        # memory would synchronize with all queued work
        tokens = torch.full((), count, dtype=torch.float64, device=self.world.device)
        # each rank's loss is sum(nats) / (tokens of all
        # ranks): the gradients then add up to the mean's
        share = 1.0 / sum_over_group(tokens, self.mesh.samples)
        if self.loss_scale is not None:
            share = share * self.loss_scale.scale
        set_lr(self.optimizer, lr)
        with self._autocast_context():
            total = self.passes.backward([self._slice_task(task) for task in microbatches], share)
        grad_norm = self._apply_gradients(self.weights.move_gradients())
        self.weights.drop_gradients()
        # tensor ranks compute equal losses and one of them
        # reports: the sum over ranks counts tokens once
        counted = float(self.passes.has_loss)
        return StepReport(
            loss_sum=total * counted, count=count if self.passes.has_loss else 0, grad_norm=grad_norm
        )

    def _apply_gradients(self, gradients: list[Tensor]) -> Tensor:
        """Clip and update; return the norm before clipping. A gradient with NaN or Inf changes no weight."""
        norm = self.weights.gradient_norm(gradients)
        is_finite = norm.isfinite()
        # Unscaling, clipping and skipping are all passed to the optimizer
        # as one divisor and a flag on the device: gradient / (scale
        # max(1, norm / grad_clip)). The host never waits for the norm.
        divisor = torch.ones_like(norm)
        if self.loss_scale is not None:
            # a copy: `update` below changes the scale in
            # place, but this step's gradients have the old one
            divisor = self.loss_scale.scale.double()
            norm = norm / divisor
            self.loss_scale.update(is_finite)
        if self.grad_clip > 0:
            # the reciprocal of torch's clip_grad_norm_:
            # min(1, grad_clip / (norm + 1e-6))
            divisor = divisor * ((norm + 1e-6) / self.grad_clip).clamp(min=1.0)
        step_optimizer(self.optimizer, divisor, is_finite)
        if self.ema_decay is not None:
            update_ema(self.optimizer, self.ema_decay)
        return norm.float()

    @torch.no_grad()
    def score(self, task: Task) -> tuple[Tensor, int]:
        """Return (nats of each sample, float64 [B], tokens).

        Each token is counted on one rank of the model.
        """
        task = self._slice_task(task)
        with self._autocast_context():
            nats = self.passes.score(task)
        counted = float(self.passes.has_loss)
        return nats * counted, task.count if self.passes.has_loss else 0

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the weights by their moving average within the context, in which `score` may be called."""
        # FSDP gathers weights from these shards again in the next forward
        self.weights.refresh()
        swap_ema(self.optimizer)
        try:
            yield
        finally:
            self.weights.refresh()
            swap_ema(self.optimizer)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the full state on rank 0, {} elsewhere; see `full_state`. Collective."""
        state = full_state.collect_state(self.weights, self.optimizer, self.shapes)
        if state and self.loss_scale is not None:
            state["optim"]["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load rank 0's full state, saved in any layout.

        Collective. Raises ValueError for another model's.
        """
        full_state.distribute_state(state, self.weights, self.optimizer, self.shapes)
        if self.loss_scale is not None:
            self.loss_scale.load(state.get("optim", {}).get("loss_scale"), self.world)

    def sharded_state(self) -> dict[str, Any]:
        """Return this rank's tensors in the structure of `state_dict`, sharded ones as DTensors, for DCP.

        The tensors share memory with the engine: writing to them changes the model.
        """
        self.weights.refresh()
        model = {name: self.weights.wrap_as_dtensor(name, tensor.detach()) for name, tensor in self.weights}
        state = {
            name: {
                # the step count is a scalar and equal on all ranks
                kind: self.weights.wrap_as_dtensor(name, value) if value.ndim else value
                for kind, value in self.optimizer.state[tensor].items()
            }
            for name, tensor in self.weights
        }
        optim: dict[str, Any] = {"state": state}
        if self.loss_scale is not None:
            optim["loss_scale"] = self.loss_scale.state_dict()
        return {"model": model, "optim": optim}

    @torch.no_grad()
    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Load the result of `sharded_state` filled by DCP, or another run's with the same layout."""
        current = self.sharded_state()
        for name, target in current["model"].items():
            _copy_in_place(target, state["model"][name])
        for name, moments in current["optim"]["state"].items():
            for kind, target in moments.items():
                _copy_in_place(target, state["optim"]["state"][name][kind])
        if self.loss_scale is not None:
            self.loss_scale.load(state["optim"].get("loss_scale"), None)


def _copy_in_place(target: Tensor, source: Tensor) -> None:
    """Copy source to target, unless both share memory."""
    target, source = to_local(target), to_local(source)
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def uses_fsdp(config: DistConfig, world: World) -> bool:
    """Return whether FSDP2 manages the weights: in all stages but zero0, and with DTensors.

    DDP does not support the DTensors of tensor parallelism.
    A zero0 pipeline sums its gradients itself and needs neither.
    Offloading is a feature of FSDP2, on a single rank as well.
    """
    if world.n_ranks == 1:
        return config.cpu_offload
    by_ddp = world.layout.tensor == 1 or world.layout.pipeline > 1
    return config.sharding_stage != "zero0" or not by_ddp


class LossScale:
    """Dynamic loss scale for float16 (Micikevicius et al., arXiv 1710.03740, section 3.2).

    A factor on the loss: halved after a step with an
    overflow, doubled after 2000 steps without one.

    The scale stays on the device, so no step synchronizes with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(INITIAL_SCALE, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)

    def update(self, is_finite: Tensor) -> None:
        """Update the scale after a step; the gradient overflowed unless `is_finite`."""
        # torch's kernel for GradScaler: updates scale and
        # good_steps in place, without synchronization
        overflowed = 1.0 - is_finite.float()
        torch._amp_update_scale_(self.scale, self.good_steps, overflowed, GROWTH, BACKOFF, GROWTH_STEPS)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale.cpu(), "good_steps": self.good_steps.cpu()}

    def load(self, state: dict[str, Tensor] | None, world: World | None) -> None:
        """Load the result of `state_dict`; None leaves the scale unchanged.

        With a world, rank 0's is broadcast.
        """
        if state is not None:
            self.scale.copy_(state["scale"])
            self.good_steps.copy_(state["good_steps"])
        if world is not None and world.n_ranks > 1:
            broadcast(self.scale, 0)
            broadcast(self.good_steps, 0)
