"""Automatic microbatches: chosen by the estimate, halved after a failed trial, all samples on a CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.config.schema import RunConfig
from megatron.objective.autoregressive import Autoregressive
from megatron.objective.masked_diffusion import MaskedDiffusion
from megatron.parallel.world import World
from megatron.plan.memory import MEMORY_SHARE, estimate_memory
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from megatron.train.build import build_engine, build_run
from megatron.train.loop import _prepare_folder
from megatron.train.microbatch import (
    build_largest_task,
    choose_microbatch_rows,
    confirm_microbatch_rows,
    find_fitting_rows,
)
from megatron.train.resume import resume_run

CPU = World(0, 1, 0, torch.device("cpu"))
GPU = World(0, 1, 0, torch.device("cuda", 0))


class InductorError(RuntimeError):
    """An error of the compiler, which contains the text of its cause."""


def make_config(batch: int = 24, folder: Path = Path("unused"), microbatch: int | None = None) -> RunConfig:
    return resolve_config(
        {
            "dist": {"cpu_only": True, "dtype": "float32"},
            "model": {"d_model": 16, "n_heads": 2, "n_layers": 2, "n_tokens": 30},
            "dataset": {
                "path_train": "synthetic", "batch_size": batch, "seq_len": 64, "microbatch_size": microbatch
            },
            "lr_scheduler": {"total_iterations": 2},
            "logging": {"run_dir": str(folder), "tensorboard": False},
        }
    )  # fmt: skip


def test_the_most_samples_that_fit_are_chosen_among_the_divisors() -> None:
    config = make_config()
    assert choose_microbatch_rows(config, CPU) == 24  # no limit on a CPU
    chosen = {}
    for rows in (24, 12, 8, 6, 4, 3, 2, 1):
        memory = estimate_memory(config, 1, rows) / MEMORY_SHARE
        chosen[rows] = choose_microbatch_rows(config, CPU, memory * 1.000001)
    assert chosen == {rows: rows for rows in chosen}
    assert choose_microbatch_rows(make_config(microbatch=6), CPU, 1.0) == 6  # a request is not changed


def test_a_model_that_fits_nowhere_is_tried_with_a_single_sample_and_a_warning(caplog) -> None:
    with caplog.at_level("WARNING", logger="megatron.train.microbatch"):
        assert choose_microbatch_rows(make_config(), CPU, 1e6) == 1
    (record,) = caplog.records
    assert "more than 85% of 0 GB. Shard it over more ranks" in record.getMessage()


@pytest.mark.parametrize(
    ("capacity", "tried", "expected"),
    [(24, [24], 24), (12, [24, 12], 12), (7, [24, 12, 6], 6), (0.5, [24, 12, 6, 3], 1)],
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, InductorError, None])
def test_a_failed_trial_halves_the_microbatch(capacity, tried, expected, error) -> None:
    trials = []

    def measure(rows: int) -> float:
        trials.append(rows)
        if error is not None and rows > capacity:
            raise error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return rows

    assert find_fitting_rows([24, 12, 8, 6, 4, 3, 2, 1], measure, capacity, CPU) == expected
    assert trials == tried


@pytest.mark.parametrize("error", [ValueError, RuntimeError, InductorError])
def test_other_errors_of_a_trial_are_not_hidden(error) -> None:
    def measure(rows: int) -> float:
        raise error("a wrong shape")

    with pytest.raises(error, match="a wrong shape"):
        find_fitting_rows([4, 2], measure, 1e9, CPU)


def make_gpu_config(name: str, **dist: object) -> RunConfig:
    config = make_config()
    objective, dist_config = replace(config.objective, name=name), replace(config.dist, **dist)
    return replace(config, objective=objective, dist=replace(dist_config, cpu_only=False))


def test_a_trial_changes_no_weight_and_leaves_no_gradient() -> None:
    config = make_config()
    from megatron.model.initialization import init_weights
    from megatron.model.transformer import Gpt

    model = Gpt(config.model)
    init_weights(model, 0)
    engine = build_engine(model, Autoregressive(), config, CPU)
    before = engine.state_dict()
    engine.probe(build_largest_task(Autoregressive(), config, 8))
    after = engine.state_dict()
    for name, weight in before["model"].items():
        assert torch.equal(weight, after["model"][name])
    assert all(float(entry["step"]) == 0 for entry in after["optim"]["state"].values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert confirm_microbatch_rows(24, engine, Autoregressive(), config, CPU) == 24  # no trial on a CPU


def test_the_trial_predicts_every_position() -> None:
    task = build_largest_task(MaskedDiffusion(30, 1e-3, seed=0), make_config(), 3)
    assert torch.equal(task.positions, torch.arange(3 * 64))
    assert len(task.targets) == len(task.scale) == 3 * 64


def test_the_plan_of_a_run_has_its_microbatch(tmp_path: Path) -> None:
    config = make_config(8, tmp_path)
    plan = plan_run(config)
    assert plan.microbatch_size is None
    run = build_run(config, plan, CPU)
    _prepare_folder(run, resume_run(run))
    assert json.loads((tmp_path / "plan.json").read_text())["microbatch_size"] == 8
