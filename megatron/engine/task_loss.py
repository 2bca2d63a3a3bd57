"""Module that combines model and loss."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.model.transformer import Gpt
from megatron.objective.task import Task, compute_sample_nats, compute_task_loss
from megatron.parallel.dtensor import to_local

if TYPE_CHECKING:
    from megatron.parallel.tensor import TensorVocabularyShard


class TaskLoss(nn.Module):
    """Model and loss in one forward: data parallelism and ZeRO wrap the module that a step calls."""

    def __init__(
        self,
        model: Gpt,
        causal: bool,
        vocabulary: "TensorVocabularyShard | None" = None,
        context_rank: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self.causal = causal
        self.vocabulary = vocabulary
        self.context_rank = context_rank

    def forward(self, task: Task, per_sample: bool = False) -> Tensor:
        """Return the sum of the task's nats; with `per_sample` the nats of each sample, without gradients."""
        # 0 without context parallelism; else rank c begins at position c S / n
        first_position = self.context_rank * task.inputs.shape[1]
        hidden = self.model.hidden_states(
            task.inputs, self.causal, first_position=first_position, **task.model_kwargs
        )
        if self.vocabulary is not None:
            hidden = self.vocabulary.gather_sequence(hidden)
        head = to_local(self.model.head_weight)
        if per_sample:
            return compute_sample_nats(hidden, head, task, self.vocabulary)
        return compute_task_loss(hidden, head, task, self.vocabulary)[0]
