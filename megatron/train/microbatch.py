"""Number of samples per forward: allowed values, the choice by estimated memory, and its check on a GPU."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatron.config.schema import RunConfig
from megatron.engine.interface import Engine
from megatron.engine.torch.compilation import is_compilation_requested
from megatron.engine.torch.torch_native import TorchEngine
from megatron.log import get_logger
from megatron.objective.task import Objective, Task
from megatron.parallel.collectives import any_rank, min_over_ranks
from megatron.parallel.world import World
from megatron.plan.memory import choose_rows, estimate_memory

MAX_MEASURED_SHARE = 0.92  # of a GPU's memory, measured without the fragments of the allocator

log = get_logger(__name__)


def choose_microbatch_rows(config: RunConfig, world: World, memory: float | None = None) -> int:
    """Return the number of samples per forward on a rank. Collective.

    memory   bytes of the device; None: those of a GPU, and no limit on a CPU

    The default is all samples of the rank; on a GPU the most whose estimated memory fits. Raises ValueError
    if the numbers do not divide.
    """
    candidates = list_microbatches(config, world)
    if config.dataset.microbatch_size is not None or world.device.type != "cuda" and memory is None:
        return candidates[0]
    if memory is None:
        # of other processes on the same GPU only what is free now
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


def confirm_microbatch_rows(
    rows: int, engine: Engine, objective: Objective, config: RunConfig, world: World
) -> int:
    """Return the number of samples per forward that a trial on the GPU confirms, `rows` or fewer. Collective.

    Only where the number was chosen by the estimate, and a forward needs no other rank: a rank that runs out
    of memory in the middle of a collective would leave the others waiting.
    """
    if config.dataset.microbatch_size is not None or world.device.type != "cuda":
        return rows
    if not isinstance(engine, TorchEngine) or not engine.can_probe:
        return rows
    limit = torch.cuda.get_device_properties(world.device).total_memory * MAX_MEASURED_SHARE

    def measure(n: int) -> float:
        torch.cuda.reset_peak_memory_stats(world.device)
        engine.probe(build_largest_task(objective, config, n).pin_memory())
        peak = float(torch.cuda.max_memory_allocated(world.device))
        estimate = estimate_memory(config, world.n_ranks, n, engine.is_compiled)
        log.info(
            "dataset.microbatch_size: %d samples per forward need %.1f GB, estimated %.1f GB",
            n,
            peak / 1e9,
            estimate / 1e9,
        )
        return peak

    candidates = [n for n in list_microbatches(config, world) if n <= rows]
    confirmed = find_fitting_rows(candidates, measure, limit, world)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(world.device)
    return confirmed


def find_fitting_rows(
    candidates: Sequence[int], measure: Callable[[int], float], limit: float, world: World
) -> int:
    """Return the first candidate whose peak memory is at most `limit` on every rank.

    The last candidate needs no trial. measure(n) returns the peak of a forward and backward of n samples, or
    raises an error of memory. After a failure at n samples the next candidate is at most n / 2.
    """
    remaining = list(candidates)
    while len(remaining) > 1:
        rows = remaining[0]
        if not any_rank(_exceeds(rows, measure, limit), world):
            return rows
        if world.is_first:
            log.warning(
                "dataset.microbatch_size: %d samples per forward exceed the memory; fewer are tried", rows
            )
        remaining = [n for n in remaining if n <= rows // 2] or remaining[-1:]
        # graphs of the failed size would make the
        # compiler treat the number of samples as variable
        torch._dynamo.reset()
    return remaining[0]


def _exceeds(rows: int, measure: Callable[[int], float], limit: float) -> bool:
    try:
        return measure(rows) > limit
    except RuntimeError as error:
        # the compiler, which runs kernels to choose the
        # fastest, wraps the error in one of its own
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
            raise
        # outside of this block the exception and the tensors in its frames are gone
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return True


def build_largest_task(objective: Objective, config: RunConfig, n_samples: int) -> Task:
    """Return a training task of `n_samples` samples that predicts every position, with the most memory."""
    tokens = np.zeros((n_samples, config.dataset.seq_len + 1), dtype=np.int64)
    task = objective.corrupt(tokens, np.arange(n_samples))
    if task.positions is None:
        return task
    n = task.inputs.numel()
    return replace(
        task,
        positions=torch.arange(n),
        targets=torch.zeros(n, dtype=torch.int64),
        scale=None if task.scale is None else torch.ones(n),
    )
