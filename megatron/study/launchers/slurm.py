"""Launcher of runs as tasks of Slurm arrays, which are polled until all have ended.

submitit 1.5.4 was tried. It keeps the limit of running tasks, cancellation, CPU and memory flags and the
wrappers of the command, but not these promises:

* Nothing on a shared disk is executed: its task loads and calls a pickle from a folder (see TRUST.md).
* The end and the exit status of a task are found on every cluster: it requests State from sacct, without the
  exit status. On a cluster without accounting a task that ended with 75 stays UNKNOWN and not done; scontrol
  has 75. Its local jobs end as FINISHED with 75.
* A new sweep finds the tasks: a local job of another process is NO PROCESS AND NO RESULT while it runs.
* A run saves when it is stopped: a task ignores SIGTERM, and a local cancellation kills it after 1 s.
* An array whose submission got no response is found by its list, and is not submitted twice.

It would replace the calls of sbatch, squeue and scancel, about 80 of the 508 lines here and in local.py.
"""

import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron.cli import INSTALLED, STOPPED, TOOLS
from megatron.config.yaml_file import is_single_line
from megatron.io import write_atomic
from megatron.log import get_logger
from megatron.plan.run_dir import is_done
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import ROOT, STOP_WAIT_S, Job, prepare_run
from megatron.study.launchers.run_locks import RunLocks

PRETRAIN = TOOLS / "pretrain.py"
# a wheel has the script beside its tools
SCRIPT = (TOOLS if TOOLS == INSTALLED else ROOT / "examples_scaling" / "training") / "sweep_slurm.sh"
TASK = "slurm_task"  # file in a run's folder: <array>_<index>, the task's id in squeue
# --array prints one line for each task. Without it squeue shows all pending tasks of an array as one line,
# "123_[4-9] PENDING", and none of them would match a task id.
SQUEUE = ("squeue", "--noheader", "--array", "--format=%i %T")
POLL_INTERVAL_S = 2.0
COMMAND_TIMEOUT_S = 60.0  # limit for one Slurm command
MAX_PAUSE_S = 60.0
GIVE_UP_S = 3600.0  # limit without a response; longer than a restart or move of the controller
# sbatch messages for an unreachable controller; any other message is an error of the submission
UNREACHABLE = (
    "Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were",
    "Connection timed out", "temporarily unable", "no response for",
)  # fmt: skip

log = get_logger(__name__)


class QueueTimeoutError(OSError):
    """Slurm has not responded for GIVE_UP_S; the sweep ends and its tasks keep running."""


class SlurmLauncher:
    """Submits one array per `start` and polls squeue for ended tasks."""

    def __init__(self, folder: Path, jobs: int | None, sbatch_args: Sequence[str] = ()) -> None:
        """Create a launcher.

        folder       for the lists of runs, one file per array
        jobs         number of tasks of an array that run concurrently; None: all
        sbatch_args  additional arguments of sbatch
        """
        self.folder, self.jobs, self.sbatch_args = folder, jobs, list(sbatch_args)
        self.polled_at = 0.0
        self.queued: set[str] = set()
        self.locks = RunLocks()
        self.squeue_backoff, self.sbatch_backoff = Backoff(), Backoff()  # separate: either can fail alone
        self.lost_submission: tuple[Path, list[PlannedRun]] | None = (
            None  # array submitted without a response
        )

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher: submits all runs, since the queue has no limit. Raises OSError with sbatch's message.

        While the controller is unreachable, no run is started and a later call tries again.
        """
        if not runs or self.squeue_backoff.is_waiting() or self.sbatch_backoff.is_waiting():
            return []
        elsewhere: list[Job] = []
        jobs: list[Job] = []
        try:
            if self.lost_submission is not None:
                jobs = self._find_lost_array(*self.lost_submission)  # its tasks may be running already
            if not jobs:
                # After a failed sbatch the runs stay locked by this sweep, and `acquire` returns True for
                # them again.
                free = [run for run in runs if self.locks.acquire(run)]
                elsewhere = [Job(run, None, is_external=True) for run in runs if run not in free]
                jobs = self._submit_array(free)
        except FileNotFoundError:
            raise
        except OSError as error:
            # any error of squeue counts as unreachable: its arguments are constant, so only the service can
            # be at fault
            if not any(text in str(error) for text in (*UNREACHABLE, "squeue")):
                raise
            self.sbatch_backoff.record_failure(error)
            return elsewhere
        self.sbatch_backoff.reset()
        for job in jobs:
            # The file lets the next sweep find the task. A sweep that is killed before this line leaves tasks
            # without it: the next sweep then sees them only once they train and lock their folder.
            write_atomic(job.run.folder / TASK, job.handle + "\n")
        # The last poll of squeue was before the submission. Without this line the tasks would seem to have
        # left the queue, that is, to have ended.
        self.queued |= {job.handle for job in jobs}
        # a new array may be missing in squeue for a moment, so the next poll waits for POLL_INTERVAL_S
        self.polled_at = time.monotonic()
        return [*jobs, *elsewhere]

    def _submit_array(self, runs: list[PlannedRun]) -> list[Job]:
        if not runs:
            return []
        for run in runs:  # task i reads line i of the list, so a folder must be a single line
            if not is_single_line(str(run.folder.resolve())):
                raise ValueError(
                    f"{str(run.folder.resolve())!r}: got a line break, expected none. Rename the folder."
                )
        for run in runs:
            prepare_run(run)
        self.folder.mkdir(parents=True, exist_ok=True)
        # runs-<time>-<nanoseconds>: unique, because a lost submission is found by this path
        listed = self.folder / f"runs-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.txt"
        write_atomic(listed, "".join(f"{run.folder.resolve()}\n" for run in runs))
        # "--array=0-99%8": 100 tasks, at most 8 at a time
        limit = f"%{self.jobs}" if self.jobs else ""
        words = ["sbatch", "--parsable", f"--array=0-{len(runs) - 1}{limit}", *self.sbatch_args]
        # set before sbatch and cleared after its response: a failure in between leaves it set
        self.lost_submission = listed, runs
        # "--parsable" prints <id>[;<cluster>]
        array = (
            _run_command([*words, str(SCRIPT), str(listed.resolve()), str(PRETRAIN)])
            .partition(";")[0]
            .strip()
        )
        self.lost_submission = None
        return [Job(run, f"{array}_{i}") for i, run in enumerate(runs)]

    def _find_lost_array(self, listed: Path, runs: list[PlannedRun]) -> list[Job]:
        """Return the jobs of an array that is queued although sbatch failed, to avoid submitting it twice."""
        # %F is the id of the array (123 for the task 123_4), %o the command with its arguments
        for line in _run_command(["squeue", "--noheader", "--format=%F %o"]).splitlines():
            # the path of the list is in the command line (%o), which identifies the array
            if str(listed.resolve()) in line:
                self.lost_submission = None
                # task i of the array trains line i of the list, and `runs` has the order of the list
                return [Job(run, f"{line.split()[0]}_{i}") for i, run in enumerate(runs)]
        self.lost_submission = None
        return []

    def find_running(self, runs: Sequence[PlannedRun]) -> list[Job] | None:
        """See Launcher: from the task ids in the runs' folders and the queue."""
        # None, not []: with an empty list the caller would submit runs again that are in the queue
        if not self._poll_queue():
            return None
        jobs = []
        for run in runs:
            task = self._read_task(run)
            # a lock on a task from an earlier sweep means that this sweep follows it from now on
            if task is not None and self.locks.lock_run(run):
                jobs.append(Job(run, task))
            elif task is not None or self.locks.is_training(run):
                jobs.append(Job(run, None, is_external=True))
        return jobs

    def _read_task(self, run: PlannedRun) -> str | None:
        """Return the id of a run's task if it is in the queue, else None."""
        with suppress(FileNotFoundError):
            task = (run.folder / TASK).read_text().strip()
            return task if task in self.queued else None
        return None

    def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher. The queue is polled every POLL_INTERVAL_S, and less often while it does not respond.

        Without a response no job counts as ended. Raises QueueTimeoutError after `GIVE_UP_S` without one.
        """
        if not jobs or time.monotonic() - self.polled_at < POLL_INTERVAL_S or not self._poll_queue():
            return []
        over = []
        for job in jobs:
            status = self._poll_external(job) if job.is_external else self._exit_status(job)
            if status is not None:
                over.append((job, status))
                self.locks.release(job.run)
        return over

    def _poll_external(self, job: Job) -> int | None:
        """Return the status of an external job, None while it runs. Take over tasks of an ended sweep."""
        # The sweep that submitted the task may have ended. Its lock is then free, and this sweep follows the
        # task as its own: `stop` cancels it, and its exit status counts.
        task = self._read_task(job.run)
        if task is None and self.locks.has_ended(job.run):
            return 0 if is_done(job.run.folder, job.run.plan.identity) else STOPPED
        if task is not None and self.locks.lock_run(job.run):
            job.handle, job.is_external = task, False
        return None

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher: cancels the tasks, which save and end; after STOP_WAIT_S Slurm kills the rest."""
        tasks = [job.handle for job in jobs if not job.is_external]
        deadline = time.monotonic() + STOP_WAIT_S
        cancelled = False
        # squeue is polled until all own tasks have left the queue
        # scancel is repeated only until it succeeds once: a second signal would not make a task save faster
        while tasks and time.monotonic() < deadline:
            try:
                if not cancelled:
                    _cancel_tasks(tasks)
                    cancelled = True
                self.queued = _parse_tasks(_run_command(SQUEUE))
                if not self.queued & set(tasks):
                    return
            except OSError as error:
                log.warning("%s; retrying", error)
                time.sleep(POLL_INTERVAL_S)
            time.sleep(0.5)
        if tasks and not cancelled:
            raise OSError(
                f"scancel: got no response from Slurm, {len(tasks)} tasks still run. Cancel them when Slurm "
                f"responds: scancel {' '.join(tasks)}"
            )

    def detach(self, jobs: Sequence[Job]) -> None:
        """See Launcher: tasks keep running without the sweep, and the next sweep finds them."""
        attached = [job for job in jobs if not job.is_external]
        if attached:
            log.warning(
                "%d Slurm tasks keep running without the sweep; rerun the same command to follow them",
                len(attached),
            )

    def close(self) -> None:
        """See Launcher."""
        self.locks.release_all()

    def _poll_queue(self) -> bool:
        """Read the queue. Return False without a response; raise QueueTimeoutError after GIVE_UP_S."""
        if self.squeue_backoff.is_waiting():
            return False
        self.polled_at = time.monotonic()
        try:
            self.queued = _parse_tasks(_run_command(SQUEUE))
        # a missing squeue is not an outage: FileNotFoundError is an OSError, so it is raised before the next
        # clause
        except FileNotFoundError:
            raise
        except OSError as error:
            self.squeue_backoff.record_failure(error)
            return False
        self.squeue_backoff.reset()
        return True

    def _exit_status(self, job: Job) -> int | None:
        """Return None for a task in the queue, else its exit status (1 if Slurm has no record of it)."""
        if job.handle in self.queued:
            return None
        if is_done(job.run.folder, job.run.plan.identity):
            return 0
        try:
            # an exit status is not available from squeue: scontrol has it for a while after the end
            match = re.search(r"ExitCode=(\d+):(\d+)", _run_command(["scontrol", "show", "job", job.handle]))
        except OSError as error:
            # unknown, not ended: the caller polls again. After any other error, such as "Invalid job id", no
            # status will come: Slurm keeps records of ended jobs for some minutes only.
            if any(text in str(error) for text in UNREACHABLE):
                return None
            match = None
        # a signal gives ExitCode=0:<signal>
        # 0:0 without result.json is a failure too, hence the last `or 1`
        return int(match[1]) or int(match[2]) or 1 if match else 1


class Backoff:
    """Exponential backoff while Slurm does not respond: retries after 2, 4, 8, ... 60 s."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset after a response."""
        self.since: float | None = None
        self.until, self.pause_s = 0.0, POLL_INTERVAL_S

    def is_waiting(self) -> bool:
        """Return whether it is too early to retry."""
        return time.monotonic() < self.until

    def record_failure(self, error: OSError) -> None:
        """Record a missing response. Raises QueueTimeoutError after GIVE_UP_S of them."""
        now = time.monotonic()
        # the first failure after the last response: GIVE_UP_S limits one outage, not the sum of several
        self.since = now if self.since is None else self.since
        if now - self.since >= GIVE_UP_S:
            raise QueueTimeoutError(
                f"{error}, for {now - self.since:.0f} s. The tasks still run; rerun the same command to "
                "follow them when Slurm responds."
            ) from error
        log.warning("%s; the tasks keep running, retrying in %.0f s", error, self.pause_s)
        self.until = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)


def _cancel_tasks(tasks: Sequence[str]) -> None:
    """Cancel tasks; tasks that have already ended are ignored."""
    try:
        _run_command(["scancel", *tasks])
    except OSError as error:
        if not any(text in str(error) for text in ("Invalid job id", "already complet")):
            raise


def _parse_tasks(answer: str) -> set[str]:
    """Return the ids of the tasks of all users that have not ended; ids are unique in a cluster."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    # "123_0 RUNNING": a line of other than two words is not a task
    pairs = [line.split() for line in answer.splitlines() if len(line.split()) == 2]
    return {task for task, state in pairs if state not in over}


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
