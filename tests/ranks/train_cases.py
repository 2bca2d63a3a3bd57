"""Run by each rank of test_layouts.py: a few steps of a tiny model in the engine and layout of each case.

Keys of a case, all optional but the first:

    name           of its files: rank 0 writes OUT/NAME.result, and the state after SAVED_AFTER steps, NAME.pt
    layout         settings of `dist`, such as "pipeline_parallel=2 zero1"
    model, objective, optim     sections of the configuration
    microbatches   per step and rank
    resume         resume from the state after SAVED_AFTER steps
    load           path of a state of another layout, to resume from
    sharded        save and load the state in shards, too
    load_shards    folder of shards of another layout, to resume from
    poison         step whose loss is NaN on the last rank
    record_dtypes  only a step that records dtypes, and two further steps
    gradients      only updates by gradients that are bit-equal in every layout
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.checkpoint import sharded
from megatron.config.parallelism import build_layout
from megatron.config.schema import DistConfig, RunConfig
from megatron.config.yaml_file import parse_overrides
from megatron.model.initialization import init_weights
from megatron.model.transformer import Block, Gpt, RmsNorm
from megatron.objective.task import Objective, Task
from megatron.optim.adamw import set_lr, step_optimizer
from megatron.optim.ema import update_ema
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World, open_world
from megatron.plan.resolve import resolve_config
from megatron.train.build import build_engine, build_objective
from tests.rank_processes import read_timeouts

BATCH, SEQ, N_STEPS, SAVED_AFTER, TIMEOUT_S = 8, 16, 4, 2, 77
# 18 divides among 2 ranks, not among 4: shards are uneven
MODEL = {"d_model": 18, "d_ff": 32, "d_head": 4, "n_heads": 8, "n_kv_heads": 4, "n_layers": 4, "n_tokens": 60}
Case = dict[str, Any]
Result = dict[str, list[float]]


def parse_layout(layout: str) -> dict[str, Any]:
    """Return settings of `dist`; a word without a value is an engine or a sharding stage."""
    words = [
        word if "=" in word else f"{'engine' if word == 'deepspeed' else 'sharding_stage'}={word}"
        for word in layout.split()
    ]
    return parse_overrides([f"dist.{word}" for word in words]).get("dist", {})


def build_config(case: Case, n_ranks: int) -> RunConfig:
    """Return the configuration of a case."""
    common = {"cpu_only": True, "dtype": "float32", "timeout_s": TIMEOUT_S}
    dist = common | parse_layout(case.get("layout", ""))
    n_shares = build_layout(DistConfig(**dist), n_ranks, n_ranks).data
    rows = BATCH // n_shares // case.get("microbatches", 1)
    return resolve_config(
        {
            "dist": dist,
            "model": {**MODEL, "vocab_rows": 64, **case.get("model", {})},
            "dataset": {"seq_len": SEQ, "batch_size": BATCH, "microbatch_size": rows},
            "objective": case.get("objective", {}),
            "optim": {"lr": 0.01, "grad_clip": 0.5, **case.get("optim", {})},
            "lr_scheduler": {"total_iterations": N_STEPS},
        }
    )


class Trained:
    """The engine of a case, with its batches."""

    def __init__(self, config: RunConfig, world: World, seed: int = 0, poison: int | None = None) -> None:
        self.config, self.world, self.poison = config, world, poison
        self.objective: Objective = build_objective(config)
        model = Gpt(config.model)
        init_weights(model, seed)
        rows = config.dataset.microbatch_size
        self.engine: Any = build_engine(model, self.objective, config, world, rows)

    def build_tasks(self, step: int) -> list[Task]:
        """Return this rank's share of a batch; the batch is the same for any number of ranks."""
        tokens = np.random.default_rng(step).integers(0, 60, (BATCH, SEQ + 1))
        tokens = np.minimum(tokens, tokens[:, ::-1])  # unequal frequencies: the loss can decrease
        size, rows = BATCH // self.world.dp_size, self.config.dataset.microbatch_size
        first = size * self.world.dp_rank
        shares = [np.arange(begin, begin + rows) for begin in range(first, first + size, rows)]
        return [self.objective.corrupt(tokens[share], share + step * BATCH) for share in shares]

    def run_steps(self, first: int, last: int) -> Result:
        """Return the loss, norm and number of predictions of each step."""
        result: Result = {"losses": [], "norms": [], "counts": []}
        for step in range(first, last):
            tasks = self.build_tasks(step)
            if step == self.poison and self.world.rank == self.world.n_ranks - 1:
                tasks[0].scale.fill_(float("nan"))
            report = self.engine.step(tasks, lr=0.01 * (step + 1) / N_STEPS)
            sums = torch.stack([report.loss_sum, torch.tensor(float(report.count))])
            nats, count = sum_over_ranks(sums, self.world).tolist()
            result["losses"].append(nats / count)
            result["norms"].append(float(report.grad_norm))
            result["counts"].append(count)
        return result

    def score_batch(self) -> list[float]:
        """Return the nats of each sample of a batch, which every data-parallel rank scores in full."""
        tokens = np.random.default_rng(99).integers(0, 60, (BATCH, SEQ + 1))
        nats = self.engine.score(self.objective.corrupt(tokens, np.arange(BATCH), draw=0))[0]
        return (sum_over_ranks(nats, self.world) / self.world.dp_size).tolist()

    def score_average(self) -> list[float]:
        """Return the scores of `score_batch` of the moving average of the weights, [] without one."""
        if self.config.optim.ema_decay is None:
            return []
        with self.engine.averaged_weights():
            return self.score_batch()

    def save_sharded(self, folder: Path) -> None:
        """Write shards from a copy, which later steps must not change."""
        sharded.wait_for_write(folder, sharded.write_sharded_async(folder, self.engine.sharded_state(), None))

    def load_sharded(self, folder: Path) -> None:
        state = self.engine.sharded_state()
        sharded.read_sharded(folder, state)
        self.engine.load_sharded_state(state)


def run_case(case: Case, config: RunConfig, world: World, out: Path) -> dict[str, Any]:
    """Return the results of a whole run, and of the steps after resuming in every way."""
    trained = Trained(config, world, poison=case.get("poison"))
    whole = trained.run_steps(0, SAVED_AFTER)
    saved = trained.engine.state_dict()
    if world.is_first:
        torch.save(saved, out / f"{case['name']}.pt")
    in_shards = case.get("sharded") and world.n_ranks > 1
    if in_shards:
        trained.save_sharded(out / case["name"])
    rest = trained.run_steps(SAVED_AFTER, N_STEPS)
    result = {"whole": {key: values + rest[key] for key, values in whole.items()}}
    result |= {"averaged": [trained.score_average()]}
    result |= {"scored": trained.score_batch(), "timeouts": read_timeouts()}
    if not case.get("resume"):
        return result
    resumed = Trained(config, world, seed=1)  # other weights: only loading makes them equal
    resumed.engine.load_state_dict(saved)
    result["resumed"] = resumed.run_steps(SAVED_AFTER, N_STEPS)
    if case.get("load"):
        state = torch.load(case["load"], weights_only=True) if world.is_first else {}
        resumed.engine.load_state_dict(state)
        result["moved"] = resumed.run_steps(SAVED_AFTER, N_STEPS)
        result["averaged"].append(resumed.score_average())
    shards = out / case["name"] if in_shards else case.get("load_shards")
    if shards is not None:
        resumed.load_sharded(Path(shards))
        result["sharded"] = resumed.run_steps(SAVED_AFTER, N_STEPS)
        result["averaged"].append(resumed.score_average())
    return result


class DtypeRecorder:
    """Records the dtypes at the interfaces of a model's modules with forward hooks."""

    def __init__(self, engine: Any) -> None:
        self.dtypes: dict[str, set[str]] = {}
        passes = getattr(engine, "passes", engine)
        roots = passes.pipeline.stages.values() if hasattr(passes, "pipeline") else [passes.model]
        for module in (module for root in roots for module in root.modules()):
            if isinstance(module, (Block, RmsNorm, nn.Linear)):
                module.register_forward_hook(self._record)

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

    def as_dict(self, engine: Any) -> dict[str, list[str]]:
        """Return the dtypes of modules, and of the weights and moments of the torch engine."""
        if hasattr(engine, "passes"):
            for parameter in engine.passes.named_parameters().values():
                self._add("stored weight", parameter)
            for state in engine.optimizer.state.values():
                self._add("moment", state["exp_avg"])
        return {kind: sorted(dtypes) for kind, dtypes in self.dtypes.items()}


def record_dtypes(config: RunConfig, world: World) -> dict[str, Any]:
    """Return the dtypes of one step, and then the losses of two."""
    trained = Trained(config, world)
    recorder = DtypeRecorder(trained.engine)
    report = trained.engine.step(trained.build_tasks(0), lr=0.0)
    assert report.loss_sum.dtype == torch.float64
    return {"dtypes": recorder.as_dict(trained.engine), "losses": trained.run_steps(0, 2)["losses"]}


def update_by_gradients(config: RunConfig, world: World) -> dict[str, Any]:
    """Return the full state after updates by random gradients, the same in every layout."""
    engine = Trained(config, world).engine
    for step in range(N_STEPS):
        engine.weights.refresh()
        gradients = {}
        for i, (name, kinds) in enumerate(engine.shapes.items()):
            generator = torch.Generator().manual_seed(100 * step + i)
            gradients[name] = torch.randn(kinds["weight"], generator=generator)
        for name, tensor in engine.weights:
            tensor.grad = engine.weights.slice_local(name, gradients[name])
        set_lr(engine.optimizer, 0.01)
        # the third step is skipped, as one with NaN
        step_optimizer(engine.optimizer, torch.tensor(2.0), torch.tensor(step != 2))
        update_ema(engine.optimizer, config.optim.ema_decay)
    state: dict[str, Any] = engine.state_dict()
    return state


def run_cases(cases: list[Case], out: Path) -> None:
    """Run all cases in sequence in one process group."""
    n_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    configs = [build_config(case, n_ranks) for case in cases]
    with open_world(DistConfig(cpu_only=True, timeout_s=TIMEOUT_S), n_threads=1) as world:
        for case, config in zip(cases, configs, strict=True):
            layout = replace(world, layout=build_layout(config.dist, n_ranks, n_ranks))
            if case.get("record_dtypes"):
                result = record_dtypes(config, layout)
            elif case.get("gradients"):
                result = update_by_gradients(config, layout)
            else:
                result = run_case(case, config, layout, out)
            if world.is_first:
                torch.save(result, out / f"{case['name']}.result")
    if "deepspeed" in sys.modules:
        os._exit(0)  # its threads sometimes abort at the interpreter's exit
