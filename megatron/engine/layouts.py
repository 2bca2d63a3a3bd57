"""A built one-GPU model, spread over the ranks. The order of the steps is said here, once."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron.config.schema import DistConfig
from megatron.engine.task_loss import TaskLoss
from megatron.engine.whole import WholeModel
from megatron.model.gpt import Gpt
from megatron.objective.base import Task
from megatron.parallel.float8 import use_float8
from megatron.parallel.mesh import Mesh
from megatron.parallel.recompute import recompute
from megatron.parallel.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Passes(Protocol):
    """Forward and backward of one layout.

    autocast   dtype to run under; float32 where the weights themselves are cast
    has_loss   whether this rank's nats count: over all ranks each token counts once
    copied     parameters of this rank that another stage holds and counts
    """

    autocast: torch.dtype
    has_loss: bool
    copied: frozenset[str]

    def named_parameters(self) -> Mapping[str, nn.Parameter]:
        """Those on this rank, under the one-GPU model's names."""
        ...

    def backward(self, tasks: Sequence[Task], share: Tensor) -> Tensor:
        """Leave the gradient of share * nats, summed over all ranks; gives the nats of this rank, float64."""
        ...

    def score(self, task: Task) -> Tensor:
        """Nats of each sample, float64 [B]."""
        ...


def build_passes(model: Gpt, causal: bool, config: DistConfig, world: World, mesh: Mesh) -> Passes:
    """Spread a model, in place: matrices first, then positions; FSDP shards what is left of each block.

    Blocks are made to forget and are compiled before they are sharded, so that gathering stays outside.
    What only a layout of many ranks needs is imported where that is built: torch takes a second for it.
    """
    if not config.cpu_offload:
        model.to(world.device)
    vocabulary = None
    if config.float8:
        use_float8(model, world.device)
    if mesh.tensor is not None:
        from megatron.parallel.tensor import Vocabulary, cut_matrices

        cut_matrices(model, mesh.tensor)
        vocabulary = Vocabulary(mesh.tensor, model.config.vocab_rows)
    if mesh.context is not None:
        from megatron.parallel.context import cut_positions

        cut_positions(model, mesh.context, config.context_method)
    recompute(model.blocks, config.activation_checkpointing)
    if config.compile:
        compile_blocks(model, whole_blocks=mesh.tensor is None)
    dtype = DTYPES[config.dtype]
    if mesh.pipeline is not None:
        from megatron.engine.pipelined import PipelinedModel

        return PipelinedModel(model, causal, vocabulary, config, dtype, world, mesh)
    task_loss = TaskLoss(model, causal, vocabulary, world.coordinate.context)
    return WholeModel(task_loss, config, dtype, world, mesh)


def compile_blocks(model: Gpt, whole_blocks: bool) -> None:
    """Compile the forward of each block, or of its feed-forward, in place.

    The forward and not the module: hooks of FSDP stay outside. All blocks share one graph.
    """
    for block in model.blocks:
        # under sequence parallel the compiler of torch 2.13 cannot follow a whole block
        module = block if whole_blocks else block.mlp
        module.forward = torch.compile(module.forward)
