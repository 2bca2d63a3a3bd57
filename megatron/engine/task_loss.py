"""Model and loss in one forward."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.model.gpt import Gpt
from megatron.objective.base import Task, loss, sample_nats
from megatron.parallel.dtensor import local

if TYPE_CHECKING:
    from megatron.parallel.tensor import Vocabulary


class TaskLoss(nn.Module):
    """Model and loss in one forward, so that data parallelism and ZeRO wrap what a step really calls."""

    def __init__(
        self, model: Gpt, causal: bool, vocabulary: "Vocabulary | None" = None, context_rank: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.causal = causal
        self.vocabulary = vocabulary
        self.context_rank = context_rank

    def forward(self, task: Task, each_sample: bool = False) -> Tensor:
        """The sum of the task's nats; with `each_sample` that of each sample, without gradients."""
        first_position = self.context_rank * task.inputs.shape[1]
        hidden = self.model.hidden(task.inputs, self.causal, first_position=first_position, **task.reading)
        if self.vocabulary is not None:
            hidden = self.vocabulary.all_positions(hidden)
        head = local(self.model.head_weight)
        if each_sample:
            return sample_nats(hidden, head, task, self.vocabulary)
        return loss(hidden, head, task, self.vocabulary)[0]
