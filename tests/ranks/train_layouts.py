"""Script run by each rank of test_layouts.py: a few steps of a tiny model in each layout of a job.

    RANK=.. WORLD_SIZE=.. MASTER_ADDR=.. MASTER_PORT=.. python train_layouts.py JOB.json

Rank 0 writes <out>/<name>.json, and the full state after `save_after` steps as <out>/<name>.pt.
"""

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from megatron.config.parallelism import build_layout
from megatron.config.schema import DistConfig, ModelConfig, OptimConfig
from megatron.engine.interface import StepReport
from megatron.engine.torch.torch_native import TorchEngine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Block, Gpt, RmsNorm
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.objective.task import Objective, Task
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World

SHAPE = ModelConfig(
    d_model=16, d_ff=32, d_head=4, n_heads=8, n_kv_heads=4, n_layers=4, n_tokens=60, vocab_rows=64
)
BATCH, SEQ, STEPS = 8, 16, 5


def build_objective(name: str) -> Objective:
    return Autoregressive() if name == "autoregressive" else MaskedDiffusion(SHAPE.n_tokens, 1e-3, seed=0)


def build_tasks(step: int, objective: Objective, world: World, n_microbatches: int) -> list[Task]:
    """Return this rank's share of a batch; the batch is the same for any number of ranks."""
    tokens = np.random.default_rng(step).integers(0, SHAPE.n_tokens, (BATCH, SEQ + 1))
    tokens = np.minimum(tokens, tokens[:, ::-1])  # unequal frequencies: the loss can decrease
    rows = BATCH // world.dp_size // n_microbatches
    first = BATCH // world.dp_size * world.dp_rank
    shares = [np.arange(first + i * rows, first + (i + 1) * rows) for i in range(n_microbatches)]
    return [objective.corrupt(tokens[share], share + step * BATCH) for share in shares]


def build_engine(job: dict[str, Any], world: World, seed: int = 0) -> TorchEngine:
    model = Gpt(replace(SHAPE, **job.get("model", {})))
    init_weights(model, seed)
    dist_config = DistConfig(cpu_only=True, **{"dtype": "float32", **job["dist"]})
    optim = OptimConfig(lr=0.01, grad_clip=job.get("grad_clip", 0.5))
    causal = job["objective"] == "autoregressive"
    return TorchEngine(model, causal=causal, dist=dist_config, optim=optim, world=world)


def run_steps(
    engine: TorchEngine, job: dict[str, Any], world: World, first: int, last: int
) -> dict[str, list]:
    objective = build_objective(job["objective"])
    result: dict[str, list] = {"losses": [], "norms": [], "counts": []}
    for step in range(first, last):
        report = engine.step(build_tasks(step, objective, world, job.get("microbatches", 1)), lr=0.01)
        nats, count = sum_over_ranks(
            torch.stack([report.loss_sum, torch.tensor(float(report.count))]), world
        ).tolist()
        result["losses"].append(nats / count)
        result["norms"].append(float(report.grad_norm))
        result["counts"].append(count)
    return result


def score_batch(engine: TorchEngine, job: dict[str, Any], world: World) -> list[float]:
    """Return the nats of each sample of one batch, which every data-parallel rank scores in full."""
    objective = build_objective(job["objective"])
    task = build_tasks(99, objective, replace(world, rank=0, layout=build_layout(DistConfig(), 1)), 1)[0]
    return (sum_over_ranks(engine.score(task)[0], world) / world.dp_size).tolist()


class DtypeRecorder:
    """Records the dtypes at the interfaces of a model's modules with forward hooks."""

    def __init__(self, engine: TorchEngine) -> None:
        self.dtypes: dict[str, set[str]] = {}
        passes: Any = engine.passes
        roots = passes.pipeline.stages.values() if hasattr(passes, "pipeline") else [passes.model]
        for module in (module for root in roots for module in root.modules()):
            if isinstance(module, (Block, RmsNorm, nn.Linear)):
                module.register_forward_hook(self._record)
        for parameter in passes.named_parameters().values():
            self._add("stored weight", parameter)

    def _record(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if isinstance(module, Block):
            self._add("residual stream", args[0])
            self._add("residual stream", output)
        elif isinstance(module, RmsNorm):
            self._add("result of a norm", output)
        else:
            self._add("input of a product", args[0])
            self._add("result of a product", output)

    def _add(self, kind: str, tensor: torch.Tensor) -> None:
        self.dtypes.setdefault(kind, set()).add(str(tensor.dtype).removeprefix("torch."))

    def as_dict(self, report: StepReport, engine: TorchEngine) -> dict[str, list[str]]:
        self._add("sum of the loss", report.loss_sum)
        for state in engine.optimizer.state.values():
            self._add("moment", state["exp_avg"])
        return {kind: sorted(dtypes) for kind, dtypes in self.dtypes.items()}


def record_dtypes(job: dict[str, Any], world: World, out: Path) -> None:
    """Write the dtypes of one step, and the losses of three, which are computed in this order."""
    engine = build_engine(job, world)
    recorder = DtypeRecorder(engine)
    tasks = build_tasks(0, build_objective(job["objective"]), world, job["microbatches"])
    dtypes = recorder.as_dict(engine.step(tasks, lr=0.0), engine)
    losses = run_steps(engine, job, world, 0, 3)["losses"]
    if world.is_first:
        (out / f"{job['name']}.json").write_text(json.dumps({"dtypes": dtypes, "losses": losses}))


def run_job(job: dict[str, Any], rank: int, n_ranks: int, out: Path) -> None:
    world = World(
        rank, n_ranks, rank, torch.device("cpu"), build_layout(DistConfig(**job["dist"]), n_ranks, n_ranks)
    )
    if job.get("record_dtypes"):
        record_dtypes(job, world, out)
        return
    engine = build_engine(job, world)
    half = job.get("save_after", 3)
    result = {"whole": run_steps(engine, job, world, 0, half)}
    saved = engine.state_dict()
    if world.is_first:
        torch.save(saved, out / f"{job['name']}.pt")
    folder = out / f"{job['name']}.dcp"
    if job.get("dcp", True) and n_ranks > 1:
        dcp.save(engine.sharded_state(), checkpoint_id=folder)
    rest = run_steps(engine, job, world, half, STEPS)
    result["whole"] = {key: values + rest[key] for key, values in result["whole"].items()}
    result["scored"] = score_batch(engine, job, world)

    resumed = build_engine(job, world, seed=1)  # other weights: only loading makes them equal
    resumed.load_state_dict(saved)
    result["resumed"] = run_steps(resumed, job, world, half, STEPS)
    if job.get("from"):
        resumed.load_state_dict(torch.load(job["from"], weights_only=True) if world.is_first else {})
        result["moved"] = run_steps(resumed, job, world, half, STEPS)
    if job.get("dcp", True) and n_ranks > 1:
        state = resumed.sharded_state()
        dcp.load(state, checkpoint_id=folder)
        resumed.load_sharded_state(state)
        result["sharded"] = run_steps(resumed, job, world, half, STEPS)
    if world.is_first:
        (out / f"{job['name']}.json").write_text(json.dumps(result))


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, n_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    for layout in job["layouts"]:
        run_job(layout, rank, n_ranks, Path(job["out"]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
