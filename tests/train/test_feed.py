"""The feed of a run: its tasks depend on the sample numbers alone."""

import pytest
import torch

from megatron.parallel.world import World
from megatron.plan.resolve import load_config
from megatron.plan.run_plan import plan_run
from megatron.train.build import build_run
from megatron.train.loop import open_feed
from tests.train.conftest import MDM


def test_a_feed_opened_later_returns_the_unused_tasks(small_run, blend, tmp_path) -> None:
    run = small_run(tmp_path / "run", *blend, MDM, "dataset.num_workers=4")
    with open_feed(run, 0, 12) as feed:
        whole = list(feed)
    with open_feed(run, 0, 12) as feed:
        for _ in range(5):
            next(feed)  # up to 8 more have been prepared and are discarded
    with open_feed(run, 5 * 24, 7) as feed:
        rest = list(feed)
    assert len(whole) == 12
    for expected, tasks in zip(whole[5:], rest, strict=True):
        for task, other in zip(expected, tasks, strict=True):
            assert torch.equal(task.inputs, other.inputs)
            assert torch.equal(task.positions, other.positions)
            assert torch.equal(task.scale, other.scale)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_tasks_are_in_pinned_memory(blend, words, config_file) -> None:
    config = load_config(config_file, [*words, *blend, "dist.cpu_only=false", "dataset.num_workers=2"])
    run = build_run(config, plan_run(config), World(0, 1, 0, torch.device("cuda", 0)))
    with open_feed(run, 0, 2) as feed:
        for (task,) in feed:
            assert task.inputs.is_pinned()
            assert task.targets.is_pinned()
