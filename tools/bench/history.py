"""History of benchmark results: one JSON line per measured cell, with commit, machine and versions.

The benches of tools/bench append to one file, by default bench_history.jsonl in the checkout. The environment
variable BENCH_HISTORY names another file, and an empty one turns recording off. BENCH_COMMIT names the commit
of code that was copied without its .git. `tools/bench/compare.py` reads the file.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from megatron.io import open_locked
from megatron.log import get_logger

HISTORY = "bench_history.jsonl"
ROOT = Path(__file__).resolve().parents[2]
LOCK_WAIT_S = 60.0
MAX_REPEATS = 100  # repetitions stored per line: 1 KB
PACKAGES = ("torch", "numpy")
# environment variables that change the speed of the same code on the same machine
SPEED_VARIABLES = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")

log = get_logger("megatron.bench_history")


def add_history_options(parser: argparse.ArgumentParser) -> None:
    """Add --history and --no-history, which set `args.history` to a path or None."""
    name = os.environ.get("BENCH_HISTORY")
    default = None if name == "" else Path(name) if name else ROOT / HISTORY
    add = parser.add_argument_group("history").add_argument
    add(
        "--history",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="FILE.jsonl",
        help=f"append the results to this file; default: BENCH_HISTORY or {HISTORY} in the checkout",
    )
    add(
        "--no-history",
        dest="history",
        action="store_const",
        const=None,
        default=argparse.SUPPRESS,
        help="do not store the results",
    )
    parser.set_defaults(history=default)


def record_result(
    history: Path | None,
    bench: str,
    cell: str,
    value: float,
    unit: str,
    *,
    better: Literal["higher", "lower"],
    repeats: Sequence[float] = (),
    details: dict[str, Any] | None = None,
) -> None:
    """Append one figure to the history; with `history` None do nothing.

    history   `args.history` of `add_history_options`
    bench     name of the bench's file, such as "train"
    cell      what was measured, with the settings that change it: results of one cell are compared
    value     the headline figure, such as the median of `repeats`
    repeats   the same figure of each repetition, in `unit`: its spread decides what is noise
    details   other values worth keeping, JSON only; not compared
    """
    if history is None:
        return
    if better not in ("higher", "lower"):
        raise ValueError(f"{bench} {cell}: got better='{better}', expected 'higher' or 'lower'.")
    numbers = [float(x) for x in repeats]
    record = {
        "bench": bench,
        "cell": cell,
        "value": float(value),
        "unit": unit,
        "better": better,
        "repeats": numbers[:MAX_REPEATS],
        "spread": (max(numbers) - min(numbers)) / abs(value) if len(numbers) > 1 and value else None,
        **read_commit(),
        "machine": describe_hardware(),
        "versions": read_versions(),
        "time": round(time.time(), 3),
        **({"details": details} if details else {}),
    }
    append_record(history, record)


def append_record(path: Path, record: dict[str, Any]) -> None:
    """Append one line of JSON. Lines of several processes do not mix; NaN and Inf raise ValueError."""
    try:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
    except ValueError as error:
        name = f"{record.get('bench')} {record.get('cell')}"
        raise ValueError(f"{path}: {name}: got NaN or Inf, expected finite numbers.") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    # the lock also covers the look at the last byte: another process may be in the middle of its line
    with open_locked(path, wait_s=LOCK_WAIT_S) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                # a killed process left half a line: end it, so that only that line is lost
                line = b"\n" + line
        file.seek(0, os.SEEK_END)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a history. A damaged line, such as that of a killed process, is logged."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if (
                isinstance(record, dict)
                and {"bench", "cell", "better", "commit"} <= record.keys()
                and isinstance(record.get("value"), int | float)
            ):
                yield record
            elif line.strip():
                log.warning("%s:%d: not a benchmark result; skipped", path, number)


@cache
def read_commit() -> dict[str, Any]:
    """Return the commit of the running code, and whether its files differ from it; None outside git."""
    if commit := os.environ.get("BENCH_COMMIT"):
        return {"commit": commit.removesuffix("+"), "dirty": commit.endswith("+")}
    try:
        # --no-optional-locks: `git status` would write the index
        commit, changed = (
            subprocess.run(
                ["git", "--no-optional-locks", *words],
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changed)}


def describe_hardware() -> dict[str, Any]:
    """Return CPU model, usable cores, GPU, and the environment variables that change the speed."""
    return {
        "cpu": _read_cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": _read_gpu_model(),
        "environment": {name: os.environ[name] for name in SPEED_VARIABLES if name in os.environ},
    }


@cache
def _read_cpu_model() -> str:
    """Return the CPU's name in /proc/cpuinfo, or the architecture where it has none (AArch64)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


@cache
def _read_gpu_model() -> str | None:
    """Return the name of the machine's first NVIDIA GPU, or None."""
    # from the driver, not from torch: that would create a CUDA context of several hundred MB in this process
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    # a container may hide the driver's files; then the context of a bench that already uses the GPU serves
    torch = sys.modules.get("torch")
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_initialized() else None


@cache
def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that decide the speed."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
