"""Sweep over a study: train the missing runs, with a live table of the running jobs on a terminal."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from megatron.cli import STOPPED, LiveView
from megatron.io import open_exclusive, read_json
from megatron.plan.memory import estimate_memory
from megatron.plan.run_dir import LOCK, RESULT, is_done
from megatron.study import price
from megatron.study.format import format_duration
from megatron.study.ladder import PlannedRun, StudyPlan, check_sealed_runs, expand_study, select_runs_of_part
from megatron.study.launchers.launch import Job, Launcher, SweepState, read_last_metrics, run_all
from megatron.study.launchers.local import MAX_MEMORY_SHARE, Device, LocalLauncher, query_gpus
from megatron.study.launchers.slurm import SlurmLauncher
from megatron.study.price import Speed

JOBS_PER_GPU = 4  # default; a small run uses only part of a GPU
HEAD = ("running", "step", "of", "done", "loss", "tokens/s", "left")
MAX_ROWS = 20  # in the live table
REDRAW_INTERVAL_S = 0.5  # seconds between two redraws


@dataclass(frozen=True)
class SweepOptions:
    """Settings of a sweep.

    jobs     concurrent runs; None: as many as fit
    retries  restarts of a failed run
    sbatch   additional arguments of sbatch
    part     only the runs of this part of the study
    """

    launcher: str = "local"
    jobs: int | None = None
    gpus_per_run: int = 1
    retries: int = 1
    sbatch: list[str] = field(default_factory=list)
    part: str | None = None


@dataclass(frozen=True)
class SweepOutcome:
    """Result of a sweep."""

    n_runs: int
    n_done: int
    failed: list[str]
    interrupted: bool


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def make_local_launcher(study: StudyPlan, options: SweepOptions) -> LocalLauncher:
    """Return the launcher on the GPUs or the CPU of this machine. Raises ValueError for too few GPUs."""
    gpu_list = [] if (study.run.get("dist") or {}).get("cpu_only") else query_gpus()
    if options.gpus_per_run > max(1, len(gpu_list)):
        raise ValueError(f"--gpus-per-run: got {options.gpus_per_run}, expected at most {len(gpu_list)}.")
    if not gpu_list:
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return LocalLauncher([Device(options.jobs or count_cores(), memory)], on_gpus=False)
    # at least `jobs` in total: ceiling division
    # Example: jobs = 10 on 4 GPUs are ceil(10 / 4) = 3 slots each, 12 in all.
    places = JOBS_PER_GPU if options.jobs is None else -(-options.jobs // len(gpu_list))
    most = max(1, count_cores() // len(gpu_list))  # each run needs a core to launch kernels
    devices = [Device(min(places, most), memory) for _, memory in gpu_list]
    return LocalLauncher(devices, True, options.gpus_per_run)


def make_launcher(study: StudyPlan, options: SweepOptions) -> Launcher:
    """Return the launcher of the options. Raises ValueError for too few GPUs."""
    if options.launcher == "local":
        return make_local_launcher(study, options)
    # Slurm needs one task per GPU; the user's own
    # arguments follow and can override it
    words = [f"--ntasks={options.gpus_per_run}"] if options.gpus_per_run > 1 else []
    return SlurmLauncher(study.directory / "slurm", options.jobs, [*words, *options.sbatch])


def count_jobs(study: StudyPlan, options: SweepOptions) -> int:
    """Return the number of concurrent runs, for the price."""
    return options.jobs or make_launcher(study, options).n_slots


def time_study(study: StudyPlan, options: SweepOptions, runs: Sequence[PlannedRun]) -> Speed:
    """Time a few steps of the remaining runs on this machine, under the conditions of the sweep.

    The speed is unknown for runs on other machines, without a
    remaining run, and for models that exceed the memory.
    """
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    if not waiting or options.launcher != "local":
        return price.UNKNOWN_SPEED
    launcher = make_local_launcher(study, options)
    memory = MAX_MEMORY_SHARE * min((d.memory for d in launcher.devices if d.memory), default=float("inf"))
    # the launcher would start it anyway on an empty device, and running out
    # of memory can disturb other processes
    if estimate_memory(max(waiting, key=price.flops_per_step).config) > memory:
        return price.UNKNOWN_SPEED
    return price.time_steps(waiting, launcher, count_jobs(study, options))


def run_sweep(
    study: StudyPlan, options: SweepOptions, estimate: Callable[[Sequence[PlannedRun]], Speed]
) -> SweepOutcome:
    """Train every run of the study that has no result yet; a failed run does not stop the others.

    estimate: returns the expected speed of the runs. The table
    of all runs is printed by the first sweep only. Raises
    ValueError while another sweep of the study runs.
    """
    runs = expand_study(study)
    check_sealed_runs(study, runs)
    runs = select_runs_of_part(study, runs, options.part)
    study.directory.mkdir(parents=True, exist_ok=True)
    # the lock ends with the process: one sweep of a study at a time
    with open_exclusive(study.directory / LOCK, study.directory):
        # saved first: the report and a forecast need the file even if all
        # runs are done
        study.save()
        waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
        if not waiting:
            print(f"nothing to do: {len(runs)} of {len(runs)} runs are done")
            return SweepOutcome(len(runs), len(runs), [], False)
        jobs = count_jobs(study, options)
        speed = estimate(runs)
        is_first = len(waiting) == len(runs)
        print(price.format_price(runs, speed, jobs, options.gpus_per_run, lists_runs=is_first), flush=True)
        live = LiveTable(len(runs), speed, jobs)
        failed: list[str] = []
        n_ended = len(runs) - len(waiting)

        def report_end(job: Job, status: int, again: bool) -> None:
            nonlocal n_ended
            n_ended += not again
            if not again and not is_done(job.run.folder, job.run.plan.identity):
                failed.append(f"{job.run.folder.name}: {job.last_line()}")
            live.view.print_line(_format_end(job, status, again, n_ended, len(runs)))

        try:
            _, whole = run_all(waiting, make_launcher(study, options), live.draw, report_end, options.retries)
        finally:
            # also after an exception: the traceback
            # would be printed over the table
            live.view.close()
        # counted from the files, as results can come from other processes
        n_done = sum(is_done(run.folder, run.plan.identity) for run in runs)
        return SweepOutcome(len(runs), n_done, failed, not whole)


def _format_end(job: Job, status: int, again: bool, n_ended: int, n_runs: int) -> str:
    """Return a line on a run that ended: its loss and time, or the reason of its failure."""
    result = read_json(job.run.folder / RESULT)
    width = len(str(n_runs))
    count = f"[{n_ended:>{width}}/{n_runs}] {job.run.config.name}"
    if not is_done(job.run.folder, job.run.plan.identity) or result is None:
        how = "preempted" if status == STOPPED else f"exit status {status}, {job.last_line()}"
        return f"{count}: {how}{', starts again' if again else ''}"
    loss = "not scored" if result["loss"] is None else f"held-out loss {result['loss']:.4f}"
    return f"{count}: {loss} nats/token, {result['wall_s']:.0f} s"


@dataclass
class LiveTable:
    """Table that is redrawn in place. Without a terminal only `print_line` has output."""

    n_runs: int
    speed: Speed
    jobs: int
    out: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.monotonic
    last_draw_s: float = -REDRAW_INTERVAL_S

    def __post_init__(self) -> None:
        self.view = LiveView(self.out)

    def draw(self, state: SweepState) -> None:
        """Show the state, at most every REDRAW_INTERVAL_S."""
        if not self.view.is_live or self.clock() - self.last_draw_s < REDRAW_INTERVAL_S:
            return
        self.last_draw_s = self.clock()
        rows = [format_job_row(job) for job in state.running[:MAX_ROWS]]
        counts = format_counts(state, self.n_runs, self.seconds_left(state))
        self.view.show(HEAD, rows, ("running",), [counts])

    def seconds_left(self, state: SweepState) -> float:
        """Return the expected time until all runs have ended, NaN without a price."""
        left = [self.speed.seconds(job.run) * (1 - job.fraction_done()) for job in state.running]
        left += [self.speed.seconds(run) for run in state.waiting]
        return price.makespan(left, self.jobs)


def format_counts(state: SweepState, n_runs: int, left_s: float) -> str:
    """Return the line below the table: counts of all runs, and the time left."""
    n_open = len(state.running) + len(state.waiting) + len(state.failed)
    counts = f"{n_runs - n_open} of {n_runs} runs done, "
    counts += f"{len(state.running)} running, {len(state.waiting)} waiting"
    counts += f", {len(state.failed)} failed" if state.failed else ""
    return f"{counts}; about {format_duration(left_s)} left"


def format_job_row(job: Job) -> tuple[str, ...]:
    """Return the cells of a running job, in the order of HEAD."""
    record, plan = read_last_metrics(job.run.folder), job.run.plan
    step, loss, tps = record.get("step", 0), record.get("loss"), record.get("tps")
    steps = (f"{step:,}", f"{plan.n_steps:,}", f"{job.fraction_done():.0%}")
    loss = f"{loss:.4f}" if isinstance(loss, float) else ""
    if not tps:
        return (job.run.config.name, *steps, loss, "", "?")
    left_s = (plan.n_steps - step) * plan.tokens_per_step / tps
    return (job.run.config.name, *steps, loss, f"{tps:,.0f}", format_duration(left_s))
