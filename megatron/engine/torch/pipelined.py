"""Forward and backward passes of a pipeline-parallel model."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.config.schema import DistConfig
from megatron.model.transformer import Gpt
from megatron.objective.task import Task, compute_sample_nats, compute_task_loss
from megatron.parallel import fsdp
from megatron.parallel.collectives import sum_gradients
from megatron.parallel.dtensor import match_placements, to_local
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline import Pipeline, Stage
from megatron.parallel.world import World

if TYPE_CHECKING:
    from megatron.parallel.tensor import TensorVocabularyShard

EMBEDDING = "embedding.weight"


class PipelinedModel:
    """The `Passes` of a model split into pipeline stages."""

    def __init__(
        self,
        model: Gpt,
        causal: bool,
        vocabulary: "TensorVocabularyShard | None",
        config: DistConfig,
        dtype: torch.dtype,
        world: World,
        mesh: Mesh,
    ) -> None:
        assert mesh.pipeline is not None, "a pipeline has several ranks"
        self.mesh, self.vocabulary = mesh, vocabulary
        at, size = world.coordinate, world.layout.pipeline
        n_stages = size * (config.pipeline_chunks if config.pipeline_schedule == "interleaved" else 1)
        stages = {
            index: Stage(
                model,
                index,
                n_stages,
                causal=causal,
                context_rank=at.context,
                n_tensor_ranks=world.layout.tensor,
            )
            for index in range(at.pipeline, n_stages, size)  # rank r holds stages r, r + size, ...
        }
        sharded = mesh.fsdp is not None
        self.autocast = torch.float32 if sharded else dtype
        self.device = world.device
        for stage in stages.values():
            if mesh.fsdp is not None:
                fsdp.shard_model(
                    stage, stage.local_blocks, mesh.fsdp, stage="zero1", dtype=dtype, cpu_offload=False
                )
        # the hidden states sent between stages are the residual stream
        assert model.precision is not None, "set by build_passes"
        self.pipeline = Pipeline(stages, n_stages, mesh.pipeline, model.precision)
        self.last = stages.get(n_stages - 1)
        self.has_loss = self.last is not None and at.tensor == 0
        self.is_tied = model.config.tied_embedding
        self.duplicated = frozenset([EMBEDDING] if self.last is not None and self.is_tied else [])

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters on this rank under the single-GPU model's names."""
        return {name: p for stage in self.pipeline.stages.values() for name, p in stage.named_parameters()}

    def _head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.vocabulary is None else self.vocabulary.gather_sequence(hidden)

    def backward(self, tasks: Sequence[Task], share: Tensor) -> Tensor:
        """Set .grad to the gradient of share * nats over all ranks; return this rank's nats, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for stage in self.pipeline.stages.values():
            stage.train()

        def microbatch_loss(hidden: Tensor, i: int) -> Tensor:
            assert self.last is not None, "called on the rank of the last stage"
            head = to_local(self.last.head_weight)
            nats = compute_task_loss(self._head_input(hidden), head, tasks[i], self.vocabulary)[0]
            total.add_(nats.detach())
            return nats * share

        self.pipeline.backward(tasks, microbatch_loss)
        self._add_gradients()
        return total

    def _add_gradients(self) -> None:
        parameters = self.named_parameters()
        # with FSDP the last backward has already reduced
        # the gradients over the ranks of mesh.samples
        if self.mesh.fsdp is None:
            sum_gradients([_local_gradient(p) for p in parameters.values()], self.mesh.samples)
        # The first and last stage both hold a tied embedding, each with
        # a part of its gradient (input and head). The sum over the two
        # ends gives both the full gradient, so their copies stay equal.
        if EMBEDDING in parameters and self.is_tied:
            sum_gradients([_local_gradient(parameters[EMBEDDING])], self.mesh.ends)

    def score(self, task: Task) -> Tensor:
        """Return the nats of each sample, float64 [B], on the rank of the last stage; zeros elsewhere."""
        for stage in self.pipeline.stages.values():
            stage.eval()
        hidden = self.pipeline.forward(task)
        nats = torch.zeros(len(task.inputs), dtype=torch.float64, device=self.device)
        if hidden is not None and self.last is not None:
            head = to_local(self.last.head_weight)
            nats = compute_sample_nats(self._head_input(hidden), head, task, self.vocabulary)
        for stage in self.pipeline.stages.values():
            fsdp.reshard(stage)
        return nats


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    match_placements(parameter)
    assert parameter.grad is not None, "every parameter of a stage gets a gradient"
    return to_local(parameter.grad)
