"""Start a command, kill it at a moment of its life, start it again until it ends, and compare what it leaves.

A job works in one folder, `Job.work`, which is made anew for the undisturbed run and for each trial: paths in
the files are the same, and every file that only one of the two runs leaves is a difference.
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
MARK = "KILLS_TRIAL"  # in the environment of every process of a trial
LIMIT_S = 240.0  # for a command; one that takes longer hangs
GONE_S = 60.0  # within this the other processes end after one of them was killed
POLL_S = 0.002
PHASES = ("start", "work", "write", "end")
ALL, PARENT, CHILD = "all", "parent", "child"


@dataclass(frozen=True)
class Job:
    """A command of one subsystem.

    words       the command
    work        folder that it writes to, and nothing else does
    outcome     {file: content, hash or summary} of `work`, without what differs from run to run
    prepare     fills `work` before the first start
    final       glob of the files that are complete when the command has done its work
    writing     globs of files that exist only while something is written
    targets     which processes are killed: "all" at once, the "parent" alone, one "child" alone
    n_copies    how many are started at once; the first is killed, the others have to end well
    at_once     also start again before the children of a killed parent are gone
    refuses     a finished output of its own is refused as an output that exists
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
    """What the trials of a job came to."""

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
        """Kills that hit a running process."""
        return self.phases.total()


class Started:
    """A command in a session of its own, with all its descendants."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: self.mark}
        environment["TMPDIR"] = str(log.parent)  # a killed process leaves its temporary files
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(words), cwd=ROOT, env=environment, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip

    def running(self) -> list[int]:
        """Ids of the processes that are still there, zombies not counted."""
        wanted = f"{MARK}={self.mark}".encode()
        pids = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    environment = Path(entry.path, "environ").read_bytes()
                except OSError:
                    continue
                if wanted in environment.split(b"\0"):
                    pids.append(int(entry.name))
        return pids

    def kill(self, target: str, rng: random.Random) -> bool:
        """SIGKILL; False where nothing was left to be killed."""
        if target == CHILD:
            children = [pid for pid in self.running() if pid != self.process.pid and not _is_tracker(pid)]
            if self.process.poll() is not None:
                return False
            if children:
                _send(rng.choice(sorted(children)), signal.SIGKILL)
                return True
            target = ALL
        if target == PARENT:
            self.process.send_signal(signal.SIGKILL)
        else:
            self.end()
        return self.process.wait(GONE_S) == -signal.SIGKILL

    def end(self) -> None:
        """Kill all of them, stopped first so that none sees another's end."""
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in self.running():
                _send(pid, number)
        while self.running():
            for pid in self.running():
                _send(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)

    def wait(self, seconds: float) -> int | None:
        """Exit status; None where it has not ended in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def wait_until_gone(self, seconds: float) -> list[int]:
        """Processes that are still there after so many seconds."""
        end = time.monotonic() + seconds
        while (pids := self.running()) and time.monotonic() < end:
            time.sleep(0.05)
        return pids


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_tracker(pid: int) -> bool:
    """Whether it is multiprocessing's resource tracker, which only cleans up."""
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True


def list_files(work: Path) -> dict[str, tuple[int, int]]:
    """{relative path: (bytes, time of change in ns)} of all files and folders."""
    files = {}
    for folder, _, names in os.walk(work):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue
            files[os.path.relpath(path, work)] = (status.st_size, status.st_mtime_ns)
    return files


def matches(files: dict[str, tuple[int, int]], globs: Sequence[str]) -> set[str]:
    """The paths of which any part matches any of the globs."""
    parts = {path: Path(path).parts for path in files}
    return {path for path, names in parts.items() for name in names for one in globs if Path(name).match(one)}


def phase_of(job: Job, before: dict[str, tuple[int, int]]) -> str:
    """Where in its life a command was killed, by what it left: one of `PHASES`."""
    now = list_files(job.work)
    changed = {path: sizes for path, sizes in now.items() if before.get(path) != sizes}
    if not changed:
        return "start"
    if matches(changed, job.writing):
        return "write"
    return "end" if all(list(job.work.glob(one)) for one in job.final) else "work"


class Trials:
    """The undisturbed run of a job, and trials that are compared with it."""

    def __init__(self, job: Job, rng: random.Random, logs: Path) -> None:
        """RuntimeError where the undisturbed run fails."""
        self.job, self.rng, self.logs = job, rng, logs
        self.tally = Tally(job.name)
        self._renew()
        start = time.monotonic()
        status = self._run_to_end("whole")
        self.duration_s = time.monotonic() - start
        if status != 0:
            raise RuntimeError(f"{job.name}: the undisturbed run ended with {status}: {self._log('whole')}")
        self.expected = job.outcome(job.work)
        if not self.expected:
            raise RuntimeError(f"{job.name}: the undisturbed run left nothing to compare")

    def run(self, n_kills: int) -> Tally:
        """Trials until so many kills have hit, or until too many have missed."""
        while self.tally.n_hits < n_kills and self.tally.n_trials < 3 * n_kills + 3:
            self._trial(min(self.rng.choice((1, 2)), n_kills - self.tally.n_hits))
        if self.tally.n_hits < n_kills:
            self.tally.faults.append(f"only {self.tally.n_hits} of {n_kills} kills hit a running process")
        return self.tally

    def _log(self, name: str) -> Path:
        return self.logs / f"{self.job.name}.{name}.log"

    def _renew(self) -> None:
        shutil.rmtree(self.job.work, ignore_errors=True)
        self.job.work.mkdir(parents=True)
        self.job.prepare(self.job.work)

    def _start(self, name: str, n: int) -> list[Started]:
        return [Started(self.job.words, self._log(name)) for _ in range(n)]

    def _run_to_end(self, name: str) -> int | None:
        """Exit status of the command, None where it hangs; what it leaves running is a fault, and ended."""
        (started,) = self._start(name, 1)
        status = started.wait(LIMIT_S)
        self._check_gone([started], name, 5.0 if status is not None else 0.0)
        return status

    def _check_gone(self, started: Sequence[Started], name: str, seconds: float) -> None:
        for one in started:
            if pids := one.wait_until_gone(seconds):
                shown = ", ".join(_describe(pid) for pid in pids)
                self.tally.leftovers.append(f"{name}: processes left after {seconds:.0f} s: {shown}")
            one.end()

    def _trial(self, n_kills: int) -> None:
        name = str(self.tally.n_trials)
        self.tally.n_trials += 1
        self._renew()
        n_faults = len(self.tally.faults) + len(self.tally.leftovers)
        status = None
        for _ in range(n_kills):
            status = self._kill_once(name)
            self.tally.n_restarts += status != 0
            if status == 0:
                break
        if status != 0:
            status = self._run_to_end(name)
        found = self.job.outcome(self.job.work)
        is_equal = found == self.expected
        if status != 0 and not (status == 1 and is_equal and self.job.refuses):
            self.tally.faults.append(f"{name}: the last start ended with {status}: see {self._log(name)}")
        if is_equal:
            self.tally.n_equal += 1
        else:
            self.tally.faults.append(f"{name}: {describe_difference(self.expected, found)}")
        if len(self.tally.faults) + len(self.tally.leftovers) > n_faults:
            shutil.copytree(self.job.work, self.logs / f"{self.job.name}.{name}", symlinks=True)

    def _kill_once(self, name: str) -> int | None:
        """Start, and kill at a random moment. 0 where it ended well before, or in spite of it."""
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
        status = first.wait(LIMIT_S if target == CHILD or not was_hit else 0)
        if status is None:
            self.tally.faults.append(f"{name}: hangs after a {target} was killed: see {self._log(name)}")
        for other in others:
            if (theirs := other.wait(LIMIT_S)) != 0:
                self.tally.faults.append(f"{name}: the other process ended with {theirs}")
        if not (target == PARENT and was_hit and self.job.at_once and self.rng.random() < 0.5):
            self._check_gone(started, name, GONE_S)
        return status

    def _wait_for_moment(self, started: Started, before: dict[str, tuple[int, int]]) -> None:
        """Return at a moment drawn over the run's duration, or when a file that is being written appears."""
        for_write = self.rng.random() < 0.5
        delay_s = self.rng.uniform(0, self.duration_s)
        started.wait(delay_s * (self.rng.random() < 0.5) if for_write else delay_s)
        if not for_write:
            return
        known = matches(before, self.job.writing)
        while started.process.poll() is None:
            if matches(list_files(self.job.work), self.job.writing) - known:
                time.sleep(self.rng.choice((0, 0, 0.003, 0.03)))
                return
            time.sleep(POLL_S)


def _describe(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return str(pid)


def describe_difference(expected: dict[str, str], found: dict[str, str], n_shown: int = 6) -> str:
    """Files that are missing, additional or different, the first of each."""
    kinds = {
        "missing": sorted(expected.keys() - found.keys()),
        "additional": sorted(found.keys() - expected.keys()),
        "different": sorted(key for key in expected.keys() & found.keys() if expected[key] != found[key]),
    }
    return "; ".join(f"{kind}: {', '.join(paths[:n_shown])}" for kind, paths in kinds.items() if paths)
