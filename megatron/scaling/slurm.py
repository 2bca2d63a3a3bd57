"""Runs as tasks of Slurm arrays, followed until all have ended."""

import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron.command import STOPPED
from megatron.config.yaml_file import is_one_line
from megatron.log import get_logger
from megatron.run_dir import is_done, write_whole
from megatron.scaling.claims import Claims
from megatron.scaling.ladder import PlannedRun
from megatron.scaling.launch import ROOT, STOP_WAIT_S, Job, prepare

PRETRAIN = ROOT / "tools" / "pretrain.py"
SCRIPT = ROOT / "examples_scaling" / "training" / "sweep_slurm.sh"
TASK = "slurm_task"  # in a run's folder: <array>_<index>, as squeue names it
SQUEUE = ("squeue", "--noheader", "--array", "--format=%i %T")
ASK_EVERY_S = 2.0
ANSWER_S = 60.0  # a command of Slurm that takes longer has failed
LONGEST_PAUSE_S = 60.0
GIVE_UP_S = 3600.0  # without an answer; longer than controllers take to restart or to be moved
# what sbatch prints where the controller is away; anything else is wrong with the submission itself
UNREACHABLE = (
    "Unable to contact slurm controller", "Socket timed out", "Connection refused", "Zero Bytes were",
    "Connection timed out", "temporarily unable", "no answer for",
)  # fmt: skip

log = get_logger(__name__)


class QueueSilentError(OSError):
    """Slurm has not answered for so long that the sweep ends without its tasks."""


class SlurmLauncher:
    """Each `start` submits one array; squeue says what has ended. `words` go to sbatch."""

    def __init__(self, folder: Path, jobs: int | None, words: Sequence[str] = ()) -> None:
        """`folder` takes the lists of runs; `jobs`: tasks of an array that run at a time, None: all."""
        self.folder, self.jobs, self.words = folder, jobs, list(words)
        self.asked = 0.0
        self.alive: set[str] = set()
        self.claims = Claims()
        self.silence, self.refusal = Silence(), Silence()  # of squeue, of sbatch
        self.unanswered: tuple[Path, list[PlannedRun]] | None = None  # submitted, and the answer got lost

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher: all of them, the queue has room. OSError with what sbatch said.

        While the controller is away it starts none, and tries again later.
        """
        if not runs or self.silence.lasts() or self.refusal.lasts():
            return []
        elsewhere: list[Job] = []
        jobs: list[Job] = []
        try:
            if self.unanswered is not None:
                jobs = self._find_unanswered(*self.unanswered)  # these may be training already
            if not jobs:
                free = [run for run in runs if self.claims.take(run)]
                elsewhere = [Job(run, None, elsewhere=True) for run in runs if run not in free]
                jobs = self._submit(free)
        except FileNotFoundError:
            raise
        except OSError as error:
            if not any(text in str(error) for text in (*UNREACHABLE, "squeue")):
                raise
            self.refusal.note(error)
            return elsewhere
        self.refusal.end()
        for job in jobs:
            write_whole(job.run.folder / TASK, job.handle + "\n")
        self.alive |= {job.handle for job in jobs}
        self.asked = time.monotonic()
        return [*jobs, *elsewhere]

    def _submit(self, runs: list[PlannedRun]) -> list[Job]:
        if not runs:
            return []
        for run in runs:  # a task finds its folder by the number of a line
            if not is_one_line(str(run.folder.resolve())):
                raise ValueError(f"{str(run.folder.resolve())!r}: got a line end, expected none. Rename it.")
        for run in runs:
            prepare(run)
        self.folder.mkdir(parents=True, exist_ok=True)
        listed = self.folder / f"runs-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}.txt"
        write_whole(listed, "".join(f"{run.folder.resolve()}\n" for run in runs))
        limit = f"%{self.jobs}" if self.jobs else ""
        words = ["sbatch", "--parsable", f"--array=0-{len(runs) - 1}{limit}", *self.words]
        self.unanswered = listed, runs
        array = _ask([*words, str(SCRIPT), str(listed.resolve()), str(PRETRAIN)]).partition(";")[0].strip()
        self.unanswered = None
        return [Job(run, f"{array}_{i}") for i, run in enumerate(runs)]

    def _find_unanswered(self, listed: Path, runs: list[PlannedRun]) -> list[Job]:
        """The jobs of an array that is in the queue though sbatch failed: they are not submitted again."""
        for line in _ask(["squeue", "--noheader", "--format=%F %o"]).splitlines():
            if str(listed.resolve()) in line:
                self.unanswered = None
                return [Job(run, f"{line.split()[0]}_{i}") for i, run in enumerate(runs)]
        self.unanswered = None
        return []

    def running(self, runs: Sequence[PlannedRun]) -> list[Job] | None:
        """See Launcher: by what is written in the folders and in the queue."""
        if not self._look():
            return None
        jobs = []
        for run in runs:
            task = self._task_of(run)
            if task is not None and self.claims.take_unstarted(run):
                jobs.append(Job(run, task))
            elif task is not None or self.claims.is_training(run):
                jobs.append(Job(run, None, elsewhere=True))
        return jobs

    def _task_of(self, run: PlannedRun) -> str | None:
        """The task of a run that is in the queue; None where it has none there."""
        with suppress(FileNotFoundError):
            task = (run.folder / TASK).read_text().strip()
            return task if task in self.alive else None
        return None

    def ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher; the queue is asked every two seconds, and more rarely while it does not answer.

        Raises QueueSilentError where that lasts for `GIVE_UP_S`: nothing is known to have ended until then.
        """
        if not jobs or time.monotonic() - self.asked < ASK_EVERY_S or not self._look():
            return []
        over = []
        for job in jobs:
            status = self._status_elsewhere(job) if job.elsewhere else self._status(job)
            if status is not None:
                over.append((job, status))
                self.claims.release(job.run)
        return over

    def _status_elsewhere(self, job: Job) -> int | None:
        """As a launcher's status. A task whose sweep is gone is taken up."""
        task = self._task_of(job.run)
        if task is None and self.claims.has_ended(job.run):
            return 0 if is_done(job.run.folder, job.run.plan.identity) else STOPPED
        if task is not None and self.claims.take_unstarted(job.run):
            job.handle, job.elsewhere = task, False
        return None

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher: cancelled tasks save and end; what is left after a minute is Slurm's to kill."""
        own = [job.handle for job in jobs if not job.elsewhere]
        deadline = time.monotonic() + STOP_WAIT_S
        cancelled = False
        while own and time.monotonic() < deadline:
            try:
                if not cancelled:
                    _cancel(own)
                    cancelled = True
                self.alive = _parse_tasks(_ask(SQUEUE))
                if not self.alive & set(own):
                    return
            except OSError as error:
                log.warning("%s; trying again", error)
                time.sleep(ASK_EVERY_S)
            time.sleep(0.5)
        if own and not cancelled:
            raise OSError(
                f"scancel: no answer from Slurm, {len(own)} tasks still run; cancel them when it is well: "
                f"scancel {' '.join(own)}"
            )

    def leave(self, jobs: Sequence[Job]) -> None:
        """See Launcher: tasks do not need the sweep, and the next one finds them."""
        own = [job for job in jobs if not job.elsewhere]
        if own:
            log.warning(
                "%d tasks of Slurm go on without the sweep; run the same command again to follow them",
                len(own),
            )

    def close(self) -> None:
        """See Launcher."""
        self.claims.release_all()

    def _look(self) -> bool:
        """Ask what is in the queue. False while there is no answer; QueueSilentError where that lasts."""
        if self.silence.lasts():
            return False
        self.asked = time.monotonic()
        try:
            self.alive = _parse_tasks(_ask(SQUEUE))
        except FileNotFoundError:
            raise
        except OSError as error:
            self.silence.note(error)
            return False
        self.silence.end()
        return True

    def _status(self, job: Job) -> int | None:
        """None for a task in the queue; the exit status of one that has left it, while Slurm knows it."""
        if job.handle in self.alive:
            return None
        if is_done(job.run.folder, job.run.plan.identity):
            return 0
        try:
            found = re.search(r"ExitCode=(\d+):(\d+)", _ask(["scontrol", "show", "job", job.handle]))
        except OSError as error:
            if any(text in str(error) for text in UNREACHABLE):
                return None
            found = None
        return int(found[1]) or int(found[2]) or 1 if found else 1


class Silence:
    """How long Slurm has not answered, and when to ask again: after 2, 4, 8, ... 60 s."""

    def __init__(self) -> None:
        self.end()

    def end(self) -> None:
        """There was an answer."""
        self.since: float | None = None
        self.until, self.pause_s = 0.0, ASK_EVERY_S

    def lasts(self) -> bool:
        """Whether it is too early to ask again."""
        return time.monotonic() < self.until

    def note(self, error: OSError) -> None:
        """There was none. Raises QueueSilentError where that has lasted too long."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        if now - self.since >= GIVE_UP_S:
            raise QueueSilentError(
                f"{error}, for {now - self.since:.0f} s now; the tasks still run, and the same command "
                "follows them when Slurm is well"
            ) from error
        log.warning("%s; the tasks go on, asking Slurm again in %.0f s", error, self.pause_s)
        self.until = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)


def _cancel(tasks: Sequence[str]) -> None:
    """Ask Slurm to end tasks; those that have ended by themselves are none the worse."""
    try:
        _ask(["scancel", *tasks])
    except OSError as error:
        if not any(text in str(error) for text in ("Invalid job id", "already complet")):
            raise


def _parse_tasks(answer: str) -> set[str]:
    """The tasks that have not ended, of all users: their ids are unique."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    pairs = [line.split() for line in answer.splitlines() if len(line.split()) == 2]
    return {task for task, state in pairs if state not in over}


def _ask(words: Sequence[str]) -> str:
    """What a command of Slurm prints. OSError with its last line where it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{words[0]}: not found; --launcher slurm wants Slurm's commands") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{words[0]}: no answer for {ANSWER_S:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise OSError(f"{words[0]}: {said.removeprefix(f'{words[0]}: ')}")
    return done.stdout
