"""The task of a batch, the interface of objectives, and the loss of hidden states."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypedDict, cast

import numpy as np
import torch
from torch import Tensor

from megatron.kernels.linear_cross_entropy import linear_cross_entropy, linear_nll
from megatron.kernels.softmax_nll import VocabularyShard


class ModelKwargs(TypedDict, total=False):
    """Keyword arguments of Gpt.hidden_states that depend on the task; absent: their defaults."""

    positions: Tensor
    visible: Tensor
    dropout_key: Tensor


@dataclass(frozen=True)
class Task:
    """Inputs and prediction targets of a batch.

    inputs        [B, S] int64         tokens given to the model
    positions     [N]    int64|None    predicted rows of the flattened [B * S]; None: all
    targets       [N]    int64         tokens to predict at these rows
    scale         [N]    float32|None  weight of each prediction; None: 1
    count         int                  number of tokens covered by the loss
    model_kwargs  {name: tensor}       further keyword arguments of Gpt.hidden_states
    """

    inputs: Tensor
    positions: Tensor | None
    targets: Tensor
    scale: Tensor | None
    count: int
    model_kwargs: ModelKwargs = field(default_factory=ModelKwargs)

    def to(self, device: torch.device) -> "Task":
        """Return the task on a device."""
        if device == self.inputs.device:
            return self

        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Task":
        """Return the task in page-locked memory, from which copies to a GPU overlap with computation."""
        return self._map_tensors(Tensor.pin_memory)

    def _map_tensors(self, move: Callable[[Tensor], Tensor]) -> "Task":
        named = cast(dict[str, Tensor], self.model_kwargs)
        return replace(
            self,
            inputs=move(self.inputs),
            positions=None if self.positions is None else move(self.positions),
            targets=move(self.targets),
            scale=None if self.scale is None else move(self.scale),
            model_kwargs=cast(ModelKwargs, {name: move(tensor) for name, tensor in named.items()}),
        )

    def slice_positions(self, begin: int, end: int) -> "Task":
        """Return the task at positions begin..end - 1 of every sample, for a context-parallel rank."""
        assert not self.model_kwargs, "the layout check refuses options that need whole samples"
        n_samples, n_positions = self.inputs.shape
        width = end - begin
        if self.positions is None:
            rows = torch.arange(n_samples * n_positions).unflatten(0, (n_samples, n_positions))
            rows = rows[:, begin:end].flatten()
            positions = None
        else:
            # flat row = sample * S + column; keep the columns of this rank,
            # with their offset in its width S = 4, begin 2, end 4, positions
            # 3 5 6: samples 0 1 1, columns 3 1 2. Predictions 0 and 2
            # remain, at rows 1 and 2 of the [B * 2] positions of this rank.
            sample, column = self.positions // n_positions, self.positions % n_positions
            rows = torch.nonzero((column >= begin) & (column < end))[:, 0]
            positions = (sample * width + column - begin)[rows]
        return Task(
            # `count` covers this rank's positions: the
            # sum over context ranks counts every token once
            inputs=self.inputs[:, begin:end].contiguous(),
            positions=positions,
            targets=self.targets[rows],
            scale=None if self.scale is None else self.scale[rows],
            count=n_samples * width,
        )


class Objective(Protocol):
    """Turns samples into tasks. It has settings but no state.

    `corrupt` is a pure function of its arguments.
    """

    @property
    def name(self) -> str:
        """Value of objective.name in the configuration."""
        ...

    @property
    def causal(self) -> bool:
        """True: position p attends to positions 0..p only."""
        ...

    @property
    def exact(self) -> bool:
        """False: the loss is a Monte Carlo estimate of a bound, and scoring averages several draws."""
        ...

    def corrupt(self, tokens: np.ndarray, numbers: np.ndarray, draw: int | None = None) -> Task:
        """Build the task of tokens int64 [B, S + 1] with sample numbers [B].

        draw   None for training, otherwise the number of a scoring draw
        """
        ...


def _select_predicted_rows(hidden: Tensor, task: Task) -> Tensor:
    """Select the predicted rows of hidden [B, S, D] -> [N, D]."""
    rows = hidden.flatten(0, 1)
    return rows if task.positions is None else rows.index_select(0, task.positions)


def compute_task_loss(
    hidden: Tensor, head: Tensor, task: Task, shard: VocabularyShard | None = None
) -> tuple[Tensor, int]:
    """Return (sum of the weighted nats, tokens covered) for hidden [B, S, D] and head weight [V, D]."""
    total = linear_cross_entropy(_select_predicted_rows(hidden, task), head, task.targets, task.scale, shard)
    return total, task.count


def compute_sample_nats(
    hidden: Tensor, head: Tensor, task: Task, shard: VocabularyShard | None = None
) -> Tensor:
    """Return the weighted nats of each sample, float64 [B], without gradients."""
    nats = linear_nll(_select_predicted_rows(hidden, task), head, task.targets, shard).double()
    if task.scale is not None:
        nats = nats * task.scale
    if task.positions is None:
        return nats.unflatten(0, task.inputs.shape).sum(1)
    sample = task.positions // task.inputs.shape[1]
    # index_add_ and not split: the number of
    # predictions differs per sample and may be 0
    return torch.zeros(len(task.inputs), dtype=nats.dtype, device=nats.device).index_add_(0, sample, nats)
