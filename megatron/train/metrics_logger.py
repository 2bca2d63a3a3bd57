"""Logging of a run: log line, metrics.jsonl, TensorBoard and Weights & Biases."""

import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.schema import RunConfig
from megatron.engine.interface import StepReport
from megatron.evaluation.validate import HeldOutLoss
from megatron.io import replace_nonfinite
from megatron.log import get_logger
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World
from megatron.plan.count import flops_per_token_executed, flops_per_token_mfu
from megatron.plan.exposure import Exposure
from megatron.plan.hardware import find_device
from megatron.plan.run_dir import METRICS
from megatron.plan.run_plan import RunPlan
from megatron.train.feedback import DomainStats
from megatron.train.memory_usage import measure_memory
from megatron.train.nonfinite_monitor import NonFiniteMonitor
from megatron.train.scalars import Scalars
from megatron.train.state import TrainState

log = get_logger(__name__)


def compute_mfu(
    tokens_per_s: float, flops_per_token: float, peak: float | None
) -> tuple[float, float | None]:
    """Return (TFLOP/s of one device, model FLOPs utilization); the latter is None if the peak is unknown."""
    # example: 10,000 tokens/s x 6e9 FLOPs = 60 TFLOP/s, 6 % of an H100's 989
    tflops = tokens_per_s * flops_per_token / 1e12
    return tflops, None if peak is None else tflops / peak


class MetricsLogger:
    """Accumulates step reports on the device and logs them at every log point. Only rank 0 writes."""

    def __init__(
        self, config: RunConfig, plan: RunPlan, world: World, run: Path, first_step: int = 0
    ) -> None:
        """first_step: number of steps taken before this process."""
        self.world = world
        self.flops_per_token = flops_per_token_mfu(config.model, config.dataset.seq_len)
        causal = config.objective.name == "autoregressive"
        # Masked diffusion computes the head at masked positions only, a fraction (1
        # - rate_min) t + rate_min with t ~ U(0, 1): on average (1 + rate_min) / 2.
        predicted = 1.0 if causal else (1 + config.objective.rate_min) / 2
        self.executed_per_token = flops_per_token_executed(
            config.model, config.dataset.seq_len, causal, predicted
        )
        on_gpu = world.device.type == "cuda"
        device = find_device(torch.cuda.get_device_name(world.device)) if on_gpu else None
        self.peak_tflops = None if device is None else device.peak_tflops
        self.exposure = Exposure(config)
        self.monitor = NonFiniteMonitor(world, gradients_may_overflow=config.dist.dtype == "float16")
        self.skip_nonfinite = config.misc.on_nonfinite == "skip"
        self.nats: Tensor | float = 0.0
        self.count: Tensor | int = 0
        self.since = time.perf_counter()
        self.file = (run / METRICS).open("a") if world.is_first else None
        self.scalars = Scalars(config, plan, run, first_step) if world.is_first else None

    def accumulate(self, report: StepReport, step: int, samples: tuple[int, int]) -> None:
        """Add a step to the running mean; a loss that is NaN or Inf is excluded.

        samples   first and last sample of this rank
        """
        good = self.monitor.add_step(report, step, *samples)
        # stays on the device: reading a value here would synchronize every step
        self.nats = self.nats + torch.where(good, report.loss_sum, 0.0)
        self.count = self.count + good * report.count

    def check_finite(self) -> None:
        """Log the steps with a NaN or Inf loss or gradient; raise FloatingPointError if they end the run."""
        bad = self.monitor.pop_bad_steps()
        for step in bad:
            self._write_line(step.as_dict())
            if self.world.is_first:
                log.warning("%s; no weight was changed", step)
        if bad and not self.skip_nonfinite:
            raise FloatingPointError(f"{bad[0]}. Lower optim.lr, or set misc.on_nonfinite=skip.")

    def restart_clock(self) -> None:
        """Restart the throughput clock, to exclude evaluation and saving."""
        self.since = time.perf_counter()

    def log_train(
        self, state: TrainState, report: StepReport, lr: float, domains: DomainStats | None = None
    ) -> None:
        """Log the mean loss and speed since the last log point, and the domain statistics of a mixture.

        Raises FloatingPointError if no loss since then is finite.
        """
        self.check_finite()
        # counted tokens can differ between ranks:
        # a rank with a loss of NaN adds none
        local = [torch.as_tensor(x, device=self.world.device).double() for x in (self.nats, self.count)]
        # reading the sums waits for the device, so the clock covers the steps
        nats, count = sum_over_ranks(torch.stack(local), self.world).tolist()
        seconds = time.perf_counter() - self.since
        self.nats, self.count, self.since = 0.0, 0, time.perf_counter()
        if not count:
            raise FloatingPointError(
                f"step {state.step}: every loss since the last log line is NaN or Inf. Lower optim.lr."
            )
        loss, tps = nats / count, count / seconds
        grad_norm = float(report.grad_norm)
        tps_of_rank = tps / self.world.n_ranks
        tflops, mfu = compute_mfu(tps_of_rank, self.flops_per_token, self.peak_tflops)
        mfu_executed = compute_mfu(tps_of_rank, self.executed_per_token, self.peak_tflops)[1]
        memory = measure_memory(self.world.device)
        seen = self.exposure.usage_after(state.next_sample, None if domains is None else domains.samples)
        self._write_line(
            {
                "kind": "train",
                "step": state.step,
                "tokens": state.tokens_seen,
                "loss": loss,
                "lr": lr,
                "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
                "tps": tps,
                "tflops": tflops,
                "mfu": mfu,
                "mfu_executed": mfu_executed,
                "memory_gib": memory[0],
                "epoch": state.tokens_seen / self.exposure.epoch_tokens,
                "unique_tokens": sum(corpus.unique_tokens for corpus in seen),
                "repeated_tokens": sum(corpus.repeated_tokens for corpus in seen),
                **({"epochs": {corpus.name: corpus.epochs for corpus in seen}} if len(seen) > 1 else {}),
                **({} if domains is None else domains.as_dict(self.exposure.names)),
                "elapsed_s": state.elapsed_s,
            }
        )
        log.info(format_log_line(state.step, loss, grad_norm, memory, tps_of_rank, tflops, mfu))

    def log_validation(
        self,
        state: TrainState,
        held_out: HeldOutLoss,
        checkpoint: str | None,
        averaged: float | None = None,
    ) -> None:
        """Log a held-out loss with its checkpoint; NaN or Inf is written as null, with a warning.

        averaged   loss of the moving average of the weights
        """
        if not math.isfinite(held_out.loss) and self.world.is_first:
            text = "step %d: got a held-out loss of %s, expected a finite number"
            log.warning(text, state.step, held_out.loss)
        self._write_line(
            {
                "kind": "validation",
                "step": state.step,
                "tokens": state.tokens_seen,
                **asdict(held_out),
                **({} if averaged is None else {"loss_ema": averaged}),
                "checkpoint": checkpoint,
            }
        )
        error = "" if held_out.loss_se is None else f" +- {held_out.loss_se:.5f}"
        average = "" if averaged is None else f"  of the average: {averaged:.5f}"
        log.info("step: %d  held-out loss: %.5f%s%s", state.step, held_out.loss, error, average)

    def _write_line(self, line: dict[str, Any]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps(replace_nonfinite(line), allow_nan=False) + "\n")
        self.file.flush()  # a killed run keeps every complete line
        if self.scalars is not None:
            self.scalars.write(line)

    def close(self) -> None:
        """Flush and close all outputs."""
        if self.file is not None:
            self.file.close()
        if self.scalars is not None:
            self.scalars.close()


def format_log_line(
    step: int,
    loss: float,
    grad_norm: float,
    memory: tuple[float, float],
    tps: float,
    tflops: float,
    mfu: float | None,
) -> str:
    """Format a log line as in torchtitan: memory, speed and MFU per device, loss and norm of the run.

    memory   (GiB, fraction of the device)
    mfu      fraction; None if the peak FLOP/s of the device is unknown
    """
    utilisation = "n/a" if mfu is None else f"{mfu:.2%}"
    return (
        f"step: {step}  loss: {loss:8.5f}  grad_norm: {grad_norm:7.4f}  "
        f"memory: {memory[0]:5.2f}GiB({memory[1]:.2%})  "
        f"tps: {tps:,.0f}  tflops: {tflops:,.2f}  mfu: {utilisation}"
    )
