"""Blends and workers in complete runs: the sample numbers alone determine the training data."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.preempt import StopMonitor
from megatron.parallel.world import World
from megatron.plan.resolve import load_config
from megatron.plan.run_dir import read_metrics
from megatron.plan.run_plan import plan_run
from megatron.train.build import build_run
from megatron.train.loop import open_feed, train
from tests.conftest import load_newest
from tests.train.conftest import build_small_run, read_losses, remove_end

WORKERS = (0, 1, 2, 4)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def blended(words: list[str], corpus: Path, tmp_path: Path) -> list[str]:
    """Arguments of the small run on two corpora: 12 steps of 24 samples, 3 : 1."""
    blend = tmp_path / "blend.txt"
    blend.write_text(f"3 {corpus / 'train'}\n1 {corpus / 'held_out'}\n")
    return [*words, f"dataset.path_train={blend}", f"dataset.path_eval={blend}"]


@pytest.mark.parametrize("objective", ["autoregressive", "masked_diffusion"])
def test_any_number_of_workers_gives_the_same_losses(blended, tmp_path, objective) -> None:
    losses = []
    for n in WORKERS:
        run = build_small_run(
            [
                *blended,
                f"objective.name={objective}",
                f"dataset.num_workers={n}",
                f"logging.run_dir={tmp_path / str(n)}",
                "dataset.microbatch_size=8",
            ],
            tmp_path,
        )
        assert train(run, StopMonitor(None))
        losses.append(read_losses(tmp_path / str(n)))
    assert len(losses[0]) == 12
    assert losses == [losses[0]] * len(WORKERS)


def test_a_feed_opened_later_returns_the_unused_tasks(blended, tmp_path) -> None:
    blended += ["objective.name=masked_diffusion", "dataset.num_workers=4"]
    run = build_small_run(blended, tmp_path)
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
    blended, tmp_path, pretrain
) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    blended += ["checkpoint.chkpt_saving_iterations=7", "dataset.num_workers=2"]
    done = pretrain([*blended, f"logging.run_dir={whole}"])
    assert done.returncode == 0, done.stderr
    # 288 samples, 216 of the first corpus and 72 of the second: each line has its epochs
    assert "train: 75.00% of the samples" in done.stderr
    plan = json.loads((whole / "plan.json").read_text())
    assert [corpus["samples"] for corpus in plan["corpora"]] == [216, 72]
    assert plan["unique_tokens"] + plan["repeated_tokens"] == 288 * 32
    last = [line for line in read_metrics(whole) if line["kind"] == "train"][-1]
    assert last["unique_tokens"] == plan["unique_tokens"]
    assert last["repeated_tokens"] == plan["repeated_tokens"]
    assert last["epochs"] == {corpus["name"]: corpus["epochs"] for corpus in plan["corpora"]}
    # as if killed after step 7
    shutil.copytree(whole, halved)
    remove_end(halved)
    resumed = pretrain([*blended, f"logging.run_dir={halved}", "dataset.num_workers=0"])
    assert "resuming after step 7" in resumed.stderr, resumed.stderr
    assert read_losses(halved) == read_losses(whole)
    first, second = (load_newest(run / "checkpoints", "step") for run in (whole, halved))
    for name, tensor in first[1]["model"].items():
        assert torch.equal(tensor, second[1]["model"][name]), name


def test_a_blend_of_other_proportions_is_another_run(blended, tmp_path) -> None:
    words = [*blended, f"logging.run_dir={tmp_path / 'run'}"]
    assert train(build_small_run(words, tmp_path), StopMonitor(None))
    blend = tmp_path / "blend.txt"
    blend.write_text(blend.read_text().replace("3 ", "2 "))
    with pytest.raises(ValueError, match="checkpoint of another run .its corpus has changed"):
        train(build_small_run(words, tmp_path), StopMonitor(None))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_tasks_are_in_pinned_memory(blended, tmp_path) -> None:
    (tmp_path / "empty.yaml").write_text("name: test\n")
    config = load_config(tmp_path / "empty.yaml", [*blended, "dist.cpu_only=false", "dataset.num_workers=2"])
    run = build_run(config, plan_run(config), World(0, 1, 0, torch.device("cuda", 0)))
    with open_feed(run, 0, 2) as feed:
        for (task,) in feed:
            assert task.inputs.is_pinned()
            assert task.targets.is_pinned()
