"""How a rank's share of a batch is cut into microbatches."""

from pathlib import Path

import pytest
import torch

from megatron.config.layout import Layout
from megatron.config.plan import plan_run
from megatron.config.read import build_config
from megatron.parallel.world import World
from megatron.train import build as module
from megatron.train.build import build, microbatch_rows


def rows(batch: int, stages: int = 1, told: int | None = None, schedule: str = "1f1b") -> int:
    config = build_config(
        {
            "dist": {"pipeline_parallel": stages, "pipeline_schedule": schedule} if stages > 1 else {},
            "model": {"d_model": 16, "n_heads": 2, "n_layers": 8, "n_tokens": 10},
            "dataset": {"batch_size": batch, "microbatch_size": told},
            "lr_scheduler": {"total_iterations": 1},
        }
    )
    layout = Layout(pipeline=stages)
    return microbatch_rows(config, World(0, stages, 0, torch.device("cpu"), layout))


def test_without_a_pipeline_one_forward_takes_the_whole_share() -> None:
    assert (rows(12), rows(12, told=4), rows(12, told=99)) == (12, 4, 12)


@pytest.mark.parametrize(
    ("batch", "stages", "schedule", "wanted"),
    [
        (8, 2, "1f1b", 4),
        (7, 2, "1f1b", 1),  # 7 samples divide into 1 or 7 microbatches, and 2 ranks want 2 or more
        (10, 4, "1f1b", 2),
        (12, 4, "interleaved", 3),
        (20, 4, "interleaved", 5),  # 4 microbatches
        (24, 4, "interleaved", 6),
    ],
)
def test_a_pipeline_takes_the_largest_that_gives_each_rank_one(batch, stages, schedule, wanted) -> None:
    assert rows(batch, stages, schedule=schedule) == wanted


@pytest.mark.parametrize(
    ("batch", "stages", "told", "schedule", "sentence"),
    [
        (8, 1, 3, "1f1b", "3 does not divide the 8 samples of a rank"),
        (8, 2, 8, "1f1b", "a pipeline of 2 ranks wants 2 or more; make it smaller, or leave it out"),
        (12, 4, 2, "interleaved", "are 6, a pipeline of 4 ranks wants a multiple of 4"),
        (6, 4, None, "interleaved", "wants a multiple of 4; choose another dataset.batch_size"),
    ],
)
def test_what_gives_no_schedule_is_one_sentence(batch, stages, told, schedule, sentence) -> None:
    with pytest.raises(ValueError) as caught:
        rows(batch, stages, told, schedule)
    assert sentence in str(caught.value)


def test_a_deepspeed_json_that_contradicts_is_told_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*words: object) -> None:
        raise AssertionError("a model is made")

    (tmp_path / "ds.json").write_text('{"train_batch_size": 3}')
    config = build_config(
        {
            "dist": {"engine": "deepspeed", "deepspeed_config": str(tmp_path / "ds.json"), "cpu_only": True},
            "model": {"d_model": 16, "n_heads": 2, "n_layers": 1, "n_tokens": 10},
            "dataset": {"path_train": "synthetic", "batch_size": 4},
            "lr_scheduler": {"total_iterations": 1},
        }
    )
    monkeypatch.setattr(module, "Gpt", too_early)
    with pytest.raises(ValueError, match="train_batch_size is 3, ours 4"):
        build(config, plan_run(config), World(0, 1, 0, torch.device("cpu")))
