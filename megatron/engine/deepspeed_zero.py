"""The DeepSpeed engine: ZeRO 0 to 3, with offload. The only place that imports deepspeed."""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron.engine.base import StepReport
from megatron.engine.deepspeed_scale import loss_scale_of, set_loss_scale
from megatron.engine.deepspeed_state import ShardedState
from megatron.engine.task_loss import TaskLoss
from megatron.model.gpt import Gpt
from megatron.objective.base import Task
from megatron.optim.adamw import MOMENTS
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World, ensure_group


class DeepSpeedEngine:
    """DeepSpeed around the one-GPU model and torch's AdamW; our loop says the learning rate of each step."""

    def __init__(
        self,
        model: Gpt,
        optimizer: torch.optim.Optimizer,
        *,
        causal: bool,
        config: dict[str, Any],
        world: World,
    ) -> None:
        """`config` as `deepspeed_config.translate` makes it.

        ValueError where deepspeed is not installed or cannot do what is asked on this machine.
        """
        self.world = world
        self.stage = config["zero_optimization"]["stage"]
        if config["fp16"]["enabled"] and world.device.type == "cpu":
            raise ValueError("dist.dtype: DeepSpeed has no float16 on a CPU; use bfloat16 or float32")
        deepspeed = _deepspeed(world)
        ensure_group(world)
        task_loss = TaskLoss(model, causal)
        optimizer.state.clear()  # DeepSpeed updates tensors of its own
        try:
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=task_loss, optimizer=optimizer, config=config, dist_init_required=False
            )
        except (deepspeed.DeepSpeedConfigError, AssertionError, ValueError) as error:
            told = " ".join(str(error).split())
            raise ValueError(f"dist.deepspeed_config: DeepSpeed does not take it ({told})") from error
        if self.stage == 3:
            # read outside of the forward of the module that has them
            read_elsewhere = [model.head_weight]
            if model.position_embedding is not None:
                read_elsewhere.append(model.position_embedding.weight)
            for weight in read_elsewhere:
                deepspeed.zero.register_external_parameter(task_loss, weight)
        self.model = model
        self.state = ShardedState(model, self.optimizer, self.stage)

    def step(self, microbatches: Sequence[Task], lr: float) -> StepReport:
        """One optimizer step; a gradient that is no number moves nothing."""
        count = sum(task.count for task in microbatches)
        tokens = sum_over_ranks(torch.full((), count, device=self.world.device), self.world)
        # DeepSpeed divides the gradient by the number of ranks: multiply, so that a sum over ranks remains
        share = self.world.n_ranks / tokens
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self.engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        for i, task in enumerate(microbatches):
            nats = self.engine(task.to(self.world.device))
            self.engine.backward(nats * share, scale_wrt_gas=False)
            total += nats.detach()
            if i < len(microbatches) - 1:
                self.engine.step()
        grad_norm = self._norm_at_stage_0() if self.stage == 0 else None
        self.engine.step()
        if grad_norm is None:
            grad_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)
        return StepReport(loss_sum=total, count=count, grad_norm=grad_norm)

    def _norm_at_stage_0(self) -> Tensor:
        """Norm before DeepSpeed clips: here it neither tells it nor minds one that is no number."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        scaler = self.engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            return norm / scaler.get_scale()  # and what is no number is the scaler's to skip
        # the fused update does nothing where this is 1, and the GPU need not be waited for
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()
        return norm

    @torch.no_grad()
    def score(self, task: Task) -> tuple[Tensor, int]:
        """(nats of each sample, float64 [B], and how many tokens they cover)."""
        self.engine.eval()
        return self.engine(task.to(self.world.device), True), task.count

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The whole state on rank 0, {} elsewhere: collective. Names are the one-GPU model's."""
        return self._collected(lambda whole: whole.cpu().clone() if self.world.is_first else None)

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Take over rank 0's whole state: collective. ValueError for the state of another model."""
        self._check(state)
        self._put(state, self._from_rank_0)

    def sharded_state(self) -> dict[str, Any]:
        """The state as DTensors cut by rows, whatever ZeRO's own cut: one whole tensor at a time is made."""
        mesh = init_device_mesh(self.world.device.type, (self.world.n_ranks,))
        return self._collected(lambda whole: _rows(whole, mesh))

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Undo `sharded_state`, after DCP has filled it: collective."""
        self._put(state, lambda part, _: part.full_tensor())

    def _collected(self, kept: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
        """What is `kept` of each whole tensor; {} where that is None."""
        model: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        step = float(self.state.steps_taken())
        for name, kind, whole in self.state.whole():
            part = kept(whole)
            if part is None:
                continue
            if kind == "weight":
                model[name] = part
            else:
                moments.setdefault(name, {"step": torch.tensor(step)})[kind] = part
        if not model:
            return {}
        scale = loss_scale_of(self.engine)
        scaling = {} if scale is None else {"loss_scale": scale}
        return {"model": model, "optim": {"state": moments, **scaling}}

    def _put(self, state: dict[str, Any], whole: Callable[[Tensor | None, torch.Size], Tensor]) -> None:
        """Take over a state of which `whole` makes each tensor whole on every rank, given its shape."""
        weights = state.get("model", {})
        moments = state.get("optim", {}).get("state", {})
        steps = torch.tensor([int(told["step"]) for told in moments.values()][:1] or [0])
        if self.world.n_ranks > 1:
            steps = steps.to(self.world.device)
            dist.broadcast(steps, 0)
        self.state.set_steps_taken(int(steps))
        self._put_loss_scale(state.get("optim", {}).get("loss_scale"))
        for name in self.state.parameters:
            shape = self.state.shape(name)
            self.state.put(name, "weight", whole(weights.get(name), shape))
            for kind in MOMENTS:
                self.state.put(name, kind, whole(moments.get(name, {}).get(kind), shape))

    def _put_loss_scale(self, told: dict[str, Tensor] | None) -> None:
        """Take rank 0's; None leaves it as it is."""
        if loss_scale_of(self.engine) is None:
            return
        said: list[Any] = [told]
        if self.world.n_ranks > 1:
            dist.broadcast_object_list(said, 0)
        if said[0] is not None:
            set_loss_scale(self.engine, said[0])

    def _from_rank_0(self, given: Tensor | None, shape: torch.Size) -> Tensor:
        whole = torch.empty(shape, device=self.world.device)
        if self.world.is_first:
            assert given is not None, "_check has found every tensor on rank 0"
            whole.copy_(given)
        dist.broadcast(whole, 0)
        return whole

    def _check(self, state: dict[str, dict[str, Any]]) -> None:
        """ValueError on all ranks where rank 0's state is of another model."""
        wrong: list[str | None] = [None]
        if self.world.is_first:
            wanted = {name: tuple(self.state.shape(name)) for name in self.state.parameters}
            found = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
            odd = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
            if odd:
                wrong = [f"{odd[0]}: found {found.get(odd[0])}, wanted {wanted.get(odd[0])}"]
        dist.broadcast_object_list(wrong, 0)
        if wrong[0] is not None:
            raise ValueError(f"weights of another model: {wrong[0]}")


def _rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of a tensor that every rank has, as DTensor counts them."""
    chunks = whole.chunk(mesh.size())
    mine = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else whole[:0]
    return DTensor.from_local(
        mine.clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _deepspeed(world: World) -> Any:
    """The library, told where it runs. ValueError where it is not installed."""
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    # without it a CPU counts as many devices as the machine has sockets
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(world.n_ranks)))
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"dist.engine: deepspeed cannot be imported ({error}); pip install deepspeed, as pinned in "
            "requirements.txt, or set dist.engine=torch (ENGINE=torch for the scripts)"
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # of names that DeepSpeed calls
    # an operator for inference that DeepSpeed would compile here, for 18 s, and that training never calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
