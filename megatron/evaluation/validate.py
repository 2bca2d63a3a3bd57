"""Held-out loss: exact for autoregressive models, a Monte Carlo bound for masked diffusion."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from megatron.data.batches import SampleSource
from megatron.data.blend import Blend
from megatron.data.prefetch import prefetch
from megatron.engine.interface import Engine
from megatron.objective.task import Objective, Task
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.watchdog import mark_phase
from megatron.parallel.world import World, make_thread_init
from megatron.plan.datapaths import name_corpora


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """A held-out loss in nats per token.

    loss_se   standard error over the scored samples,
              for text of the same distribution; None for one sample
    mc_se     standard error of the Monte Carlo estimate; None if the loss is exact
    num_mc    masks per sample; None if the loss is exact
    by_corpus loss of each corpus of a blend, by the name of its file
    """

    loss: float
    loss_se: float | None
    mc_se: float | None
    num_mc: int | None
    n_tokens: int
    by_corpus: dict[str, float] = field(default_factory=dict)


def validate(
    engine: Engine,
    objective: Objective,
    samples: SampleSource,
    world: World,
    *,
    batch_size: int,
    num_mc: int = 8,
    max_samples: int | None = None,
    n_workers: int = 1,
) -> HeldOutLoss:
    """Score every held-out sample once (autoregressive) or `num_mc` times (masked diffusion).

    Data-parallel rank r scores samples r, r + dp_size, ... The
    noise is keyed by sample and draw, so the result does not depend
    on the number of ranks beyond rounding. Tokens after the last
    whole sample are not scored. `n_workers` threads prepare the
    batches, in page-locked memory for a GPU.
    """
    n_samples = min(samples.samples_per_epoch, max_samples or samples.samples_per_epoch)
    n_draws = 1 if objective.exact else num_mc
    nats = torch.zeros(n_samples, n_draws, dtype=torch.float64, device=world.device)
    # Sharded forward passes are collective,
    # so all ranks need the same number of batches:
    # ranks with fewer samples score the last sample again,
    # and only the first n_local results of a rank are counted.
    # 10 samples on 4 ranks: 3 turns. Rank 2 scores 2,
    # 6 and, instead of 10, again 9; n_local = 2.
    n_turns = -(-n_samples // world.dp_size)
    local_samples = np.minimum(np.arange(n_turns) * world.dp_size + world.dp_rank, n_samples - 1)
    n_local = len(range(world.dp_rank, n_samples, world.dp_size))
    begins = [begin for begin in range(0, n_turns, batch_size) for _ in range(n_draws)]

    def make_task(item: int) -> Task:
        numbers = local_samples[begins[item] : begins[item] + batch_size]
        # every draw reads its samples again: from the
        # page cache, and the threads share no state
        tokens = samples.take(numbers)
        task = objective.corrupt(tokens, numbers, draw=item % n_draws)
        return task.pin_memory() if world.device.type == "cuda" else task

    # slices of this buffer, and not indices on the host,
    # which would be copied and waited for in every batch
    local = torch.zeros(n_turns, n_draws, dtype=torch.float64, device=world.device)
    with prefetch(make_task, len(begins), n_workers, make_thread_init(world.device)) as tasks:
        for item, task in enumerate(tasks):
            mark_phase(None, "validation")
            begin, n_samples_of_batch = begins[item], len(task.inputs)
            local[begin : begin + n_samples_of_batch, item % n_draws] = engine.score(task)[0]
    nats[world.dp_rank :: world.dp_size] = local[:n_local]
    # Ranks that share a model score the same samples, but
    # `score` counts each token on one of them: the sum over all
    # ranks is that over data-parallel ranks.
    per_sample = (
        sum_over_ranks(nats, world).cpu().numpy() / samples.seq_len
    )  # [samples, draws], nats per token
    # mean over draws: a loss per sample, for loss_se;
    # mean over samples: a loss per draw, for mc_se
    means = per_sample.mean(axis=1)
    mc_se = None
    if not objective.exact and n_draws > 1:
        mc_se = float(per_sample.mean(axis=0).std(ddof=1) / math.sqrt(n_draws))
    return HeldOutLoss(
        loss=float(means.mean()),
        loss_se=float(means.std(ddof=1) / math.sqrt(n_samples)) if n_samples > 1 else None,
        mc_se=mc_se,
        num_mc=None if objective.exact else n_draws,
        n_tokens=n_samples * samples.seq_len,
        by_corpus=_average_corpora(samples, means),
    )


def _average_corpora(samples: SampleSource, losses: np.ndarray) -> dict[str, float]:
    """Return the mean loss of each corpus of a blend; {} for other samples. losses [n]."""
    if not isinstance(samples, Blend):
        return {}
    corpora = samples.locate_samples(np.arange(len(losses)))[0]
    names = name_corpora([corpus.tokens.prefix for corpus in samples.corpora])
    # with max_samples a corpus of small weight may have no sample
    scored = {name: losses[corpora == i] for i, name in enumerate(names)}
    return {name: float(part.mean()) for name, part in scored.items() if len(part)}
