"""Losses and gradients that are no numbers, told by step, rank and samples; the device is not waited for."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.engine.base import StepReport
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World

# float16's loss scale begins at 2^16 and is halved each time: after so many in a row it is not the scale
OVERFLOWS = 24


@dataclass(frozen=True)
class Bad:
    """A step that moved nothing. `shares`: (rank, first sample, last sample) where the loss was no number."""

    step: int
    shares: list[tuple[int, int, int]]

    def as_dict(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        named = [
            dict(zip(("rank", "first_sample", "last_sample"), share, strict=True)) for share in self.shares
        ]
        return {"kind": "nonfinite", "step": self.step, "ranks": named}

    def __str__(self) -> str:
        where = ", ".join(f"rank {rank} (samples {first} to {last})" for rank, first, last in self.shares)
        return f"step {self.step}: " + (
            f"the loss is no number on {where}"
            if where
            else "the gradient is no number, though every loss is"
        )


class Watch:
    """Keeps what each step told on the device until `found` reads it."""

    def __init__(self, world: World, gradients_may_overflow: bool) -> None:
        """`gradients_may_overflow`: as float16's do while its scale is sought; OVERFLOWS are no fault."""
        self.world, self.tolerated = world, OVERFLOWS if gradients_may_overflow else 0
        self.in_a_row = 0  # gradients that were no numbers, up to the last step
        self.steps: list[tuple[int, int, int]] = []  # (step, this rank's first and last sample)
        self.flags: list[Tensor] = []

    def add(self, report: StepReport, step: int, first_sample: int, last_sample: int) -> Tensor:
        """Note a step; gives whether this rank's loss is a number, on the device."""
        loss_is_one = torch.isfinite(report.loss_sum)
        gradient = torch.isfinite(report.grad_norm).to(loss_is_one.device)
        self.steps.append((step, first_sample, last_sample))
        self.flags.append(torch.stack([~loss_is_one, ~gradient]))
        return loss_is_one

    def found(self) -> list[Bad]:
        """The bad steps since the last call, the same on all ranks: collective."""
        if not self.flags:
            return []
        flags = torch.stack(self.flags).double()  # [steps, 2]
        own = torch.tensor(self.steps, dtype=torch.float64, device=flags.device)[:, 1:]
        table = torch.zeros(len(flags), self.world.n_ranks, 4, dtype=torch.float64, device=flags.device)
        table[:, self.world.rank] = torch.cat([flags, own], dim=1)
        rows = sum_over_ranks(table, self.world).tolist()
        steps, self.steps, self.flags = self.steps, [], []
        bad = []
        for (step, _, _), ranks in zip(steps, rows, strict=True):
            shares = [(rank, int(told[2]), int(told[3])) for rank, told in enumerate(ranks) if told[0]]
            self.in_a_row = self.in_a_row + 1 if any(told[1] for told in ranks) else 0
            if shares or self.in_a_row > self.tolerated:
                bad.append(Bad(step, shares))
        return bad
