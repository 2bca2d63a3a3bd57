"""Run all runs of a study through a launcher: interface, locks, folders, retries, and stops on signals."""

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from megatron.cli import STOPPED, TOOLS, replace_lost_terminal, stop_signals
from megatron.config.read import write_config
from megatron.io import write_json
from megatron.plan.run_dir import CHECKPOINTS, CONFIG, EXIT, METRICS, PLAN, is_done, lock_run
from megatron.study.forecast import read_forecasts, record_seals
from megatron.study.ladder import PlannedRun
from megatron.study.table import parse_metrics

PRETRAIN = TOOLS / "pretrain.py"
ROOT = Path(__file__).resolve().parents[3]
LOG = "log.txt"
STOP_WAIT_S = 60.0


@dataclass
class Job:
    """One run that was started.

    handle   process or task, as defined by the launcher
    devices  indices of the local devices that the run occupies
    """

    run: PlannedRun
    handle: Any
    devices: list[int] = field(default_factory=list)

    def fraction_done(self) -> float:
        """Return the share of the run's trained steps that it has logged, 0 to 1."""
        # metrics count steps from the trunk's start, so the branch point
        # is subtracted. Example: a run of 500 steps that branches at 400
        # has begin = 400; logged step 450 is (450 - 400) / 100 = 50 %.
        begin = self.run.plan.n_steps - self.run.trained_steps
        step = read_last_metrics(self.run.folder).get("step", 0)
        return min(1.0, max(0.0, (step - begin) / self.run.trained_steps))

    def last_line(self) -> str:
        """Return the last line of the run's output: the error, if it failed."""
        path = self.run.folder / LOG
        lines = path.read_text(errors="replace").strip().splitlines() if path.is_file() else []
        return lines[-1] if lines else "no output"


def read_last_metrics(run: Path, tail_bytes: int = 4096) -> dict[str, Any]:
    """Return the last complete record of metrics.jsonl, {} without one. Reads only the end of the file."""
    path = run / METRICS
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        # The first line of the tail is usually cut. Its rest is not a JSON
        # object and is skipped.
        file.seek(max(0, path.stat().st_size - tail_bytes))
        lines = file.read().decode(errors="replace").split("\n")[:-1]  # the last part is incomplete
    return next(parse_metrics(reversed(lines)), {})


class Launcher(Protocol):
    """Starts and follows runs. Methods raise OSError if the backend does not respond."""

    n_slots: int = 1  # concurrent runs, for the price

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """Prepare and start the `runs` that fit now, in order; none while the backend does not respond.

        A run that an earlier sweep started is followed. A run that
        another process trains is not started, and waits.
        """

    def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """Return the jobs that have ended, with exit status."""

    def stop(self, jobs: Sequence[Job]) -> None:
        """Signal every job to save and stop, wait, and kill those that do not stop."""

    def detach(self, jobs: Sequence[Job]) -> None:
        """After an error or SIGHUP: stop jobs that need the sweep, and leave the others running."""
        self.stop(jobs)


def is_free(run: PlannedRun) -> bool:
    """Return whether a run has no result and no process trains it: one that outlived an earlier sweep."""
    # a probe of the lock, released at once so that a training can
    # take it. A training process that starts during this probe
    # finds the folder locked. It retries for LOCK_WAIT_S
    # (train/loop.py), much longer than the probe takes.
    training = lock_run(run.folder)
    if training is None:
        return False
    training.close()
    return not is_done(run.folder, run.plan.identity)


def prepare_run(run: PlannedRun) -> None:
    """Write the configuration for tools/pretrain.py, with branch_from if the trunk has a checkpoint.

    The hashes of all forecasts are written first: they show
    that the run was started after these.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    if run.folder.parent.name == "runs":  # in a study, and not a timed probe
        record_seals(run.folder, read_forecasts(run.folder.parents[1]))
    config = run.config
    # without the trunk's checkpoint the run trains all its steps from scratch
    trunk = None if run.branch is None else find_checkpoint(run.branch.trunk, run.branch.step)
    if trunk is not None:
        config = replace(config, checkpoint=replace(config.checkpoint, branch_from=str(trunk)))
    write_config(config, run.folder / CONFIG)
    # plan.json exists from here on, although the run has not started: without
    # metrics.jsonl the table lists the run as missing
    write_json(run.folder / PLAN, run.plan.as_dict())
    # the record of an earlier failure is obsolete now
    (run.folder / EXIT).unlink(missing_ok=True)


def find_checkpoint(run_dir: Path, last_step: int, exact: bool = False) -> Path | None:
    """Return the latest complete checkpoint up to `last_step`, or with `exact` at it; None without one.

    Preemption checkpoints are ignored, because the run deletes
    them when it resumes.
    """
    checkpoints: dict[tuple[int, int], Path] = {}
    # meta.json is part of a complete checkpoint; a folder without it is
    # skipped by the pattern
    for meta_file in (run_dir / CHECKPOINTS).glob("*/meta.json"):
        if meta_file.parent.suffix in (".preempt", ".partial"):
            continue
        # a file may be damaged, or another process deletes it
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            meta = json.loads(meta_file.read_text())
            # for one step the later generation counts: the run was rolled
            # back past the earlier one
            checkpoints[int(meta["step"]), int(meta.get("generation", 0))] = meta_file.parent
    # keys are (step, generation) and compare in this order: the latest step,
    # and of that step the last generation
    steps = [key for key in checkpoints if key[0] == last_step or key[0] < last_step and not exact]
    return checkpoints[max(steps)] if steps else None


@dataclass
class SweepState:
    """State of a sweep. Runs move from waiting to running, then to done or failed."""

    waiting: list[PlannedRun]
    running: list[Job] = field(default_factory=list)
    done: list[PlannedRun] = field(default_factory=list)
    failed: list[PlannedRun] = field(default_factory=list)
    n_failures: dict[str, int] = field(default_factory=dict)  # by identity

    def find_ready(self) -> list[PlannedRun]:
        """Return the waiting runs that can start, most expensive first.

        A branch can start when its trunk has the checkpoint of the
        branch point, or has ended without it.
        """
        # A failed trunk is in neither list: its branches become
        # ready, and start from its last checkpoint before
        # the branch point or from scratch (launch.prepare_run).
        alive = {run.folder for run in self.waiting} | {job.run.folder for job in self.running}

        def can_start(run: PlannedRun) -> bool:
            at = run.branch
            # a trunk that is neither waiting nor running has ended: nothing
            # to wait for
            return at is None or at.trunk not in alive or find_checkpoint(at.trunk, at.step, True) is not None

        # most expensive first: longest-processing-time scheduling keeps the
        # last jobs short
        return sorted(filter(can_start, self.waiting), key=lambda run: -run.trained_flops)

    def has_stop_file(self) -> bool:
        """Return whether the stop file of an unfinished run exists, which would stop every restart too."""
        runs = [*self.waiting, *(job.run for job in self.running)]
        stop_files = {run.config.misc.stop_file for run in runs} - {None}
        return any(Path(str(file)).exists() for file in stop_files)


def run_all(
    runs: Sequence[PlannedRun],
    launcher: Launcher,
    on_poll: Callable[[SweepState], None],
    on_end: Callable[[Job, int, bool], None],
    retries: int = 1,
    poll_s: float = 0.5,
) -> tuple[SweepState, bool]:
    """Run all runs, retrying each failed run up to `retries` times. Return (state, whether all runs ended).

    A preempted run resumes without limit.
    A run that another process trains stays
    in the list of waiting runs until its result exists,
    or until its lock is free and it can be started.
    All runs stop when the stop file of an unfinished run appears.

    on_poll  called every `poll_s` seconds with the state
    on_end   called for each job that ends, with its exit
             status and whether it will be restarted
    """
    state = SweepState(list(runs))
    # Handlers do not raise: they append to a list, which the loop
    # tests between two steps. An exception raised inside
    # a handler could interrupt the code between the start of a job
    # and its entry in `state.running`: no list would contain
    # the job, and neither `stop` nor `detach` would get it.
    with _collect_signals() as signals:
        try:
            while (state.waiting or state.running) and not signals and not state.has_stop_file():
                for job in launcher.start(state.find_ready()):
                    state.waiting.remove(job.run)
                    state.running.append(job)
                time.sleep(poll_s)
                for job, status in launcher.collect_ended(state.running):
                    state.running.remove(job)
                    _record_end(state, job, status, retries, on_end)
                # results of other processes: trainings that outlived a killed
                # sweep, or were started by hand
                for run in [run for run in state.waiting if is_done(run.folder, run.plan.identity)]:
                    state.waiting.remove(run)
                    _record_end(state, Job(run, None), 0, retries, on_end)
                on_poll(state)
        except BaseException:
            # BaseException includes KeyboardInterrupt and SystemExit: an
            # error in a callback, or a launcher that gives up, must not leave
            # local processes behind
            launcher.detach(state.running)
            raise
        else:
            # after SIGHUP alone (a closed terminal), jobs that do not need
            # the sweep keep running
            end = launcher.detach if signals and set(signals) == {signal.SIGHUP} else launcher.stop
            end(state.running)
    return state, not (state.waiting or state.running)


def _record_end(
    state: SweepState, job: Job, status: int, retries: int, on_end: Callable[[Job, int, bool], None]
) -> None:
    """Move the run of a job that ended to done, waiting or failed."""
    run = job.run
    # result.json decides, not the exit status: a run that wrote its result
    # and then failed at exit is done
    if is_done(run.folder, run.plan.identity):
        state.done.append(run)
        on_end(job, status, False)
        return
    # preemption (exit status 75) is not a failure: the run has saved and resumes
    tried = state.n_failures.get(run.plan.identity, 0) + (status != STOPPED)
    state.n_failures[run.plan.identity] = tried
    # retries = 1: the first failure gives tried = 1 and a restart, the second
    # gives 2 and ends the run
    again = tried <= retries
    (state.waiting if again else state.failed).append(run)
    # the file records the failure for read_runs; prepare_run deletes it when
    # the run is started again
    if not again:
        write_json(run.folder / EXIT, {"status": status, "last_words": job.last_line()})
    on_end(job, status, again)


@contextlib.contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Yield a list to which received SIGINT, SIGTERM and SIGHUP are appended."""
    signals: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        # a later print to the closed terminal would raise EIO in the middle
        # of stopping the runs
        if number == signal.SIGHUP:
            replace_lost_terminal()

    before = {number: signal.signal(number, remember) for number in stop_signals()}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
