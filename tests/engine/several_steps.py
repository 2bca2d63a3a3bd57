"""Script run by each rank: several steps of several engines; rank 0 writes the results as JSON.

    several_steps.py '[{"dist": {...}, "objective": "autoregressive", "microbatch_size": 2, ...}, ...]' FOLDER

Keys of a case: `save: NAME` (saves the state after step 3 to FOLDER/NAME), `load: NAME` (resumes from it),
and `sharded: true` for DCP's layout. `poison: STEP` makes the last rank's loss NaN. `record_dtypes` adds the
dtypes of residual stream and norms. `model` and `options` are further keys of the configuration's model and
objective.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint import sharded
from megatron.config.schema import RunConfig
from megatron.engine.interface import Engine
from megatron.model.initialization import init_weights
from megatron.model.transformer import Block, Gpt, RmsNorm
from megatron.parallel.collectives import sum_over_ranks
from megatron.parallel.world import World, open_world
from megatron.plan.resolve import resolve_config
from megatron.train.build import build_engine, build_objective

BATCH, SEQ_LEN, N_TOKENS, N_STEPS, SAVED_AFTER = 8, 16, 100, 5, 3


def build_case_config(case: dict[str, Any]) -> RunConfig:
    """Return the configuration of a case: a model small enough to be split unevenly."""
    return resolve_config(
        {
            "dist": {"cpu_only": True, "dtype": "float32", **case.get("dist", {})},
            "model": {
                "d_model": 24,
                "n_heads": 2,
                "n_layers": 2,
                "n_tokens": N_TOKENS,
                **case.get("model", {}),
            },
            "dataset": {
                "seq_len": SEQ_LEN,
                "batch_size": BATCH,
                "microbatch_size": case.get("microbatch_size"),
            },
            "objective": {"name": case["objective"], **case.get("options", {})},
            "optim": {"lr": 0.01, "grad_clip": case.get("grad_clip", 0.3)},
            "lr_scheduler": {"total_iterations": N_STEPS},
        }
    )


def draw_samples(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (tokens [BATCH, SEQ_LEN + 1], sample numbers) of a step, the same on all ranks."""
    tokens = np.random.default_rng(step).integers(0, N_TOKENS, (BATCH, SEQ_LEN + 1))
    return tokens, np.arange(step * BATCH, (step + 1) * BATCH)


def run_case(case: dict[str, Any], world: World, folder: Path) -> dict[str, Any]:
    """Return losses, gradient norms and the score of one case."""
    config = build_case_config(case)
    model = Gpt(config.model)
    init_weights(model, config.misc.seed)
    objective = build_objective(config)
    engine = build_engine(model, objective, config, world)
    dtypes = record_dtypes(engine) if case.get("record_dtypes") else None
    first = 0
    if "load" in case:
        _load_state(engine, folder / case["load"], world, bool(case.get("sharded")))
        first = SAVED_AFTER
    n_samples = BATCH // world.n_ranks
    rows = config.dataset.microbatch_size or n_samples
    results: dict[str, Any] = {"loss": [], "grad_norm": []}
    for step in range(first, N_STEPS):
        tokens, numbers = draw_samples(step)
        begins = range(world.rank * n_samples, (world.rank + 1) * n_samples, rows)
        tasks = [objective.corrupt(tokens[i : i + rows], numbers[i : i + rows]) for i in begins]
        if case.get("poison") == step and world.rank == world.n_ranks - 1:
            tasks[0].scale.fill_(float("nan"))
        report = engine.step(tasks, lr=0.01 * (step + 1) / N_STEPS)
        results["loss"].append(float(sum_over_ranks(report.loss_sum, world)) / (BATCH * SEQ_LEN))
        results["grad_norm"].append(float(report.grad_norm))
        if "save" in case and step + 1 == SAVED_AFTER:
            _save_state(engine, folder / case["save"], world, bool(case.get("sharded")))
    nats, count = engine.score(objective.corrupt(*draw_samples(99), draw=0))
    results["score"] = float(nats.sum()) / count
    if dtypes is not None:
        results["dtypes"] = {kind: sorted(names) for kind, names in dtypes.items()}
    return results


def record_dtypes(engine: Any) -> dict[str, set[str]]:
    """Return a table of the dtypes of residual stream and norms, which forward hooks fill."""
    dtypes: dict[str, set[str]] = {"stream": set(), "norm": set()}

    def record(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        tensors = (args[0], output) if isinstance(module, Block) else (output,)
        kind = "stream" if isinstance(module, Block) else "norm"
        dtypes[kind].update(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)

    model = engine.model if hasattr(engine, "model") else engine.passes.model
    for module in model.modules():
        if isinstance(module, (Block, RmsNorm)):
            module.register_forward_hook(record)
    return dtypes


def _save_state(engine: Engine, path: Path, world: World, in_shards: bool) -> None:
    if in_shards:
        # saved from a copy: later steps must not change it
        writing = sharded.write_sharded_async(path, engine.sharded_state(), None)
        sharded.wait_for_write(path, writing)
        return
    state = engine.state_dict()
    if world.is_first:
        torch.save(state, path)


def _load_state(engine: Engine, path: Path, world: World, in_shards: bool) -> None:
    if in_shards:
        state = engine.sharded_state()
        sharded.read_sharded(path, state)
        engine.load_sharded_state(state)
        return
    engine.load_state_dict(torch.load(path, weights_only=True) if world.is_first else {})


def main() -> None:
    """Run all cases in sequence in one process group."""
    cases, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    with open_world(build_case_config(cases[0]).dist, n_threads=1) as world:
        results = [run_case(case, world, folder) for case in cases]
        if world.is_first:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
    if "deepspeed" in sys.modules:
        import os

        os._exit(0)
