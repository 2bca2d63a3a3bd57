"""Background preparation of the tasks of each step, in pinned memory for a GPU."""

from functools import partial

import torch

from megatron.data.prefetch import Prefetcher
from megatron.objective.task import Task
from megatron.train.build import Run, choose_microbatch_rows


def open_feed(run: Run, first_sample: int, n_steps: int) -> Prefetcher[list[Task]]:
    """Return this rank's microbatches of `n_steps` steps, prepared by dataset.num_workers threads.

    Order, masks and other noise are functions of the sample numbers, so the number of workers does not change
    the result.
    """
    batches = run.open_batches(first_sample)
    rows = choose_microbatch_rows(run.config, run.world)
    size = run.config.dataset.batch_size
    on_gpu = run.world.device.type == "cuda"

    def make_tasks(step: int) -> list[Task]:
        batch = batches.batch_at(first_sample + step * size)
        # the noise is keyed by sample number: the size of a microbatch changes rounding only
        parts = [slice(begin, begin + rows) for begin in range(0, len(batch.tokens), rows)]
        tasks = [run.objective.corrupt(batch.tokens[part], batch.numbers[part]) for part in parts]
        return [task.pin_memory() for task in tasks] if on_gpu else tasks

    # a new thread has CUDA device 0 as its current device and would pin memory for that GPU
    init_thread = partial(torch.cuda.set_device, run.world.device) if on_gpu else None
    return Prefetcher(make_tasks, n_steps, run.config.dataset.num_workers, init_thread)
