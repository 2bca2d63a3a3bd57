"""Blocks cut over ranks: stages of a built model, and their schedules (torch.distributed.pipelining).

1F1B: Narayanan et al., arXiv 2006.09503; interleaved: arXiv 2104.04473, section 2.2.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, schedules

from megatron.model.gpt import Gpt
from megatron.model.rotary import rotary_table


class _Exchange:
    """Sends and receives that are waited for together."""

    def __init__(self, pieces: list[dist.Work]) -> None:
        self.pieces = pieces

    def wait(self) -> None:
        for piece in self.pieces:
            piece.wait()


def _start(pieces: list[dist.P2POp], desc: str | None = None) -> _Exchange | None:
    return _Exchange(dist.batch_isend_irecv(pieces)) if pieces else None


if not hasattr(schedules, "_wait_batch_p2p"):
    # Schedules of torch 2.7 keep the last piece of an exchange alone. With NCCL that is the whole of it; gloo
    # never sends those that nobody keeps, and the ranks wait for one another for good.
    schedules._batch_p2p = _start


class Stage(nn.Module):
    """Consecutive blocks of a Gpt, under their own names; the tied embedding is with the first and the last.

    The first stage takes tokens int64 [B, S / c], where the ranks of a context hold c shares of the
    positions, the others hidden states [B, S / (c t), D], cut again by t where the matrices are; the last
    gives what the head reads.
    """

    def __init__(
        self, model: Gpt, index: int, n_stages: int, *, causal: bool, context_rank: int, n_cuts: int
    ) -> None:
        super().__init__()
        self.config, self.causal = model.config, causal
        self.context_rank, self.n_cuts = context_rank, n_cuts
        self.is_first, self.is_last = index == 0, index == n_stages - 1
        begin, end = (model.config.n_layers * i // n_stages for i in (index, index + 1))
        if self.is_first or self.is_last:
            self.embedding = model.embedding
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(begin, end)})
        if self.is_last:
            self.norm = model.norm

    def forward(self, x: Tensor) -> Tensor:
        """x as the class says -> [B, S / (c t), D], from the last stage [B, S / c, D]."""
        n_positions = x.shape[1] * (1 if self.is_first else self.n_cuts)
        angles = rotary_table(
            n_positions,
            self.config.d_head,
            self.config.rope_theta,
            x.device,
            self.context_rank * n_positions,
        )
        if self.is_first:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, *angles, self.causal)
        return self.norm(x) if self.is_last else x


class Pipeline:
    """The stages on this rank among all: every `group.size()`-th, from its own number on."""

    def __init__(
        self, stages: dict[int, Stage], n_stages: int, group: ProcessGroup, dtype: torch.dtype
    ) -> None:
        """dtype: of the hidden states between stages."""
        self.stages, self.n_stages, self.group, self.dtype = stages, n_stages, group, dtype
        self.schedules: dict[tuple[int, ...], Schedule1F1B | ScheduleInterleaved1F1B] = {}
        self.loss: Callable[[Tensor, int], Tensor] | None = None

    @property
    def has_last(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.n_stages - 1 in self.stages

    def backward(self, inputs: list[Tensor], loss: Callable[[Tensor, int], Tensor]) -> None:
        """One forward and backward of every microbatch, tokens [b, S / c] each.

        loss(hidden, i), of what the head reads in microbatch i, is called where the last stage is.
        """
        self.loss = loss
        n = len(inputs)
        key = (n, *inputs[0].shape)
        if key not in self.schedules:
            self.schedules[key] = self._schedule(n, inputs[0])
        tokens = (torch.cat(inputs),) if 0 in self.stages else ()
        target = torch.arange(n) if self.has_last else None  # cut into n numbers: which microbatch it is
        self.schedules[key].step(*tokens, target=target)

    def _schedule(self, n_microbatches: int, tokens: Tensor) -> Schedule1F1B | ScheduleInterleaved1F1B:
        def of_microbatch(hidden: Tensor, number: Tensor) -> Tensor:
            assert self.loss is not None, "set by backward"
            return self.loss(hidden, int(number))

        parts = [
            PipelineStage(
                stage,
                index,
                self.n_stages,
                tokens.device,
                input_args=tokens if stage.is_first else self._hidden_like(tokens, stage),
                output_args=self._hidden_like(tokens, stage, whole=stage.is_last),
                group=self.group,
            )
            for index, stage in self.stages.items()
        ]
        settings = {"n_microbatches": n_microbatches, "loss_fn": of_microbatch, "scale_grads": False}
        if len(parts) == 1:
            return Schedule1F1B(parts[0], **settings)
        return ScheduleInterleaved1F1B(parts, **settings)

    def _hidden_like(self, tokens: Tensor, stage: Stage, whole: bool = False) -> Tensor:
        """A tensor of the shape of hidden states between stages; told, so that nothing runs to find out.

        whole: as the head reads them, with the positions that ranks of cut matrices share out.
        """
        n_samples, n_positions = tokens.shape
        shape = (n_samples, n_positions // (1 if whole else stage.n_cuts), stage.config.d_model)
        return torch.empty(shape, dtype=self.dtype, device=tokens.device, requires_grad=True)

    def forward(self, tokens: Tensor) -> Tensor | None:
        """Without gradients: what the head reads, where the last stage is. Collective over the group."""
        mine, size = self.group.rank(), self.group.size()
        before, after = (dist.get_global_rank(self.group, (mine + way) % size) for way in (-1, 1))
        x = tokens
        for index, stage in self.stages.items():
            if index > 0:
                x = self._hidden_like(tokens, stage).detach()
                dist.recv(x, before, group=self.group)
            x = stage(x)
            if not stage.is_last:
                dist.send(x.contiguous(), after, group=self.group)
        return x if self.has_last else None
