"""How long a run will take: by the study's own runs, else by what the machine does in a quarter second."""

import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.hardware import PEAK_TFLOPS, peak_tflops
from megatron.config.presets import nearest
from megatron.run_dir import RESULT, read_json
from megatron.scaling.ladder import PlannedRun

STARTUP_S = 6.0  # one process: imports, building, opening files
CPU_EFFICIENCY = 0.5  # of a plain float32 matrix product; small models spend the rest outside products
GPU_EFFICIENCY = 0.4
GPU_STEP_S = 0.02  # least time of a step of a small model, which waits for kernel launches


@dataclass(frozen=True)
class Speed:
    """Seconds of a run = STARTUP_S + steps * step_s + FLOPs / flops_per_s, of what it trains itself."""

    flops_per_s: float
    step_s: float
    basis: str

    def seconds(self, run: PlannedRun) -> float:
        """Expected wall time of a run by itself."""
        return STARTUP_S + run.own_steps * self.step_s + run.own_flops / self.flops_per_s


def gpu_names() -> list[str]:
    """Names of this machine's NVIDIA GPUs, by nvidia-smi; empty without one."""
    return [name for name, _ in gpus()]


def gpus() -> list[tuple[str, float]]:
    """(name, bytes of memory) of this machine's NVIDIA GPUs, by nvidia-smi; empty where it does not answer.

    0 bytes of a GPU that shares the host's memory and tells none: it gets one run at a time.
    """
    try:
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    told = [line.rpartition(",") for line in asked.stdout.splitlines() if "," in line]
    return [(name.strip(), float(mib) * 2**20 if mib.strip().isdigit() else 0.0) for name, _, mib in told]


def speed_of(
    runs: Sequence[PlannedRun],
    tflops: float | None = None,
    hardware: str | None = None,
    gpus_per_run: int = 1,
    mfu: float = GPU_EFFICIENCY,
    elsewhere: bool = False,
) -> Speed:
    """What to expect: `tflops` sustained if given, or `mfu` of the named hardware's peak on each GPU.

    Else by the study's finished runs, else by this machine, of which runs `elsewhere` say nothing (then the
    speed is no number). ValueError for hardware of unknown peak.
    """
    if tflops is not None:
        return Speed(tflops * 1e12, 0.0, f"{tflops:g} TFLOP/s sustained, as given")
    if hardware is not None:
        peak = peak_tflops(hardware)
        if peak is None:
            raise ValueError(f"--hardware {hardware}: peak not known; {nearest(hardware, list(PEAK_TFLOPS))}")
        told = f"{mfu:.0%} of the {peak:g} TFLOP/s of {'each ' if gpus_per_run > 1 else ''}{hardware}"
        return Speed(mfu * peak * 1e12 * gpus_per_run, GPU_STEP_S, told)
    measured = _from_finished(runs)
    if measured is not None:
        return measured
    if elsewhere:
        return Speed(math.nan, 0.0, "nothing yet: --hardware says for which GPU")
    names = gpu_names()
    if names:
        peak = peak_tflops(names[0]) or 100.0
        return Speed(
            GPU_EFFICIENCY * peak * 1e12, GPU_STEP_S, f"{GPU_EFFICIENCY:.0%} of {names[0]}'s {peak:g} TFLOP/s"
        )
    rate = matmul_flops_per_s()
    return Speed(
        CPU_EFFICIENCY * rate,
        0.0,
        f"{CPU_EFFICIENCY:.0%} of the {rate / 1e9:.0f} GFLOP/s that one core multiplies matrices at here",
    )


def _from_finished(runs: Sequence[PlannedRun]) -> Speed | None:
    """Median rate over finished runs; small models run at a lower one, hence weighted by their FLOPs."""
    flops = seconds = 0.0
    n = 0
    for run in runs:
        result = read_json(run.folder / RESULT)
        if result and result.get("identity") == run.plan.identity and result.get("wall_s"):
            flops += run.own_flops
            seconds += result["wall_s"]
            n += 1
    return Speed(flops / seconds, 0.0, f"the {n} finished runs of this study") if n else None


def matmul_flops_per_s(size: int = 256, seconds: float = 0.25) -> float:
    """Float32 FLOP/s of numpy's products on one core: by CPU time, so that others may be busy."""
    a = np.ones((size, size), dtype=np.float32)
    a @ a
    n, begin = 0, time.process_time()
    while time.process_time() - begin < seconds:
        a @ a
        n += 1
    return 2 * size**3 * n / (time.process_time() - begin)


def makespan(seconds: Sequence[float], jobs: int) -> float:
    """Wall time of all runs, `jobs` at a time, the longest started first."""
    lanes = [0.0] * max(1, jobs)
    for one in sorted(seconds, reverse=True):
        lanes[lanes.index(min(lanes))] += one
    return max(lanes)


def duration(seconds: float) -> str:
    """For people: 42 s, 7 min, 3.2 h, 5.1 d."""
    if not math.isfinite(seconds):
        return "?"
    for size, unit in ((86400, "d"), (3600, "h")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
