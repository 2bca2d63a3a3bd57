"""What a run tells while it goes: the log line, metrics.jsonl, and what people watch."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.count import flops_per_token_executed, flops_per_token_mfu
from megatron.config.exposure import Exposure
from megatron.config.hardware import peak_tflops, utilisation
from megatron.config.plan import RunPlan
from megatron.config.schema import RunConfig
from megatron.engine.base import StepReport
from megatron.evaluation.validate import HeldOut
from megatron.log import get_logger
from megatron.parallel.reduce import sum_over_ranks
from megatron.parallel.world import World
from megatron.run_dir import METRICS, with_null
from megatron.train.feedback import Told
from megatron.train.memory import memory_line, memory_used, peaks_of_ranks
from megatron.train.nonfinite import Watch
from megatron.train.scalars import Scalars
from megatron.train.state import TrainState

log = get_logger(__name__)
MEMORY_STEPS = 2


class Record:
    """Collects step reports without reading them, and tells them at every log point. Only rank 0 writes."""

    def __init__(
        self, config: RunConfig, plan: RunPlan, world: World, run: Path, first_step: int = 0
    ) -> None:
        """`first_step`: how many steps were taken before."""
        self.world = world
        self.flops_per_token = flops_per_token_mfu(config.model, config.dataset.seq_len)
        causal = config.objective.name == "autoregressive"
        # masked diffusion predicts hidden positions only: (1 - rate_min) t + rate_min of them, t ~ U(0, 1)
        predicted = 1.0 if causal else (1 + config.objective.rate_min) / 2
        self.executed_per_token = flops_per_token_executed(
            config.model, config.dataset.seq_len, causal, predicted
        )
        self.report_memory_until = first_step + MEMORY_STEPS
        on_gpu = world.device.type == "cuda"
        self.peak_tflops = peak_tflops(torch.cuda.get_device_name(world.device)) if on_gpu else None
        self.exposure = Exposure(config)
        self.watch = Watch(world, gradients_may_overflow=config.dist.dtype == "float16")
        self.skip_nonfinite = config.misc.on_nonfinite == "skip"
        self.nats: Tensor | float = 0.0
        self.count: Tensor | int = 0
        self.since = time.perf_counter()
        self.file = (run / METRICS).open("a") if world.is_first else None
        self.scalars = Scalars(config, plan, run, first_step) if world.is_first else None

    def add(self, report: StepReport, step: int, samples: tuple[int, int]) -> None:
        """Count one step in; `samples`: this rank's first and last. A loss that is no number stays out."""
        good = self.watch.add(report, step, *samples)
        self.nats = self.nats + torch.where(good, report.loss_sum, 0.0)
        self.count = self.count + good * report.count

    def check(self) -> None:
        """Tell the steps of which loss or gradient is no number; FloatingPointError if those end the run."""
        bad = self.watch.found()
        for one in bad:
            self._write(one.as_dict())
            if self.world.is_first:
                log.warning("%s; the step moved nothing", one)
        if bad and not self.skip_nonfinite:
            raise FloatingPointError(f"{bad[0]}; lower optim.lr, or set misc.on_nonfinite=skip")

    def restart_clock(self) -> None:
        """Leave evaluation and saving out of the throughput."""
        self.since = time.perf_counter()

    def train(self, state: TrainState, report: StepReport, lr: float, domains: Told | None = None) -> None:
        """Tell mean loss and speed since the last log point, and of a mixture what each domain has taken.

        FloatingPointError when there is no loss.
        """
        self.check()
        total = sum_over_ranks(
            torch.stack(
                [torch.as_tensor(x, device=self.world.device).double() for x in (self.nats, self.count)]
            ),
            self.world,
        )
        nats, count = total.tolist()
        seconds = time.perf_counter() - self.since
        self.nats, self.count, self.since = 0.0, 0, time.perf_counter()
        if not count:
            raise FloatingPointError(
                f"step {state.step}: no loss since the last log line was a number; lower optim.lr"
            )
        loss, tps = nats / count, count / seconds
        grad_norm = float(report.grad_norm)
        tps_of_rank = tps / self.world.n_ranks
        tflops, mfu = utilisation(tps_of_rank, self.flops_per_token, self.peak_tflops)
        mfu_executed = utilisation(tps_of_rank, self.executed_per_token, self.peak_tflops)[1]
        memory = memory_used(self.world.device)
        seen = self.exposure.after(state.next_sample, None if domains is None else domains.samples)
        self._write(
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
                "epoch": state.tokens_seen / self.exposure.tokens,
                "unique_tokens": sum(corpus.unique_tokens for corpus in seen),
                "repeated_tokens": sum(corpus.repeated_tokens for corpus in seen),
                **({"epochs": {corpus.name: corpus.epochs for corpus in seen}} if len(seen) > 1 else {}),
                **({} if domains is None else domains.as_dict(self.exposure.names)),
                "elapsed_s": state.elapsed_s,
            }
        )
        log.info(log_line(state.step, loss, grad_norm, memory, tps_of_rank, tflops, mfu))

    def memory(self, step: int) -> None:
        """Tell every rank's peak after the first steps: the first makes the optimizer's state."""
        if step > self.report_memory_until:
            return
        peaks = peaks_of_ranks(self.world)
        self._write({"kind": "memory", "step": step, "peak_gib": peaks})
        log.info(memory_line(step, peaks, self.world.device))

    def validation(self, state: TrainState, held_out: HeldOut, checkpoint: str | None) -> None:
        """Tell a held-out loss, and of which checkpoint it is; one that is NaN or Inf as null, and loudly."""
        if not math.isfinite(held_out.loss) and self.world.is_first:
            log.warning("step %d: got a held-out loss of %s, expected a number", state.step, held_out.loss)
        self._write(
            {
                "kind": "validation",
                "step": state.step,
                "tokens": state.tokens_seen,
                "loss": held_out.loss,
                "loss_se": held_out.loss_se,
                "mc_se": held_out.mc_se,
                "num_mc": held_out.num_mc,
                "n_tokens": held_out.n_tokens,
                "checkpoint": checkpoint,
            }
        )
        error = "" if held_out.loss_se is None else f" +- {held_out.loss_se:.5f}"
        log.info("step: %d  held-out loss: %.5f%s", state.step, held_out.loss, error)

    def _write(self, line: dict[str, Any]) -> None:
        if self.file is None:
            return
        self.file.write(json.dumps(with_null(line), allow_nan=False) + "\n")
        self.file.flush()
        if self.scalars is not None:
            self.scalars.write(line)

    def close(self) -> None:
        """Flush everything to disk."""
        if self.file is not None:
            self.file.close()
        if self.scalars is not None:
            self.scalars.close()


def log_line(
    step: int,
    loss: float,
    grad_norm: float,
    memory: tuple[float, float],
    tps: float,
    tflops: float,
    mfu: float | None,
) -> str:
    """torchtitan's line: memory, speed and utilisation of one device, loss and norm of the whole run.

    `memory` is (GiB, fraction); `mfu` a fraction, None where the peak is not known.
    """
    utilisation = "n/a" if mfu is None else f"{mfu:.2%}"
    return (
        f"step: {step}  loss: {loss:8.5f}  grad_norm: {grad_norm:7.4f}  "
        f"memory: {memory[0]:5.2f}GiB({memory[1]:.2%})  "
        f"tps: {tps:,.0f}  tflops: {tflops:,.2f}  mfu: {utilisation}"
    )
