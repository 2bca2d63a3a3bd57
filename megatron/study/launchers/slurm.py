"""Launcher of runs as tasks of Slurm arrays, which are polled until all have ended.

A task's id is stored in the folder of its run, so that the
next call follows the tasks of an earlier one. A run whose
task is lost is submitted again.
"""

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import INSTALLED, STOPPED, TOOLS
from megatron.io import write_atomic
from megatron.log import get_logger
from megatron.plan.run_dir import CHECKPOINTS, is_done
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import PRETRAIN, ROOT, Job, Launcher, is_free, prepare_run

# a wheel has the script beside its tools
SCRIPT = (TOOLS if TOOLS == INSTALLED else ROOT / "examples_scaling" / "training") / "sweep_slurm.sh"
TASK = "slurm_task"  # file in a run's folder: <array>_<index>, the task's id in squeue
# --array prints one line for each task. Without it squeue shows all pending
# tasks of an array as one line, "123_[4-9] PENDING", and none of them would
# match a task id.
SQUEUE = ("squeue", "--noheader", "--array", "--format=%i %T")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
POLL_INTERVAL_S = 2.0
RETRY_INTERVAL_S = 30.0  # after a poll without a response, for example while the controller restarts
COMMAND_TIMEOUT_S = 60.0  # limit for one Slurm command

log = get_logger(__name__)


class SlurmLauncher(Launcher):
    """Submits one array per `start` and polls squeue for ended tasks."""

    def __init__(self, folder: Path, jobs: int | None, sbatch_args: Sequence[str] = ()) -> None:
        """Create a launcher.

        folder       for the lists of runs, one file per array
        jobs         number of tasks of an array that run concurrently; None: all
        sbatch_args  additional arguments of sbatch
        """
        self.folder, self.jobs, self.sbatch_args = folder, jobs, list(sbatch_args)
        self.next_poll_s = 0.0
        self.queued: set[str] = set()
        self.has_queue = False  # whether squeue has responded

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher: submits all runs that are not in the queue. Raises OSError with sbatch's message."""
        # without an answer of squeue, runs
        # that are in the queue would be submitted again
        if not runs or not self._poll_queue():
            return []
        jobs, free = list[Job](), list[PlannedRun]()
        for run in runs:
            task = self._read_task(run)
            # a task of an earlier sweep is followed from now on
            if task is not None:
                jobs.append(Job(run, task))
            elif is_free(run):
                free.append(run)
        submitted = self._submit_array(free) if free else []
        for job in submitted:
            # The file lets the next sweep find the task. A sweep that is
            # killed before this line leaves tasks without it: the next sweep
            # then sees them only once they train and lock their folder.
            write_atomic(job.run.folder / TASK, job.handle + "\n")
        # The last poll of squeue was before the submission. Without this line
        # the tasks would seem to have left the queue, that is, to have ended.
        self.queued |= {job.handle for job in submitted}
        if submitted:  # a new array may be missing in squeue for a moment
            self.next_poll_s = time.monotonic() + POLL_INTERVAL_S
        return [*jobs, *submitted]

    def _submit_array(self, runs: list[PlannedRun]) -> list[Job]:
        for run in runs:
            prepare_run(run)
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = self.folder / f"runs-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.txt"
        write_atomic(listed, "".join(f"{run.folder.resolve()}\n" for run in runs))
        # "--array=0-99%8": 100 tasks, at most 8 at a time
        limit = f"%{self.jobs}" if self.jobs else ""
        words = ["sbatch", "--parsable", f"--array=0-{len(runs) - 1}{limit}", *self.sbatch_args]
        # "--parsable" prints <id>[;<cluster>]
        answer = _run_command([*words, str(SCRIPT), str(listed.resolve()), str(PRETRAIN)])
        array = answer.partition(";")[0].strip()
        return [Job(run, f"{array}_{i}") for i, run in enumerate(runs)]

    def _read_task(self, run: PlannedRun) -> str | None:
        """Return the id of a run's task if it is in the queue, else None."""
        path = run.folder / TASK
        task = path.read_text().strip() if path.is_file() else ""
        return task if task in self.queued else None

    def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher. The queue is polled every POLL_INTERVAL_S; without a response no job has ended."""
        if not jobs or not self._poll_queue():
            return []
        return [(job, _find_status(job.run)) for job in jobs if job.handle not in self.queued]

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher: cancels the tasks, which save and end; Slurm kills the rest after its KillWait.

        Raises OSError if Slurm does not respond.
        """
        tasks = [job.handle for job in jobs]
        if not tasks:
            return
        try:
            _run_command(["scancel", *tasks])
        except OSError as error:
            if "Invalid job id" not in str(error) and "already complet" not in str(error):
                raise OSError(f"{error}. {len(tasks)} tasks still run: scancel {' '.join(tasks)}") from error

    def detach(self, jobs: Sequence[Job]) -> None:
        """See Launcher: tasks keep running without the sweep, and the next sweep finds them."""
        if jobs:
            log.warning("%d Slurm tasks keep running; rerun the same command to follow them", len(jobs))

    def _poll_queue(self) -> bool:
        """Read the queue if it is time to. Return False if the last call of squeue had no response."""
        if time.monotonic() < self.next_poll_s:
            return self.has_queue
        self.next_poll_s = time.monotonic() + POLL_INTERVAL_S
        try:
            lines = [line.split() for line in _run_command(SQUEUE).splitlines()]
        # a missing squeue is not an outage
        except FileNotFoundError:
            raise
        except OSError as error:
            log.warning("%s; the tasks keep running, retrying in %.0f s", error, RETRY_INTERVAL_S)
            self.next_poll_s, self.has_queue = time.monotonic() + RETRY_INTERVAL_S, False
            return False
        # "123_0 RUNNING": a line of other than two words is not a task
        self.queued = {line[0] for line in lines if len(line) == 2 and line[1] not in ENDED}
        self.has_queue = True
        return True


def _find_status(run: PlannedRun) -> int:
    """Return the status of a run whose task has left the queue; a preempted one has saved a checkpoint."""
    if is_done(run.folder, run.plan.identity):
        return 0
    return STOPPED if any((run.folder / CHECKPOINTS).glob("*.preempt")) else 1


def _run_command(words: Sequence[str]) -> str:
    """Run a Slurm command and return its output. Raises OSError with its last line if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{words[0]}: command not found. Run --launcher slurm on a machine with Slurm."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]}: no response for {COMMAND_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        # the last line is the cause: sbatch prints its warnings before it
        message = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise OSError(f"{words[0]}: {message.removeprefix(f'{words[0]}: ')}")
    return done.stdout
