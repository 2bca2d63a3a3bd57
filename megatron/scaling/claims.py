"""Which sweep starts which run, where several sweeps of one study work at once or one was killed.

A sweep locks a run (`.sweep.lock` in its folder) before it starts it and until the run has ended; a training
locks its folder (`.lock`) as well and may outlive its sweep for as long as it saves. A run is free when none
of both is locked.
"""

from contextlib import suppress

from megatron.io import FileLock, take_lock
from megatron.run_dir import is_done, lock
from megatron.scaling.ladder import PlannedRun

CLAIM = ".sweep.lock"


class Claims:
    """The runs that this sweep has locked."""

    def __init__(self) -> None:
        self._locks: dict[str, FileLock] = {}

    def take(self, run: PlannedRun) -> bool:
        """Lock a run that this process may start now; False where it is done or another process has it."""
        if not self.take_unstarted(run):
            return False
        if self.is_training(run) or is_done(run.folder, run.plan.identity):
            self.release(run)
            return False
        return True

    def take_unstarted(self, run: PlannedRun) -> bool:
        """Lock a run against other sweeps, whether or not it is being trained."""
        identity = run.plan.identity
        if identity not in self._locks:
            run.folder.mkdir(parents=True, exist_ok=True)
            claim = take_lock(run.folder / CLAIM, watch=False)
            if claim is None:
                return False
            self._locks[identity] = claim
        return True

    def is_training(self, run: PlannedRun) -> bool:
        """Whether a process trains the run at this moment."""
        training = lock(run.folder, watch=False)
        if training is not None:
            training.close()
        return training is None

    def release(self, run: PlannedRun) -> None:
        """Let other sweeps have the run. Nothing where it is not locked."""
        if claim := self._locks.pop(run.plan.identity, None):
            claim.close()

    def release_all(self) -> None:
        """At the end of a sweep."""
        while self._locks:
            with suppress(OSError):
                self._locks.popitem()[1].close()

    def has_ended(self, run: PlannedRun) -> bool:
        """Whether a run of another process has ended, well or not."""
        if is_done(run.folder, run.plan.identity):
            return True
        free = self.take(run)
        self.release(run)
        return free
