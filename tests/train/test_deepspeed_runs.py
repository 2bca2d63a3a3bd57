"""Complete DeepSpeed runs."""

import pytest

from megatron.checkpoint import layout, reshard
from megatron.plan.run_dir import is_done
from tests.conftest import load_newest
from tests.train.conftest import assert_same_losses, list_saved, save_every

pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_resumes_with_another_engine_and_layout(pretrain, tmp_path) -> None:
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    changes = [save_every(4), "checkpoint.keep_last=9"]
    pretrain(alone, *changes)

    def forget_after(n_checkpoints: int) -> None:
        for checkpoint in list_saved(moved)[n_checkpoints:]:
            checkpoint.path.rename(tmp_path / checkpoint.path.name)
        (moved / "result.json").unlink()

    sharded = ["checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"]
    zero = ["dist.engine=deepspeed", "dist.sharding_stage=zero3"]
    pretrain(moved, *changes, *sharded, *zero, n_ranks=2)
    forget_after(1)
    # steps 5 to 8 from the sharded checkpoint of two ranks, on one rank with torch
    assert "resuming after step 4" in pretrain(moved, *changes).error
    forget_after(2)
    # steps 9 to 12 from torch's full checkpoint, converted to sharded
    full = list_saved(moved)[1].path
    name = layout.new_checkpoint_name("step", preempt=False)
    reshard.reshard_to_sharded(full, moved / "checkpoints" / name)
    zero[1] = "dist.sharding_stage=zero2"
    assert "resuming after step 8" in pretrain(moved, *changes, *zero, n_ranks=2).error
    assert_same_losses(moved, alone)
    assert load_newest(moved / "checkpoints", "step")[2]["step"] == 12


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_successful_run_exits_0_every_time_of_20(start, tmp_path, stage) -> None:
    changes = ["lr_scheduler.total_iterations=1", "lr_scheduler.warmup_iterations=0"]
    changes += ["dist.engine=deepspeed", f"dist.sharding_stage={stage}"]
    for i in range(20):
        results = [rank.wait() for rank in start(tmp_path / str(i), *changes)]
        assert [result.status for result in results] == [0, 0], (i, results)
        assert is_done(tmp_path / str(i))
