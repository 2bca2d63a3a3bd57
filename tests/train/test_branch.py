"""Branches of several lengths from one trunk, and synthetic data."""

import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import layout
from megatron.plan.run_dir import read_metrics
from tests.conftest import load_newest

WSD = ["lr_scheduler.kind=wsd", "lr_scheduler.decay_iterations=4", "checkpoint.keep_last=null"]


def read_steps(run: Path) -> dict[int, tuple[float, float]]:
    """Return loss and learning rate by step."""
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    return {line["step"]: (line["loss"], line["lr"]) for line in lines}


@pytest.mark.slow
def test_a_branch_of_a_stable_trunk_ends_bit_equal_to_the_run_from_its_first_step(
    pretrain, words, tmp_path
) -> None:
    words = [*words, *WSD]
    trunk, alone, branch = (tmp_path / name for name in ("trunk", "alone", "branch"))
    length = "lr_scheduler.total_iterations="
    long = [*words, f"{length}20", "checkpoint.chkpt_saving_iterations=8", f"logging.run_dir={trunk}"]
    assert pretrain(long).returncode == 0
    assert pretrain([*words, f"logging.run_dir={alone}"]).returncode == 0
    at_8, at_16, _ = (checkpoint.path for checkpoint in layout.find_checkpoints(trunk / "checkpoints"))
    words = [*words, f"logging.run_dir={branch}", f"checkpoint.branch_from={at_8}"]
    done = pretrain(words)
    assert done.returncode == 0, done.stderr
    assert "resuming after step 8" in done.stderr
    # 12 steps, the last 4 with decay: the branch takes these, the trunk has taken the others
    assert list(read_steps(branch)) == [9, 10, 11, 12]
    assert read_steps(branch) == {step: both for step, both in read_steps(alone).items() if step > 8}
    first, second = (load_newest(run / "checkpoints", "step") for run in (alone, branch))
    for name, tensor in first[1]["model"].items():
        assert torch.equal(tensor, second[1]["model"][name]), name
    # interrupted and restarted, it resumes from its own checkpoint, not from that of the trunk
    (branch / "result.json").unlink()
    again = pretrain(words)
    assert (again.returncode, "resuming after step 12 from" in again.stderr) == (0, True)
    shutil.rmtree(branch)
    late = pretrain([*words, f"checkpoint.branch_from={at_16}"])
    assert late.returncode == 1
    assert "learning rates equal those of this run for the first 8 only" in late.stderr.splitlines()[-1]
    other = pretrain([*words, "misc.seed=5"])
    assert (other.returncode, "run with another model, corpus" in other.stderr) == (1, True)


@pytest.mark.parametrize("objective", ["ar", pytest.param("mdm", marks=pytest.mark.slow)])
def test_a_run_on_synthetic_tokens_learns_that_they_are_uniform(pretrain, words, tmp_path, objective) -> None:
    run = tmp_path / "run"
    synthetic = ["dataset.path_train=synthetic", "dataset.path_eval=synthetic", "model.n_tokens=10"]
    words = [*words, *synthetic, f"logging.run_dir={run}", f"objective.name={objective}"]
    done = pretrain([*words, "lr_scheduler.total_iterations=60"])
    assert done.returncode == 0, done.stderr
    held_out = [line for line in read_metrics(run) if line["kind"] == "validation"][-1]
    # no model can be better than log 10 nats, up to the error of the estimate; an untrained model starts near
    # log 128, the log of its rows
    error = 4 * math.hypot(held_out["loss_se"], held_out["mc_se"] or 0)
    assert math.log(10) - error < held_out["loss"] < math.log(10) + 0.3
