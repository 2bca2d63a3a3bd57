"""Shared parts of the benches: timing of both sides in turns, medians, and a JSON file of the results."""

import argparse
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.cli import positive_int
from megatron.io import write_json

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy", "scipy", "tokenizers", "transformers")
# environment variables that change the speed of the same code on the same machine
SPEED_VARIABLES = ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


@dataclass(frozen=True)
class Cost:
    """Seconds of one call; CPU seconds include all threads and the children that have ended."""

    wall_s: float
    cpu_s: float
    result: Any = None


def add_options(parser: argparse.ArgumentParser, *, repeat: int) -> None:
    """Add --repeat and --json in a group of their own."""
    add = parser.add_argument_group("measurement").add_argument
    add("--repeat", type=positive_int, default=repeat, metavar="N", help="runs of each side; medians count")
    add("--json", type=Path, metavar="FILE", help="also write the results with machine and versions")


def read_cpu_s() -> float:
    """Return the CPU seconds of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def time_call(run: Callable[[], Any]) -> Cost:
    """Call a function and measure it."""
    wall, cpu = time.perf_counter(), read_cpu_s()
    result = run()
    return Cost(time.perf_counter() - wall, read_cpu_s() - cpu, result)


def time_in_turns(
    sides: Mapping[str, Callable[[], Any]], repeat: int, *, warmup: int = 0
) -> dict[str, list[Cost]]:
    """Run all sides alternately, so that other load affects each; drop the first `warmup` turns."""
    costs: dict[str, list[Cost]] = {name: [] for name in sides}
    for turn in range(warmup + repeat):
        for name, run in sides.items():
            cost = time_call(run)
            if turn >= warmup:
                costs[name].append(cost)
    return costs


def median_wall(costs: Sequence[Cost]) -> float:
    """Return the median of the wall times in seconds."""
    return statistics.median(cost.wall_s for cost in costs)


def median_cpu(costs: Sequence[Cost]) -> float:
    """Return the median of the CPU times in seconds, at least a nanosecond."""
    return max(statistics.median(cost.cpu_s for cost in costs), 1e-9)


def format_ratio(ours: Sequence[Cost], theirs: Sequence[Cost]) -> str:
    """Return how many times as long the other side takes, such as 'ratio 1.91 (CPU 1.39)'."""
    wall = median_wall(theirs) / median_wall(ours)
    return f"ratio {wall:.2f} (CPU {median_cpu(theirs) / median_cpu(ours):.2f})"


def describe_machine() -> dict[str, Any]:
    """Return commit, CPU, cores, versions and the environment variables that change the speed."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    installed = {d.metadata["Name"]: d.version for d in metadata.distributions()}
    return {
        "commit": commit or None,
        "cpu": next(models, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version()}
        | {name: installed[name] for name in PACKAGES if name in installed},
        "environment": {name: os.environ[name] for name in SPEED_VARIABLES if name in os.environ},
    }


def write_results(path: Path | None, results: Any) -> None:
    """Write results beside a description of the machine; do nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**describe_machine(), "results": results})
