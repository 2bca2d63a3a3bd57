"""Division of a rank's share of a batch into microbatches, and settings refused before a model is built."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.parallelism import ParallelLayout
from megatron.config.schema import RunConfig
from megatron.parallel.world import World
from megatron.plan.memory import estimate_memory
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from megatron.train import build as module
from megatron.train.build import build_run
from megatron.train.microbatch import MEMORY_SHARE, choose_microbatch_rows
from tests.train.conftest import ALONE


def make_config(batch: int = 24, rows: int | None = None, **dist: Any) -> RunConfig:
    data = {"path_train": "synthetic", "batch_size": batch, "seq_len": 64, "microbatch_size": rows}
    return resolve_config(
        {
            "dist": {"cpu_only": True, "dtype": "float32", **dist},
            "model": {"d_model": 16, "n_heads": 2, "n_layers": 8, "n_tokens": 30},
            "dataset": data,
            "lr_scheduler": {"total_iterations": 2},
        }
    )


def choose_rows(batch: int, stages: int = 1, rows: int | None = None, schedule: str = "1f1b") -> int:
    dist = {"pipeline_parallel": stages, "pipeline_schedule": schedule} if stages > 1 else {}
    world = World(0, stages, 0, torch.device("cpu"), ParallelLayout(pipeline=stages))
    return choose_microbatch_rows(make_config(batch, rows=rows, **dist), world)


def test_a_pipeline_uses_the_largest_size_with_a_microbatch_per_rank() -> None:
    # without a pipeline a single forward computes the whole share
    assert (choose_rows(12), choose_rows(12, rows=4), choose_rows(12, rows=99)) == (12, 4, 12)
    for batch, stages, schedule, expected in (
        (8, 2, "1f1b", 4),
        (7, 2, "1f1b", 1),  # 7 samples divide into 1 or 7 microbatches, and 2 ranks require 2 or more
        (10, 4, "1f1b", 2),
        (12, 4, "interleaved", 3),
        (20, 4, "interleaved", 5),  # 4 microbatches
        (24, 4, "interleaved", 6),
    ):
        assert choose_rows(batch, stages, schedule=schedule) == expected, (batch, stages)


def test_every_size_of_a_ramp_must_divide_among_the_ranks() -> None:
    config = make_config(12)
    config = replace(config, dataset=replace(config.dataset, rampup_batch_size=[6, 3, 9]))
    for n_ranks in (3, 6):
        world = World(0, n_ranks, 0, torch.device("cpu"), ParallelLayout(data=n_ranks))
        if n_ranks == 3:
            assert choose_microbatch_rows(config, world) == 4
            continue
        with pytest.raises(
            ValueError, match="dataset.rampup_batch_size: got 9, expected a multiple of the 6"
        ):
            choose_microbatch_rows(config, world)


@pytest.mark.parametrize(
    ("batch", "stages", "rows", "schedule", "sentence"),
    [
        (8, 1, 3, "1f1b", "got 3, expected a divisor of the 8 samples of a rank"),
        (8, 2, 8, "1f1b", "got 1 microbatches, expected 2 or more for a pipeline of 2 ranks. Lower it"),
        (12, 4, 2, "interleaved", "got 6 microbatches, expected a multiple of 4 for a pipeline of 4 ranks"),
        (6, 4, None, "interleaved", "for a pipeline of 4 ranks. Choose another dataset.batch_size."),
    ],
)
def test_sizes_without_a_schedule_are_refused(batch, stages, rows, schedule, sentence) -> None:
    with pytest.raises(ValueError) as caught:
        choose_rows(batch, stages, rows, schedule)
    assert sentence in str(caught.value)


def test_the_most_samples_that_fit_are_chosen_among_the_divisors() -> None:
    config = make_config()
    chosen = {}
    for rows in (24, 12, 8, 6, 4, 3, 2, 1):
        memory = estimate_memory(config, 1, rows) / MEMORY_SHARE
        chosen[rows] = choose_microbatch_rows(config, ALONE, memory * 1.000001)
    assert chosen == {rows: rows for rows in chosen}
    assert choose_microbatch_rows(make_config(rows=6), ALONE, 1.0) == 6  # a request is not changed


def test_a_model_that_fits_nowhere_is_tried_with_a_warning(caplog) -> None:
    with caplog.at_level("WARNING", logger="megatron.train.microbatch"):
        assert choose_microbatch_rows(make_config(), ALONE, 1e6) == 1
    (record,) = caplog.records
    assert "more than 85% of 0 GB. Shard it over more ranks" in record.getMessage()


def test_deepspeeds_settings_are_checked_early(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": 3}')
    monkeypatch.setattr(module, "Gpt", None)
    recomputed = {"sharding_stage": "zero3", "activation_checkpointing": "selective"}
    for dist, sentence in (
        ({"deepspeed_config": str(tmp_path / "ds.json")}, "train_batch_size: got 3, expected 24"),
        (recomputed, "got selective with DeepSpeed's zero3"),
    ):
        config = make_config(engine="deepspeed", **dist)
        with pytest.raises(ValueError, match=sentence):
            build_run(config, plan_run(config), ALONE)
