"""A torch profiler trace of a few steps."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.io import atomic_path, write_atomic
from megatron.log import get_logger
from megatron.parallel.world import World
from megatron.plan.run_dir import PROFILE

log = get_logger(__name__)
N_ROWS = 30  # in the table next to the trace


class ProfileWindow:
    """Profiles steps first..last on rank 0, counted from 1 as in the log; other steps have no overhead.

    profile/steps_<first>-<last>.json.gz   trace for chrome://tracing or ui.perfetto.dev
    profile/steps_<first>-<last>.txt       the most expensive operators
    """

    def __init__(self, steps: list[int] | None, run: Path, world: World) -> None:
        self.first, self.last = steps if steps is not None and world.is_first else (0, 0)
        self.folder = run / PROFILE
        self.on_gpu = world.device.type == "cuda"
        self.profiler: profile | None = None

    def start_step(self, step: int) -> None:
        """Start the profiler if this is the first step of the window."""
        if step == self.first:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
            self.profiler = profile(activities=kinds, record_shapes=True)
            self.profiler.start()

    def finish_step(self, step: int) -> None:
        """Finish a step; after the last one, write the trace."""
        if self.profiler is not None:
            self.profiler.step()
            if step == self.last:
                self.close(step)

    def close(self, step: int) -> None:
        """Write the trace of the steps up to `step` if the profiler is running."""
        if self.profiler is None:
            return
        if self.on_gpu:
            torch.cuda.synchronize()
        self.profiler.stop()
        self.folder.mkdir(exist_ok=True)
        trace = self.folder / f"steps_{self.first}-{step}.json.gz"
        # torch compresses by the suffix of the name
        with atomic_path(trace, partial_name=f"partial.{trace.name}") as partial:
            self.profiler.export_chrome_trace(str(partial))
        by = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        table = self.profiler.key_averages().table(sort_by=by, row_limit=N_ROWS)
        write_atomic(trace.with_name(f"steps_{self.first}-{step}.txt"), table + "\n")
        self.profiler = None
        log.info("profile of steps %d to %d: %s", self.first, step, trace)
