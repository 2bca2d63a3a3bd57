"""Start a command, kill it at a random moment, restart it until it ends, and compare the files it leaves.

A job writes to one folder, `Job.work`, which is recreated for the undisturbed run and for each trial. So
paths in the files are equal, and a file that only one of the two runs leaves is a difference.
"""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MARK = "KILLS_TRIAL"  # environment variable of all processes of a trial, which identifies them
LIMIT_S = 240.0  # a command that takes longer hangs
GONE_S = 60.0  # time for the other processes to end after one of them was killed
# a partial file of a small job exists for a few milliseconds
POLL_S = 0.002
PHASES = ("start", "work", "write", "end")
ALL, PARENT, CHILD = "all", "parent", "child"


@dataclass(frozen=True)
class Job:
    """A command of one subsystem.

    words       command line
    work        folder that only this command writes to
    outcome     returns {file: content, hash or summary} of `work`, without parts that differ from run to run
    prepare     fills `work` before the first start
    final       globs of the files that exist when the command has finished its work
    writing     globs of files that exist only during a write
    targets     processes to kill: "all" at once, only the "parent", or one "child"
    n_copies    number of copies started at once; the first is killed, the others must succeed
    at_once     also restart before the children of a killed parent have ended
    refuses     the command fails with status 1 if its output is already complete
    """

    name: str
    words: Sequence[str]
    work: Path
    outcome: Callable[[Path], dict[str, str]]
    final: Sequence[str]
    prepare: Callable[[Path], None] = lambda work: None
    writing: Sequence[str] = ("*.partial*",)
    targets: Sequence[str] = (ALL,)
    n_copies: int = 1
    at_once: bool = False
    refuses: bool = False


@dataclass
class Tally:
    """Counts and faults of the trials of a job."""

    name: str
    phases: Counter[str] = field(default_factory=Counter)
    targets: Counter[str] = field(default_factory=Counter)
    n_missed: int = 0
    n_restarts: int = 0
    n_equal: int = 0
    n_trials: int = 0
    faults: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    @property
    def n_hits(self) -> int:
        """Number of kills that hit a running process."""
        return self.phases.total()


class RunningCommand:
    """A running command in a new session, with all its descendants."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        # One mark for each start: a trial starts the same command several times, and the orphans of an
        # earlier start must not count as processes of a later one.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: self.mark}
        environment["TMPDIR"] = str(
            log.parent
        )  # killed processes leave temporary files, which must not be left in the system's folder
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(words), cwd=ROOT, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    def list_pids(self) -> list[int]:
        """Return the ids of the running processes, without zombies.

        Descendants are identified by MARK in their environment, also after their parent has ended.
        """
        # A process group is not enough: start_ranks gives each rank a new session, and an orphan has another
        # parent. All of them inherit the environment.
        marker = f"{MARK}={self.mark}".encode()
        pids = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    # a zombie has no memory any more: its environ is empty, so it does not match below
                    environment = Path(entry.path, "environ").read_bytes()
                except OSError:
                    continue
                if marker in environment.split(b"\0"):
                    pids.append(int(entry.name))
        return pids

    def kill(self, target: str, rng: random.Random) -> bool:
        """Send SIGKILL to the target; return False if it had already ended."""
        if target == CHILD:
            # the resource tracker only cleans up, so killing it does not test the command
            children = [pid for pid in self.list_pids() if pid != self.process.pid and not _is_tracker(pid)]
            # polled after the children were listed: the list is of no use if the command ended meanwhile
            if self.process.poll() is not None:
                return False
            if children:
                _send_signal(rng.choice(sorted(children)), signal.SIGKILL)
                return True
            # no child has started yet: the kill must hit something, so all processes are killed
            target = ALL
        if target == PARENT:
            self.process.send_signal(signal.SIGKILL)
        else:
            self.end()
        # a status other than -9 means that the command ended before the signal: this kill missed
        return self.process.wait(GONE_S) == -signal.SIGKILL

    def end(self) -> None:
        """Kill all processes. They are stopped first, so that none reacts to the end of another."""
        # A batch system kills all processes at the same moment. With SIGKILL alone, a parent would see its
        # first child die, and would have time to clean up and to write an error.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.list_pids():
                _send_signal(pid, number)
        # a process may have forked between the listing and its SIGSTOP
        while self.list_pids():
            for pid in self.list_pids():
                _send_signal(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)

    def wait(self, seconds: float) -> int | None:
        """Return the exit status; None if the command has not ended in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait_until_gone(self, seconds: float) -> list[int]:
        """Wait for all processes to end; return those that still run after `seconds`."""
        end = time.monotonic() + seconds
        while (pids := self.list_pids()) and time.monotonic() < end:
            time.sleep(0.05)
        return pids


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_tracker(pid: int) -> bool:
    """Return whether a process is multiprocessing's resource tracker, which only cleans up."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def list_files(work: Path) -> dict[str, tuple[int, int]]:
    """Return {relative path: (bytes, modification time in ns)} of all files and folders."""
    files = {}
    for folder, _, names in os.walk(work):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                status = os.stat(path)
            except FileNotFoundError:  # removed or renamed by the command in the meantime
                continue
            # a folder's time changes when an entry is added, renamed or removed, also if no file grows
            files[os.path.relpath(path, work)] = (status.st_size, status.st_mtime_ns)
    return files


def match_paths(files: dict[str, tuple[int, int]], globs: Sequence[str]) -> set[str]:
    """Return the paths with a component that matches one of the globs."""
    parts = {path: Path(path).parts for path in files}
    return {
        path
        for path, names in parts.items()
        for name in names
        for pattern in globs
        if Path(name).match(pattern)
    }


def phase_of(job: Job, before: dict[str, tuple[int, int]]) -> str:
    """Return the phase in which a command was killed, derived from its files: one of `PHASES`."""
    now = list_files(job.work)
    # Compared after the kill. If only a child was killed, the others still run and write, so the phase is
    # then an approximation.
    changed = {path: sizes for path, sizes in now.items() if before.get(path) != sizes}
    if not changed:
        return "start"
    # a leftover of an earlier kill that this start did not touch is not in `changed`
    if match_paths(changed, job.writing):
        return "write"
    return "end" if all(list(job.work.glob(pattern)) for pattern in job.final) else "work"


class Trials:
    """The undisturbed run of a job, and trials that are compared with it."""

    def __init__(self, job: Job, rng: random.Random, logs: Path) -> None:
        """Run the job undisturbed. Raise RuntimeError if that fails."""
        self.job, self.rng, self.logs = job, rng, logs
        self.tally = Tally(job.name)
        self._prepare_work()
        # the moments of the kills are drawn from this duration, so it includes the start of the interpreter
        start = time.monotonic()
        status = self._run_to_end("whole")
        self.duration_s = time.monotonic() - start
        if status != 0:
            raise RuntimeError(
                f"{job.name}: the undisturbed run ended with {status}: {self._log_path('whole')}"
            )
        self.expected = job.outcome(job.work)
        if not self.expected:
            raise RuntimeError(f"{job.name}: the undisturbed run left nothing to compare")

    def run(self, n_kills: int) -> Tally:
        """Run trials until `n_kills` kills have hit, or until too many have missed."""
        # A command that is faster than its first run is missed often. For 10 kills at most 33 trials are run,
        # so a command that never gets hit ends as a fault and not as an endless loop.
        while self.tally.n_hits < n_kills and self.tally.n_trials < 3 * n_kills + 3:
            self._run_trial(min(self.rng.choice((1, 2)), n_kills - self.tally.n_hits))
        if self.tally.n_hits < n_kills:
            self.tally.faults.append(f"only {self.tally.n_hits} of {n_kills} kills hit a running process")
        return self.tally

    def _log_path(self, name: str) -> Path:
        return self.logs / f"{self.job.name}.{name}.log"

    def _prepare_work(self) -> None:
        # the folder has the same path in each trial, because commands store paths in their files
        shutil.rmtree(self.job.work, ignore_errors=True)
        self.job.work.mkdir(parents=True)
        self.job.prepare(self.job.work)

    def _start(self, name: str, n: int) -> list[RunningCommand]:
        return [RunningCommand(self.job.words, self._log_path(name)) for _ in range(n)]

    def _run_to_end(self, name: str) -> int | None:
        """Return the exit status of the command, None if it hangs.

        Leftover processes are recorded and ended.
        """
        (started,) = self._start(name, 1)
        status = started.wait(LIMIT_S)
        # 5 s for helpers such as the resource tracker to end; a hung command is ended without a delay
        self._check_gone([started], name, 5.0 if status is not None else 0.0)
        return status

    def _check_gone(self, started: Sequence[RunningCommand], name: str, seconds: float) -> None:
        for command in started:
            if pids := command.wait_until_gone(seconds):
                shown = ", ".join(_describe_process(pid) for pid in pids)
                self.tally.leftovers.append(f"{name}: processes left after {seconds:.0f} s: {shown}")
            command.end()

    def _run_trial(self, n_kills: int) -> None:
        name = str(self.tally.n_trials)
        self.tally.n_trials += 1
        self._prepare_work()
        # faults and leftovers of this trial are those that come after these
        n_faults = len(self.tally.faults) + len(self.tally.leftovers)
        status = None
        for _ in range(n_kills):
            status = self._kill_once(name)
            # status 0: the kill missed, or the command replaced its killed child and succeeded
            self.tally.n_restarts += status != 0
            if status == 0:
                break
        if status != 0:
            status = self._run_to_end(name)
        # compared also after a failed last start: the difference shows what the failure left
        outcome = self.job.outcome(self.job.work)
        is_equal = outcome == self.expected
        # a kill after the last write leaves a complete output, which such commands refuse to overwrite
        if status != 0 and not (status == 1 and is_equal and self.job.refuses):
            self.tally.faults.append(
                f"{name}: the last start ended with {status}: see {self._log_path(name)}"
            )
        if is_equal:
            self.tally.n_equal += 1
        else:
            self.tally.faults.append(f"{name}: {describe_difference(self.expected, outcome)}")
        # the next trial deletes the work folder, so the files of a failed trial are copied to the logs
        if len(self.tally.faults) + len(self.tally.leftovers) > n_faults:
            shutil.copytree(self.job.work, self.logs / f"{self.job.name}.{name}", symlinks=True)

    def _kill_once(self, name: str) -> int | None:
        """Start the command and kill it at a random moment.

        Return 0 if it succeeded before or despite the kill.
        """
        # before the start, so that changes are those of this start and not of an earlier one
        before = list_files(self.job.work)
        started = self._start(name, self.job.n_copies)
        first, others = started[0], started[1:]
        self._wait_for_moment(first, before)
        target = self.rng.choice(list(self.job.targets))
        was_hit = first.kill(target, self.rng)
        if was_hit:
            self.tally.phases[phase_of(self.job, before)] += 1
            self.tally.targets[target] += 1
        else:
            self.tally.n_missed += 1
        # After the loss of a child the parent must end or recover within the limit. A parent that was hit has
        # already been waited for.
        status = first.wait(LIMIT_S if target == CHILD or not was_hit else 0)
        if status is None:
            self.tally.faults.append(
                f"{name}: hangs after target '{target}' was killed: see {self._log_path(name)}"
            )
        # the other copies must not depend on the killed one: a lock that is not released would block them
        for other in others:
            if (theirs := other.wait(LIMIT_S)) != 0:
                self.tally.faults.append(f"{name}: the other process ended with {theirs}")
        # in half of the cases the restart overlaps with the orphaned children of the killed parent
        if not (target == PARENT and was_hit and self.job.at_once and self.rng.random() < 0.5):
            self._check_gone(started, name, GONE_S)
        return status

    def _wait_for_moment(self, started: RunningCommand, before: dict[str, tuple[int, int]]) -> None:
        """Return at a random moment of the run's duration, or when a partially written file appears."""
        # Uniform moments rarely hit a write: one of 10 ms in a run of 10 s is hit once in a thousand kills.
        # So half of the kills wait for a partial file, half of these from the start and half from a random
        # moment, since the first write of a run may differ from later ones.
        for_write = self.rng.random() < 0.5
        delay_s = self.rng.uniform(0, self.duration_s)
        started.wait(delay_s * (self.rng.random() < 0.5) if for_write else delay_s)
        if not for_write:
            return
        # a partial file that an earlier kill left is no sign of a write by this start
        present = match_paths(before, self.job.writing)
        while started.process.poll() is None:
            if match_paths(list_files(self.job.work), self.job.writing) - present:
                # the file may be empty at first: kill at different stages of the write
                time.sleep(self.rng.choice((0, 0, 0.003, 0.03)))
                return
            time.sleep(POLL_S)


def _describe_process(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return str(pid)


def describe_difference(expected: dict[str, str], outcome: dict[str, str], n_shown: int = 6) -> str:
    """Describe the first missing, additional and different files."""
    kinds = {
        "missing": sorted(expected.keys() - outcome.keys()),
        "additional": sorted(outcome.keys() - expected.keys()),
        "different": sorted(key for key in expected.keys() & outcome.keys() if expected[key] != outcome[key]),
    }
    return "; ".join(f"{kind}: {', '.join(paths[:n_shown])}" for kind, paths in kinds.items() if paths)
