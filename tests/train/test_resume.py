"""Content of checkpoints, and its restoration on resume."""

import pytest
import torch

from megatron.checkpoint import layout, store
from megatron.config.read import config_to_dict
from megatron.io import code_revision, read_json
from megatron.plan.run_dir import METRICS
from megatron.train.build import build_schedule
from megatron.train.loop import open_feed
from megatron.train.resume import resume_run
from megatron.train.saver import Saver
from megatron.train.state import TrainState
from tests.conftest import flip_middle_bit
from tests.train.conftest import (
    assert_same_losses,
    list_saved,
    read_error,
    read_lines,
    remove_end,
    save_every,
)


def assert_equal(result: object, expected: object) -> None:
    if isinstance(expected, dict):
        assert isinstance(result, dict) and result.keys() == expected.keys()
        for key, value in expected.items():
            assert_equal(result[key], value)
    else:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_contains_all_that_a_run_resumes_with(small_run, tmp_path, kind) -> None:
    changes = [f"checkpoint.state_dict_type={kind}", "dist.dtype=float16"]
    changes += ["lr_scheduler.warmup_iterations=null", "lr_scheduler.warmup_tokens=2000"]
    run = small_run(tmp_path, *changes)
    with open_feed(run, 0, 3) as feed:
        for tasks in feed:
            run.engine.step(tasks, lr=0.01)
    run.engine.loss_scale.scale.fill_(4096.0)
    state = TrainState(step=3, next_sample=72, tokens_seen=72 * 32, best_loss=4.25, elapsed_s=1.5)
    trained = run.engine.state_dict()
    torch.manual_seed(5)
    path = Saver(run).save(state)
    draws = torch.rand(4)

    parts, meta = store.load_checkpoint(path)
    schedule = build_schedule(run.config, run.plan)
    assert schedule.warmup_steps == 3  # 2,000 tokens are slightly more than 2 steps of 768
    assert parts["lr"] == {"step": 3, **schedule.as_dict()}
    epoch_samples = run.train_samples.samples_per_epoch
    epoch = 72 // epoch_samples
    assert (parts["iter"]["epoch"], parts["iter"]["segment_index"]) == (epoch, epoch)
    segment = (parts["iter"]["segment_start"], parts["iter"]["segment_end"])
    assert segment == (epoch * epoch_samples, (epoch + 1) * epoch_samples)
    assert (meta["step"], meta["tokens_seen"], meta["git"]) == (3, 72 * 32, code_revision())
    assert meta["config"] == config_to_dict(run.config)

    other = small_run(tmp_path, *changes)
    torch.manual_seed(77)
    assert resume_run(other) == state
    assert torch.equal(torch.rand(4), draws)
    assert_equal(other.engine.state_dict(), trained)
    assert float(trained["optim"]["state"]["norm.weight"]["step"]) == 3


def test_a_reset_run_resumes_from_its_newest_save(small_run, tmp_path) -> None:
    changes = ["checkpoint.keep_last=3"]
    saver = Saver(small_run(tmp_path, *changes))
    first, _, later = (saver.save(TrainState(step=step, next_sample=24 * step)) for step in (3, 6, 9))
    back = small_run(tmp_path, *changes, f"checkpoint.resume={first}")
    assert resume_run(back).step == 3
    saved = Saver(back).save(TrainState(step=5, next_sample=120))
    # steps 6 and 9 belong to the abandoned branch; the oldest checkpoint was removed
    assert resume_run(small_run(tmp_path, *changes)).step == 5
    assert [checkpoint.step for checkpoint in layout.find_checkpoints(saved.parent)] == [6, 9, 5]
    again = Saver(small_run(tmp_path, *changes)).save(TrainState(step=7, next_sample=168))
    assert [checkpoint.path for checkpoint in layout.find_checkpoints(saved.parent)] == [later, saved, again]
    assert resume_run(small_run(tmp_path, *changes)).step == 7


@pytest.mark.parametrize("where", ["meta.json", layout.FILES["model"]])
def test_damaged_checkpoints_alone_do_not_restart_a_run(small_run, pretrain, tmp_path, where) -> None:
    saver = Saver(small_run(tmp_path))
    paths = [saver.save(TrainState(step=step, next_sample=24 * step)) for step in (3, 6)]
    (tmp_path / METRICS).write_text(metrics := '{"kind": "train", "step": 1}\n{"kind": "train", "step": 6}\n')
    for path in paths:
        flip_middle_bit(path / where)
    sentence = read_error(pretrain(tmp_path, status=1))
    assert sentence.startswith(f"error: {tmp_path / 'checkpoints'}: all 2 checkpoints are damaged (")
    for fix in ("Restore one", "checkpoint.resume=PATH", "checkpoint.resume=never", "delete them"):
        assert fix in sentence
    assert (tmp_path / METRICS).read_text() == metrics
    assert sorted((tmp_path / "checkpoints").iterdir()) == sorted(paths)
    # a branch does not fall back to its trunk either
    with pytest.raises(ValueError, match="all 2 checkpoints are damaged"):
        resume_run(small_run(tmp_path, f"checkpoint.branch_from={paths[0]}"))
    assert resume_run(small_run(tmp_path, "checkpoint.resume=never")) == TrainState()


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_average_of_the_weights_is_scored_and_resumed(pretrain, tmp_path, kind) -> None:
    """Its loss at the end is that of the averages of all steps, computed here from a checkpoint of each."""
    changes = ["optim.ema_decay=0.5", "optim.kind=muon", f"checkpoint.state_dict_type={kind}", save_every(1)]
    changes += ["checkpoint.keep_last=null", "lr_scheduler.total_iterations=6"]
    whole = tmp_path / "whole"
    pretrain(whole, *changes)
    *_, line = read_lines(whole, "validation")
    result = read_json(whole / "result.json")
    assert line["loss_ema"] == result["loss_ema"] != result["loss"]
    parts = [store.load_checkpoint(checkpoint.path)[0] for checkpoint in list_saved(whole)]
    averages = parts[0]["optim"]["state"]["embedding.weight"]["ema"].double()
    for part in parts[1:]:
        averages = 0.5 * averages + 0.5 * part["model"]["embedding.weight"].double()
    saved = parts[-1]["optim"]["state"]["embedding.weight"]["ema"]
    torch.testing.assert_close(saved.double(), averages, rtol=1e-6, atol=1e-7)
    remove_end(whole)
    pretrain(whole, *changes)
    assert read_json(whole / "result.json")["loss_ema"] == result["loss_ema"]
    # the state of one optimizer does not continue with another
    remove_end(whole)
    error = read_error(pretrain(whole, *changes, "optim.kind=adamw", status=1))
    assert "checkpoint of another run (optim.kind was 'muon', is 'adamw')" in error


def test_a_run_with_a_ramp_resumes_within_it(pretrain, tmp_path) -> None:
    """Its rates are those of a schedule over samples, as in Megatron."""
    changes = ["dataset.rampup_batch_size=[8,8,60]", "lr_scheduler.total_iterations=9", save_every(5)]
    changes += ["checkpoint.keep_last=null", "lr_scheduler.warmup_iterations=null"]
    changes += ["lr_scheduler.kind=linear", "lr_scheduler.lr_min_ratio=0.0"]
    run, again = tmp_path / "run", tmp_path / "again"
    for folder in (run, again):
        pretrain(folder, *changes)
    lines = read_lines(run)
    positions = [0, 8, 16, 24, 32, 48, 64, 88, 112]
    assert [line["tokens"] for line in lines] == [32 * n for n in (*positions[1:], 136)]
    # 136 samples are 5.67 batches of 24: 6 steps, and the rate falls to 0 at the last of them
    assert [line["lr"] for line in lines] == pytest.approx([0.01 * (1 - n / 24 / 5) for n in positions])
    remove_end(again)
    pretrain(again, *changes)
    assert [line["loss"] for line in read_lines(again)] == [line["loss"] for line in lines]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero0", "zero3"])
def test_a_ramp_has_the_losses_of_one_rank_on_two(pretrain, tmp_path, stage) -> None:
    changes = ["dataset.rampup_batch_size=[8,8,60]", f"dist.sharding_stage={stage}", "optim.kind=muon"]
    changes += ["dataset.microbatch_size=3", "optim.ema_decay=0.9"]
    alone, two = tmp_path / "alone", tmp_path / "two"
    pretrain(alone, *changes)
    pretrain(two, *changes, n_ranks=2)
    assert_same_losses(two, alone, error=2e-4)
    averages = [[line["loss_ema"] for line in read_lines(run, "validation")] for run in (two, alone)]
    assert averages[0] == pytest.approx(averages[1], abs=2e-4)
