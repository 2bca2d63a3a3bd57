"""Run what is missing of a study, and say how far it is."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.command import STOPPED
from megatron.io import wait_for_lock
from megatron.run_dir import LOCK, RESULT, is_done, read_json
from megatron.scaling.follow import run_all
from megatron.scaling.ladder import PlannedRun, StudyPlan, expand
from megatron.scaling.launch import Job, Launcher
from megatron.scaling.local import FULL, Device, LocalLauncher
from megatron.scaling.price import Speed, gpus
from megatron.scaling.price_table import price_table
from megatron.scaling.probe import Timing, time_steps
from megatron.scaling.progress import LiveTable
from megatron.scaling.slurm import SlurmLauncher

JOBS_PER_GPU = 4  # small runs leave most of a GPU idle


@dataclass(frozen=True)
class Options:
    """How a sweep runs. `jobs` at a time, None: as many as fit; `retries` of a failed run.

    `details` adds a second table to the price.
    """

    launcher: str = "local"
    jobs: int | None = None
    gpus_per_run: int = 1
    retries: int = 1
    sbatch: list[str] = field(default_factory=list)
    details: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a sweep ended."""

    n_runs: int
    n_done: int
    failed: list[str]
    interrupted: bool


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def devices_of(study: StudyPlan, options: Options) -> tuple[list[Device], bool]:
    """(what runs are placed on here, whether these are GPUs). ValueError where there are too few."""
    found = [] if (study.run.get("dist") or {}).get("cpu_only") else gpus()
    if options.gpus_per_run > max(1, len(found)):
        raise ValueError(f"--gpus-per-run {options.gpus_per_run}: the study may use {len(found)} here")
    if not found:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return [Device(options.jobs or n_cores(), memory)], False
    places = JOBS_PER_GPU if options.jobs is None else -(-options.jobs // len(found))
    most = max(1, n_cores() // len(found))  # each run wants a core of its own to start kernels from
    return [Device(min(places, most), memory) for _, memory in found], True


def jobs_of(study: StudyPlan, options: Options) -> int:
    """Runs at a time, for the price."""
    if options.jobs is not None or options.launcher == "slurm":
        return options.jobs or 1
    devices, _ = devices_of(study, options)
    if options.gpus_per_run > 1:
        return max(1, len(devices) // options.gpus_per_run)
    return sum(device.places for device in devices)


def time_study(study: StudyPlan, options: Options, runs: Sequence[PlannedRun]) -> list[Timing]:
    """Time a few steps of what is still to run, on this machine and as the sweep would run it."""
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    if not waiting or options.launcher != "local":
        return []
    devices, on_gpus = devices_of(study, options)
    launcher = LocalLauncher(devices, on_gpus, options.gpus_per_run)
    memory = FULL * min((device.memory for device in devices if device.memory), default=float("inf"))
    return time_steps(waiting, launcher, jobs_of(study, options), memory, study.directory)


def _launcher(study: StudyPlan, options: Options) -> Launcher:
    if options.launcher == "slurm":
        words = list(options.sbatch)
        if options.gpus_per_run > 1:
            words = [f"--ntasks={options.gpus_per_run}", *words]
        return SlurmLauncher(study.directory / "slurm", options.jobs, words)
    devices, on_gpus = devices_of(study, options)
    return LocalLauncher(devices, on_gpus, options.gpus_per_run)


def sweep(study: StudyPlan, options: Options, price: Callable[[Sequence[PlannedRun]], Speed]) -> Outcome:
    """Run every run of the study that has no result yet; one that fails does not stop the others.

    `price` says how fast they are expected to be.
    """
    runs = expand(study)
    study.directory.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(study.directory / LOCK):  # another sweep may begin at the same moment
        study.save()
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    if len(waiting) < len(runs):
        print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    if not waiting:
        return Outcome(len(runs), len(runs), [], False)
    jobs = jobs_of(study, options)
    print(price_table(runs, price(runs), jobs, options.gpus_per_run, options.details), flush=True)
    live = LiveTable()
    failed: list[str] = []
    n_ended = len(runs) - len(waiting)

    def ended(job: Job, status: int, again: bool) -> None:
        nonlocal n_ended
        n_ended += not again
        if not again and not is_done(job.run.folder, job.run.plan.identity):
            failed.append(f"{job.run.folder.name}: {job.last_words()}")
        live.say(_line(job, status, again, n_ended, len(runs)))

    try:
        _, whole = run_all(waiting, _launcher(study, options), live.draw, ended, options.retries)
    finally:
        live.clear()
    return Outcome(len(runs), _n_done(runs), failed, not whole)


def _n_done(runs: Sequence[PlannedRun]) -> int:
    return sum(is_done(run.folder, run.plan.identity) for run in runs)


def _line(job: Job, status: int, again: bool, n_ended: int, n_runs: int) -> str:
    """What a run that ended has to say for itself."""
    result = read_json(job.run.folder / RESULT)
    width = len(str(n_runs))
    count = f"[{n_ended:>{width}}/{n_runs}] {job.run.config.name}"
    if not is_done(job.run.folder, job.run.plan.identity) or result is None:
        how = "preempted" if status == STOPPED else f"exit status {status}, {job.last_words()}"
        if job.elsewhere:
            how = "another process that trained it has ended"
        return f"{count}: {how}{', starts again' if again else ''}"
    loss = "not scored" if result["loss"] is None else f"held-out loss {result['loss']:.4f}"
    return f"{count}: {loss} nats/token, {result['wall_s']:.0f} s"
