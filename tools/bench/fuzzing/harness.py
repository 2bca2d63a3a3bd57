"""Feeding inputs to one entrance in a process of its own, and counting what comes of them.

The process writes the number of the input it is at into shared memory. Where it dies or makes no progress,
that input is a crash or a hang, and another process resumes behind it.
"""

import json
import linecache
import logging
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import time
import traceback
import warnings
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Files = dict[str, bytes]
COUNTS = ("inputs", "passed", "accepted", "refused", "foreign", "tracebacks", "wrong", "hangs", "crashes")
FAILURES = ("tracebacks", "wrong", "hangs", "crashes")
MEMORY = 4 << 30  # bytes of address space that reading one input may add
POLL_S = 0.05


class WrongAnswerError(Exception):
    """An accepted input, read as something else than the reference reads."""


class RefusedError(ValueError):
    """A refusal that the project returns instead of raising it."""


class Case(Protocol):
    """What an entrance needs to run. `n_inputs` is how many inputs one call of `make` gives."""

    n_inputs: int

    def make(self, rng: random.Random) -> Files:
        """One input, by the name of its file."""

    def passes(self, files: Files) -> int:
        """How many of its inputs get past the first check: the container format is intact."""

    def read(self, files: Files) -> Mapping[str, int] | None:
        """Counts of `accepted` and `refused`; None: all accepted. Raises what the entrance raises."""


@dataclass(frozen=True)
class Entrance:
    """A place where data from outside comes in. `share`: of all inputs; `open` runs in the process."""

    name: str
    share: float
    open: Callable[[Path], Case]


@dataclass
class Result:
    """What came of the inputs of one entrance. `places`: lines of code that refused some."""

    name: str
    counts: dict[str, int]
    cpu_s: float
    places: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        """Whether any input was a failure."""
        return any(self.counts[name] for name in FAILURES)


@dataclass(frozen=True)
class Limits:
    """`cpu_s`: of an entrance, None: no limit. `hang_s`: of one input, by the clock."""

    cpu_s: float | None
    hang_s: float


class _Board:
    """Numbers that both processes see: the next input, then COUNTS."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 8 * (len(COUNTS) + 1))

    def get(self, place: int) -> int:
        return struct.unpack_from("<q", self.memory, 8 * place)[0]

    def set(self, place: int, value: int) -> None:
        struct.pack_into("<q", self.memory, 8 * place, value)

    def add(self, name: str, n: int = 1) -> None:
        place = COUNTS.index(name) + 1
        self.set(place, self.get(place) + n)

    def counts(self) -> dict[str, int]:
        return {name: self.get(i + 1) for i, name in enumerate(COUNTS)}


def fuzz(entrance: Entrance, n_inputs: int, seed: int, out: Path, limits: Limits) -> Result:
    """Feed inputs to an entrance; what fails is written below `out`, one folder for each input."""
    board = _Board()
    scratch = out / "scratch" / entrance.name
    context = multiprocessing.get_context("fork")
    begin = _cpu_of_children()
    while True:
        process = context.Process(target=_work, args=(entrance, n_inputs, seed, out, scratch, board, limits))
        process.start()
        is_hung = _watch(process, board, limits.hang_s)
        process.join()
        at = board.get(0)
        if process.exitcode == 0 and not is_hung:
            break
        if at < 0 or (process.exitcode or 0) > 0:
            where = f"before the first input; see {out}/{entrance.name}.log" if at < 0 else f"at input {at}"
            raise RuntimeError(f"{entrance.name}: the fuzzing itself ended with {process.exitcode} {where}")
        kind = "hangs" if is_hung else "crashes"
        board.add(kind)
        board.add("inputs")
        _keep(out, entrance.name, at, kind, _last_input(scratch), f"status {process.exitcode}\n")
        shutil.rmtree(scratch, ignore_errors=True)
        board.set(0, at + 1)
    places = scratch.with_suffix(".places")
    told = set(places.read_text().split("\n")) - {""} if places.exists() else set()
    shutil.rmtree(scratch, ignore_errors=True)
    return Result(entrance.name, board.counts(), _cpu_of_children() - begin, told)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watch(process: Any, board: _Board, hang_s: float) -> bool:
    """Wait for a process to end; one that stays at an input is killed: True."""
    at, since = -2, time.monotonic()
    while process.is_alive():
        process.join(POLL_S)
        if board.get(0) != at:
            at, since = board.get(0), time.monotonic()
        elif time.monotonic() - since > (hang_s if at > 0 else 10 * hang_s):  # the first one imports
            process.kill()
            return True
    return False


def _work(
    entrance: Entrance, n_inputs: int, seed: int, out: Path, scratch: Path, board: _Board, limits: Limits
) -> None:
    """The process of an entrance: inputs from the board's number on."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (out / f"{entrance.name}.log").open("ab") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    first = board.get(0)
    if first == 0:
        board.set(0, -1)
    case = entrance.open(scratch)
    at = max(first, 0)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
    while at < n_inputs and (limits.cpu_s is None or time.process_time() < limits.cpu_s):
        files = case.make(random.Random(f"{seed}/{entrance.name}/{at}"))
        _remember(scratch, files)
        board.set(0, at)
        _feed(entrance.name, case, files, at, out, scratch, board)
        at += case.n_inputs
    os._exit(0)  # nothing is to be saved, and libraries may hang at exit after what they were given


def _feed(name: str, case: Case, files: Files, at: int, out: Path, scratch: Path, board: _Board) -> None:
    """One input, or one batch of them."""
    try:
        passed = case.passes(files)
        told = case.read(files) or {"accepted": case.n_inputs}
    except BaseException as error:  # what Rust libraries raise of a panic is no Exception
        told = {judge(error): 1}
        place = place_of(error)
        with scratch.with_suffix(".places").open("a") as places:
            places.write(place + "\n") if place not in _seen else None
        _seen.add(place)
        (kind,) = told
        if kind in FAILURES or kind == "foreign" and (kind, place) not in _seen:
            _seen.add((kind, place))
            _keep(out, name, at, kind, files, "".join(traceback.format_exception(error)))
    for kind, n in told.items():
        board.add(kind, n)
    board.add("passed", passed)
    board.add("inputs", case.n_inputs)


_seen: set[Any] = set()


def judge(error: BaseException) -> str:
    """`refused` in the project's own words, `foreign` in a library's, `wrong`, or `tracebacks`."""
    if isinstance(error, WrongAnswerError):
        return "wrong"
    if isinstance(error, RefusedError):
        return "refused"
    if isinstance(error, OSError) and error.errno is not None:
        return "refused"  # the command prints file and reason
    if not isinstance(error, ValueError | OSError | ArgumentTypeError):
        return "tracebacks"
    if isinstance(error, UnicodeError | json.JSONDecodeError):
        return "foreign"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    is_own = "/megatron/" in frame.filename and ("raise" in line or "_csrc" in line)
    return "refused" if is_own else "foreign"


def place_of(error: BaseException) -> str:
    """The last line of the project that the error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if "/megatron/" in one.filename and "/site-packages/" not in one.filename]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {type(error).__name__}"


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE


def _remember(scratch: Path, files: Files) -> None:
    """Write the input down before it is read: what kills the process can be looked at."""
    held = scratch / ".input"
    held.mkdir(exist_ok=True)
    for old in held.iterdir():
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (held / name.replace("/", "__")).write_bytes(content)


def _last_input(scratch: Path) -> Files:
    held = scratch / ".input"
    return {path.name: path.read_bytes() for path in held.iterdir()} if held.is_dir() else {}


def _keep(out: Path, name: str, at: int, kind: str, files: Files, told: str) -> None:
    folder = out / name / f"{at}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file.replace("/", "__")).write_bytes(content)
    (folder / "error.txt").write_text(told, errors="backslashreplace")
