"""Estimate of a run's wall time, from the study's finished runs or from timed steps of two models.

Seconds of a run = process start-up + steps x fixed cost + FLOPs / rate, including the FLOPs of scoring.
"""

import contextlib
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.io import read_json
from megatron.plan.datapaths import SYNTHETIC, read_corpora
from megatron.plan.exposure import count_epoch_samples
from megatron.plan.hardware import PEAK_TFLOPS, peak_tflops
from megatron.run_dir import RESULT
from megatron.study.ladder import PlannedRun
from megatron.study.probe import Timing, flops_per_step

STARTUP_S = 6.0  # default for one process: imports, building the model, opening files
FORWARD_SHARE = 1 / 3  # of a training step's FLOPs
SYNTHETIC_SAMPLES = 64  # number of held-out samples of random tokens
GPU_MFU = 0.4
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


def scoring_flops(run: PlannedRun) -> float:
    """Return the FLOPs of a run's held-out losses: the final one and those during training."""
    config, plan = run.config, run.plan
    if config.dataset.path_eval is None:
        return 0.0
    n_samples = SYNTHETIC_SAMPLES
    if config.dataset.path_eval != SYNTHETIC:
        n_samples = 0
        with contextlib.suppress(OSError, ValueError):  # missing text is reported by the run
            corpora = read_corpora(config.dataset.path_eval)
            n_samples = sum(count_epoch_samples(corpus.prefix, plan.seq_len) for corpus in corpora)
    n_samples = min(n_samples, config.evaluation.max_samples or n_samples)
    # one forward pass per mask sample for masked diffusion
    n_masks = 1 if plan.objective == "autoregressive" else config.evaluation.num_mc
    # the final loss is at n_steps; a set, since a checkpoint and a validation can coincide
    at = {plan.n_steps, *(config.checkpoint.chkpt_at or ())}
    for every in (config.evaluation.every_iterations, config.checkpoint.chkpt_saving_iterations):
        # range stops before n_steps, which is in the set already
        at |= set(range(every, plan.n_steps, every)) if every else set()
    # a branch scores only after its branch point
    # Example: a branch at 400 of 500 steps that scores every 100 steps scores at 500 only, not again at 100
    # ... 400.
    n_times = sum(step > plan.n_steps - run.trained_steps for step in at)
    return FORWARD_SHARE * plan.flops_per_token * n_samples * plan.seq_len * n_masks * n_times


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
    mfu: float = GPU_MFU,
    remote: bool = False,
    probe: Callable[[], Sequence[Timing]] | None = None,
) -> Speed:
    """Estimate the speed of runs.

    In order of precedence: `tflops` sustained, `mfu` times the peak of `hardware` on each GPU, the study's
    finished runs if they span several sizes, the timings measured by `probe`.
    For `remote` runs nothing is timed on this machine. Without any basis the speed is NaN.
    Raises ValueError for hardware of unknown peak.
    """
    if tflops is not None:
        return Speed(tflops * 1e12, 0.0, f"{tflops:g} TFLOP/s sustained, as given")
    if hardware is not None:
        peak = peak_tflops(hardware)
        if peak is None:
            raise ValueError(
                f"--hardware {hardware}: unknown peak; {suggest_nearest(hardware, list(PEAK_TFLOPS))}"
            )
        words = f"{mfu:.0%} of the {peak:g} TFLOP/s of {'each ' if gpus_per_run > 1 else ''}{hardware}"
        return Speed(mfu * peak * 1e12 * gpus_per_run, GPU_STEP_S, words)
    finished = _find_finished(runs)
    # with a single size the fixed cost and the rate cannot be separated, so timings are preferred
    spans = len({flops_per_step(run) for run, _ in finished}) > 1
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


def _find_finished(runs: Sequence[PlannedRun]) -> list[tuple[PlannedRun, float]]:
    """Return the runs that have a result, with the seconds of their training."""
    finished = []
    for run in runs:
        result = read_json(run.folder / RESULT)
        # a result of an earlier version of the run took another time
        if result and result.get("identity") == run.plan.identity and result.get("wall_s"):
            finished.append((run, float(result["wall_s"])))
    return finished


def _speed_from_finished(finished: Sequence[tuple[PlannedRun, float]]) -> Speed:
    """Fit the speed to finished runs, by least squares of relative errors; no fixed cost with one size."""
    # of the whole run: a branch continues the clock of its trunk, so its seconds include the shared steps
    flops = np.array([run.plan.train_flops for run, _ in finished])
    seconds = np.array([wall_s for _, wall_s in finished])
    basis = f"the {len(finished)} finished runs of this study"
    if len({flops_per_step(run) for run, _ in finished}) > 1:
        steps = np.array([run.plan.n_steps for run, _ in finished], dtype=float)
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
