"""Held-out loss: exact for autoregressive models, a Monte-Carlo bound for masked diffusion."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.batches import SampleSource
from megatron.engine.base import Engine
from megatron.objective.base import Objective
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.watchdog import mark
from megatron.parallel.world import World


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A held-out loss in nats a token.

    loss_se   standard error over the samples scored: how far another text of the same kind might be; None of
              a single sample, which does not say
    mc_se     standard error of the Monte-Carlo estimate, None where the loss is exact
    num_mc    masks drawn for each sample, None where the loss is exact
    """

    loss: float
    loss_se: float | None
    mc_se: float | None
    num_mc: int | None
    n_samples: int
    n_tokens: int


def validate(
    engine: Engine,
    objective: Objective,
    samples: SampleSource,
    world: World,
    *,
    batch_size: int,
    num_mc: int = 8,
    max_samples: int | None = None,
) -> HeldOut:
    """Score every held-out sample once (autoregressive) or `num_mc` times (masked diffusion).

    Share r of the ranks scores samples r, r + dp_size, ...; noise is keyed by sample and draw, so that the
    figure does not depend on the ranks beyond rounding. Tokens after the last whole sample are not scored.
    """
    n_samples = min(samples.samples_per_epoch, max_samples or samples.samples_per_epoch)
    n_draws = 1 if objective.exact else num_mc
    nats = torch.zeros(n_samples, n_draws, dtype=torch.float64, device=world.device)
    # ranks that share weights score together: all take as many turns, the last sample again if need be
    n_turns = -(-n_samples // world.dp_size)
    mine = np.minimum(np.arange(n_turns) * world.dp_size + world.dp_rank, n_samples - 1)
    n_own = len(range(world.dp_rank, n_samples, world.dp_size))
    for begin in range(0, n_turns, batch_size):
        mark(None, "validation")
        numbers = mine[begin : begin + batch_size]
        own = max(0, min(len(numbers), n_own - begin))
        tokens = np.stack([samples[int(i)] for i in numbers])
        for draw in range(n_draws):
            scored = engine.score(objective.corrupt(tokens, numbers, draw=draw))[0]
            nats[torch.from_numpy(numbers[:own]).to(world.device), draw] = scored[:own]
    per_sample = sum_over_ranks(nats, world).cpu().numpy() / samples.seq_len  # [samples, draws], nats a token
    means = per_sample.mean(axis=1)
    mc_se = None
    if not objective.exact and n_draws > 1:
        mc_se = float(per_sample.mean(axis=0).std(ddof=1) / math.sqrt(n_draws))
    return HeldOut(
        loss=float(means.mean()),
        loss_se=float(means.std(ddof=1) / math.sqrt(n_samples)) if n_samples > 1 else None,
        mc_se=mc_se,
        num_mc=None if objective.exact else n_draws,
        n_samples=n_samples,
        n_tokens=n_samples * samples.seq_len,
    )
