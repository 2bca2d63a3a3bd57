"""Number of samples per forward: allowed values, and the choice by estimated memory on a GPU."""

import torch

from megatron.config.schema import RunConfig
from megatron.engine.torch.compilation import is_compilation_requested
from megatron.log import get_logger
from megatron.parallel.collectives import min_over_ranks
from megatron.parallel.world import World
from megatron.plan.memory import choose_rows

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


def list_microbatches(config: RunConfig, world: World) -> list[int]:
    """Return the allowed numbers of samples per forward, largest first; only the requested one if it is set.

    Raises ValueError if batch, ranks and microbatch do not divide.
    """
    size, ranks, stages = config.dataset.batch_size, world.dp_size, world.layout.pipeline
    if size % ranks:
        raise ValueError(f"dataset.batch_size: got {size}, expected a multiple of the {ranks} ranks")
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
