"""Complete DeepSpeed runs, started from the command line."""

import pytest

from megatron.checkpoint import layout, reshard
from megatron.plan.run_dir import is_done
from tests.conftest import load_newest
from tests.train.conftest import read_losses

pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")


@pytest.mark.slow
@pytest.mark.ranks
def test_a_run_resumes_with_other_ranks_engine_and_layout(pretrain, words, tmp_path) -> None:
    words = [*words, "checkpoint.chkpt_saving_iterations=4", "checkpoint.keep_last=9"]
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    assert pretrain([*words, f"logging.run_dir={alone}"]).returncode == 0

    def forget_after(n_checkpoints: int) -> None:
        for checkpoint in layout.find_checkpoints(moved / "checkpoints")[n_checkpoints:]:
            checkpoint.path.rename(tmp_path / checkpoint.path.name)
        (moved / "result.json").unlink()

    words += [f"logging.run_dir={moved}"]
    in_shards = [*words, "checkpoint.state_dict_type=sharded", "checkpoint.asynchronous=true"]
    zero3 = ["dist.engine=deepspeed", "dist.sharding_stage=zero3"]
    first = pretrain([*in_shards, *zero3], n_ranks=2)
    assert first.returncode == 0, first.stderr
    forget_after(1)
    # steps 5 to 8 from the sharded checkpoint of two ranks, on one rank with torch
    second = pretrain(words)
    assert "resuming after step 4" in second.stderr
    forget_after(2)
    # steps 9 to 12 from torch's full checkpoint, converted to sharded
    full = layout.find_checkpoints(moved / "checkpoints")[1].path
    reshard.reshard_to_sharded(
        full, moved / "checkpoints" / layout.new_checkpoint_name("step", preempt=False)
    )
    third = pretrain([*words, "dist.engine=deepspeed", "dist.sharding_stage=zero2"], n_ranks=2)
    assert "resuming after step 8" in third.stderr, third.stderr
    for kind in ("train", "validation"):
        assert read_losses(moved, kind) == pytest.approx(read_losses(alone, kind), abs=1e-5)
    assert load_newest(moved / "checkpoints", "step")[2]["step"] == 12


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_a_successful_run_exits_0_every_time_of_20(start, words, tmp_path, stage) -> None:
    words = [*words, "lr_scheduler.total_iterations=1", "lr_scheduler.warmup_iterations=0"]
    words += ["dist.engine=deepspeed", f"dist.sharding_stage={stage}"]
    for i in range(20):
        ranks = start([*words, f"logging.run_dir={tmp_path / str(i)}"], n_ranks=2)
        outputs = [rank.communicate(timeout=300) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], (i, outputs)
        assert is_done(tmp_path / str(i))
