"""Tests of train_slurm.sh on a real Slurm cluster of two nodes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint import layout
from megatron.plan.run_dir import RESULT, read_metrics
from megatron.study.launchers.launch import read_last_metrics
from tests.conftest import wait_until
from tests.end_to_end.conftest import SMALL, Slurm

STEPS = 1000
MODEL = [
    "model.d_model=32",
    "model.n_heads=2",
    "model.n_layers=2",
    "model.n_tokens=100",
    "dataset.seq_len=32",
]
TRAINING = "examples_scaling/training"


def wait_for_step(run: Path, step: int, log: Path) -> None:
    """Wait until the run has logged a step beyond `step`."""
    wait_until(
        lambda: ((read_last_metrics(run) or {}).get("step") or 0) > step,
        lambda: log.read_text() if log.is_file() else "the job has not started",
    )


def read_losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run) if line["kind"] == "train"}


def submit_job(
    slurm: Slurm, root: Path, run: Path, log: Path, words: list[str], nodes: int, steps: int = STEPS
) -> str:
    """Submit train_slurm.sh with one task per node; return the job number."""
    settings = {
        "ENGINE": "torch", "DATA": "synthetic", "VALID": "synthetic", "STEPS": str(steps), "RUN": str(run)
    }  # fmt: skip
    header = [f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1"]
    script = f"{TRAINING}/train_slurm.sh"
    submitted = ("sbatch", "--parsable", *header, f"--output={log}", script, *SMALL, *MODEL, *words)
    return slurm(*submitted, cwd=root, **settings)


def wait_for_state(slurm: Slurm, number: str, states: tuple[str, ...], log: Path) -> None:
    """Wait until the job is in one of the states."""
    wait_until(lambda: slurm.show_job(number)["JobState"] in states, log.read_text, 300)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_preempted_job_on_two_nodes_requeues_itself_and_ends_as_undisturbed(slurm, root, tmp_path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    number = submit_job(slurm, root, run, log, [], nodes=2)
    wait_for_step(run, 5, log)
    assert slurm.show_job(number)["NumNodes"] == "2"
    # as Slurm does two minutes before the time limit: a signal to the batch script only
    slurm("scancel", "--batch", "--signal=USR1", number)
    first = _wait_for_restart(slurm, number, 1, log)
    wait_for_step(run, first, log)
    # as an administrator or a preempting job does
    slurm("scontrol", "requeue", number)
    second = _wait_for_restart(slurm, number, 2, log)
    wait_for_state(slurm, number, ("COMPLETED", "FAILED"), log)
    text = log.read_text()
    assert slurm.show_job(number)["JobState"] == "COMPLETED", text
    assert 5 < first < second < STEPS
    result = json.loads((run / RESULT).read_text())
    assert (result["step"], result["n_ranks"]) == (STEPS, 2)
    assert "2 rank(s) on cpu" in text
    alone = tmp_path / "alone"
    words = [
        f"{TRAINING}/train.yaml",
        *SMALL,
        *MODEL,
        "dataset.path_train=synthetic",
        "dataset.path_eval=synthetic",
    ]
    words += [f"lr_scheduler.total_iterations={STEPS}", f"logging.run_dir={alone}"]
    subprocess.run([sys.executable, "tools/pretrain.py", *words], cwd=root, check=True, timeout=300)
    assert list(read_losses(run)) == list(range(1, STEPS + 1))
    assert read_losses(run) == pytest.approx(read_losses(alone), abs=1e-4)


def _wait_for_restart(slurm, number: str, times: int, log: Path) -> int:
    """Wait until the job has resumed `times` times; return the step after which it last resumed."""
    words = "resuming after step "
    wait_until(lambda: log.read_text().count(words) >= times, log.read_text)
    assert slurm.show_job(number)["Restarts"] == str(times)
    return int(log.read_text().rpartition(words)[2].split()[0])


@pytest.mark.slow
@pytest.mark.ranks
def test_a_job_that_is_cancelled_saves_and_stays_cancelled(slurm, root, tmp_path) -> None:
    run, log = tmp_path / "run", tmp_path / "log.txt"
    number = submit_job(slurm, root, run, log, [], nodes=1, steps=100_000)
    wait_for_step(run, 5, log)
    slurm("scancel", number)
    wait_for_state(slurm, number, ("CANCELLED", "COMPLETED", "FAILED", "PENDING"), log)
    assert slurm.show_job(number)["JobState"] == "CANCELLED", log.read_text()
    assert slurm.show_job(number)["Restarts"] == "0"
    assert [checkpoint.is_preempt for checkpoint in layout.find_checkpoints(run / "checkpoints")] == [True]
    assert "stopped by SIG" in log.read_text()


@pytest.mark.slow
def test_a_job_that_fails_stays_failed(slurm, root, tmp_path) -> None:
    log = tmp_path / "log.txt"
    number = submit_job(slurm, root, tmp_path / "run", log, ["optim.lrr=1"], nodes=1)
    wait_for_state(slurm, number, ("COMPLETED", "FAILED"), log)
    assert slurm.show_job(number)["ExitCode"] == "1:0"
    assert "error: examples_scaling/training/train.yaml: optim: unknown key 'lrr'" in log.read_text()
    assert slurm.show_job(number)["Restarts"] == "0"
