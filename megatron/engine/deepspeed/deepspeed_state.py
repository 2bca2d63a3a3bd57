"""Access by name to the float32 weights and AdamW moments inside DeepSpeed's flat tensors, and loss scale.

ZeRO splits flattened parameters over the ranks: a rank holds one contiguous
range of the elements of each parameter (or none), at some offset of a flat
float32 tensor. Stage 0 keeps full parameters on every rank. The float16 loss
scale is in torch's scaler at stage 0, otherwise in DeepSpeed's optimizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optim.adamw import MOMENTS


class _ZeroParameter(Protocol):
    """Attributes that DeepSpeed adds to a parameter."""

    ds_numel: int  # stage 3
    ds_shape: torch.Size  # stage 3
    _hp_mapping: Any  # stages 1 and 2: class of DeepSpeed; None if no element is on this rank


@dataclass(frozen=True)
class ParameterFragment:
    """Elements [start, start + n) of a parameter are flat[offset : offset + n] on this rank."""

    flat: Tensor
    offset: int
    n: int
    start: int


class ShardedState:
    """The state of a DeepSpeed engine under the single-GPU model's parameter names, for every stage."""

    def __init__(self, model: nn.Module, optimizer: Any, stage: int) -> None:
        """optimizer: result of deepspeed.initialize; torch's at stage 0, otherwise a wrapper of it."""
        self.parameters = dict(model.named_parameters())
        self.stage = stage
        self.zero_optimizer = optimizer
        self.torch_optimizer = optimizer if stage == 0 else optimizer.optimizer
        self.fragments = {
            name: self._locate_fragment(parameter) for name, parameter in self.parameters.items()
        }

    def _locate_fragment(self, parameter: nn.Parameter) -> ParameterFragment | None:
        if self.stage == 0:
            return ParameterFragment(parameter, 0, parameter.numel(), 0)
        if self.stage == 3:
            group, offset, n = self.zero_optimizer.grad_position[self.zero_optimizer.get_param_id(parameter)]
            # stage 3 splits every parameter into equal ranges
            # of n elements: rank r holds [r n, (r + 1) n),
            # and the last ranks may hold padding beyond the end of the parameter
            # 10 elements on 4 ranks: n = 3, the ranks have
            # 3, 3, 3 and 1 elements (and 2 of padding)
            start = dist.get_rank() * n
            n_elements = cast(_ZeroParameter, parameter).ds_numel
            n_local = max(0, min(n, n_elements - start))  # padding is not counted
            return ParameterFragment(
                self.zero_optimizer.fp32_partitioned_groups_flat[group], offset, n_local, start
            )
        # stages 1 and 2: DeepSpeed links each low-precision
        # parameter to its range of the float32 partition
        # Without padding, parameters a of 10 and b of 6
        # elements on 2 ranks, 8 elements each. Rank 0: a[0:8]
        # = flat[0:8], none of b. Rank 1: a[8:10] = flat[0:2]
        # (start 8, offset 0), b[0:6] = flat[2:8] (start
        # 0, offset 2).
        mapping = cast(_ZeroParameter, parameter)._hp_mapping
        if mapping is None:
            return None
        flats = getattr(self.zero_optimizer, "single_partition_of_fp32_groups", None)
        if flats is None:  # stage 1 with bfloat16 uses another optimizer class
            flats = self.zero_optimizer.fp32_groups_flat_partition
        n_local, begins = mapping.hp_fragment_address, mapping.lp_fragment_address.start
        return ParameterFragment(flats[mapping.param_group_index], n_local.start, n_local.numel, begins)

    def full_shape(self, name: str) -> torch.Size:
        """Return the shape of the full parameter."""
        parameter = self.parameters[name]
        return cast(_ZeroParameter, parameter).ds_shape if self.stage == 3 else parameter.shape

    def get_step_count(self) -> int:
        """Return the number of updates of the optimizer; 0 before the first."""
        for state in self.torch_optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        return 0

    @torch.no_grad()
    def iterate_full_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (name, "weight" or a moment, full float32 tensor) on all ranks. Collective.

        Only one full tensor exists at a time. Moments are zeros before the first update.
        Every rank must consume the whole iterator, since each item is an all-reduce.
        """
        for name, fragment in self.fragments.items():
            for kind in ("weight", *MOMENTS):
                yield name, kind, self._gather_full_tensor(name, kind, fragment)

    def _gather_full_tensor(self, name: str, kind: str, fragment: ParameterFragment | None) -> Tensor:
        shape = self.full_shape(name)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=_get_collective_device())
        if fragment is not None and fragment.n:
            moments = self.torch_optimizer.state.get(fragment.flat, {})
            source = fragment.flat if kind == "weight" else moments.get(kind, torch.zeros_like(fragment.flat))
            part = source.detach().view(-1)[fragment.offset : fragment.offset + fragment.n]
            whole[fragment.start : fragment.start + fragment.n].copy_(part)
        # at stage 0 the fragment of every rank is the full parameter
        if self.stage:
            # the ranges of the ranks are disjoint and
            # the rest is 0: the sum concatenates them
            dist.all_reduce(whole)
        return whole.view(shape)

    @torch.no_grad()
    def load_tensor(self, name: str, kind: str, whole: Tensor) -> None:
        """Take over one whole tensor, on every rank; moments after `set_steps_taken`."""
        fragment, values = self.fragments[name], whole.reshape(-1)
        if fragment is not None and fragment.n:
            target = fragment.flat if kind == "weight" else self.torch_optimizer.state[fragment.flat][kind]
            part = values[fragment.start : fragment.start + fragment.n]
            target.detach().view(-1)[fragment.offset : fragment.offset + fragment.n].copy_(part)
        if kind == "weight" and self.stage:
            self._update_working_weights(self.parameters[name], values, fragment)

    def _update_working_weights(
        self, parameter: Any, values: Tensor, fragment: ParameterFragment | None
    ) -> None:
        if self.stage < 3:
            parameter.data.copy_(values.view(parameter.shape))
            return
        if fragment is not None and fragment.n:
            # the copy of this rank's range in the model's dtype:
            # gathers read it, not the float32 partition
            parameter.ds_tensor.data[: fragment.n].copy_(values[fragment.start : fragment.start + fragment.n])
        # DeepSpeed keeps small parameters gathered between steps
        if parameter.data.numel() == parameter.ds_numel:
            parameter.data.copy_(values.view(parameter.ds_shape))

    def set_step_count(self, n_steps: int) -> None:
        """Reset the optimizer to `n_steps` updates and zero moments."""
        self.torch_optimizer.state.clear()
        for flat in self._list_flat_tensors():
            fused = self.torch_optimizer.defaults.get("fused")
            # torch's fused kernel requires the step on the device of the weights
            step = torch.tensor(float(n_steps), device=flat.device if fused else "cpu")
            zeros = {kind: torch.zeros_like(flat.detach()) for kind in MOMENTS}
            self.torch_optimizer.state[flat] = {"step": step, **zeros}

    def _list_flat_tensors(self) -> list[Tensor]:
        if self.stage == 0:
            return list(self.parameters.values())
        for name in (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        ):
            if hasattr(self.zero_optimizer, name):
                return list(getattr(self.zero_optimizer, name))
        raise AssertionError(
            "DeepSpeed's optimizer has no known weight attribute. "
            "Install the version pinned in requirements.txt."
        )


def _get_collective_device() -> torch.device:
    """Return the device required for tensors in collectives of the default group."""
    on_gpu = "nccl" in dist.get_backend() and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def get_loss_scale(engine: Any) -> dict[str, Tensor] | None:
    """Return the loss scale in the form of the torch engine's `LossScale.state_dict`; None without one."""
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        state = scaler.state_dict()
        return _build_scale_state(state["scale"], state["_growth_tracker"])
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    # DeepSpeed counts iterations since the last overflow;
    # good_steps is the number of steps without one
    return _build_scale_state(scaler.cur_scale, scaler.cur_iter - scaler.last_overflow_iter - 1)


def set_loss_scale(engine: Any, state: dict[str, Tensor]) -> None:
    """Set the scale from the result of `get_loss_scale`."""
    scale, good_steps = float(state["scale"]), int(state["good_steps"])
    scaler = engine.torch_autocast_z0_gradscaler
    if scaler is not None:
        scaler.load_state_dict({**scaler.state_dict(), "scale": scale, "_growth_tracker": good_steps})
        return
    scaler = engine.optimizer.loss_scaler
    # the inverse of get_loss_scale: good_steps - (-1) - 1 = good_steps
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = scale, good_steps, -1


def _build_scale_state(scale: float, good_steps: int) -> dict[str, Tensor]:
    return {"scale": torch.tensor(float(scale)), "good_steps": torch.tensor(good_steps, dtype=torch.int32)}
