"""Parallelization of a single-GPU model: the steps and their order are defined here."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.config.schema import DistConfig
from megatron.engine.task_loss import TaskLoss
from megatron.engine.torch.compilation import compile_blocks
from megatron.engine.torch.unpipelined import UnpipelinedModel
from megatron.model.precision import choose_precision
from megatron.model.transformer import Gpt
from megatron.objective.task import Task
from megatron.parallel.activation_checkpointing import apply_activation_checkpointing
from megatron.parallel.float8 import convert_to_float8
from megatron.parallel.mesh import Mesh
from megatron.parallel.world import World


class Passes(Protocol):
    """Forward and backward passes of one parallel layout.

    autocast     autocast dtype; float32 if the weights themselves are cast
    has_loss     whether this rank's nats are counted; each token is counted on one rank only
    duplicated   parameters of this rank that are also on another stage and counted there
    """

    autocast: torch.dtype
    has_loss: bool
    duplicated: frozenset[str]

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters on this rank under the single-GPU model's names."""
        ...

    def backward(self, tasks: Sequence[Task], share: Tensor) -> Tensor:
        """Set .grad to the gradient of share * nats over all ranks; return this rank's nats, float64."""
        ...

    def score(self, task: Task) -> Tensor:
        """Return the nats of each sample, float64 [B]."""
        ...


def build_passes(
    model: Gpt, causal: bool, config: DistConfig, world: World, mesh: Mesh, compiled: bool
) -> Passes:
    """Parallelize a model in place: tensor parallelism, then context parallelism, then pipeline or FSDP.

    Activation checkpointing and compilation are applied before FSDP, so that its gathers
    stay outside of the recomputed and compiled regions. Modules needed by multi-rank
    layouts only are imported on demand: torch takes a second to import them.
    """
    precision = choose_precision(config)
    model.set_precision(precision)
    if not config.cpu_offload:
        model.to(world.device)
    vocabulary = None
    if config.float8:
        convert_to_float8(model, world.device)
    if mesh.tensor is not None:
        from megatron.parallel.tensor import TensorVocabularyShard, apply_tensor_parallel

        apply_tensor_parallel(model, mesh.tensor)
        vocabulary = TensorVocabularyShard(mesh.tensor, model.config.vocab_rows)
    if mesh.context is not None:
        from megatron.parallel.context import apply_context_parallel

        apply_context_parallel(model, mesh.context)
    # checkpointing inside compilation: the compiler
    # then sees the recomputation and can fuse it
    apply_activation_checkpointing(model.blocks, config.activation_checkpointing)
    if compiled:
        compile_blocks(
            model, has_tensor_ranks=mesh.tensor is not None, has_context_ranks=mesh.context is not None
        )
    # from here on the parallel passes wrap the model: a
    # pipeline of stages, or one module with DDP or FSDP
    if mesh.pipeline is not None:
        from megatron.engine.torch.pipelined import PipelinedModel

        return PipelinedModel(model, causal, vocabulary, config, precision.compute, world, mesh)
    task_loss = TaskLoss(model, causal, vocabulary, world.coordinate.context)
    return UnpipelinedModel(task_loss, config, precision.compute, world, mesh)
