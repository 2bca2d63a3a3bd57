"""Tests of sweeps from the command line: trunks and branches, locally and on Slurm, signals, failed runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.io import open_exclusive
from megatron.plan.run_dir import RESULT, lock_run, read_metrics
from megatron.study.ladder import expand_study, read_study_plan
from megatron.study.launchers.local import Device, LocalLauncher
from megatron.study.sweep import LOCK
from tests.conftest import run_process, wait_until
from tests.datasets import write_dataset

STUDY = """
name: tiny sweep
directory: {out}
run:
  dist: {{dtype: float32, cpu_only: true}}
  dataset: {{path_train: {out}/text, path_eval: {out}/text, seq_len: 32, batch_size: 4}}
  optim: {{lr: 1.0e-2}}
  lr_scheduler: {{kind: wsd, warmup_iterations: 2, decay_fraction: 0.5}}
  logging: {{tensorboard: false, every_iterations: 1}}
  evaluation: {{max_samples: 16}}
  misc: {{n_threads: 1}}
sizes:
  tiny: {{d_model: 16, n_heads: 2, n_layers: 1}}
cells:
  - {{size: [tiny], unique_tokens: [1280], epochs: [1, 2, 4]}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three runs of 10, 20 and 40 steps; the first two branch from the third at 5 and 10."""
    rng = np.random.default_rng(0)
    write_dataset(tmp_path / "text", rng.integers(0, 100, (60, 50)), {"tokenizer": {"n_tokens": 100}})
    path = tmp_path / "study.in.yaml"
    path.write_text(STUDY.format(out=tmp_path))
    return path


def sweep_command(root: Path, study: Path, *words: str) -> list[str]:
    return [sys.executable, str(root / "tools" / "sweep.py"), str(study), *words]


LONG = "cells=[{size: [tiny], tokens: [12_800_000]}]"


def start(words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, text=True, env=variables, **pipes)


def start_and_wait_for_steps(words: list[str], variables: dict[str, str], out: Path) -> subprocess.Popen[str]:
    process = start(words, variables)
    has_steps = lambda: any(read_steps(run) for run in runs_of(out).values())  # noqa: E731
    wait_until(lambda: has_steps() or process.poll() is not None)
    assert process.poll() is None, process.communicate(timeout=240)
    return process


def runs_of(out: Path) -> dict[int, Path]:
    """Return run folders by their number of planned steps."""
    plans = {path.parent: json.loads(path.read_text()) for path in out.glob("runs/*/plan.json")}
    return {plan["n_steps"]: folder for folder, plan in plans.items()}


def read_losses(out: Path) -> dict[int, float]:
    """Return held-out losses by the runs' number of steps."""
    return {n: json.loads((run / RESULT).read_text())["loss"] for n, run in runs_of(out).items()}


def read_steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run) if line["kind"] == "train"]


@pytest.mark.slow
def test_a_trunk_is_trained_once_and_its_branches_end_as_if_trained_alone(cli, study, tmp_path) -> None:
    assert "3 of 3 runs done" in cli("sweep", study).output
    folders = runs_of(tmp_path)
    assert {n: read_steps(run)[0] for n, run in folders.items()} == {10: 6, 20: 11, 40: 1}
    branched = read_losses(tmp_path)
    words = ["share_trunks=false", f"directory={tmp_path / 'alone'}"]
    words += [f"run.dataset.path_{part}={tmp_path / 'text'}" for part in ("train", "eval")]
    cli("sweep", study, *words)
    assert read_losses(tmp_path / "alone") == branched
    names, alone = ({run.name for run in runs_of(out).values()} for out in (tmp_path, tmp_path / "alone"))
    assert names == alone
    # with one more budget, the existing runs are reused, and the new run also branches
    words = ["cells=[{size: [tiny], unique_tokens: [1280], epochs: [1, 2, 3, 4]}]"]
    assert "1 of 4 runs to do" in cli("sweep", study, *words).output
    assert read_steps(runs_of(tmp_path)[30])[0] == 11  # the trunk's latest checkpoint before step 15


@pytest.mark.slow
def test_a_run_that_fails_is_retried_and_then_reported(cli, study, tmp_path) -> None:
    words = ["run.dataset.path_eval=/nowhere/text", "cells=[{size: [tiny], epochs: [1]}]", "--retries", 1]
    done = cli("sweep", study, *words, status=1)
    assert done.output.count("starts again") == 1
    assert done.error.splitlines()[-1].startswith("error: ") and "/nowhere/text" in done.error
    assert len(list(tmp_path.glob("runs/*/exit.json"))) == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_a_stopped_run_over_two_ranks_is_reported_as_preempted(root, study) -> None:
    plan = read_study_plan(study, ["share_trunks=false", "run.misc.max_hours=1e-9"])
    (run, *_) = expand_study(plan)
    launcher = LocalLauncher([Device(1, 1e12)] * 2, on_gpus=True, gpus_per_run=2)
    (job,) = launcher.start([run])
    job.handle.wait(timeout=240)
    log = (run.folder / "log.txt").read_text()
    assert [status for _, status in launcher.collect_ended([job])] == [75], log
    assert "2 rank(s) on cpu" in log
    assert len(list(run.folder.glob("checkpoints/*.preempt"))) == 1


@pytest.mark.slow
@pytest.mark.ranks
def test_on_slurm_runs_are_tasks_of_arrays_and_branches_follow_trunks(slurm, root, study, tmp_path) -> None:
    words = sweep_command(root, study, "--launcher", "slurm", "--sbatch=--cpus-per-task=1")
    done = run_process(words, base=slurm.variables, PATH=slurm.variables["PATH"])
    logs = "".join(path.read_text() for path in tmp_path.glob("runs/*/log.txt"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "3 of 3 runs done" in done.stdout
    assert {n: read_steps(run)[0] for n, run in runs_of(tmp_path).items()} == {10: 6, 20: 11, 40: 1}
    tasks = {(run / "slurm_task").read_text().strip() for run in runs_of(tmp_path).values()}
    assert len(tasks) == 3


@pytest.mark.slow
@pytest.mark.ranks
def test_on_slurm_a_killed_sweep_is_resumed_and_a_signal_stops_tasks(slurm, root, study, tmp_path) -> None:
    words = sweep_command(root, study, LONG, "--launcher", "slurm", "--sbatch=--cpus-per-task=1")
    first = start_and_wait_for_steps(words, slurm.variables, tmp_path)
    first.kill()
    first.communicate(timeout=240)
    (run,) = runs_of(tmp_path).values()
    task = (run / "slurm_task").read_text()
    assert slurm("squeue", "--noheader", "--array", "--format=%i") == task.strip()
    second = start(words, slurm.variables)
    time.sleep(8)
    assert (run / "slurm_task").read_text() == task, "the task continues, no other is submitted"
    os.kill(second.pid, signal.SIGINT)
    _, errors = second.communicate(timeout=240)
    assert second.returncode == 75, errors
    # Slurm may still be completing the task, which the sweep does not wait for
    assert slurm("squeue", "--noheader", "--states=PENDING,RUNNING") == ""
    assert len(list(run.glob("checkpoints/*.preempt"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGHUP, signal.SIGTERM])
def test_the_runs_of_a_sweep_that_is_ended_save_and_end_with_it(root, study, tmp_path, number) -> None:
    sweep = start_and_wait_for_steps(sweep_command(root, study, LONG), dict(os.environ), tmp_path)
    (run,) = runs_of(tmp_path).values()
    sweep.send_signal(number)
    _, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == (-9 if number == signal.SIGKILL else 75), errors
    assert number != signal.SIGINT or "run the same command again" in errors
    wait_until(lambda: lock_run(run), lambda: "a process of an ended sweep still trains", 60)
    assert len(list(run.glob("checkpoints/*.preempt"))) == 1
    assert "stopped by SIGTERM after step" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_started_again_at_once_ends_well(root, study, tmp_path) -> None:
    words = sweep_command(root, study, "cells=[{size: [tiny], tokens: [76_800]}]")  # 600 steps
    first = start_and_wait_for_steps(words, dict(os.environ), tmp_path)
    first.kill()
    first.communicate(timeout=120)
    again = run_process(words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.splitlines()[-1] == f"{tmp_path}: 1 of 1 runs done"
    (run,) = runs_of(tmp_path).values()
    assert read_steps(run) == list(range(1, 601))
    assert "another process is training there" not in (run / "log.txt").read_text()


def test_a_second_sweep_of_a_study_is_refused(cli, study, tmp_path) -> None:
    with open_exclusive(tmp_path / LOCK):
        failed = cli("sweep", study, LONG, status=1)
    assert f"{tmp_path}: in use by another process. Wait until it has ended" in failed.error
