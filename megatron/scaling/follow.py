"""Run all of a study through one launcher: start what is ready, try again what fails, stop on a signal."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from megatron.command import STOPPED
from megatron.processes import replace_lost_terminal, stop_signals
from megatron.run_dir import EXIT, is_done, write_json
from megatron.scaling.ladder import PlannedRun
from megatron.scaling.launch import Job, Launcher, checkpoint_of


@dataclass
class Progress:
    """Where a sweep stands. Runs move from waiting to running, and on to done or failed."""

    waiting: list[PlannedRun]
    running: list[Job] = field(default_factory=list)
    done: list[PlannedRun] = field(default_factory=list)
    failed: list[PlannedRun] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)  # failures, by identity

    def ready(self) -> list[PlannedRun]:
        """The waiting runs that can start, the dearest first; a branch waits for its trunk to reach it."""
        alive = {run.folder for run in self.waiting} | {job.run.folder for job in self.running}

        def can_start(run: PlannedRun) -> bool:
            at = run.branch
            return at is None or at.trunk not in alive or checkpoint_of(at.trunk, at.step, True) is not None

        return sorted(filter(can_start, self.waiting), key=lambda run: -run.own_flops)

    def killed(self) -> bool:
        """Whether the stop file of a run that is not done is there: started again it would stop for ever."""
        told = (run.config.misc.stop_file for run in [*self.waiting, *(job.run for job in self.running)])
        return any(Path(file).exists() for file in set(told) if file is not None)


def run_all(
    runs: Sequence[PlannedRun],
    launcher: Launcher,
    tick: Callable[[Progress], None],
    ended: Callable[[Job, int, bool], None],
    retries: int = 1,
    poll_s: float = 0.5,
) -> tuple[Progress, bool]:
    """Run all, each failed one `retries` times more. Returns False beside the progress when asked to stop.

    A run that was preempted goes on as often as it takes; one that another process trains is waited for, and
    started where that ends without a result. Where the stop file of one that is not done
    appears, all stop. `tick` is called about twice a second, `ended` with
    each job that ends, its exit status, and whether it will be started again.
    """
    state = Progress(list(runs))
    with _stop_wish() as wish:
        try:
            while (jobs := launcher.running(runs)) is None and not wish:
                time.sleep(poll_s)
            for job in jobs or ():
                state.waiting.remove(job.run)
                state.running.append(job)
            while (state.waiting or state.running) and not wish and not state.killed():
                _start(state, launcher)
                time.sleep(poll_s)
                for job, status in launcher.ended(state.running):
                    state.running.remove(job)
                    _settle(state, job, status, retries, ended)
                tick(state)
        except BaseException:
            launcher.leave(state.running)
            raise
        else:
            # a closed terminal is no reason to cancel what does not need it
            end = launcher.leave if wish and set(wish) == {signal.SIGHUP} else launcher.stop
            end(state.running)
        finally:
            launcher.close()
    return state, not (state.waiting or state.running)


def _start(state: Progress, launcher: Launcher) -> None:
    for job in launcher.start(state.ready()):
        state.waiting.remove(job.run)
        state.running.append(job)


def _settle(
    state: Progress, job: Job, status: int, retries: int, ended: Callable[[Job, int, bool], None]
) -> None:
    """Put a job that ended where it belongs."""
    run = job.run
    if is_done(run.folder, run.plan.identity):
        state.done.append(run)
        ended(job, status, False)
        return
    tried = state.tries.get(run.plan.identity, 0) + (status != STOPPED)
    state.tries[run.plan.identity] = tried
    again = tried <= retries
    (state.waiting if again else state.failed).append(run)
    if not again:
        write_json(run.folder / EXIT, {"status": status, "last_words": job.last_words()})
    ended(job, status, again)


@contextlib.contextmanager
def _stop_wish() -> Iterator[list[int]]:
    """A list that is empty until SIGINT, SIGTERM or SIGHUP comes."""
    wish: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        wish.append(number)
        if number == signal.SIGHUP:
            replace_lost_terminal()

    before = {number: signal.signal(number, remember) for number in stop_signals()}
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
