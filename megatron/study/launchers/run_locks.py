"""Run locks that coordinate concurrent sweeps of one study, also after one of them was killed.

A sweep locks a run (`.sweep.lock` in its folder) from before its start until
its end. The training process locks the folder too (`.lock`) and can outlive its
sweep while it saves a checkpoint. A run is free if neither lock is taken.
"""

from contextlib import suppress

from megatron.io import LockedFile, acquire_lock
from megatron.plan.run_dir import is_done, lock_run
from megatron.study.ladder import PlannedRun

# Two locks, because they end at different times. After a sweep is killed,
# `.sweep.lock` is free at once, but `.lock` only when the training has saved.
# A new sweep must not start the run in between.
SWEEP_LOCK = ".sweep.lock"


class RunLocks:
    """Locks that this sweep holds, by run."""

    def __init__(self) -> None:
        self._locks: dict[str, LockedFile] = {}

    def acquire(self, run: PlannedRun) -> bool:
        """Lock a run that this process may start now. False if it is done or belongs to another process."""
        if not self.lock_run(run):
            return False
        # the run may have finished between planning and this lock, so its
        # result is checked while it is locked
        if self.is_training(run) or is_done(run.folder, run.plan.identity):
            self.release(run)
            return False
        return True

    def lock_run(self, run: PlannedRun) -> bool:
        """Lock a run against other sweeps, even while it is being trained. False if another sweep has it."""
        identity = run.plan.identity
        if identity not in self._locks:
            run.folder.mkdir(parents=True, exist_ok=True)
            claim = acquire_lock(run.folder / SWEEP_LOCK)
            if claim is None:
                return False
            # the lock file stays open: closing it releases the lock, also
            # when the process is killed
            self._locks[identity] = claim
        return True

    def is_training(self, run: PlannedRun) -> bool:
        """Return whether a process is training the run."""
        # a probe of the lock, released at once so that a training can take it
        # A training process that starts during this probe finds the folder
        # locked. It retries for LOCK_WAIT_S (train/loop.py), much longer than
        # the probe takes.
        training = lock_run(run.folder)
        if training is not None:
            training.close()
        return training is None

    def release(self, run: PlannedRun) -> None:
        """Unlock a run; do nothing if it is not locked."""
        if claim := self._locks.pop(run.plan.identity, None):
            claim.close()

    def release_all(self) -> None:
        """Unlock all runs, at the end of a sweep."""
        # a lock is popped before it is closed, so one that cannot be closed
        # does not make this loop endless
        while self._locks:
            with suppress(OSError):
                self._locks.popitem()[1].close()

    def has_ended(self, run: PlannedRun) -> bool:
        """Return whether a run of another process has ended, successfully or not."""
        if is_done(run.folder, run.plan.identity):
            return True
        # acquire succeeds only if no process trains or sweeps the run: then
        # the other process is gone
        free = self.acquire(run)
        self.release(run)
        return free
