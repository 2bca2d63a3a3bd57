"""Estimate of a run's wall time: from finished runs, a named GPU's roofline, or timed steps of two models.

On a CPU, seconds of a run = process start-up + steps x fixed cost + FLOPs / rate, including the FLOPs of
scoring. On a GPU the time of each size follows from its roofline (roofline_price.py).
"""

import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.io import read_json
from megatron.plan.hardware import PEAK_TFLOPS, find_device
from megatron.plan.run_dir import RESULT
from megatron.study.ladder import PlannedRun
from megatron.study.probe import Timing, flops_per_step
from megatron.study.roofline_price import FinishedRun, RooflineSpeed, build_roofline_speed
from megatron.study.scoring import scoring_flops

STARTUP_S = 6.0  # default for one process: imports, building the model, opening files
GPU_STEP_S = 0.02  # minimum time of a step; small models are limited by kernel launches


@dataclass(frozen=True)
class Speed:
    """Seconds of a run = startup_s + steps * step_s + FLOPs / flops_per_s, for training and scoring."""

    flops_per_s: float
    step_s: float
    basis: str
    startup_s: float = STARTUP_S

    def seconds(self, run: PlannedRun) -> float:
        """Return the expected wall time of a run, under the conditions given in `basis`."""
        flops = run.trained_flops + scoring_flops(run)
        return self.startup_s + run.trained_steps * self.step_s + flops / self.flops_per_s


AnySpeed = Speed | RooflineSpeed


def list_gpu_names() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs, from nvidia-smi; empty without one."""
    return [name for name, _ in query_gpus()]


def query_gpus() -> list[tuple[str, float]]:
    """Return (name, bytes of memory) of this machine's NVIDIA GPUs; empty if nvidia-smi fails.

    The memory of a GPU that shares the host's memory is not reported: it is 0, and the GPU gets one run at a
    time.
    """
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    # names can contain commas, so the split is at the last one
    # "[N/A]" instead of a number of MiB: a GPU that shares the host's memory
    fields = [line.rpartition(",") for line in result.stdout.splitlines() if "," in line]
    return [(name.strip(), float(mib) * 2**20 if mib.strip().isdigit() else 0.0) for name, _, mib in fields]


def estimate_speed(
    runs: Sequence[PlannedRun],
    tflops: float | None = None,
    hardware: str | None = None,
    gpus_per_run: int = 1,
    mfu: float | None = None,
    remote: bool = False,
    probe: Callable[[], Sequence[Timing]] | None = None,
) -> AnySpeed:
    """Estimate the speed of runs.

    In order of precedence: `tflops` sustained; `mfu` times the peak of `hardware` on each GPU; the roofline
    of `hardware`, corrected by runs that finished on such a GPU; the roofline of the GPU on which runs of the
    study finished, corrected by them; finished runs if they span several sizes; timings measured by `probe`.
    For `remote` runs nothing is timed on this machine. Without any basis the speed is NaN.
    Raises ValueError for hardware of unknown peak.
    """
    if tflops is not None:
        return Speed(tflops * 1e12, 0.0, f"{tflops:g} TFLOP/s sustained, as given")
    finished = _find_finished(runs)
    if hardware is not None:
        return _speed_on_hardware(runs, hardware, gpus_per_run, mfu, finished)
    gpus = {entry.hardware for entry in finished}
    device = find_device(next(iter(gpus))) if len(gpus) == 1 else None
    if device is not None:
        return build_roofline_speed(runs, gpus.pop(), device, gpus_per_run, finished)
    # with a single size the fixed cost and the rate cannot be separated, so timings are preferred
    spans = len({flops_per_step(entry.run) for entry in finished}) > 1
    if finished and (spans or remote or probe is None):
        return _speed_from_finished(finished)
    # a measurement on this machine would describe other hardware than that of the runs
    if remote:
        return Speed(math.nan, 0.0, "no measurement: name the GPU with --hardware")
    timings = probe() if probe is not None and runs else []
    if timings:
        return speed_from_timings(timings)
    if finished:
        return _speed_from_finished(finished)
    return Speed(
        math.nan, 0.0, "no measurement: no step could be timed on this machine; name the GPU with --hardware"
    )


def _speed_on_hardware(
    runs: Sequence[PlannedRun],
    hardware: str,
    gpus_per_run: int,
    mfu: float | None,
    finished: Sequence[FinishedRun],
) -> AnySpeed:
    """Return the speed on a named GPU."""
    device = find_device(hardware)
    if device is None:
        raise ValueError(
            f"--hardware {hardware}: unknown peak; {suggest_nearest(hardware, list(PEAK_TFLOPS))}"
        )
    if mfu is None:
        same = [entry for entry in finished if find_device(entry.hardware) is device]
        return build_roofline_speed(runs, hardware, device, gpus_per_run, same)
    prefix = "each " if gpus_per_run > 1 else ""
    words = f"{mfu:.0%} of the {device.peak_tflops:g} TFLOP/s of {prefix}{hardware}, as given"
    return Speed(mfu * device.peak_tflops * 1e12 * gpus_per_run, GPU_STEP_S, words)


def speed_from_timings(timings: Sequence[Timing]) -> Speed:
    """Return the speed from timed models, small to large; start-up is their mean."""
    startup_s = sum(timing.startup_s for timing in timings) / len(timings)
    small, large = timings[0], timings[-1]
    step_s = 0.0
    if large.flops_per_step > small.flops_per_step:
        # two equations: seconds = step_s + FLOPs / rate for the small and the large model
        # Example: 1e9 FLOPs in 0.02 s and 1e10 in 0.11 s. Slope 0.09 / 9e9 = 1e-11 s per FLOP, intercept 0.02
        # - 0.01 = 0.01 s, rate 1e10 / (0.11 - 0.01) = 1e11 FLOP/s.
        slope = (large.step_s - small.step_s) / (large.flops_per_step - small.flops_per_step)
        # the intercept is negative if the larger model is less efficient: then there is no fixed cost
        step_s = max(0.0, small.step_s - slope * small.flops_per_step)
        # kept below the large model's step, so that the rate stays finite and positive
        step_s = min(step_s, small.step_s, 0.999 * large.step_s)
    # the large model determines the rate: most of a study's FLOPs are in its large models
    rate = large.flops_per_step / (large.step_s - step_s)
    words = " and ".join(timing.describe() for timing in timings)
    basis = f"{words} timed on this machine, {startup_s:.1f} s of start-up per run"
    return Speed(rate, step_s, basis, startup_s)


def _find_finished(runs: Sequence[PlannedRun]) -> list[FinishedRun]:
    """Return the runs that have a result, with the seconds of their training."""
    finished = []
    for run in runs:
        result = read_json(run.folder / RESULT)
        # a result of an earlier version of the run took another time
        if result and result.get("identity") == run.plan.identity and result.get("wall_s"):
            n_devices, hardware = int(result.get("n_ranks") or 1), str(result.get("hardware", ""))
            finished.append(FinishedRun(run, float(result["wall_s"]), n_devices, hardware))
    return finished


def _speed_from_finished(finished: Sequence[FinishedRun]) -> Speed:
    """Fit the speed to finished runs, by least squares of relative errors; no fixed cost with one size."""
    # of the whole run: a branch continues the clock of its trunk, so its seconds include the shared steps
    flops = np.array([entry.run.plan.train_flops for entry in finished])
    seconds = np.array([entry.wall_s for entry in finished])
    basis = f"the {len(finished)} finished runs of this study"
    if len({flops_per_step(entry.run) for entry in finished}) > 1:
        steps = np.array([entry.run.plan.n_steps for entry in finished], dtype=float)
        scale = np.array([steps.max(), flops.max()])
        # columns scaled to 1 and rows divided by the time: relative errors, well conditioned
        # minimise sum (fixed s_i + per_flop f_i - t_i)^2 / t_i^2 over coefficients >= 0, s = steps / max, f =
        # FLOPs / max. Absolute errors would fit only the longest run; a negative fixed cost would give small
        # models a negative time.
        from scipy.optimize import nnls  # slow to import

        (fixed, per_flop), _ = nnls(
            np.stack([steps, flops], 1) / scale / seconds[:, None], np.ones(len(flops))
        )
        if per_flop > 0:
            return Speed(float(flops.max() / per_flop), float(fixed / steps.max()), basis)
    # total FLOPs over total seconds: weighted by time, so short runs with much overhead count little
    return Speed(float(flops.sum() / seconds.sum()), 0.0, basis)


def makespan(seconds: Sequence[float], jobs: int) -> float:
    """Return the wall time of all runs, `jobs` at a time, when the longest are started first."""
    lanes = [0.0] * max(1, jobs)
    # longest-processing-time rule: each run goes to the lane that is free first
    for run_s in sorted(seconds, reverse=True):
        # Example: [5, 4, 3, 3] in 2 lanes: 5 | 4, then 5 | 4 + 3, then 5 + 3 | 7: 8. At most 4/3 of the
        # optimum (Graham 1969).
        lanes[lanes.index(min(lanes))] += run_s
    return max(lanes)
