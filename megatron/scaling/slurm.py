"""Runs as tasks of Slurm arrays, followed until all have ended."""

import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.config.yaml_file import is_one_line
from megatron.run_dir import is_done, write_whole
from megatron.scaling.ladder import PlannedRun
from megatron.scaling.launch import ROOT, STOP_WAIT_S, Job, prepare

PRETRAIN = ROOT / "tools" / "pretrain.py"
SCRIPT = ROOT / "examples_scaling" / "training" / "sweep_slurm.sh"
TASK = "slurm_task"  # in a run's folder: <array>_<index>, as squeue names it
ASK_EVERY_S = 2.0


class SlurmLauncher:
    """Each `start` submits one array; squeue says what has ended. `words` go to sbatch."""

    def __init__(self, folder: Path, jobs: int | None, words: Sequence[str] = ()) -> None:
        """`folder` takes the lists of runs; `jobs`: tasks of an array that run at a time, None: all."""
        self.folder, self.jobs, self.words = folder, jobs, list(words)
        self.asked = 0.0
        self.alive: set[str] = set()

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher: all of them, the queue has room. OSError with what sbatch said."""
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
        array = _ask([*words, str(SCRIPT), str(listed.resolve()), str(PRETRAIN)]).partition(";")[0].strip()
        jobs = [Job(run, f"{array}_{i}") for i, run in enumerate(runs)]
        for job in jobs:
            write_whole(job.run.folder / TASK, job.handle + "\n")
        self.alive |= {job.handle for job in jobs}
        self.asked = time.monotonic()
        return jobs

    def running(self, runs: Sequence[PlannedRun]) -> list[Job]:
        """See Launcher: by what is written in the folders and in the queue."""
        written = {run.folder / TASK: run for run in runs if (run.folder / TASK).is_file()}
        if not written:
            return []
        self._look()
        tasks = [(path.read_text().strip(), run) for path, run in written.items()]
        return [Job(run, task) for task, run in tasks if task in self.alive]

    def ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        """See Launcher; the queue is asked every two seconds."""
        if not jobs or time.monotonic() - self.asked < ASK_EVERY_S:
            return []
        self._look()
        return [(job, self._status(job)) for job in jobs if job.handle not in self.alive]

    def stop(self, jobs: Sequence[Job]) -> None:
        """See Launcher: cancelled tasks save and end; what is left after a minute is Slurm's to kill."""
        if not jobs:
            return
        _ask(["scancel", *(job.handle for job in jobs)])
        deadline = time.monotonic() + STOP_WAIT_S
        while time.monotonic() < deadline:
            self._look()
            if not self.alive & {job.handle for job in jobs}:
                return
            time.sleep(0.5)

    def _look(self) -> None:
        """What is in the queue, of all users: ids of tasks are unique."""
        self.asked = time.monotonic()
        told = _ask(["squeue", "--noheader", "--array", "--format=%i %T"]).splitlines()
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        pairs = [line.split() for line in told if len(line.split()) == 2]
        self.alive = {task for task, state in pairs if state not in over}

    def _status(self, job: Job) -> int:
        """Exit status of a task that has left the queue; Slurm forgets it after some minutes."""
        if is_done(job.run.folder, job.run.plan.identity):
            return 0
        try:
            found = re.search(r"ExitCode=(\d+):(\d+)", _ask(["scontrol", "show", "job", job.handle]))
        except OSError:
            found = None
        return int(found[1]) or int(found[2]) or 1 if found else 1


def _ask(words: Sequence[str]) -> str:
    """What a command of Slurm prints. OSError with its last line where it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{words[0]}: not found; --launcher slurm wants Slurm's commands") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(
            f"{words[0]}: no answer for a minute; run the sweep again when Slurm is well"
        ) from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise OSError(f"{words[0]}: {said.removeprefix(f'{words[0]}: ')}")
    return done.stdout
