"""Faults of a cluster: killed ranks, full disks, damaged files, NaN losses."""

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from megatron.checkpoint import layout, store
from megatron.plan.run_dir import is_done
from tests.conftest import flip_middle_bit
from tests.rank_processes import Rank
from tests.train.conftest import (
    MDM,
    assert_same_weights,
    list_saved,
    read_error,
    read_lines,
    read_losses,
    read_step,
    save_every,
)
from tests.train.faults import kill_after_third_save, limit_file_size, spoil_sample, wait_at_random

STEPS_LEFT = 20  # after the last kill: half a second, since a busy machine may be late
SHARDED = "checkpoint.state_dict_type=sharded"


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob("*.partial"))


def kill_at(run: Path, ranks: list[Rank], step: int, in_save: bool, after_s: float) -> bool:
    """SIGKILL every rank once `step` is logged: during the next save, or `after_s` seconds later.

    Return whether the signal ended rank 0; it may have exited already after losing another rank.
    """
    ranks[0].wait_for(lambda: read_step(run) >= step and (not in_save or is_saving(run)))
    time.sleep(0 if in_save else after_s)
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    return [rank.wait().status for rank in ranks][0] == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("n_kills", "changes"), [(20, []), (6, [SHARDED])])
def test_a_run_killed_at_any_moment_ends_bit_equal(start, pretrain, tmp_path, n_kills, changes) -> None:
    changes = [*changes, MDM, f"lr_scheduler.total_iterations={6 * n_kills + STEPS_LEFT}"]
    changes += [save_every(2)]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    pretrain(whole, *changes, n_ranks=2)
    rng = random.Random(0)
    for kill in range(n_kills):
        ranks = start(killed, *changes, change=wait_at_random)
        at = rng.randint(6 * kill + 1, 6 * kill + 5)
        assert kill_at(killed, ranks, at, in_save=kill % 2 == 0, after_s=rng.uniform(0, 0.05)), kill
        assert not is_done(killed)
    pretrain(killed, *changes, n_ranks=2)
    assert read_losses(killed) == read_losses(whole)
    assert_same_weights(killed, whole)
    assert not is_saving(killed)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [[], [SHARDED], [SHARDED, "checkpoint.asynchronous=true"]])
def test_a_run_killed_after_a_save_has_its_held_out_loss(pretrain, tmp_path, changes) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = [*changes, save_every(2)]
    pretrain(whole, *changes)
    pretrain(killed, *changes, change=kill_after_third_save, status=-signal.SIGKILL)
    assert list_saved(killed)[-1].step == 6
    pretrain(killed, *changes)
    scored = [
        [(line["step"], line["loss"]) for line in read_lines(run, "validation")] for run in (whole, killed)
    ]
    assert [step for step, _ in scored[0]] == [2, 4, 6, 8, 10, 12]
    assert scored[1] == scored[0]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(pretrain, tmp_path) -> None:
    changes = [save_every(7)]
    pretrain(tmp_path, *changes, n_ranks=2)
    first, last = list_saved(tmp_path)
    shutil.rmtree(last.path)
    (tmp_path / "result.json").unlink()
    failed = pretrain(tmp_path, *changes, n_ranks=2, change=limit_file_size, status=1)
    sentence = read_error(failed)
    file = rf"\.partial/{layout.FILES['model']}"
    expected = rf"error: .*checkpoint of step 12 not saved \(.*{file}: File too large\); make room and run"
    assert re.match(expected, sentence), sentence
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [first.path.name]
    assert store.load_checkpoint(first.path)[1]["step"] == 7
    assert not is_done(tmp_path)


def test_a_damaged_newest_checkpoint_is_skipped(pretrain, tmp_path) -> None:
    changes = [save_every(5), "checkpoint.keep_last=3"]
    pretrain(tmp_path, *changes)
    _, flipped, truncated = (point.path for point in list_saved(tmp_path))
    weights = truncated / layout.FILES["model"]
    weights.write_bytes(weights.read_bytes()[:-100])
    flip_middle_bit(flipped / layout.FILES["optim"])
    before = read_losses(tmp_path)
    (tmp_path / "result.json").unlink()
    again = pretrain(tmp_path, *changes)
    assert again.error.count("falling back to the previous checkpoint") == 2
    assert "resuming after step 5" in again.error
    assert read_losses(tmp_path) == before


# tests/ranks poisons the gradient under every engine and stage
@pytest.mark.slow
@pytest.mark.ranks
def test_a_nan_loss_ends_the_run_or_is_skipped(pretrain, tmp_path) -> None:
    changes = ["dist.sharding_stage=zero3", MDM, "logging.every_iterations=3"]
    # batches of 24 samples, half on each rank: sample 110 is in the fifth batch, samples 96 to 119
    bad = {"kind": "nonfinite", "step": 5, "ranks": [{"rank": 1, "first_sample": 108, "last_sample": 119}]}

    def train_with_bad_sample(name: str, *more: str, status: int) -> str:
        done = pretrain(tmp_path / name, *changes, *more, n_ranks=2, change=spoil_sample, status=status)
        assert read_lines(tmp_path / name, "nonfinite") == [bad]
        return read_error(done)

    last = train_with_bad_sample("stop", status=1)
    assert last.startswith("error: step 5: the loss is NaN or Inf on rank 1 (samples 108 to 119)")
    assert not list((tmp_path / "stop").glob("checkpoints/*"))
    train_with_bad_sample("skip", "misc.on_nonfinite=skip", status=0)
    losses = read_losses(tmp_path / "skip")
    assert len(losses) == 4 and max(losses) < 10
