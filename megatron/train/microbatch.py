"""Number of samples per forward: allowed values, and the choice by estimated memory on a GPU."""

from collections.abc import Sequence

import torch

from megatron.config.schema import RunConfig
from megatron.engine.torch.compilation import is_compilation_requested
from megatron.log import get_logger
from megatron.parallel.collectives import min_over_ranks
from megatron.parallel.world import World
from megatron.plan.batch_ramp import BatchSizes
from megatron.plan.count import n_params
from megatron.plan.memory import estimate_memory

MEMORY_SHARE = 0.85  # estimated share of a device's memory that a microbatch may fill; the rest is fragments

log = get_logger(__name__)


def choose_microbatch_rows(config: RunConfig, world: World, memory: float | None = None) -> int:
    """Return the number of samples per forward on a rank. Collective.

    memory   bytes of the device; None: as the GPU has, and no limit on a CPU

    The default is all samples of the rank; on a GPU the most whose
    estimated memory fits. Raises ValueError if the numbers do not divide.
    """
    candidates = list_microbatches(config, world)
    if config.dataset.microbatch_size is not None or world.device.type != "cuda" and memory is None:
        return candidates[0]
    if memory is None:
        # other processes may use the same GPU: count only what is free now
        free = torch.cuda.mem_get_info(world.device)[0] + torch.cuda.memory_reserved(world.device)
        memory = float(free)
    compiled = is_compilation_requested(config.dist, world.device)
    rows, warning = choose_rows(config, world.n_ranks, candidates, memory, compiled)
    if warning is not None and world.is_first:
        log.warning("%s", warning)
    # GPUs may have different free memory: all ranks take the smallest choice
    return min_over_ranks(rows, world)


def choose_rows(
    config: RunConfig,
    n_ranks: int,
    candidates: Sequence[int],
    memory: float,
    compiled: bool = False,
) -> tuple[int, str | None]:
    """Return the most samples per forward that fit into `memory` bytes, and a warning if none does.

    candidates   allowed numbers of samples, largest first
    """
    for rows in candidates:
        if estimate_memory(config, n_ranks, rows, compiled) <= MEMORY_SHARE * memory:
            return rows, None
    rows = candidates[-1]
    need = estimate_memory(config, n_ranks, rows, compiled)
    return rows, (
        f"dataset.microbatch_size: {rows} sample(s) of {config.dataset.seq_len} tokens of a model of "
        f"{n_params(config.model) / 1e6:,.0f}M parameters need about {need / 1e9:,.0f} GB on each of "
        f"{n_ranks} rank(s), more than {MEMORY_SHARE:.0%} of {memory / 1e9:,.0f} GB. "
        "Shard it over more ranks (dist.sharding_stage=zero3), or set dist.activation_checkpointing=full."
    )


def list_microbatches(config: RunConfig, world: World) -> list[int]:
    """Return the allowed numbers of samples per forward, largest first; only the requested one if it is set.

    Raises ValueError if batch, ranks and microbatch do not divide.
    """
    size, ranks, stages = config.dataset.batch_size, world.dp_size, world.layout.pipeline
    for step_size in BatchSizes(config.dataset).list_sizes():
        if step_size % ranks:
            key = "batch_size" if step_size == size else "rampup_batch_size"
            raise ValueError(f"dataset.{key}: got {step_size}, expected a multiple of the {ranks} ranks")
    share, requested = size // ranks, config.dataset.microbatch_size
    step = stages if config.dist.pipeline_schedule == "interleaved" else 1
    # A pipeline needs at least one microbatch per stage; the interleaved
    # schedule needs a multiple of the stages. Without a request, the
    # fewest microbatches, that is the largest ones, are first.
    if requested is None:
        # 12 samples per rank on 4 stages: 4 microbatches of 3, 6 of 2 or 12 of 1
        candidates = [share // n for n in range(stages, share + 1, step) if share % n == 0]
        if candidates:
            return candidates
    micro = share if requested is None else min(requested, share)
    if share % micro:
        raise ValueError(
            f"dataset.microbatch_size: got {micro}, expected a divisor of the {share} samples of a rank"
        )
    n_microbatches = share // micro
    if n_microbatches < stages or n_microbatches % step:
        expected = f"a multiple of {stages}" if step > 1 else f"{stages} or more"
        fix = "Choose another dataset.batch_size." if requested is None else "Lower it, or omit it."
        raise ValueError(
            f"dataset.microbatch_size: {share} samples of a rank in microbatches of {micro}: got "
            f"{n_microbatches} microbatches, expected {expected} for a pipeline of {stages} ranks. {fix}"
        )
    return [micro]
