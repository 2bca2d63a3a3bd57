"""Pipeline parallelism: stages of a model and their schedules (torch.distributed.pipelining).

1F1B: Narayanan et al., arXiv 2006.09503; interleaved: arXiv 2104.04473, section
2.2.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from megatron.kernels.rotary import rotary_table
from megatron.model.attention_inputs import AttentionInputs
from megatron.model.precision import Precision
from megatron.model.transformer import Gpt, embed_tokens


class Stage(nn.Module):
    """Consecutive blocks of a Gpt under their original names; the tied embedding is in the first and last.

    With c context ranks and t tensor ranks:

    first stage    tokens int64 [B, S / c]              -> hidden states [B, S / (c t), D]
    other stages   hidden states [B, S / (c t), D]      -> hidden states [B, S / (c t), D]
    last stage     hidden states [B, S / (c t), D]      -> input of the head [B, S / c, D]
    """

    def __init__(
        self, model: Gpt, index: int, n_stages: int, *, causal: bool, context_rank: int, n_tensor_ranks: int
    ) -> None:
        super().__init__()
        self.config, self.causal, self.precision = model.config, causal, model.precision
        self.context_rank, self.n_tensor_ranks = context_rank, n_tensor_ranks
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        # stage i holds blocks L i / n .. L (i + 1) / n - 1: sizes differ by at most one
        # 10 blocks in 4 stages: 0-1, 2-4, 5-6, 7-9
        begin, end = (model.config.n_layers * i // n_stages for i in (index, index + 1))
        # the first stage is on rank 0 and the last on rank
        # p - 1: no rank has both copies of the embedding
        if self.is_first or self.is_last:
            self.embedding = model.embedding
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(begin, end)})
        if self.is_last:
            self.norm = model.norm

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks of the stage; shapes as in the class docstring."""
        # hidden states between stages are split over the
        # tensor ranks; rotary tables need all positions
        n_positions = x.shape[1] * (1 if self.is_first else self.n_tensor_ranks)
        # context rank c has the consecutive positions c S / n to (c + 1) S / n - 1
        rotary = rotary_table(n_positions, self.config, x.device, self.context_rank * n_positions)
        if self.is_first:
            x = embed_tokens(self.embedding, x, self.precision)
        for block in self.blocks.values():
            x = block(x, AttentionInputs(self.causal, rotary))
        return self.norm(x) if self.is_last else x


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

    def backward(self, inputs: list[Tensor], loss: Callable[[Tensor, int], Tensor]) -> None:
        """Run the forward and backward of every microbatch, tokens [b, S / c] each.

        loss(hidden, i) is called on the rank of the last stage with the input
        of the head for microbatch i.
        """
        self.loss = loss
        key = (len(inputs), *inputs[0].shape)
        # a schedule is built for fixed shapes: one per
        # number of microbatches and shape of tokens
        if key not in self.schedules:
            self.schedules[key] = self._build_schedule(len(inputs), inputs[0])
        # the schedule cuts the batch along dimension
        # 0 into n equal microbatches again
        tokens = (torch.cat(inputs),) if 0 in self.stages else ()
        # the schedule splits the target into n scalars:
        # the loss receives the index of its microbatch
        target = torch.arange(len(inputs)) if self.has_last else None
        self.schedules[key].step(*tokens, target=target)

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
                output_args=self._empty_hidden_states(tokens, stage, all_positions=stage.is_last),
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

    def _empty_hidden_states(self, tokens: Tensor, stage: Stage, all_positions: bool = False) -> Tensor:
        """Return an empty tensor with the shape and dtype of the hidden states between stages.

        It gives torch's schedule the shapes, which would otherwise run a
        forward to infer them. all_positions: for the input of the head,
        with the positions of all tensor ranks.
        """
        n_samples, n_positions = tokens.shape
        n_positions //= 1 if all_positions else stage.n_tensor_ranks
        shape = (n_samples, n_positions, stage.config.d_model)
        dtype = self.precision.compute if all_positions else self.precision.residual
        return torch.empty(shape, dtype=dtype, device=tokens.device, requires_grad=True)

    def forward(self, tokens: Tensor) -> Tensor | None:
        """Return the input of the head on the rank of the last stage, None elsewhere; without gradients.

        Collective over the group. Stages run in order of their number, each
        after the receive from the previous one. With several stages per rank
        the ranks form a ring, so the neighbours are modulo p.
        """
        rank, size = self.group.rank(), self.group.size()
        # p = 2 with 4 stages: stage 1 on rank 1
        # sends to stage 2 on rank (1 + 1) % 2 = 0
        x = tokens
        for index, stage in self.stages.items():
            if index > 0:
                # blocking receive: stage index - 1 is on the previous rank
                # and sends after its forward. A deadlock is impossible:
                # stage 0 waits for no receive, and stage i only for stage i - 1
                x = self._empty_hidden_states(tokens, stage).detach()
                dist.recv(x, group=self.group, group_src=(rank - 1) % size)
            x = stage(x)
            if not stage.is_last:
                dist.send(x.contiguous(), group=self.group, group_dst=(rank + 1) % size)
        return x if self.has_last else None
