"""Run all runs of a study through one launcher: start ready runs, retry failed ones, stop on a signal."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatron.cli import STOPPED, replace_lost_terminal, stop_signals
from megatron.io import write_json
from megatron.plan.run_dir import EXIT, is_done
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import Job, Launcher, find_checkpoint


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

        A branch can start when its trunk has the checkpoint of the branch
        point, or has ended without it.
        """
        # A failed trunk is in neither list: its branches become ready, and
        # start from its last checkpoint before the branch point or from
        # scratch (launch.prepare_run).
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
        stop_files = (
            run.config.misc.stop_file for run in [*self.waiting, *(job.run for job in self.running)]
        )
        return any(Path(file).exists() for file in set(stop_files) if file is not None)


def run_all(
    runs: Sequence[PlannedRun],
    launcher: Launcher,
    on_poll: Callable[[SweepState], None],
    on_end: Callable[[Job, int, bool], None],
    retries: int = 1,
    poll_s: float = 0.5,
) -> tuple[SweepState, bool]:
    """Run all runs, retrying each failed run up to `retries` times. Return (state, whether all runs ended).

    A preempted run resumes without limit. A run that another process trains is
    waited for, and started if that process ends without a result. All runs stop
    when the stop file of an unfinished run appears.

    on_poll  called every `poll_s` seconds with the state
    on_end   called for each job that ends, with its exit status and whether it will be restarted
    """
    state = SweepState(list(runs))
    # Handlers do not raise: they append to a list, which the loop tests
    # between two steps. An exception raised inside a handler could interrupt
    # the code between the start of a job and its entry in `state.running`: no
    # list would contain the job, and neither `stop` nor `detach` would get
    # it.
    with _collect_signals() as signals:
        try:
            # None means that the backend is unreachable: starting runs now
            # could start them twice
            while (jobs := launcher.find_running(runs)) is None and not signals:
                time.sleep(poll_s)
            # only after the start: a job of an earlier sweep must not be
            # started again
            for job in jobs or ():
                state.waiting.remove(job.run)
                state.running.append(job)
            while (state.waiting or state.running) and not signals and not state.has_stop_file():
                _start_ready(state, launcher)
                time.sleep(poll_s)
                for job, status in launcher.collect_ended(state.running):
                    state.running.remove(job)
                    _record_end(state, job, status, retries, on_end)
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
        finally:
            # the locks are released last: until then no other sweep starts a
            # run that is still being stopped here
            launcher.close()
    return state, not (state.waiting or state.running)


def _start_ready(state: SweepState, launcher: Launcher) -> None:
    for job in launcher.start(state.find_ready()):
        state.waiting.remove(job.run)
        state.running.append(job)


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
    # preemption (exit status 75) is no failure: the run has saved and resumes
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
