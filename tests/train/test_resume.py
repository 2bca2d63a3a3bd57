"""What a checkpoint holds, and that going on brings all of it back."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint import store
from megatron.config.plan import plan_run
from megatron.config.read import as_dict, read_config
from megatron.parallel.world import World
from megatron.train.build import Run, build, build_schedule
from megatron.train.feed import open_feed
from megatron.train.record import git_of_code
from megatron.train.resume import resume
from megatron.train.saver import Saver
from megatron.train.state import TrainState

pytestmark = pytest.mark.usefixtures("one_thread")
ALONE = World(0, 1, 0, torch.device("cpu"))


def built(words: list[str], folder: Path) -> Run:
    (folder / "empty.yaml").write_text("name: test\n")
    config = read_config(folder / "empty.yaml", words)
    return build(config, plan_run(config), ALONE)


def assert_equal(found: object, wanted: object) -> None:
    if isinstance(wanted, dict):
        assert isinstance(found, dict) and found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_holds_all_that_a_run_goes_on_with(words, tmp_path, kind) -> None:
    words = [*words, f"logging.run_dir={tmp_path / 'run'}", f"checkpoint.state_dict_type={kind}"]
    words += ["dist.dtype=float16", "lr_scheduler.warmup_iterations=null", "lr_scheduler.warmup_tokens=2000"]
    run = built(words, tmp_path)
    with open_feed(run, 0, 3) as feed:
        for tasks in feed:
            run.engine.step(tasks, lr=0.01)
    run.engine.loss_scale.scale.fill_(4096.0)
    state = TrainState(step=3, next_sample=72, tokens_seen=72 * 32, best_loss=4.25, elapsed_s=1.5)
    trained = run.engine.state_dict()
    torch.manual_seed(5)
    path = Saver(run).save(state)
    drawn = torch.rand(4)

    parts, meta = store.load(path)
    schedule = build_schedule(run.config, run.plan)
    assert schedule.warmup_steps == 3  # 2,000 tokens are 2 steps of 768 and a bit
    assert parts["lr"] == {"step": 3, **schedule.as_dict()}
    held = run.train_samples.samples_per_epoch
    epoch = 72 // held
    assert (parts["iter"]["epoch"], parts["iter"]["segment_index"]) == (epoch, epoch)
    assert (parts["iter"]["segment_start"], parts["iter"]["segment_end"]) == (
        epoch * held,
        (epoch + 1) * held,
    )
    assert (meta["step"], meta["tokens_seen"], meta["git"]) == (3, 72 * 32, git_of_code())
    assert meta["config"] == as_dict(run.config)

    other = built(words, tmp_path)
    torch.manual_seed(77)
    assert resume(other) == state
    assert torch.equal(torch.rand(4), drawn)
    assert_equal(other.engine.state_dict(), trained)
    assert float(trained["optim"]["state"]["norm.weight"]["step"]) == 3


def test_a_shared_folder_of_checkpoints_is_told_by_its_own_keys(words, tmp_path) -> None:
    words = [*words, f"logging.run_dir={tmp_path / 'run'}", f"checkpoint.directory={tmp_path / 'chkpts'}"]
    run = built(words, tmp_path)
    Saver(run).save(TrainState())
    with pytest.raises(ValueError, match="optim.lr was 0.01, is 0.5.; choose another checkpoint.prefix or"):
        resume(built([*words, "optim.lr=0.5"], tmp_path))
