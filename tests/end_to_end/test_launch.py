"""Tests of the training scripts and the cluster check, run as in the guide, on this machine."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import layout
from megatron.io import read_json
from megatron.plan.run_dir import PLAN, RESULT, read_metrics
from tests.conftest import run_process
from tests.datasets import write_dataset
from tests.end_to_end.conftest import SMALL
from tests.tool_modules import Cli, load_tool

TRAINING = "examples_scaling/training"
LAUNCHERS = ["train", pytest.param("train_mpi", marks=pytest.mark.slow)]
SHORT = ["dataset.seq_len=16", "evaluation.max_samples=8", "evaluation.num_mc=1"]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """1,041 tokens: 65 samples of 16 + 1."""
    ids = np.random.default_rng(0).integers(0, 100, 1041)
    return write_dataset(tmp_path / "text", [ids], {"tokenizer": {"n_tokens": 100}})


def run_launcher(
    root: Path, launcher: str, corpus: str, run: Path, *more: str
) -> subprocess.CompletedProcess[str]:
    """Run one launcher with the variables of the guide and two ranks."""
    settings = {
        "MODEL": "7M", "DATA": corpus, "VALID": corpus, "EPOCHS": "2", "OBJECTIVE": "mdm", "ENGINE": "torch",
        "RUN": str(run), "GPUS": "2", "MPI_FLAGS": "--allow-run-as-root --oversubscribe",
    }  # fmt: skip
    if launcher == "train_mpi":
        settings |= {"CLUSTER": "frontier", "GLOO_SOCKET_IFNAME": "lo", "CACHE_ROOT": str(run.parent)}
    return run_process(["bash", f"{TRAINING}/{launcher}.sh", *SMALL, *SHORT, *more], root, **settings)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_trains_for_the_requested_epochs_without_editing(root, tmp_path, corpus, launcher) -> None:
    if launcher == "train_mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    run = tmp_path / "run"
    done = run_launcher(root, launcher, corpus, run)
    assert done.returncode == 0, done.stderr
    assert f"{run}: done" in done.stdout
    plan, result = read_json(run / PLAN), read_json(run / RESULT)
    # two epochs of 65 samples are 130: 16 steps of 8, and two samples are skipped
    assert (plan["n_steps"], result["n_ranks"]) == (16, 2)
    assert plan["epochs"] == pytest.approx(128 / 65)
    assert (plan["size"], plan["objective"]) == ("7M", "masked_diffusion")
    assert "2 rank(s) on cpu" in done.stderr
    # only one rank writes metrics and logs
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "train"] == list(range(1, 17))
    assert done.stderr.count("step: 16  loss:") == 1
    assert not list(tmp_path.glob("cache-*")), "the private cache of a rank was not removed"


def test_a_wrong_setting_is_reported_by_one_rank_only(root, tmp_path, corpus) -> None:
    failed = run_launcher(root, "train", corpus, tmp_path / "run", "optim.lrr=1")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.endswith("optim: unknown key 'lrr'; did you mean 'lr'?\n")
    assert failed.stderr.count("\n") == 1


def test_a_wrong_setting_that_only_the_second_rank_has_is_reported(
    cli: Cli, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_tool(root / "tools" / "pretrain.py"), "AFTER_FIRST_S", 0)
    env = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    failed = cli("train", tmp_path / "none.yaml", env=env, status=1)
    assert failed.error == f"error: {tmp_path / 'none.yaml'}: no such configuration file\n"


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_exits_with_75_when_its_ranks_were_stopped(root, tmp_path, corpus, launcher) -> None:
    if launcher == "train_mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    stopped = run_launcher(root, launcher, corpus, tmp_path / "run", "misc.max_hours=1e-9")
    assert stopped.returncode == 75, stopped.stderr
    (saved,) = layout.find_checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.is_preempt


VERIFY = [
    "dist.cpu_only=true", "lr_scheduler.total_iterations=8", "model.hf_config.hidden_size=64",
    "model.hf_config.num_hidden_layers=2", "model.hf_config.num_attention_heads=4", "model.n_tokens=300",
    "dataset.batch_size=4", "dataset.seq_len=32", "logging.every_iterations=1", "misc.n_threads=1",
]  # fmt: skip


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=[pytest.mark.slow, pytest.mark.ranks])])
def test_the_cluster_check_runs_eight_steps_on_a_cpu(cli: Cli, root: Path, tmp_path: Path, n_ranks) -> None:
    words = [f"{TRAINING}/verify_cluster.yaml", *VERIFY, f"checkpoint.directory={tmp_path / 'chkpts'}"]
    words.append(f"logging.run_dir={tmp_path / 'run'}")
    if n_ranks == 1:
        errors = cli("train", *words, cwd=root).error
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = run_process([*torchrun, "tools/pretrain.py", *words], root)
        assert done.returncode == 0, done.stderr
        errors = done.stderr
    assert "the run ends after 8 of its 10 warm-up steps" in errors
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["lr"] for line in lines] == pytest.approx([3e-4 * step / 10 for step in range(1, 9)])
    (saved,) = layout.find_checkpoints(tmp_path / "chkpts")
    assert saved.prefix == "dummy-0.1"
    assert read_json(saved.path / "meta.json")["step"] == 8
