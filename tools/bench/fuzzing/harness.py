"""Feed inputs to one fuzz target in a separate process, and count the outcomes.

The process writes the number of its current input to shared memory. If it dies or makes no progress, that
input is a crash or a hang, and a new process resumes after it.
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
# A length of 2^60 in a damaged header must raise MemoryError in the reader. Without this limit the kernel
# would kill the process, or another one.
MEMORY = 4 << 30  # bytes of address space that reading one input may add
POLL_S = 0.05


class WrongAnswerError(Exception):
    """An accepted input that was read differently from the reference."""


class RefusedError(ValueError):
    """A refusal that the project returns instead of raising an exception."""


class Case(Protocol):
    """Interface of a fuzz case. `n_inputs` is the number of inputs of one call of `make`."""

    n_inputs: int

    def make(self, rng: random.Random) -> Files:
        """Return one input, by file name."""

    def passes(self, files: Files) -> int:
        """Return the number of inputs whose container format is intact."""

    def read(self, files: Files) -> Mapping[str, int] | None:
        """Return counts of `accepted` and `refused`; None: all accepted. Raise the errors of the reader."""


@dataclass(frozen=True)
class FuzzTarget:
    """A reader of external data.

    share  its relative share of all inputs
    open   makes the case; runs in the process of the target
    """

    name: str
    share: float
    open: Callable[[Path], Case]


@dataclass
class Result:
    """Outcomes of the inputs of one target. `places`: lines of code that refused inputs."""

    name: str
    counts: dict[str, int]
    cpu_s: float
    places: set[str] = field(default_factory=set)

    @property
    def failed(self) -> bool:
        """Return whether any input failed."""
        return any(self.counts[name] for name in FAILURES)


@dataclass(frozen=True)
class Limits:
    """Limits of a target: `cpu_s` CPU seconds (None: no limit), and `hang_s` wall seconds for one input."""

    cpu_s: float | None
    hang_s: float


class _Board:
    """Shared memory of both processes: the number of the current input, then COUNTS, as int64."""

    def __init__(self) -> None:
        # An anonymous mapping is shared after fork, and its content outlives the child: the parent still
        # reads the last number of a process that was killed.
        self.memory = mmap.mmap(-1, 8 * (len(COUNTS) + 1))

    def get(self, place: int) -> int:
        # place 0 is the number of the input, place i + 1 is COUNTS[i]
        return struct.unpack_from("<q", self.memory, 8 * place)[0]

    def set(self, place: int, value: int) -> None:
        struct.pack_into("<q", self.memory, 8 * place, value)

    def add(self, name: str, n: int = 1) -> None:
        place = COUNTS.index(name) + 1
        self.set(place, self.get(place) + n)

    def counts(self) -> dict[str, int]:
        return {name: self.get(i + 1) for i, name in enumerate(COUNTS)}


def fuzz_target(target: FuzzTarget, n_inputs: int, seed: int, out: Path, limits: Limits) -> Result:
    """Feed inputs to a target; write failing inputs to a folder each below `out`."""
    board = _Board()
    scratch = out / "scratch" / target.name
    # fork: the child inherits the board, and `target.open` need not be picklable
    context = multiprocessing.get_context("fork")
    begin = _cpu_of_children()
    while True:
        # what dead processes of the target used counts too
        left_s = None if limits.cpu_s is None else limits.cpu_s - (_cpu_of_children() - begin)
        process = context.Process(
            target=_run_target,
            args=(target, n_inputs, seed, out, scratch, board, Limits(left_s, limits.hang_s)),
        )
        process.start()
        is_hung = _wait_or_kill(process, board, limits.hang_s)
        process.join()
        at = board.get(0)
        # all inputs done, or the limit of CPU seconds is reached
        if process.exitcode == 0 and not is_hung:
            break
        # A positive status is an exception outside `_feed_input`, an error of the fuzzer. An input that kills
        # the process leaves a negative one, minus the signal: -11 for a segmentation fault.
        if at < 0 or (process.exitcode or 0) > 0:
            where = f"before the first input; see {out}/{target.name}.log" if at < 0 else f"at input {at}"
            raise RuntimeError(f"{target.name}: the fuzz process ended with {process.exitcode} {where}")
        kind = "hangs" if is_hung else "crashes"
        board.add(kind)
        # the dead process could not count its last input
        board.add("inputs")
        _store_failure(out, target.name, at, kind, _last_input(scratch), f"status {process.exitcode}\n")
        shutil.rmtree(scratch, ignore_errors=True)
        board.set(0, at + 1)  # the next process skips this input
    # every process of the target appended its lines, so a line may be repeated
    places = scratch.with_suffix(".places")
    refusing_lines = set(places.read_text().split("\n")) - {""} if places.exists() else set()
    shutil.rmtree(scratch, ignore_errors=True)
    return Result(target.name, board.counts(), _cpu_of_children() - begin, refusing_lines)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_or_kill(process: Any, board: _Board, hang_s: float) -> bool:
    """Wait for a process to end. Kill it if it stays at one input for too long, and return True."""
    # -2 is never on the board, so the clock starts at the first look
    at, since = -2, time.monotonic()
    while process.is_alive():
        process.join(POLL_S)
        if board.get(0) != at:
            at, since = board.get(0), time.monotonic()
        elif time.monotonic() - since > (
            hang_s if at > 0 else 10 * hang_s
        ):  # the first input also imports libraries
            # SIGKILL: a loop in C++ never returns to Python, where another signal would be handled
            process.kill()
            return True
    return False


def _run_target(
    target: FuzzTarget, n_inputs: int, seed: int, out: Path, scratch: Path, board: _Board, limits: Limits
) -> None:
    """Process of a target: feed inputs from the board's number on."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (out / f"{target.name}.log").open("ab") as printed:
        # at the level of descriptors: libraries in C++ and Rust print without sys.stdout
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    # Ctrl-C must end this process. As KeyboardInterrupt it would count as an error of the current input.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    first = board.get(0)
    if first == 0:
        board.set(0, -1)  # -1: the case is not yet open; a failure now is one of the fuzzer

    # reads the valid files: an error here is one of the fuzzer or of a reader that refuses valid input
    case = target.open(scratch)
    at = max(first, 0)
    with suppress(OSError, ValueError):
        # a limit relative to the current size, so that an oversized allocation raises MemoryError
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
    while at < n_inputs and (limits.cpu_s is None or time.process_time() < limits.cpu_s):
        # the input depends only on seed, target and number, so a new process continues the same series
        files = case.make(random.Random(f"{seed}/{target.name}/{at}"))
        # First the file, then the number. In the other order, a death between the two would store the files
        # of the previous input under the number of this one.
        _store_input(scratch, files)
        board.set(0, at)
        _feed_input(target.name, case, files, at, out, scratch, board)
        # a batch of 16 lines has the numbers at to at + 15
        at += case.n_inputs
    os._exit(
        0
    )  # skip the shutdown: nothing is to be saved, and libraries may hang at exit after invalid inputs


def _feed_input(
    name: str, case: Case, files: Files, at: int, out: Path, scratch: Path, board: _Board
) -> None:
    """Feed one input or one batch of inputs, and count the outcome."""
    passed = 0
    try:
        passed = case.passes(files)
        # None: accepted, and equal to the reference where there is one
        counts = case.read(files) or {"accepted": case.n_inputs}
    except BaseException as error:  # a panic of a Rust library is not an Exception
        # one outcome for the whole batch: the columns of a target with batches add up to less than its inputs
        counts = {classify_error(error): 1}
        place = locate_refusal(error)
        with scratch.with_suffix(".places").open("a") as places:
            places.write(place + "\n") if place not in _seen else None
        _seen.add(place)
        # A failure is always stored. Of the foreign messages only the first of each line of code is stored:
        # they are no failures, and there are thousands.
        (kind,) = counts
        if kind in FAILURES or kind == "foreign" and (kind, place) not in _seen:
            _seen.add((kind, place))
            _store_failure(out, name, at, kind, files, "".join(traceback.format_exception(error)))
    for kind, n in counts.items():
        board.add(kind, n)
    board.add("passed", passed)
    board.add("inputs", case.n_inputs)


_seen: set[Any] = set()


def classify_error(error: BaseException) -> str:
    """Return the outcome of an error.

    `refused` for a message of the project, `foreign` for a message of a library, `wrong` or `tracebacks`.
    """
    # from the most specific class to the most general: UnicodeError and JSONDecodeError are ValueErrors
    if isinstance(error, WrongAnswerError):
        return "wrong"
    if isinstance(error, RefusedError):
        return "refused"
    if isinstance(error, OSError) and error.errno is not None:
        return "refused"  # the command prints the file and the reason
    # the tools print ValueError and OSError as one line; any other class ends with a traceback
    if not isinstance(error, ValueError | OSError | ArgumentTypeError):
        return "tracebacks"
    if isinstance(error, UnicodeError | json.JSONDecodeError):
        return "foreign"
    # a message of the project comes from one of its `raise` lines, or from its C++ extension
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    is_project_line = "/megatron/" in frame.filename and ("raise" in line or "_csrc" in line)
    return "refused" if is_project_line else "foreign"


def locate_refusal(error: BaseException) -> str:
    """Return the innermost line of the project in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    project_frames = [
        frame
        for frame in frames
        if "/megatron/" in frame.filename and "/site-packages/" not in frame.filename
    ]
    # [-1]: the innermost frame, where the exception was raised or a library was called
    frame = (project_frames or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno} {type(error).__name__}"


def _address_space() -> int:
    # the first field is the size of the address space in pages, which is what RLIMIT_AS limits
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE


def _store_input(scratch: Path, files: Files) -> None:
    """Write the input to disk before it is read, so that an input that kills the process is preserved."""
    folder = scratch / ".input"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        # the previous input may have mutated another file
        if old.name not in files:
            old.unlink()
    for name, content in files.items():
        (folder / name.replace("/", "__")).write_bytes(content)


def _last_input(scratch: Path) -> Files:
    folder = scratch / ".input"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def _store_failure(out: Path, name: str, at: int, kind: str, files: Files, error_text: str) -> None:
    folder = out / name / f"{at}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / file.replace("/", "__")).write_bytes(content)
    (folder / "error.txt").write_text(error_text, errors="backslashreplace")
