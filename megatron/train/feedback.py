"""Feedback of a run to an adaptive mixture: the loss per domain, and the statistics of the domains."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.objective.task import Task
from megatron.parallel.collectives import sum_over_ranks
from megatron.train.build import Run
from megatron.train.state import TrainState


@dataclass(frozen=True)
class DomainStats:
    """Per domain: samples so far, weight, and last loss in nats (None: not in that batch)."""

    samples: Sequence[int]
    weights: Sequence[float]
    losses: Sequence[float | None] | None

    def as_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a line of metrics.jsonl."""
        fields: dict[str, Any] = {"weights": dict(zip(names, self.weights, strict=True))}
        if self.losses is not None:
            fields["domain_losses"] = dict(zip(names, self.losses, strict=True))
        return fields


class Feedback:
    """Scores the batch of every `every_steps`-th step again, without gradients, per domain.

    This costs one forward, a third of a step, in those steps.
    It costs nothing if the weights of the mixture do not depend on the model.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.losses: list[float | None] | None = None

    def observe(self, state: TrainState, tasks: Sequence[Task]) -> None:
        """Score this rank's microbatches before a step and pass the sums over all ranks to the mixture."""
        samples, world = self.run.train_samples, self.run.world
        first, last = self.run.open_batches(state.next_sample).sample_range(state.next_sample)
        scored_domains = samples.scored_domains(state.step, np.arange(first, last + 1))
        # depends on the step only, which is equal
        # on all ranks: all of them score or none
        if scored_domains is None:
            return
        domains = torch.from_numpy(scored_domains.astype(np.int64))
        # from pageable memory the copy would wait for all queued work
        domains = domains.pin_memory() if world.device.type == "cuda" else domains
        domains = domains.to(world.device, non_blocking=True)
        scored = [self.run.engine.score(task) for task in tasks]
        nats = torch.cat([nats for nats, _ in scored])
        # every sample has the same number of
        # tokens, so a microbatch is divided equally
        tokens = torch.cat([torch.full_like(nats, count / len(nats)) for nats, count in scored])
        # [nats, tokens] x domains; ranks that
        # share a model contribute each token once
        sums = torch.zeros(2, len(samples.names), dtype=torch.float64, device=world.device)
        sums[0].index_add_(0, domains, nats)
        sums[1].index_add_(0, domains, tokens)
        total = sum_over_ranks(sums, world).cpu().numpy()
        samples.observe(state.step, total[0], total[1])
        self.losses = [float(loss / n) if n else None for loss, n in total.T]

    def get_domain_stats(self, state: TrainState) -> DomainStats | None:
        """Return the statistics after a step; None without a mixture."""
        usage = self.run.train_samples.domain_usage(state.next_sample, state.step - 1)
        return None if usage is None else DomainStats(*usage, self.losses)
