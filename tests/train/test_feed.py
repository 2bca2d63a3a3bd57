"""Blends and workers in complete runs: the sample numbers alone determine the training data."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.parallel.world import World
from megatron.plan.resolve import load_config
from megatron.plan.run_plan import plan_run
from megatron.train.build import build_run
from megatron.train.loop import open_feed
from tests.train.conftest import MDM, assert_same_weights, read_last, read_losses, remove_end

WORKERS = (0, 1, 4)


@pytest.fixture
def blend(corpus: Path, tmp_path: Path) -> list[str]:
    """Changes of the small run for two corpora: 12 steps of 24 samples, 3 : 1."""
    path = tmp_path / "blend.txt"
    path.write_text(f"3 {corpus / 'train'}\n1 {corpus / 'held_out'}\n")
    return [f"dataset.path_train={path}", f"dataset.path_eval={path}"]


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_any_number_of_workers_gives_the_same_losses(pretrain, blend, tmp_path, objective) -> None:
    changes = [*blend, f"objective.name={objective}", "dataset.microbatch_size=8"]
    losses = []
    for n in WORKERS:
        pretrain(tmp_path / str(n), *changes, f"dataset.num_workers={n}")
        losses.append(read_losses(tmp_path / str(n)))
    assert len(losses[0]) == 12
    assert losses == [losses[0]] * len(WORKERS)


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


def test_a_blend_stopped_at_step_7_and_resumed_with_other_workers_ends_bit_equal(
    pretrain, blend, tmp_path
) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    blend.append("checkpoint.chkpt_saving_iterations=7")
    done = pretrain(whole, *blend, "dataset.num_workers=2")
    # 288 samples, 216 of the first corpus and 72 of the second: each line has its epochs
    assert "train: 75.00% of the samples" in done.error
    plan = json.loads((whole / "plan.json").read_text())
    assert [corpus["samples"] for corpus in plan["corpora"]] == [216, 72]
    assert plan["unique_tokens"] + plan["repeated_tokens"] == 288 * 32
    last = read_last(whole)
    assert last["unique_tokens"] == plan["unique_tokens"]
    assert last["repeated_tokens"] == plan["repeated_tokens"]
    assert last["epochs"] == {corpus["name"]: corpus["epochs"] for corpus in plan["corpora"]}
    # as if killed after step 7
    shutil.copytree(whole, halved)
    remove_end(halved)
    assert "resuming after step 7" in pretrain(halved, *blend, "dataset.num_workers=0").error
    assert read_losses(halved) == read_losses(whole)
    assert_same_weights(halved, whole)


def test_a_blend_of_other_proportions_is_another_run(pretrain, blend, tmp_path) -> None:
    pretrain(tmp_path / "run", *blend)
    path = tmp_path / "blend.txt"
    path.write_text(path.read_text().replace("3 ", "2 "))
    failed = pretrain(tmp_path / "run", *blend, status=1)
    assert "checkpoint of another run (its corpus has changed" in failed.error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_tasks_are_in_pinned_memory(blend, words, config_file) -> None:
    config = load_config(config_file, [*words, *blend, "dist.cpu_only=false", "dataset.num_workers=2"])
    run = build_run(config, plan_run(config), World(0, 1, 0, torch.device("cuda", 0)))
    with open_feed(run, 0, 2) as feed:
        for (task,) in feed:
            assert task.inputs.is_pinned()
            assert task.targets.is_pinned()
