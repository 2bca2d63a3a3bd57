"""Held-out loss: exact for autoregressive models, a Monte Carlo bound for masked diffusion."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from megatron.data.batches import SampleSource
from megatron.engine.interface import Engine
from megatron.objective.task import Objective
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.watchdog import mark_phase
from megatron.parallel.world import World


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """A held-out loss in nats per token.

    loss_se   standard error over the scored samples, for text of the same distribution; None for one sample
    mc_se     standard error of the Monte Carlo estimate; None if the loss is exact
    num_mc    masks per sample; None if the loss is exact
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
) -> HeldOutLoss:
    """Score every held-out sample once (autoregressive) or `num_mc` times (masked diffusion).

    Data-parallel rank r scores samples r, r + dp_size, ... The noise is keyed by sample and draw, so the
    result does not depend on the number of ranks beyond rounding. Tokens after the last whole sample are not
    scored.
    """
    n_samples = min(samples.samples_per_epoch, max_samples or samples.samples_per_epoch)
    n_draws = 1 if objective.exact else num_mc
    nats = torch.zeros(n_samples, n_draws, dtype=torch.float64, device=world.device)
    # Sharded forward passes are collective, so all ranks need the same number of batches: ranks with fewer
    # samples score the last sample again, and only the first n_local results of a rank are counted.
    # 10 samples on 4 ranks: 3 turns. Rank 2 scores 2, 6 and, instead of 10, again 9; n_local = 2.
    n_turns = -(-n_samples // world.dp_size)
    local_samples = np.minimum(np.arange(n_turns) * world.dp_size + world.dp_rank, n_samples - 1)
    n_local = len(range(world.dp_rank, n_samples, world.dp_size))
    for begin in range(0, n_turns, batch_size):
        mark_phase(None, "validation")
        numbers = local_samples[begin : begin + batch_size]
        n_valid = max(0, min(len(numbers), n_local - begin))
        tokens = np.stack([samples[int(i)] for i in numbers])
        for draw in range(n_draws):
            scored = engine.score(objective.corrupt(tokens, numbers, draw=draw))[0]
            nats[torch.from_numpy(numbers[:n_valid]).to(world.device), draw] = scored[:n_valid]
    # Ranks that share a model score the same samples, but `score` counts each token on one of them: the sum
    # over all ranks is that over data-parallel ranks.
    per_sample = (
        sum_over_ranks(nats, world).cpu().numpy() / samples.seq_len
    )  # [samples, draws], nats per token
    # mean over draws: a loss per sample, for loss_se; mean over samples: a loss per draw, for mc_se
    means = per_sample.mean(axis=1)
    mc_se = None
    if not objective.exact and n_draws > 1:
        mc_se = float(per_sample.mean(axis=0).std(ddof=1) / math.sqrt(n_draws))
    return HeldOutLoss(
        loss=float(means.mean()),
        loss_se=float(means.std(ddof=1) / math.sqrt(n_samples)) if n_samples > 1 else None,
        mc_se=mc_se,
        num_mc=None if objective.exact else n_draws,
        n_samples=n_samples,
        n_tokens=n_samples * samples.seq_len,
    )
