"""Wall time of runs on a listed GPU: the roofline's prediction, corrected by the study's finished runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from megatron.config.schema import RunConfig
from megatron.plan.hardware import DeviceSpec
from megatron.plan.roofline import RATES, StepSettings, StepTime, predict_step
from megatron.study.ladder import PlannedRun
from megatron.study.scoring import scoring_flops

STARTUP_S = 30.0  # assumed: imports, context of the GPU, compilation or its cache
GRAPH_PARAMS = 150_000_000  # up to which steps are replayed from a graph
MAX_MICROBATCH_TOKENS = 65536  # assumed if no microbatch is set: the largest that fits is chosen


@dataclass(frozen=True)
class FinishedRun:
    """A finished run, the seconds of its training, and the devices that it used."""

    run: PlannedRun
    wall_s: float
    n_devices: int = 1
    hardware: str = ""


@dataclass(frozen=True)
class RooflineSpeed:
    """Seconds of a run = start-up + tokens * seconds per token / GPUs * ratio.

    ratios   {objective: [(N, measured seconds / predicted seconds)]} of finished runs, ascending in N
    """

    device: DeviceSpec
    basis: str
    gpus_per_run: int = 1
    startup_s: float = STARTUP_S
    ratios: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def seconds(self, run: PlannedRun) -> float:
        """Return the expected wall time of a run."""
        train_s = predict_run_seconds(run, self.device, run.trained_steps) / self.gpus_per_run
        return self.startup_s + train_s * self.find_ratio(run)

    def find_ratio(self, run: PlannedRun) -> float:
        """Return measured over predicted time at a run's size, from runs of its objective or of any."""
        points = self.ratios.get(run.plan.objective) or sorted(sum(self.ratios.values(), []))
        if not points:
            return 1.0
        # Linear in log N between the finished sizes, constant beyond. Example: 1.5 at 10M and 1.1 at 1B give
        # 1.28 at 100M.
        logs = np.log([point[0] for point in points])
        ratio = np.interp(math.log(run.plan.n_params), logs, np.log([point[1] for point in points]))
        return float(np.exp(ratio))


def predict_run_step(run: PlannedRun, device: DeviceSpec) -> StepTime:
    """Predict the time per token of a run on one GPU, in bf16 also if the run is in float32."""
    config, plan = run.config, run.plan
    data = config.dataset
    rows = data.microbatch_size or max(1, MAX_MICROBATCH_TOKENS // data.seq_len)
    return predict_step(
        config.model,
        plan.seq_len,
        plan.objective == "autoregressive",
        device,
        choose_settings(config, plan.n_params),
        microbatch_tokens=min(rows, data.batch_size) * data.seq_len,
        tokens_per_step=plan.tokens_per_step,
    )


def choose_settings(config: RunConfig, n_params: int) -> StepSettings:
    """Return the roofline settings of a run on a GPU; None of a switch stands for auto."""
    dist = config.dist
    stream = getattr(dist, "residual_dtype", "float32") or dist.dtype
    graph = getattr(dist, "cuda_graphs", False)
    on_torch = dist.engine == "torch"
    return StepSettings(
        compiled=on_torch and dist.compile in (None, True),
        stream="float32" if stream == "float32" else "bfloat16",
        graph=on_torch and (n_params <= GRAPH_PARAMS if graph is None else bool(graph)),
        recompute=dist.activation_checkpointing == "full",
    )


def predict_run_seconds(run: PlannedRun, device: DeviceSpec, n_steps: int) -> float:
    """Return the predicted seconds of `n_steps` steps and the run's held-out losses on one GPU."""
    plan = run.plan
    # scoring in tokens of training with the same FLOPs
    tokens = n_steps * plan.tokens_per_step + scoring_flops(run) / plan.flops_per_token
    return tokens * predict_run_step(run, device).seconds_per_token


def build_roofline_speed(
    runs: Sequence[PlannedRun],
    hardware: str,
    device: DeviceSpec,
    gpus_per_run: int,
    finished: Sequence[FinishedRun],
) -> RooflineSpeed:
    """Build the speed on a GPU from the roofline and from runs that finished on the same kind of GPU."""
    groups: dict[tuple[str, float], list[float]] = {}
    for entry in finished:
        # of the whole run: a branch continues the clock of its trunk, so its seconds include the shared steps
        expected = predict_run_seconds(entry.run, device, entry.run.plan.n_steps) / entry.n_devices
        key = (entry.run.plan.objective, float(entry.run.plan.n_params))
        groups.setdefault(key, []).append(entry.wall_s / expected)
    ratios: dict[str, list[tuple[float, float]]] = {}
    for (objective, n), values in sorted(groups.items()):
        ratios.setdefault(objective, []).append((n, median(values)))
    speed = RooflineSpeed(device, "", gpus_per_run, ratios=ratios)
    mfus = [predict_run_step(run, device).mfu / speed.find_ratio(run) for run in runs]
    span = f"{min(mfus):.0%} to {max(mfus):.0%} MFU" if mfus else "MFU by size"
    prefix = "each " if gpus_per_run > 1 else ""
    if finished:
        basis = f"{span} on {prefix}{hardware}: roofline times the ratio of {len(finished)} finished runs"
    else:
        basis = f"{span} on {prefix}{hardware}: {RATES}"
    return RooflineSpeed(device, basis, gpus_per_run, ratios=ratios)
