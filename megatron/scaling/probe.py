"""Time a few real steps of a study's smallest and largest model, as the study's own launcher starts them.

Runs are processes of tools/pretrain.py on random tokens with the run's model, batch, type and threads, as
many at a time as the study will have, so that start-up, other load and contention are in the measurement.
"""

import contextlib
import hashlib
import json
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.config.datapaths import SYNTHETIC
from megatron.config.plan import plan_run
from megatron.config.read import as_dict
from megatron.config.schema import CheckpointConfig, LrSchedulerConfig
from megatron.run_dir import read_json, read_metrics, write_json
from megatron.scaling.ladder import PlannedRun
from megatron.scaling.launch import Job, Launcher
from megatron.scaling.memory import bytes_of

CACHE = "price.json"  # in the study's directory
CACHE_AGE_S = 900.0
PROBE_FLOPS = 8e10  # of one probe: a second or two of a CPU core
FEWEST_STEPS, MOST_STEPS = 10, 240
SKIPPED_STEPS = 2  # the first ones allocate and compile
MOST_COPIES = 8
TIMEOUT_S = 90.0
POLL_S = 0.05


@dataclass(frozen=True)
class Timing:
    """Of one model: FLOPs and seconds of a step, and seconds of a process outside its steps."""

    size: str
    flops_per_step: float
    step_s: float
    startup_s: float
    n_steps: int

    def words(self) -> str:
        """For people."""
        return f"{self.n_steps} steps of {self.size}"


def flops_per_step(run: PlannedRun) -> float:
    """Training FLOPs of one step."""
    return run.plan.flops_per_token * run.plan.tokens_per_step


def time_steps(
    runs: Sequence[PlannedRun],
    launcher: Launcher,
    jobs: int,
    memory_bytes: float,
    directory: Path,
    timeout_s: float = TIMEOUT_S,
) -> list[Timing]:
    """Timings of the model of fewest and of most FLOPs a step among `runs`, `jobs` processes at a time.

    Read from `directory`/price.json where that is of this machine, these settings and the last CACHE_AGE_S.
    Empty where the largest model does not fit `memory_bytes` or no process got through its first steps.
    """
    ordered = sorted(runs, key=flops_per_step)
    ends = [ordered[0], ordered[-1]]
    if flops_per_step(ends[0]) == flops_per_step(ends[1]):
        ends = ends[:1]
    if bytes_of(ends[-1].config) > memory_bytes:
        return []
    n_copies = max(len(ends), min(jobs, len(runs), MOST_COPIES))
    n_copies = min(n_copies, max(len(ends), int(memory_bytes // bytes_of(ends[-1].config))))
    key = _key(ends, jobs)
    cached = read_json(directory / CACHE)
    if cached and cached.get("key") == key and 0 <= time.time() - cached.get("time", 0) < CACHE_AGE_S:
        with contextlib.suppress(KeyError, TypeError):
            return [Timing(**entry) for entry in cached["timings"]]
    with tempfile.TemporaryDirectory(prefix="price-") as folder:
        probes = [_probe(ends[i % len(ends)], Path(folder) / str(i)) for i in range(n_copies)]
        timings = _timings(_run(probes, launcher, jobs, timeout_s))
    if timings:
        with contextlib.suppress(OSError):  # a price is printed where nothing can be written, too
            directory.mkdir(parents=True, exist_ok=True)
            entries = [vars(timing) for timing in timings]
            write_json(directory / CACHE, {"key": key, "time": time.time(), "timings": entries})
    return timings


def _key(ends: Sequence[PlannedRun], jobs: int) -> str:
    """Hash of the machine and of whatever changes the time of a step."""
    settings: list[Any] = [platform.node(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), jobs]
    for run in ends:
        config = as_dict(run.config)
        settings.append({name: config[name] for name in ("model", "dist", "objective", "optim")})
        settings.append([run.plan.tokens_per_step, run.config.misc.n_threads])
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _probe(run: PlannedRun, folder: Path) -> PlannedRun:
    """The run on random tokens, cut to a few steps: as many as cost PROBE_FLOPS."""
    n_steps = min(max(PROBE_FLOPS / flops_per_step(run), FEWEST_STEPS), MOST_STEPS)
    config = run.config
    config = replace(
        config,
        dataset=replace(
            config.dataset, path_train=SYNTHETIC, path_eval=SYNTHETIC, mixture=None, unique_tokens=None
        ),
        lr_scheduler=LrSchedulerConfig(kind="constant", total_iterations=int(n_steps)),
        evaluation=replace(config.evaluation, every_iterations=None, max_samples=1, num_mc=1),
        checkpoint=CheckpointConfig(),
        logging=replace(
            config.logging, run_dir=str(folder), every_iterations=1, wandb=None, profile_steps=None
        ),
        misc=replace(config.misc, stop_file=None, max_hours=None),
    )
    return PlannedRun(config, plan_run(config), folder)


def _run(
    probes: Sequence[PlannedRun], launcher: Launcher, jobs: int, timeout_s: float
) -> list[tuple[PlannedRun, float | None]]:
    """(probe, seconds of its process), None for one that failed or was stopped after `timeout_s`."""
    waiting, running = list(probes), list[Job]()
    began: dict[Path, float] = {}
    results: list[tuple[PlannedRun, float | None]] = []
    deadline = time.monotonic() + timeout_s
    with _interruptible():
        try:
            while (waiting or running) and time.monotonic() < deadline:
                free = waiting[: max(0, jobs - len(running))]
                for run in free:  # one by one: the clock of a process begins when it does
                    started = time.monotonic()
                    for job in launcher.start([run]):
                        began[job.run.folder] = started
                        waiting.remove(job.run)
                        running.append(job)
                time.sleep(POLL_S)
                for job, status in launcher.ended(running):
                    running.remove(job)
                    seconds = time.monotonic() - began[job.run.folder]
                    results.append((job.run, None if status else seconds))
        finally:
            launcher.stop(running)
            launcher.ended(running)
    return results + [(job.run, None) for job in running]


def _timings(results: Sequence[tuple[PlannedRun, float | None]]) -> list[Timing]:
    """One of each model, the mean over its processes; small to large."""
    by_size: dict[float, list[Timing]] = {}
    for run, seconds in results:
        lines = [line for line in read_metrics(run.folder) if line["kind"] == "train"]
        if len(lines) <= SKIPPED_STEPS:
            continue
        first, last = lines[SKIPPED_STEPS - 1], lines[-1]
        step_s = (last["elapsed_s"] - first["elapsed_s"]) / (last["step"] - first["step"])
        outside = float("nan") if seconds is None else max(0.0, seconds - step_s * last["step"])
        flops = flops_per_step(run)
        timing = Timing(run.plan.size, flops, step_s, outside, last["step"])
        by_size.setdefault(flops, []).append(timing)
    found = []
    for flops in sorted(by_size):
        group = by_size[flops]
        outside = [timing.startup_s for timing in group if timing.startup_s == timing.startup_s]
        if not outside:  # stopped on its way: its start-up is not known, that of the others stands for it
            others = [t.startup_s for ts in by_size.values() for t in ts if t.startup_s == t.startup_s]
            outside = others or [0.0]
        step_s = sum(timing.step_s for timing in group) / len(group)
        found.append(replace(group[0], step_s=step_s, startup_s=sum(outside) / len(outside)))
    return found


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does, so that processes that were started are ended."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
