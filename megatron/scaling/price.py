"""How long a run will take: by the study's own runs, else by a few steps of its smallest and largest model.

Seconds of a run = start-up of its process + steps x fixed cost + FLOPs / rate, with the FLOPs of scoring.
"""

import contextlib
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from megatron.config.datapaths import SYNTHETIC, read_corpora
from megatron.config.exposure import samples_held
from megatron.config.hardware import PEAK_TFLOPS, peak_tflops
from megatron.config.presets import nearest
from megatron.run_dir import RESULT, read_json
from megatron.scaling.ladder import PlannedRun
from megatron.scaling.probe import Timing, flops_per_step

STARTUP_S = 6.0  # one process: imports, building, opening files; where it was not measured
FORWARD_SHARE = 1 / 3  # of a training step's FLOPs
SYNTHETIC_SAMPLES = 64  # held-out samples of random tokens
GPU_EFFICIENCY = 0.4
GPU_STEP_S = 0.02  # least time of a step of a small model, which waits for kernel launches


@dataclass(frozen=True)
class Speed:
    """Seconds of a run = startup_s + steps * step_s + FLOPs / flops_per_s, of what it trains and scores."""

    flops_per_s: float
    step_s: float
    basis: str
    startup_s: float = STARTUP_S

    def seconds(self, run: PlannedRun) -> float:
        """Expected wall time of a run, beside as many others as `basis` says."""
        flops = run.own_flops + scoring_flops(run)
        return self.startup_s + run.own_steps * self.step_s + flops / self.flops_per_s


def scoring_flops(run: PlannedRun) -> float:
    """FLOPs of all its held-out losses: one at the end, and those on the way."""
    config, plan = run.config, run.plan
    if config.dataset.path_eval is None:
        return 0.0
    n_samples = SYNTHETIC_SAMPLES
    if config.dataset.path_eval != SYNTHETIC:
        n_samples = 0
        with contextlib.suppress(OSError, ValueError):  # text that is not there yet; the run will say so
            corpora = read_corpora(config.dataset.path_eval)
            n_samples = sum(samples_held(corpus.prefix, plan.seq_len) for corpus in corpora)
    n_samples = min(n_samples, config.evaluation.max_samples or n_samples)
    n_masks = 1 if plan.objective == "autoregressive" else config.evaluation.num_mc
    at = {plan.n_steps, *(config.checkpoint.chkpt_at or ())}
    for every in (config.evaluation.every_iterations, config.checkpoint.chkpt_saving_iterations):
        at |= set(range(every, plan.n_steps, every)) if every else set()
    n_times = sum(step > plan.n_steps - run.own_steps for step in at)
    return FORWARD_SHARE * plan.flops_per_token * n_samples * plan.seq_len * n_masks * n_times


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
    probe: Callable[[], Sequence[Timing]] | None = None,
) -> Speed:
    """What to expect: `tflops` sustained if given, or `mfu` of the named hardware's peak on each GPU.

    Else by the study's finished runs where they span its sizes, else by the timings that `probe` measures.
    Runs `elsewhere` are not priced by this machine: then, and where nothing was measured, the speed is NaN.
    ValueError for hardware of unknown peak.
    """
    if tflops is not None:
        return Speed(tflops * 1e12, 0.0, f"{tflops:g} TFLOP/s sustained, as given")
    if hardware is not None:
        peak = peak_tflops(hardware)
        if peak is None:
            raise ValueError(f"--hardware {hardware}: peak not known; {nearest(hardware, list(PEAK_TFLOPS))}")
        words = f"{mfu:.0%} of the {peak:g} TFLOP/s of {'each ' if gpus_per_run > 1 else ''}{hardware}"
        return Speed(mfu * peak * 1e12 * gpus_per_run, GPU_STEP_S, words)
    finished = _finished(runs)
    spans = len({flops_per_step(run) for run, _ in finished}) > 1
    if finished and (spans or elsewhere or probe is None):
        return _from_finished(finished)
    if elsewhere:
        return Speed(math.nan, 0.0, "nothing yet: --hardware says for which GPU")
    timings = probe() if probe is not None and runs else []
    if timings:
        return from_timings(timings)
    if finished:
        return _from_finished(finished)
    return Speed(
        math.nan, 0.0, "nothing: no step of this study could be timed here; --hardware says for which GPU"
    )


def from_timings(timings: Sequence[Timing]) -> Speed:
    """Fixed cost a step and rate from the timed models, small to large; start-up is their mean."""
    startup_s = sum(timing.startup_s for timing in timings) / len(timings)
    small, large = timings[0], timings[-1]
    step_s = 0.0
    if large.flops_per_step > small.flops_per_step:
        slope = (large.step_s - small.step_s) / (large.flops_per_step - small.flops_per_step)
        # below 0 where the larger model is the less efficient one: then no cost is fixed
        step_s = max(0.0, small.step_s - slope * small.flops_per_step)
        step_s = min(step_s, small.step_s, 0.999 * large.step_s)
    rate = large.flops_per_step / (large.step_s - step_s)
    words = " and ".join(timing.words() for timing in timings)
    basis = f"{words} just timed here, {startup_s:.1f} s of start-up a run"
    return Speed(rate, step_s, basis, startup_s)


def _finished(runs: Sequence[PlannedRun]) -> list[tuple[PlannedRun, float]]:
    """Runs that have a result, with the seconds of their training."""
    found = []
    for run in runs:
        result = read_json(run.folder / RESULT)
        if result and result.get("identity") == run.plan.identity and result.get("wall_s"):
            found.append((run, float(result["wall_s"])))
    return found


def _from_finished(finished: Sequence[tuple[PlannedRun, float]]) -> Speed:
    """Least squares of relative errors over finished runs; without two sizes a step has no fixed cost."""
    flops = np.array([run.own_flops for run, _ in finished])
    seconds = np.array([wall_s for _, wall_s in finished])
    basis = f"the {len(finished)} finished runs of this study"
    if len({flops_per_step(run) for run, _ in finished}) > 1:
        steps = np.array([run.own_steps for run, _ in finished], dtype=float)
        scale = np.array([steps.max(), flops.max()])
        (fixed, per_flop), _ = nnls(
            np.stack([steps, flops], 1) / scale / seconds[:, None], np.ones(len(flops))
        )
        if per_flop > 0:
            return Speed(float(flops.max() / per_flop), float(fixed / steps.max()), basis)
    return Speed(float(flops.sum() / seconds.sum()), 0.0, basis)


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
