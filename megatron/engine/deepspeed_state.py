"""Where DeepSpeed keeps the float32 weights and AdamW's moments of each parameter, read and written by name.

ZeRO cuts flattened parameters over the ranks: a rank holds, of each parameter, one run of its elements (or
none) somewhere in a flat float32 tensor. Stage 0 leaves parameters whole on every rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.optim.adamw import MOMENTS


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + n) of a parameter are flat[offset : offset + n] on this rank."""

    flat: Tensor
    offset: int
    n: int
    start: int


class ShardedState:
    """The state of a DeepSpeed engine by the one-GPU model's parameter names, whatever the stage."""

    def __init__(self, model: nn.Module, optimizer: Any, stage: int) -> None:
        """`optimizer`: from deepspeed.initialize; torch's own at stage 0, else DeepSpeed's around it."""
        self.parameters = dict(model.named_parameters())
        self.stage = stage
        self.around = optimizer
        self.torch_optimizer = optimizer if stage == 0 else optimizer.optimizer
        self.pieces = {name: self._piece(parameter) for name, parameter in self.parameters.items()}

    def _piece(self, parameter: nn.Parameter) -> Piece | None:
        if self.stage == 0:
            return Piece(parameter, 0, parameter.numel(), 0)
        if self.stage == 3:
            group, offset, n = self.around.grad_position[self.around.get_param_id(parameter)]
            start = dist.get_rank() * n
            held = max(0, min(n, parameter.ds_numel - start))  # the last ranks may hold padding
            return Piece(self.around.fp32_partitioned_groups_flat[group], offset, held, start)
        mapped = parameter._hp_mapping
        if mapped is None:
            return None
        flats = getattr(self.around, "single_partition_of_fp32_groups", None)
        if flats is None:  # the optimizer that DeepSpeed takes for bfloat16 at stage 1
            flats = self.around.fp32_groups_flat_partition
        held, begins = mapped.hp_fragment_address, mapped.lp_fragment_address.start
        return Piece(flats[mapped.param_group_index], held.start, held.numel, begins)

    def shape(self, name: str) -> torch.Size:
        """Of the whole parameter."""
        parameter = self.parameters[name]
        return parameter.ds_shape if self.stage == 3 else parameter.shape

    def steps_taken(self) -> int:
        """Updates that the optimizer has behind it; 0 before the first."""
        for state in self.torch_optimizer.state.values():
            if "step" in state:
                return int(state["step"])
        return 0

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name, "weight" or a moment, the whole float32 tensor), one at a time, on all ranks: collective.

        Moments are zeros before the first update. Every rank goes through all of it, in the same order.
        """
        for name, piece in self.pieces.items():
            for kind in ("weight", *MOMENTS):
                yield name, kind, self._assemble(name, kind, piece)

    def _assemble(self, name: str, kind: str, piece: Piece | None) -> Tensor:
        shape = self.shape(name)
        whole = torch.zeros(shape.numel(), dtype=torch.float32, device=_device_of_group())
        if piece is not None and piece.n:
            moments = self.torch_optimizer.state.get(piece.flat, {})
            source = piece.flat if kind == "weight" else moments.get(kind, torch.zeros_like(piece.flat))
            part = source.detach().view(-1)[piece.offset : piece.offset + piece.n]
            whole[piece.start : piece.start + piece.n].copy_(part)
        if self.stage:
            dist.all_reduce(whole)
        return whole.view(shape)

    @torch.no_grad()
    def put(self, name: str, kind: str, whole: Tensor) -> None:
        """Take over one whole tensor, on every rank; moments after `set_steps_taken`."""
        piece, values = self.pieces[name], whole.reshape(-1)
        if piece is not None and piece.n:
            target = piece.flat if kind == "weight" else self.torch_optimizer.state[piece.flat][kind]
            part = values[piece.start : piece.start + piece.n]
            target.detach().view(-1)[piece.offset : piece.offset + piece.n].copy_(part)
        if kind == "weight" and self.stage:
            self._put_in_working_precision(self.parameters[name], values, piece)

    def _put_in_working_precision(self, parameter: Any, values: Tensor, piece: Piece | None) -> None:
        if self.stage < 3:
            parameter.data.copy_(values.view(parameter.shape))
            return
        if piece is not None and piece.n:
            parameter.ds_tensor.data[: piece.n].copy_(values[piece.start : piece.start + piece.n])
        if parameter.data.numel() == parameter.ds_numel:  # small ones stay gathered between steps
            parameter.data.copy_(values.view(parameter.ds_shape))

    def set_steps_taken(self, n_steps: int) -> None:
        """Let the optimizer count from here, with moments of zero."""
        self.torch_optimizer.state.clear()
        for flat in self._flats():
            fused = self.torch_optimizer.defaults.get("fused")
            step = torch.tensor(float(n_steps), device=flat.device if fused else "cpu")
            zeros = {kind: torch.zeros_like(flat.detach()) for kind in MOMENTS}
            self.torch_optimizer.state[flat] = {"step": step, **zeros}

    def _flats(self) -> list[Tensor]:
        if self.stage == 0:
            return list(self.parameters.values())
        for name in (
            "fp32_partitioned_groups_flat",
            "single_partition_of_fp32_groups",
            "fp32_groups_flat_partition",
        ):
            if hasattr(self.around, name):
                return list(getattr(self.around, name))
        raise AssertionError(
            "DeepSpeed's optimizer keeps its weights elsewhere; is its version the pinned one?"
        )


def _device_of_group() -> torch.device:
    """Where collectives of the default group want their tensors."""
    on_gpu = "nccl" in dist.get_backend() and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
