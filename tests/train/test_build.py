"""Division of a rank's share of a batch into microbatches."""

from pathlib import Path

import pytest
import torch

from megatron.config.parallelism import ParallelLayout
from megatron.parallel.world import World
from megatron.plan.resolve import resolve_config
from megatron.plan.run_plan import plan_run
from megatron.train import build as module
from megatron.train.build import build_run
from megatron.train.microbatch import choose_microbatch_rows


def choose_rows(batch: int, stages: int = 1, requested: int | None = None, schedule: str = "1f1b") -> int:
    config = resolve_config(
        {
            "dist": {"pipeline_parallel": stages, "pipeline_schedule": schedule} if stages > 1 else {},
            "model": {"d_model": 16, "n_heads": 2, "n_layers": 8, "n_tokens": 10},
            "dataset": {"batch_size": batch, "microbatch_size": requested},
            "lr_scheduler": {"total_iterations": 1},
        }
    )
    layout = ParallelLayout(pipeline=stages)
    return choose_microbatch_rows(config, World(0, stages, 0, torch.device("cpu"), layout))


def test_without_a_pipeline_a_single_forward_computes_the_whole_share() -> None:
    assert (choose_rows(12), choose_rows(12, requested=4), choose_rows(12, requested=99)) == (12, 4, 12)


@pytest.mark.parametrize(
    ("batch", "stages", "schedule", "expected"),
    [
        (8, 2, "1f1b", 4),
        (7, 2, "1f1b", 1),  # 7 samples divide into 1 or 7 microbatches, and 2 ranks require 2 or more
        (10, 4, "1f1b", 2),
        (12, 4, "interleaved", 3),
        (20, 4, "interleaved", 5),  # 4 microbatches
        (24, 4, "interleaved", 6),
    ],
)
def test_a_pipeline_uses_the_largest_size_with_a_microbatch_per_rank(
    batch, stages, schedule, expected
) -> None:
    assert choose_rows(batch, stages, schedule=schedule) == expected


@pytest.mark.parametrize(
    ("batch", "stages", "requested", "schedule", "sentence"),
    [
        (8, 1, 3, "1f1b", "got 3, expected a divisor of the 8 samples of a rank"),
        (
            8,
            2,
            8,
            "1f1b",
            "got 1 microbatches, expected 2 or more for a pipeline of 2 ranks. Lower it, or omit it.",
        ),
        (12, 4, 2, "interleaved", "got 6 microbatches, expected a multiple of 4 for a pipeline of 4 ranks"),
        (
            6,
            4,
            None,
            "interleaved",
            "expected a multiple of 4 for a pipeline of 4 ranks. Choose another dataset.batch_size.",
        ),
    ],
)
def test_sizes_without_a_schedule_are_refused(batch, stages, requested, schedule, sentence) -> None:
    with pytest.raises(ValueError) as caught:
        choose_rows(batch, stages, requested, schedule)
    assert sentence in str(caught.value)


def test_a_conflicting_deepspeed_json_is_refused_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*words: object) -> None:
        raise AssertionError("a model is made")

    (tmp_path / "ds.json").write_text('{"train_batch_size": 3}')
    config = resolve_config(
        {
            "dist": {"engine": "deepspeed", "deepspeed_config": str(tmp_path / "ds.json"), "cpu_only": True},
            "model": {"d_model": 16, "n_heads": 2, "n_layers": 1, "n_tokens": 10},
            "dataset": {"path_train": "synthetic", "batch_size": 4},
            "lr_scheduler": {"total_iterations": 1},
        }
    )
    monkeypatch.setattr(module, "Gpt", too_early)
    with pytest.raises(ValueError, match="train_batch_size: got 3, expected 4"):
        build_run(config, plan_run(config), World(0, 1, 0, torch.device("cpu")))


def test_partly_recomputed_blocks_are_refused_under_deepspeeds_zero3() -> None:
    dist = {"engine": "deepspeed", "sharding_stage": "zero3", "activation_checkpointing": "selective"}
    config = resolve_config(
        {"dist": dist, "model": {"size": "7M", "n_tokens": 500}, "lr_scheduler": {"total_iterations": 1}}
    )
    with pytest.raises(ValueError, match="got selective with DeepSpeed's zero3"):
        module.build_deepspeed_settings(config, World(0, 1, 0, torch.device("cpu")))
