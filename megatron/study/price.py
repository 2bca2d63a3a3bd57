"""Price of a study: the time of its runs by the roofline of a GPU or a few timed steps, money and energy."""

import argparse
import contextlib
import math
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.cli import format_table, positive_float
from megatron.config.presets import suggest_nearest
from megatron.config.schema import CheckpointConfig, LrSchedulerConfig, RunConfig
from megatron.plan.datapaths import SYNTHETIC, read_corpora
from megatron.plan.exposure import CorpusUse, count_epoch_samples
from megatron.plan.hardware import DeviceSpec, find_device, load_devices
from megatron.plan.memory import estimate_memory
from megatron.plan.roofline import RATES, StepSettings, predict_step
from megatron.plan.run_dir import CONFIG, RESULT, is_done, read_metrics
from megatron.plan.run_plan import plan_run
from megatron.study.format import format_digits, format_duration, format_short
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import Launcher, SweepState, run_all

GPU_STARTUP_S = 30.0  # assumed: imports, context of the GPU, compilation or its cache
GPU_STEP_S = 0.02  # minimum time of a step; small models are limited by kernel launches
MAX_MICROBATCH_TOKENS = 65536  # assumed if no microbatch is set: the largest that fits is chosen
PROBE_FLOPS = 8e10  # per probe: one or two seconds of a CPU core
MIN_STEPS, MAX_STEPS = 10, 240
SKIPPED_STEPS = 2  # at the start: allocation and compilation
MAX_PROBES = 8
TIMEOUT_S = 90.0
POLL_S = 0.05
FORWARD_SHARE = 1 / 3  # share of a training step's FLOPs
SYNTHETIC_SAMPLES = 64  # number of held-out samples of random tokens
WIDTH = 100  # columns of a terminal
SHORT_OBJECTIVES = {"autoregressive": "AR", "masked_diffusion": "MD"}  # prefixes of run names
LEGEND = (
    "AR: autoregressive; MD: masked diffusion; H: held out of the fit; B: branches from a longer run, "
    "time of its own steps"
)
USE_HEAD = ("mixture", "dataset", "share", "tokens", "epochs")
HEAD = ("run", "N", "tokens", "epochs", "steps", "FLOPs", "GiB", "time", "status")


@dataclass(frozen=True)
class Tariff:
    """Price and power of one device; None: not known.

    price_per_hour  money for one hour of one device
    watts           power of one device; default: the power limit of `hardware`, if it is
                    a listed GPU
    """

    price_per_hour: float | None = None
    watts: float | None = None
    hardware: str | None = None

    def describe(self, device_seconds: float) -> str:
        """Return hours, money and energy of one or more devices, such as `3.2 GPU-hours, 8.0 at 2.5 an hour`.

        Energy is an upper bound if the power is a limit. Empty
        without a price or a power, or for no known time.
        """
        device = find_device(self.hardware) if self.hardware else None
        watts = self.watts or (device.watts if device else None)
        if not math.isfinite(device_seconds) or self.price_per_hour is watts is None:
            return ""
        hours = device_seconds / 3600
        word = "device" if (self.hardware or "CPU").startswith("CPU") else "GPU"
        parts = [f"{format_digits(hours)} {word}-hours"]
        if self.price_per_hour is not None:
            parts.append(f"{format_digits(hours * self.price_per_hour)} at {self.price_per_hour:g} an hour")
        if watts is not None:
            # 700 W for 10 hours: 7 kWh
            parts.append(f"up to {format_digits(hours * watts / 1000)} kWh at {watts:g} W")
        return ", ".join(parts)


@dataclass(frozen=True)
class Speed:
    """Seconds of a run = startup_s + steps * step_s + FLOPs / flops_per_s; scoring FLOPs count too.

    flops_per_s   of a run: a rate, or a function of the run
    basis         origin of the numbers, in words
    """

    basis: str
    flops_per_s: Callable[[PlannedRun], float]
    step_s: float = 0.0
    startup_s: float = GPU_STARTUP_S

    def seconds(self, run: PlannedRun) -> float:
        """Return the expected wall time of a run; NaN if it is unknown."""
        flops = run.trained_flops + scoring_flops(run)
        return self.startup_s + run.trained_steps * self.step_s + flops / self.flops_per_s(run)


UNKNOWN_SPEED = Speed("no measurement: name the GPU with --hardware", lambda run: math.nan)


def estimate_speed(
    runs: Sequence[PlannedRun], hardware: str, mfu: float | None = None, gpus_per_run: int = 1
) -> Speed:
    """Return the speed of runs on a named GPU. Raises ValueError for hardware of unknown peak.

    mfu   share of the peak of the GPU; default: by size, from the roofline
    """
    device = find_device(hardware)
    if device is None:
        raise ValueError(
            f"--hardware {hardware}: unknown peak; {suggest_nearest(hardware, list(load_devices()))}"
        )
    if mfu is not None:
        rate = mfu * device.peak_tflops * 1e12 * gpus_per_run
        basis = f"{mfu:.0%} of the {device.peak_tflops:g} TFLOP/s of {hardware}, as given"
        return Speed(basis, lambda run: rate, GPU_STEP_S)
    mfus = [predict_rate(run, device)[1] for run in runs] or [0.0]
    basis = f"{min(mfus):.0%} to {max(mfus):.0%} MFU on {hardware}: {RATES}"
    return Speed(basis, lambda run: gpus_per_run * predict_rate(run, device)[0])


def predict_rate(run: PlannedRun, device: DeviceSpec) -> tuple[float, float]:
    """Return (FLOPs per second, MFU) of a run on one GPU by the roofline, in bf16 also for float32."""
    data, plan = run.config.dataset, run.plan
    rows = data.microbatch_size or max(1, MAX_MICROBATCH_TOKENS // data.seq_len)
    step = predict_step(
        run.config.model,
        plan.seq_len,
        plan.objective == "autoregressive",
        device,
        choose_settings(run.config),
        microbatch_tokens=min(rows, data.batch_size) * data.seq_len,
        tokens_per_step=plan.tokens_per_step,
    )
    return plan.flops_per_token / step.seconds_per_token, step.mfu


def choose_settings(config: RunConfig) -> StepSettings:
    """Return the roofline settings of a run on a GPU; None of a switch stands for auto."""
    dist = config.dist
    stream = getattr(dist, "residual_dtype", "float32") or dist.dtype
    on_torch = dist.engine == "torch"
    return StepSettings(
        compiled=on_torch and dist.compile in (None, True),
        stream="float32" if stream == "float32" else "bfloat16",
        recompute=dist.activation_checkpointing == "full",
    )


def flops_per_step(run: PlannedRun) -> float:
    """Return the training FLOPs of one step."""
    return run.plan.flops_per_token * run.plan.tokens_per_step


def time_steps(
    runs: Sequence[PlannedRun], launcher: Launcher, jobs: int, timeout_s: float = TIMEOUT_S
) -> Speed:
    """Time a few steps of the smallest and the largest model of `runs`, with the study's launcher.

    Probes are processes of tools/pretrain.py on random tokens.
    As many run concurrently as in the study, so that the
    measurement includes start-up, other load and contention. It
    is unknown if no process completed its steps.
    """
    ordered = sorted(runs, key=flops_per_step)
    ends = [ordered[0], ordered[-1]]
    n_probes = max(2, min(jobs, len(runs), MAX_PROBES))
    with tempfile.TemporaryDirectory(prefix="price-") as folder:
        probes = [_make_probe(ends[i % 2], Path(folder) / str(i)) for i in range(n_probes)]
        timings = _run_probes(probes, launcher, timeout_s)
    if not timings:
        return UNKNOWN_SPEED
    startup_s = sum(startup for _, _, startup in timings) / len(timings)
    small, large = (min(timings), max(timings))
    # two equations: seconds = step_s + FLOPs / rate for the small and the large
    # model. Example: 1e9 FLOPs in 0.02 s and 1e10 in 0.11 s. Slope 0.09 / 9e9
    # = 1e-11 s per FLOP, intercept 0.02 - 0.01 = 0.01 s, rate 1e10 / (0.11 -
    # 0.01) = 1e11 FLOP/s.
    slope = (large[1] - small[1]) / max(large[0] - small[0], 1.0)
    # the intercept is negative if the larger model is less efficient: then
    # there is no fixed cost. It is below the large model's step, so that the
    # rate stays finite and positive.
    step_s = min(max(0.0, small[1] - slope * small[0]), 0.999 * large[1]) if slope else 0.0
    # the large model determines the rate:
    # most of a study's FLOPs are in its large models
    rate = large[0] / (large[1] - step_s)
    basis = f"steps of {ends[0].plan.size} and {ends[1].plan.size} timed on this machine"
    return Speed(f"{basis}, {startup_s:.1f} s of start-up per run", lambda run: rate, step_s, startup_s)


def _make_probe(run: PlannedRun, folder: Path) -> PlannedRun:
    """Return the run on random tokens, shortened to the number of steps that costs PROBE_FLOPS."""
    n_steps = min(max(PROBE_FLOPS / flops_per_step(run), MIN_STEPS), MAX_STEPS)
    config = run.config
    # random tokens: a price can be estimated before the corpus exists
    text = replace(
        config.dataset, path_train=SYNTHETIC, path_eval=SYNTHETIC, mixture=None, unique_tokens=None
    )
    # settings that cost extra time or write files are reset: validation,
    # checkpoints, wandb, profiling
    logs = replace(config.logging, run_dir=str(folder), every_iterations=1, wandb=None, profile_steps=None)
    config = replace(
        config,
        dataset=text,
        lr_scheduler=LrSchedulerConfig(kind="constant", total_iterations=int(n_steps)),
        evaluation=replace(config.evaluation, every_iterations=None, max_samples=1, num_mc=1),
        checkpoint=CheckpointConfig(),
        logging=logs,
        misc=replace(config.misc, stop_file=None, max_hours=None),
    )
    return PlannedRun(config, plan_run(config), folder)


def _run_probes(
    probes: Sequence[PlannedRun], launcher: Launcher, timeout_s: float
) -> list[tuple[float, float, float]]:
    """Return (FLOPs and seconds of a step, seconds outside the steps) of each probe that ended in time.

    Raises KeyboardInterrupt after a signal, when the probes are stopped.
    """
    # monotonic clock: wall-clock adjustments must not end or extend the probe
    deadline = time.monotonic() + timeout_s

    def check_time(state: SweepState) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    try:
        _, whole = run_all(probes, launcher, check_time, lambda *end: None, 0, POLL_S)
        if not whole:
            raise KeyboardInterrupt
    except TimeoutError:  # run_all has stopped the others
        pass
    timings = []
    for run in probes:
        lines = [line for line in read_metrics(run.folder) if line["kind"] == "train"]
        if (run.folder / RESULT).is_file() and len(lines) > SKIPPED_STEPS:
            # from the end of step SKIPPED_STEPS to the end of the last
            first, last = lines[SKIPPED_STEPS - 1], lines[-1]
            step_s = (last["elapsed_s"] - first["elapsed_s"]) / (last["step"] - first["step"])
            # the configuration is written before the process starts
            start, end = ((run.folder / name).stat().st_mtime for name in (CONFIG, RESULT))
            timings.append((flops_per_step(run), step_s, max(0.0, end - start - step_s * last["step"])))
    return timings


def makespan(seconds: Sequence[float], jobs: int) -> float:
    """Return the wall time of all runs, `jobs` at a time, when the longest are started first."""
    lanes = [0.0] * max(1, jobs)
    # longest-processing-time rule: each run
    # goes to the lane that is free first
    for run_s in sorted(seconds, reverse=True):
        # Example: [5, 4, 3, 3] in 2 lanes: 5 | 4, then 5 | 4 + 3, then 5 + 3
        # | 7: 8. At most 4/3 of the optimum (Graham 1969).
        lanes[lanes.index(min(lanes))] += run_s
    return max(lanes) if not any(map(math.isnan, lanes)) else math.nan


def scoring_flops(run: PlannedRun) -> float:
    """Return the FLOPs of a run's held-out losses: those during training, the final one, and the test."""
    config, plan = run.config, run.plan
    n_samples, n_test = (
        _count_scored_samples(path, run) for path in (config.dataset.path_eval, config.dataset.path_test)
    )
    # one forward pass per mask sample for masked diffusion
    n_masks = 1 if plan.objective == "autoregressive" else config.evaluation.num_mc
    # the final loss is at n_steps; a set,
    # since a checkpoint and a validation can coincide
    at = {plan.n_steps, *(config.checkpoint.chkpt_at or ())}
    # range stops before n_steps, which is in the set already
    for every in (config.evaluation.every_iterations, config.checkpoint.chkpt_saving_iterations):
        at |= set(range(every, plan.n_steps, every)) if every else set()
    # a branch scores only after its branch point
    # Example: a branch at 400 of 500 steps that scores every 100 steps scores
    # at 500 only, not again at 100 ... 400.
    n_times = sum(step > plan.n_steps - run.trained_steps for step in at)
    n_scored = n_samples * n_times + n_test
    return FORWARD_SHARE * plan.flops_per_token * n_scored * plan.seq_len * n_masks


def _count_scored_samples(path: str | None, run: PlannedRun) -> int:
    n_samples = SYNTHETIC_SAMPLES if path == SYNTHETIC else 0
    if path not in (None, SYNTHETIC):
        with contextlib.suppress(OSError, ValueError):  # missing text is reported by the run
            counts = (count_epoch_samples(corpus.prefix, run.plan.seq_len) for corpus in read_corpora(path))
            n_samples = sum(counts)
    return min(n_samples, run.config.evaluation.max_samples or n_samples)


def format_price(
    runs: Sequence[PlannedRun],
    speed: Speed,
    jobs: int,
    gpus_per_run: int = 1,
    tariff: Tariff | None = None,
    lists_runs: bool = True,
) -> str:
    """Return time, tokens and FLOPs of the runs that are not done, and one line per run.

    With a tariff, the totals include the time, money and energy of all devices.
    Without `lists_runs`, only the totals.

    FLOPs are exact and for the whole training. Time and totals
    count only the steps that are trained: a branch trains only
    the steps after its branch point.
    """
    waiting = [run for run in runs if not is_done(run.folder, run.plan.identity)]
    seconds = [speed.seconds(run) for run in waiting]
    tokens = sum(run.plan.tokens_per_step * run.trained_steps for run in waiting)
    flops = sum(run.trained_flops for run in waiting)
    wall_time = format_duration(makespan(seconds, jobs)) if seconds else "0 s"
    gpus = f" on {gpus_per_run} GPUs each" if gpus_per_run > 1 else ""
    totals = [
        f"about {wall_time} with {jobs} at a time{gpus}: {len(waiting)} of {len(runs)} runs to do, "
        f"{format_short(tokens)} tokens, {flops:.2e} FLOPs",
        f"({format_duration(sum(seconds))} one after another; expected from {speed.basis})",
        (tariff or Tariff()).describe(sum(seconds) * gpus_per_run),
    ]
    lines = [part for total in totals for part in textwrap.wrap(total, WIDTH)]
    if lists_runs:
        rows = [_format_row(run, speed, gpus_per_run) for run in runs]
        lines += ["", *format_table(HEAD, rows, ("run", "status")), *textwrap.wrap(LEGEND, WIDTH)]
        if uses := _list_uses(runs):
            lines += ["", *format_table(USE_HEAD, uses, USE_HEAD[:2])]
    return "\n".join(lines)


def _format_row(run: PlannedRun, speed: Speed, gpus_per_run: int) -> tuple[str, ...]:
    plan = run.plan
    done = is_done(run.folder, plan.identity)
    marks = ("H" if run.held_out else "") + ("B" if run.branch and not done else "")
    objective, dash, rest = run.config.name.partition("-")
    return (
        f"{SHORT_OBJECTIVES.get(objective, objective)}{dash}{rest}",
        f"{plan.n_params:,}",
        format_short(plan.train_tokens),
        f"{plan.epochs:.2f}",
        f"{plan.n_steps:,}",
        f"{plan.train_flops:.2e}",
        f"{estimate_memory(run.config, gpus_per_run) / 2**30:.1f}",
        format_duration(speed.seconds(run)),
        f"{'done' if done else 'to run'} {marks}".strip(),
    )


def _list_uses(runs: Sequence[PlannedRun]) -> list[tuple[str, ...]]:
    """Return the cells of each dataset of each blend, in the run that repeats it most."""
    uses: dict[tuple[str, str], CorpusUse] = {}
    for run in runs:
        data, corpora = run.config.dataset, run.plan.corpora
        for use in corpora if len(corpora) > 1 else ():
            key = (Path(str(data.mixture or data.path_train)).stem, use.name)
            uses[key] = max(use, uses.get(key, use), key=lambda use: use.epochs)
    return [
        (*key, f"{use.share:.1%}", format_short(use.unique_tokens + use.repeated_tokens), f"{use.epochs:.2f}")
        for key, use in uses.items()
    ]


def add_tariff_options(group: argparse._ArgumentGroup) -> None:
    """Add --price-per-hour and --watts to a group of options."""
    watts = "power of one GPU; default: the power limit of a listed GPU"
    for name, about in (("--price-per-hour", "price of one GPU for an hour"), ("--watts", watts)):
        group.add_argument(name, type=positive_float, metavar="NUMBER", help=about)
