"""Timing of a few real steps of a study's smallest and largest model, with the study's launcher.

Probes are processes of tools/pretrain.py on random tokens, with the run's model, batch, dtype and threads. As
many run concurrently as in the study, so that the measurement includes start-up, other load and contention.
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

from megatron.config.read import config_to_dict
from megatron.config.schema import CheckpointConfig, LrSchedulerConfig
from megatron.io import read_json, write_json
from megatron.plan.datapaths import SYNTHETIC
from megatron.plan.memory import estimate_memory
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import Job, Launcher

CACHE = "price.json"  # in the study's directory
CACHE_AGE_S = 900.0
PROBE_FLOPS = 8e10  # per probe: one or two seconds of a CPU core
MIN_STEPS, MAX_STEPS = 10, 240
SKIPPED_STEPS = 2  # at the start: allocation and compilation
MAX_COPIES = 8
TIMEOUT_S = 90.0
POLL_S = 0.05


@dataclass(frozen=True)
class Timing:
    """Timing of one model: FLOPs and seconds per step, and seconds of the process outside its steps."""

    size: str
    flops_per_step: float
    step_s: float
    startup_s: float
    n_steps: int

    def describe(self) -> str:
        """Return a short description."""
        return f"{self.n_steps} steps of {self.size}"


def flops_per_step(run: PlannedRun) -> float:
    """Return the training FLOPs of one step."""
    return run.plan.flops_per_token * run.plan.tokens_per_step


def time_steps(
    runs: Sequence[PlannedRun],
    launcher: Launcher,
    jobs: int,
    memory_bytes: float,
    directory: Path,
    timeout_s: float = TIMEOUT_S,
) -> list[Timing]:
    """Time the models with the fewest and the most FLOPs per step of `runs`, `jobs` processes at a time.

    Results are cached in `directory`/price.json for CACHE_AGE_S, by machine and settings.
    Returns an empty list if the largest model exceeds `memory_bytes` or no process completed its first steps.
    """
    ordered = sorted(runs, key=flops_per_step)
    ends = [ordered[0], ordered[-1]]
    # equal FLOPs per step: one model is enough
    if flops_per_step(ends[0]) == flops_per_step(ends[1]):
        ends = ends[:1]
    # the launcher would start it anyway on an empty device, and running out of memory can disturb other
    # processes
    if estimate_memory(ends[-1].config) > memory_bytes:
        return []
    # at least one copy of each model, at most as many as run concurrently and fit the memory
    n_copies = max(len(ends), min(jobs, len(runs), MAX_COPIES))
    # Copies alternate between small and large; the estimate assumes that all of them are large. Example: jobs
    # = 8, memory for 5 large models: 5 copies, 3 small and 2 large.
    n_copies = min(n_copies, max(len(ends), int(memory_bytes // estimate_memory(ends[-1].config))))
    key = _hash_settings(ends, jobs)
    cached = read_json(directory / CACHE)
    # 0 <=: a time in the future, from a host with another clock, is not trusted
    if cached and cached.get("key") == key and 0 <= time.time() - cached.get("time", 0) < CACHE_AGE_S:
        with contextlib.suppress(KeyError, TypeError):
            return [Timing(**entry) for entry in cached["timings"]]
    with tempfile.TemporaryDirectory(prefix="price-") as folder:
        probes = [_make_probe(ends[i % len(ends)], Path(folder) / str(i)) for i in range(n_copies)]
        timings = _average_timings(_run_probes(probes, launcher, jobs, timeout_s))
    if timings:
        with contextlib.suppress(OSError):  # the cache is optional: the directory may be read-only
            directory.mkdir(parents=True, exist_ok=True)
            entries = [vars(timing) for timing in timings]
            write_json(directory / CACHE, {"key": key, "time": time.time(), "timings": entries})
    return timings


def _hash_settings(ends: Sequence[PlannedRun], jobs: int) -> str:
    """Return a hash of the machine and of all settings that change the time of a step."""
    # the identity of the machine is in the key, since directories can be on a shared file system
    settings: list[Any] = [platform.node(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), jobs]
    for run in ends:
        config = config_to_dict(run.config)
        settings.append({name: config[name] for name in ("model", "dist", "objective", "optim")})
        settings.append([run.plan.tokens_per_step, run.config.misc.n_threads])
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def _make_probe(run: PlannedRun, folder: Path) -> PlannedRun:
    """Return the run on random tokens, shortened to the number of steps that costs PROBE_FLOPS."""
    n_steps = min(max(PROBE_FLOPS / flops_per_step(run), MIN_STEPS), MAX_STEPS)
    config = run.config
    # settings that cost extra time or write files are reset: validation, checkpoints, wandb, profiling
    config = replace(
        config,
        # random tokens: a price can be estimated before the corpus exists
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


def _run_probes(
    probes: Sequence[PlannedRun], launcher: Launcher, jobs: int, timeout_s: float
) -> list[tuple[PlannedRun, float | None]]:
    """Return (probe, seconds of its process); None for a probe that failed or exceeded `timeout_s`."""
    waiting, running = list(probes), list[Job]()
    began: dict[Path, float] = {}
    results: list[tuple[PlannedRun, float | None]] = []
    # monotonic clock: wall-clock adjustments must not end or extend the probe
    deadline = time.monotonic() + timeout_s
    with _interrupt_on_sigterm():
        try:
            while (waiting or running) and time.monotonic() < deadline:
                free = waiting[: max(0, jobs - len(running))]
                for run in free:  # one call per run, so that each process has its own start time
                    started = time.monotonic()
                    for job in launcher.start([run]):
                        began[job.run.folder] = started
                        waiting.remove(job.run)
                        running.append(job)
                time.sleep(POLL_S)
                for job, status in launcher.collect_ended(running):
                    running.remove(job)
                    seconds = time.monotonic() - began[job.run.folder]
                    results.append((job.run, None if status else seconds))
        finally:
            # also after KeyboardInterrupt; collect_ended then frees devices and locks of the stopped probes
            launcher.stop(running)
            launcher.collect_ended(running)
    return results + [(job.run, None) for job in running]


def _average_timings(results: Sequence[tuple[PlannedRun, float | None]]) -> list[Timing]:
    """Return the mean timing over the processes of each model, small to large."""
    by_size: dict[float, list[Timing]] = {}
    for run, seconds in results:
        lines = [line for line in read_metrics(run.folder) if line["kind"] == "train"]
        if len(lines) <= SKIPPED_STEPS:
            continue
        # the first steps are excluded, so the interval starts at the end of step SKIPPED_STEPS
        # Example with SKIPPED_STEPS = 2 and 10 steps: elapsed_s at the ends of steps 2 and 10, divided by 8.
        first, last = lines[SKIPPED_STEPS - 1], lines[-1]
        step_s = (last["elapsed_s"] - first["elapsed_s"]) / (last["step"] - first["step"])
        # Start-up is the rest of the process's time: its total minus all steps at the mean rate. A negative
        # rest is noise.
        outside = float("nan") if seconds is None else max(0.0, seconds - step_s * last["step"])
        # models are identified by FLOPs per step, as in time_steps: copies of one model have equal values
        flops = flops_per_step(run)
        timing = Timing(run.plan.size, flops, step_s, outside, last["step"])
        by_size.setdefault(flops, []).append(timing)
    timings = []
    for flops in sorted(by_size):
        group = by_size[flops]
        # x == x is False for NaN, the start-up of a stopped probe
        outside = [timing.startup_s for timing in group if timing.startup_s == timing.startup_s]
        if not outside:  # all probes of this model were stopped: use the start-up of the other models
            others = [t.startup_s for ts in by_size.values() for t in ts if t.startup_s == t.startup_s]
            outside = others or [0.0]
        step_s = sum(timing.step_s for timing in group) / len(group)
        timings.append(replace(group[0], step_s=step_s, startup_s=sum(outside) / len(outside)))
    return timings


@contextlib.contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as for SIGINT, so that started processes are stopped."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
