"""Forward and backward of a model whose blocks lie on several ranks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.config.schema import DistConfig
from megatron.model.gpt import Gpt
from megatron.objective.base import Task, loss, sample_nats
from megatron.parallel import fsdp
from megatron.parallel.dtensor import lay_as_weight, local
from megatron.parallel.mesh import Mesh
from megatron.parallel.pipeline import Pipeline, Stage
from megatron.parallel.reduce import sum_gradients
from megatron.parallel.world import World

if TYPE_CHECKING:
    from megatron.parallel.tensor import Vocabulary

EMBEDDING = "embedding.weight"


class PipelinedModel:
    """What `TorchEngine` asks for gradients where a pipeline cuts the model."""

    def __init__(
        self,
        model: Gpt,
        causal: bool,
        vocabulary: "Vocabulary | None",
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
                n_cuts=world.layout.tensor,
            )
            for index in range(at.pipeline, n_stages, size)
        }
        sharded = mesh.fsdp is not None
        self.autocast = torch.float32 if sharded else dtype
        self.divisor = 1 if mesh.fsdp is None else fsdp.divisor(mesh.fsdp)
        self.device = world.device
        for stage in stages.values():
            if mesh.fsdp is not None:
                fsdp.shard(
                    stage, stage.blocks.values(), mesh.fsdp, stage="zero1", dtype=dtype, cpu_offload=False
                )
        # autocast leaves the residual stream in float32, cast weights take it along
        self.pipeline = Pipeline(stages, n_stages, mesh.pipeline, dtype if sharded else torch.float32)
        self.last = stages.get(n_stages - 1)
        self.has_loss = self.last is not None and at.tensor == 0
        self.copied = frozenset([EMBEDDING] if self.last is not None else [])

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Those on this rank, under the one-GPU model's names."""
        return {name: p for stage in self.pipeline.stages.values() for name, p in stage.named_parameters()}

    def _head_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.vocabulary is None else self.vocabulary.all_positions(hidden)

    def backward(self, tasks: Sequence[Task], share: Tensor) -> Tensor:
        """Leave the gradient of share * nats, summed over all ranks; gives the nats of this rank, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        share = share * self.divisor

        def of_microbatch(hidden: Tensor, i: int) -> Tensor:
            assert self.last is not None, "called by the last stage"
            head = local(self.last.embedding.weight)
            nats = loss(self._head_input(hidden), head, tasks[i], self.vocabulary)[0]
            total.add_(nats.detach())
            return nats * share

        self.pipeline.backward([task.inputs for task in tasks], of_microbatch)
        self._add_gradients()
        return total

    def _add_gradients(self) -> None:
        parameters = self.named_parameters()
        if self.mesh.fsdp is None:
            sum_gradients([_local_gradient(p) for p in parameters.values()], self.mesh.samples)
        # both ends hold the tied embedding and see a part of its gradient
        if EMBEDDING in parameters:
            sum_gradients([_local_gradient(parameters[EMBEDDING])], self.mesh.ends)

    def score(self, task: Task) -> Tensor:
        """Nats of each sample, float64 [B], where the last stage is; zeros elsewhere."""
        hidden = self.pipeline.forward(task.inputs)
        nats = torch.zeros(len(task.inputs), dtype=torch.float64, device=self.device)
        if hidden is not None and self.last is not None:
            head = local(self.last.embedding.weight)
            nats = sample_nats(self._head_input(hidden), head, task, self.vocabulary)
        for stage in self.pipeline.stages.values():
            fsdp.let_go(stage)
        return nats


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    lay_as_weight(parameter)
    assert parameter.grad is not None, "every weight of a stage takes part"
    return local(parameter.grad)
