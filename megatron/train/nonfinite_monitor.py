"""Detection of NaN or Inf losses and gradients by step, rank and samples, without synchronization."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.engine.interface import StepReport
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World

# The loss scale of float16 starts at 2^16 and is halved at each overflow. After
# this many consecutive overflows it is below 2^-8, so the scale is not the cause.
MAX_OVERFLOWS = 24


@dataclass(frozen=True)
class NonFiniteStep:
    """A step that changed no weight. `shares`: (rank, first sample, last sample) with a NaN or Inf loss."""

    step: int
    shares: list[tuple[int, int, int]]

    def as_dict(self) -> dict[str, Any]:
        """Return the line for metrics.jsonl."""
        named = [
            dict(zip(("rank", "first_sample", "last_sample"), share, strict=True)) for share in self.shares
        ]
        return {"kind": "nonfinite", "step": self.step, "ranks": named}

    def __str__(self) -> str:
        if not self.shares:
            return f"step {self.step}: the gradient is NaN or Inf, but every loss is finite"
        where = ", ".join(f"rank {rank} (samples {first} to {last})" for rank, first, last in self.shares)
        return f"step {self.step}: the loss is NaN or Inf on {where}"


class NonFiniteMonitor:
    """Collects the flags of each step on the device until `pop_bad_steps` reads them."""

    def __init__(self, world: World, gradients_may_overflow: bool) -> None:
        """gradients_may_overflow: float16, whose scale is being adapted.

        MAX_OVERFLOWS in a row are tolerated.
        """
        self.world, self.max_overflows = world, MAX_OVERFLOWS if gradients_may_overflow else 0
        self.in_a_row = 0  # consecutive steps with a NaN or Inf gradient, up to the last step
        self.steps: list[tuple[int, int, int]] = []  # (step, this rank's first and last sample)
        self.flags: list[Tensor] = []

    def add_step(self, report: StepReport, step: int, first_sample: int, last_sample: int) -> Tensor:
        """Record a step; return whether this rank's loss is finite, as a bool tensor on the device."""
        loss_is_finite = torch.isfinite(report.loss_sum)
        gradient = torch.isfinite(report.grad_norm).to(loss_is_finite.device)
        self.steps.append((step, first_sample, last_sample))
        self.flags.append(torch.stack([~loss_is_finite, ~gradient]))
        return loss_is_finite

    def pop_bad_steps(self) -> list[NonFiniteStep]:
        """Return the bad steps since the last call, the same on all ranks. Collective."""
        if not self.flags:
            return []
        flags = torch.stack(self.flags).double()  # [steps, 2]
        # float64 is exact for sample numbers up to 2^53
        samples = torch.tensor(self.steps, dtype=torch.float64, device=flags.device)[:, 1:]
        # each rank fills its own row and a sum gathers all:
        # [steps, ranks, (loss bad, gradient bad, first, last)]
        table = torch.zeros(len(flags), self.world.n_ranks, 4, dtype=torch.float64, device=flags.device)
        table[:, self.world.rank] = torch.cat([flags, samples], dim=1)
        rows = sum_over_ranks(table, self.world).tolist()
        # the steps are the same on all ranks, the
        # samples of a row belong to its rank
        steps, self.steps, self.flags = self.steps, [], []
        bad = []
        for (step, _, _), ranks in zip(steps, rows, strict=True):
            shares = [(rank, int(row[2]), int(row[3])) for rank, row in enumerate(ranks) if row[0]]
            # a NaN loss is always reported, overflows
            # of the gradient only beyond the tolerance
            self.in_a_row = self.in_a_row + 1 if any(row[1] for row in ranks) else 0
            if shares or self.in_a_row > self.max_overflows:
                bad.append(NonFiniteStep(step, shares))
        return bad
