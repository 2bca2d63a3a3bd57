"""The feed of a run: its tasks depend on the sample numbers alone."""

import numpy as np
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


def test_with_a_ramp_steps_read_consecutive_samples_of_growing_number(small_run, tmp_path) -> None:
    """Sizes 8, 16 and 24, the full one, each for 30 samples; a rank's part starts where the batch does."""
    ramp = "dataset.rampup_batch_size=[8,8,60]"
    run = small_run(tmp_path / "run", ramp, MDM, "dataset.microbatch_size=6")
    sizes = [8, 8, 8, 8, 16, 16, 24, 24]
    with open_feed(run, 0, 8) as feed:
        whole = list(feed)
    assert [sum(len(task.inputs) for task in tasks) for tasks in whole] == sizes
    assert [len(task.inputs) for task in whole[4]] == [6, 6, 4]
    tokens = np.concatenate([task.inputs for tasks in whole for task in tasks])
    expected = run.objective.corrupt(run.train_samples.take(np.arange(sum(sizes))), np.arange(sum(sizes)))
    assert np.array_equal(tokens, expected.inputs)
    with open_feed(run, 8 * 4 + 16, 3) as feed:
        rest = list(feed)
    for expected_tasks, tasks in zip(whole[5:], rest, strict=True):
        assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(expected_tasks, tasks, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_tasks_are_in_pinned_memory(blend, words, config_file) -> None:
    config = load_config(config_file, [*words, *blend, "dist.cpu_only=false", "dataset.num_workers=2"])
    run = build_run(config, plan_run(config), World(0, 1, 0, torch.device("cuda", 0)))
    with open_feed(run, 0, 2) as feed:
        for (task,) in feed:
            assert task.inputs.is_pinned()
            assert task.targets.is_pinned()
