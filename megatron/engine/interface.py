"""The interface of the training engines; the training loop depends on nothing else."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron.objective.task import Task


@dataclass(frozen=True)
class StepReport:
    """Result of one optimizer step; tensors stay on the device until they are read.

    loss_sum   float64 scalar   nats, summed over this rank's tokens
    count      int              tokens on this rank
    grad_norm  float32 scalar   norm of the whole gradient before clipping; NaN or Inf: no weight was changed

    Among ranks that share a model, each token is counted on exactly one rank.
    """

    loss_sum: Tensor
    count: int
    grad_norm: Tensor


class Engine(Protocol):
    """One model with its optimizer, on one or more ranks. Every method is collective over all of them."""

    def step(self, microbatches: Sequence[Task], lr: float) -> StepReport:
        """Take one optimizer step on this rank's microbatches.

        The loss is the mean over all tokens of all ranks.
        """
        ...

    def score(self, task: Task) -> tuple[Tensor, int]:
        """Return (nats of each sample [B], tokens) without gradients; tokens are counted as in a step."""
        ...

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Replace the weights by their moving average (optim.ema_decay) within the context, to score it."""
        ...

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return on rank 0 the full state on the CPU, independent of layout and engine; {} on other ranks.

        {"model": {name: tensor}, "optim": {"state":
        {name: {"exp_avg", "exp_avg_sq", "step"}}}}, or
        {"momentum_buffer"} for a matrix that Muon updates;
        and "ema" with optim.ema_decay
        """
        ...

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Load the result of `state_dict` from rank 0's argument.

        Raises ValueError for another model's state.
        """
        ...

    def sharded_state(self) -> dict[str, Any]:
        """Return the same dictionary with this rank's tensors, DTensors where sharded, for torch's DCP."""
        ...

    def load_sharded_state(self, state: dict[str, Any]) -> None:
        """Load the result of `sharded_state` after DCP has filled it."""
        ...
