"""The DeepSpeed engine: ZeRO stages 0 to 3 with offload. The only module that imports deepspeed."""

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron.engine.deepspeed.deepspeed_state import ShardedState, get_loss_scale, set_loss_scale
from megatron.engine.interface import StepReport
from megatron.engine.task_loss import TaskLoss
from megatron.model.transformer import Gpt
from megatron.objective.task import Task
from megatron.optim.adamw import MOMENTS
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World, ensure_group


class DeepSpeedEngine:
    """DeepSpeed around the single-GPU model and torch's AdamW; the training loop sets the learning rate."""

    def __init__(
        self,
        model: Gpt,
        optimizer: torch.optim.Optimizer,
        *,
        causal: bool,
        config: dict[str, Any],
        world: World,
    ) -> None:
        """Initialize DeepSpeed with the result of `deepspeed_config.build_deepspeed_config`.

        Raises ValueError if deepspeed is not installed
        or does not support the settings on this machine.
        """
        self.world = world
        self.stage = config["zero_optimization"]["stage"]
        if config["fp16"]["enabled"] and world.device.type == "cpu":
            raise ValueError("dist.dtype: DeepSpeed has no float16 on a CPU. Use bfloat16 or float32.")
        deepspeed = _import_deepspeed(world)
        ensure_group(world)
        task_loss = TaskLoss(model, causal)
        # The state is keyed by parameter. From stage 1 on DeepSpeed updates
        # flat partitions instead, so the entries would only occupy memory.
        optimizer.state.clear()  # DeepSpeed updates its own tensors
        try:
            self.engine, self.optimizer, _, _ = deepspeed.initialize(
                model=task_loss, optimizer=optimizer, config=config, dist_init_required=False
            )
        except (deepspeed.DeepSpeedConfigError, AssertionError, ValueError) as error:
            message = " ".join(str(error).split())
            raise ValueError(f"dist.deepspeed_config: refused by DeepSpeed ({message})") from error
        if self.stage == 3:
            # The head is used outside the forward of its module, in the loss.
            # Registered, ZeRO 3 gathers it for the forward of TaskLoss.
            deepspeed.zero.register_external_parameter(task_loss, model.head_weight)
        self.model = model
        self.state = ShardedState(model, self.optimizer, self.stage)

    def step(self, microbatches: Sequence[Task], lr: float) -> StepReport:
        """Take one optimizer step; a gradient with NaN or Inf changes no weight."""
        count = sum(task.count for task in microbatches)
        tokens = sum_over_ranks(torch.full((), count, device=self.world.device), self.world)
        # DeepSpeed averages the gradient over ranks.
        # Multiplying by n_ranks turns the average into a sum.
        share = self.world.n_ranks / tokens
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        self.engine.train()
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        for i, task in enumerate(microbatches):
            # scale_wrt_gas=False: `share` already contains
            # the division by all tokens of the step
            nats = self.engine(task.to(self.world.device))
            self.engine.backward(nats * share, scale_wrt_gas=False)
            total += nats.detach()
            if i < len(microbatches) - 1:
                self.engine.step()  # counts the microbatch; the last step() below updates the weights
        grad_norm = self._compute_stage_0_norm() if self.stage == 0 else None
        self.engine.step()
        if grad_norm is None:
            grad_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)
        return StepReport(loss_sum=total, count=count, grad_norm=grad_norm)

    def _compute_stage_0_norm(self) -> Tensor:
        """Return the gradient norm before clipping; at stage 0 DeepSpeed neither reports nor checks it."""
        # after the last backward every rank has the full
        # averaged gradient: the norm requires no collective
        norm = torch.nn.utils.get_total_norm(
            [_get_gradient(parameter) for parameter in self.model.parameters()]
        )
        scaler = self.engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            return norm / scaler.get_scale()  # the scaler skips steps with NaN or Inf
        # the fused update is a no-op if found_inf is
        # 1; this avoids a synchronization with the GPU
        self.optimizer.found_inf = (~torch.isfinite(norm)).float()
        return norm

    @torch.no_grad()
    def score(self, task: Task) -> tuple[Tensor, int]:
        """Return (nats of each sample, float64 [B], number of tokens)."""
        self.engine.eval()
        return self.engine(task.to(self.world.device), True), task.count

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Raise ValueError: the schema refuses optim.ema_decay for this engine."""
        raise ValueError("optim.ema_decay: got dist.engine=deepspeed, expected torch")

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the full state on rank 0, {} elsewhere, under the single-GPU model's names. Collective."""
        return self._collect_state(lambda whole: whole.cpu().clone() if self.world.is_first else None)

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load rank 0's full state. Collective. Raises ValueError for the state of another model."""
        self._check_shapes(state)
        self._load_state(state, self._broadcast_from_rank_0)

    def sharded_state(self) -> dict[str, Any]:
        """Return the state as DTensors sharded by rows, independent of ZeRO's partition.

        Only one full tensor exists at a time.
        """
        mesh = init_device_mesh(self.world.device.type, (self.world.n_ranks,))
        return self._collect_state(lambda whole: _shard_rows(whole, mesh))

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Load the result of `sharded_state` after DCP has filled it. Collective."""
        self._load_state(state, _gather_rows)

    def _collect_state(self, select: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
        """Build a state of `select(tensor)` for every full tensor; {} if it is None for all."""
        model: dict[str, Tensor] = {}
        moments: dict[str, dict[str, Tensor]] = {}
        step = float(self.state.get_step_count())
        for name, kind, whole in self.state.iterate_full_tensors():
            # the loop runs to the end on every rank, whatever
            # `select` returns: every item is a collective
            part = select(whole)
            if part is None:
                continue
            if kind == "weight":
                model[name] = part
            else:
                moments.setdefault(name, {"step": torch.tensor(step)})[kind] = part
        if not model:
            return {}
        scale = get_loss_scale(self.engine)
        scaling = {} if scale is None else {"loss_scale": scale}
        return {"model": model, "optim": {"state": moments, **scaling}}

    def _load_state(
        self, state: dict[str, Any], make_full: Callable[[Tensor | None, torch.Size], Tensor]
    ) -> None:
        """Load a state; make_full(tensor or None, shape) returns each full tensor on every rank."""
        weights = state.get("model", {})
        moments = state.get("optim", {}).get("state", {})
        # one number for all parameters: they are updated together
        steps = torch.tensor([int(entries["step"]) for entries in moments.values()][:1] or [0])
        if self.world.n_ranks > 1:
            steps = steps.to(self.world.device)
            dist.broadcast(steps, 0)
        self.state.set_step_count(int(steps))
        self._load_loss_scale(state.get("optim", {}).get("loss_scale"))
        for name in self.state.parameters:
            shape = self.state.full_shape(name)
            self.state.load_tensor(name, "weight", make_full(weights.get(name), shape))
            for kind in MOMENTS:
                self.state.load_tensor(name, kind, make_full(moments.get(name, {}).get(kind), shape))

    def _load_loss_scale(self, state: dict[str, Tensor] | None) -> None:
        """Load rank 0's loss scale; None leaves it unchanged."""
        if get_loss_scale(self.engine) is None:
            return
        payload: list[Any] = [state]
        if self.world.n_ranks > 1:
            dist.broadcast_object_list(payload, 0)
        if payload[0] is not None:
            set_loss_scale(self.engine, payload[0])

    def _broadcast_from_rank_0(self, tensor: Tensor | None, shape: torch.Size) -> Tensor:
        whole = torch.empty(shape, device=self.world.device)
        if self.world.is_first:
            assert tensor is not None, "_check_shapes has verified that rank 0 has every tensor"
            whole.copy_(tensor)
        dist.broadcast(whole, 0)
        return whole

    def _check_shapes(self, state: dict[str, dict[str, Any]]) -> None:
        """Raise ValueError on all ranks if rank 0's state is of another model."""
        payload: list[str | None] = [None]
        if self.world.is_first:
            expected = {name: tuple(self.state.full_shape(name)) for name in self.state.parameters}
            got = {name: tuple(tensor.shape) for name, tensor in state["model"].items()}
            mismatched = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
            if mismatched:
                payload = [
                    f"{mismatched[0]}: got {got.get(mismatched[0])}, expected {expected.get(mismatched[0])}"
                ]
        dist.broadcast_object_list(payload, 0)
        if payload[0] is not None:
            raise ValueError(f"weights of another model: {payload[0]}")


def _shard_rows(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor with this rank's rows of a tensor that every rank has.

    The rows are split as by torch.chunk, which is
    DTensor's convention; the last ranks may get none.
    """
    # 5 rows on 4 ranks: chunks of 2, 2 and 1 rows, and rank 3 has none
    chunks = whole.chunk(mesh.size())
    rows = chunks[mesh.get_local_rank()] if mesh.get_local_rank() < len(chunks) else whole[:0]
    return DTensor.from_local(
        rows.clone(), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _get_gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "DeepSpeed keeps the gradients at stage 0"
    return parameter.grad


def _gather_rows(part: Tensor | None, shape: torch.Size) -> Tensor:
    """Return the full tensor of the result of `_shard_rows`. Collective."""
    assert isinstance(part, DTensor), "every tensor of `sharded_state` is one"
    return part.full_tensor()


def _import_deepspeed(world: World) -> Any:
    """Import deepspeed with its environment variables set. Raises ValueError if it is not installed."""
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    # without LOCAL_SIZE a CPU run counts the sockets of the machine as devices
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(world.n_ranks)))
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"dist.engine: deepspeed cannot be imported ({error}). pip install deepspeed, as pinned in "
            "requirements.txt, or set dist.engine=torch (ENGINE=torch for the scripts)."
        ) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # from calls inside DeepSpeed
    # an inference operator that DeepSpeed would compile
    # now, for 18 s, and that training never calls
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
