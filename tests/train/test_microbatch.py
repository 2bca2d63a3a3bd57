"""Automatic microbatches: chosen by the estimate, all samples on a CPU."""

import json
from pathlib import Path

import torch

from megatron.config.schema import RunConfig
from megatron.parallel.world import World
from megatron.plan.memory import MEMORY_SHARE, estimate_memory
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from megatron.train.build import build_run
from megatron.train.loop import _prepare_folder
from megatron.train.microbatch import choose_microbatch_rows
from megatron.train.resume import resume_run

CPU = World(0, 1, 0, torch.device("cpu"))
GPU = World(0, 1, 0, torch.device("cuda", 0))


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


def test_the_plan_of_a_run_has_its_microbatch(tmp_path: Path) -> None:
    config = make_config(8, tmp_path)
    plan = plan_run(config)
    assert plan.microbatch_size is None
    run = build_run(config, plan, CPU)
    _prepare_folder(run, resume_run(run))
    assert json.loads((tmp_path / "plan.json").read_text())["microbatch_size"] == 8
