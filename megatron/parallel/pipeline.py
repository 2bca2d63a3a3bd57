"""Pipeline parallelism: stages of a model and their schedules (torch.distributed.pipelining).

1F1B: Narayanan et al., arXiv 2006.09503; interleaved: arXiv 2104.04473, section
2.2.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from megatron.model.attention_inputs import AttentionInputs
from megatron.model.precision import Precision
from megatron.model.transformer import Gpt
from megatron.objective.task import Task


class AbsentBlock(nn.Module):
    """A block of another stage."""

    def forward(self, x: Tensor, _: AttentionInputs) -> Tensor:
        """Return the residual stream as it is."""
        return x


class Stage(Gpt):
    """Consecutive blocks of a Gpt under their original names; the first and last have a tied embedding.

    With c context ranks and t tensor ranks:

    first stage    tokens int64 [B, S / c]              -> hidden states [B, S / (c t), D]
    other stages   hidden states [B, S / (c t), D]      -> hidden states [B, S / (c t), D]
    last stage     hidden states [B, S / (c t), D]      -> input of the head [B, S / (c t), D]
    """

    def __init__(
        self, model: Gpt, index: int, n_stages: int, *, causal: bool, context_rank: int, n_tensor_ranks: int
    ) -> None:
        nn.Module.__init__(self)  # the parts of the model are taken, not built
        self.config, self.precision, self.tensor_rank = model.config, model.precision, model.tensor_rank
        self.causal, self.context_rank, self.n_tensor_ranks = causal, context_rank, n_tensor_ranks
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        # the first stage is on rank 0 and the last on rank
        # p - 1: no rank has both copies of the embedding
        if self.is_first or self.is_last and model.unembedding is None:
            self.embedding = model.embedding
        self.position_embedding = model.position_embedding if self.is_first else None
        # stage i holds blocks L i / n .. L (i + 1) / n - 1: sizes differ by at most one
        # 10 blocks in 4 stages: 0-1, 2-4, 5-6, 7-9
        begin, end = (model.config.n_layers * i // n_stages for i in (index, index + 1))
        self.blocks = nn.ModuleList(
            block if begin <= i < end else AbsentBlock() for i, block in enumerate(model.blocks)
        )
        self.unembedding = model.unembedding if self.is_last else None
        if self.is_last:
            self.norm = model.norm

    @property
    def local_blocks(self) -> list[nn.Module]:
        """The blocks of this stage."""
        return [block for block in self.blocks if not isinstance(block, AbsentBlock)]

    def forward(self, x: Tensor, tokens: Tensor, **options: Tensor) -> Tensor:  # type: ignore[override]
        """Run the blocks of the stage; shapes as in the class docstring.

        tokens [B, S / c] and the options of `hidden_states` are given to every
        stage: masks, positions and dropout depend on them.
        """
        return self.hidden_states(
            tokens,
            self.causal,
            # context rank c has the consecutive positions c S / n to (c + 1) S / n - 1
            first_position=self.context_rank * tokens.shape[1],
            stream=None if self.is_first else x,
            **options,  # type: ignore[arg-type]  # names of tensors only
        )

    def _read_out(self, x: Tensor) -> Tensor:
        return super()._read_out(x) if self.is_last else x


class Pipeline:
    """The stages of this rank: rank r of p ranks holds stages r, r + p, r + 2p, ..."""

    loss: Callable[[Tensor, int], Tensor]  # set by `backward`

    def __init__(
        self, stages: dict[int, Stage], n_stages: int, group: ProcessGroup, precision: Precision
    ) -> None:
        self.stages, self.n_stages, self.group, self.precision = stages, n_stages, group, precision
        self.schedules: dict[tuple[int, ...], Schedule1F1B | ScheduleInterleaved1F1B] = {}

    @property
    def has_last(self) -> bool:
        """Return whether this rank holds the last stage."""
        return self.n_stages - 1 in self.stages

    def backward(self, tasks: Sequence[Task], loss: Callable[[Tensor, int], Tensor]) -> None:
        """Run the forward and backward of every microbatch, with inputs [b, S / c] each.

        loss(hidden, i) is called on the rank of the last stage with the input
        of the head for microbatch i.
        """
        self.loss = loss
        key = (len(tasks), *tasks[0].inputs.shape)
        # a schedule is built for fixed shapes: one per
        # number of microbatches and shape of tokens
        if key not in self.schedules:
            self.schedules[key] = self._build_schedule(len(tasks), tasks[0].inputs)
        # the schedule cuts the batch along dimension
        # 0 into n equal microbatches again
        options: dict[str, Any] = {"tokens": torch.cat([task.inputs for task in tasks])}
        for name in tasks[0].model_kwargs:
            options[name] = torch.cat([task.model_kwargs[name] for task in tasks])  # type: ignore[literal-required]
        # every stage gets the keywords, and the first one also
        # tokens in place of the hidden states of a previous stage
        inputs = (options["tokens"],) if 0 in self.stages else ()
        # the schedule splits the target into n scalars:
        # the loss receives the index of its microbatch
        target = torch.arange(len(tasks)) if self.has_last else None
        self.schedules[key].step(*inputs, target=target, **options)

    def _build_schedule(self, n_microbatches: int, tokens: Tensor) -> Schedule1F1B | ScheduleInterleaved1F1B:
        def microbatch_loss(hidden: Tensor, number: Tensor) -> Tensor:
            return self.loss(hidden, int(number))

        stages = [
            # dtype and shape of every receive buffer are
            # fixed here and must match the sent tensor
            PipelineStage(
                stage,
                index,
                self.n_stages,
                tokens.device,
                input_args=tokens if stage.is_first else self._empty_hidden_states(tokens, stage),
                output_args=self._empty_hidden_states(tokens, stage, is_head_input=stage.is_last),
                group=self.group,
            )  # fmt: skip
            for index, stage in self.stages.items()
        ]
        # 1F1B: a stage starts the backward of a microbatch
        # as soon as it can, so at most p microbatches have
        # their activations in memory. With m microbatches
        # a rank is idle for (p - 1) / (m + p - 1) of the
        # time, and with v stages per rank the idle part is divided by about v.
        # scale_grads=False: the loss is already divided
        # by all tokens, not by the number of microbatches
        if len(stages) == 1:
            return Schedule1F1B(stages[0], n_microbatches, microbatch_loss, scale_grads=False)
        return ScheduleInterleaved1F1B([*stages], n_microbatches, microbatch_loss, scale_grads=False)

    def _empty_hidden_states(self, tokens: Tensor, stage: Stage, is_head_input: bool = False) -> Tensor:
        """Return an empty tensor with the shape and dtype of the hidden states between stages.

        It gives torch's schedule the shapes, which would otherwise run a
        forward to infer them. is_head_input: for the input of the head instead.
        """
        shape = (len(tokens), tokens.shape[1] // stage.n_tensor_ranks, stage.config.d_model)
        dtype = self.precision.residual
        if is_head_input:
            shape, dtype = (*shape[:2], stage.head_weight.shape[1]), self.precision.compute
        return torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)

    def forward(self, task: Task) -> Tensor | None:
        """Return the input of the head on the rank of the last stage, None elsewhere; without gradients.

        Collective over the group. Stages run in order of their number, each
        after the receive from the previous one. With several stages per rank
        the ranks form a ring, so the neighbours are modulo p.
        """
        rank, size = self.group.rank(), self.group.size()
        # p = 2 with 4 stages: stage 1 on rank 1
        # sends to stage 2 on rank (1 + 1) % 2 = 0
        x = task.inputs
        for index, stage in self.stages.items():
            if index > 0:
                # blocking receive: stage index - 1 is on the previous rank
                # and sends after its forward. A deadlock is impossible:
                # stage 0 waits for no receive, and stage i only for stage i - 1
                x = self._empty_hidden_states(task.inputs, stage).detach()
                dist.recv(x, group=self.group, group_src=(rank - 1) % size)
            x = stage(x, tokens=task.inputs)
            if not stage.is_last:
                dist.send(x.contiguous(), group=self.group, group_dst=(rank + 1) % size)
        return x if self.has_last else None
