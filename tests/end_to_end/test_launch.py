"""The training scripts and the cluster check, typed as the guide says, on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint import layout
from megatron.command import load_tool
from megatron.data.indexed_writer import IndexedWriter
from megatron.run_dir import PLAN, RESULT, read_json, read_metrics
from tests.conftest import free_port

TRAINING = "examples_scaling/training"
SMALL = [
    "dist.cpu_only=true", "dist.dtype=float32", "dataset.seq_len=16", "dataset.batch_size=8",
    "logging.every_iterations=1", "logging.tensorboard=false", "misc.n_threads=1", "evaluation.max_samples=8",
    "evaluation.num_mc=1",
]  # fmt: skip


def start(root: Path, words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the checkout's root, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """1,041 tokens: 65 samples of 16 + 1."""
    about = {"tokenizer": {"n_tokens": 100}}
    with IndexedWriter(tmp_path / "text", np.dtype(np.uint16), about) as writer:
        writer.add_document(np.random.default_rng(0).integers(0, 100, 1041))
    return str(tmp_path / "text")


def launch(root: Path, launcher: str, corpus: str, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """One launcher, with the variables of the guide and two ranks."""
    settings = {
        "MODEL": "7M", "DATA": corpus, "VALID": corpus, "EPOCHS": "2", "OBJECTIVE": "mdm", "ENGINE": "torch",
        "RUN": str(run), "GPUS": "2", "MPI_FLAGS": "--allow-run-as-root --oversubscribe",
    }  # fmt: skip
    if launcher == "train_mpi":
        settings |= {"CLUSTER": "frontier", "GLOO_SOCKET_IFNAME": "lo", "CACHE_ROOT": str(run.parent)}
    return start(root, ["bash", f"{TRAINING}/{launcher}.sh", *SMALL, *more], **settings)


def test_a_section_that_is_none_is_one_sentence(root) -> None:
    pretrain = load_tool(root / "tools" / "pretrain.py")
    with pytest.raises(ValueError, match="dataset: wanted keys, found 3"):
        pretrain.planned(str(root / "examples_scaling" / "training" / "small.yaml"), ["dataset=3"])


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["train", "train_mpi"])
def test_a_script_trains_for_the_epochs_asked_without_editing(root, tmp_path, corpus, launcher) -> None:
    if launcher == "train_mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    run = tmp_path / "run"
    done = launch(root, launcher, corpus, run)
    assert done.returncode == 0, done.stderr
    assert f"{run}: done" in done.stdout
    plan, result = read_json(run / PLAN), read_json(run / RESULT)
    # two epochs of 65 samples are 130: 16 steps of 8, and two samples are left out
    assert (plan["n_steps"], result["n_ranks"]) == (16, 2)
    assert plan["epochs"] == pytest.approx(128 / 65)
    assert (plan["size"], plan["objective"]) == ("7M", "masked_diffusion")
    assert "2 rank(s) on cpu" in done.stderr
    # only one rank writes and talks
    assert [line["step"] for line in read_metrics(run) if line["kind"] == "train"] == list(range(1, 17))
    assert done.stderr.count("step: 16  loss:") == 1
    assert not list(tmp_path.glob("cache-*")), "what a rank kept for itself stays behind"


def test_a_setting_that_is_wrong_is_told_by_one_of_the_ranks(root, tmp_path, corpus) -> None:
    failed = launch(root, "train", corpus, tmp_path / "run", "optim.lrr=1")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.endswith("unknown key 'optim.lrr'; did you mean 'lr'?\n")
    assert failed.stderr.count("\n") == 1


def test_a_second_rank_that_alone_finds_a_wrong_setting_tells_it(root, tmp_path) -> None:
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    failed = start(root, [sys.executable, "tools/pretrain.py", str(tmp_path / "none.yaml")], **environment)
    assert failed.returncode == 1
    assert failed.stderr == f"error: {tmp_path / 'none.yaml'}: no such configuration file\n"


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["train", "train_mpi"])
def test_a_script_answers_75_where_its_ranks_were_asked_to_stop(root, tmp_path, corpus, launcher) -> None:
    if launcher == "train_mpi" and shutil.which("mpirun") is None:
        pytest.skip("no mpirun: apt-get install openmpi-bin")
    stopped = launch(root, launcher, corpus, tmp_path / "run", "misc.max_hours=1e-9")
    assert stopped.returncode == 75, stopped.stderr
    assert [found.is_preempt for found in layout.find(tmp_path / "run" / "checkpoints")] == [True]


def test_a_script_passes_a_failure_on(root, tmp_path) -> None:
    settings = {"MODEL": "425", "DATA": "synthetic", "STEPS": "1", "ENGINE": "torch", "GPUS": "1"}
    failed = start(root, ["bash", f"{TRAINING}/train.sh", *SMALL], RUN=str(tmp_path / "run"), **settings)
    assert failed.returncode == 1
    assert "model.size: '425' is not in model_sizes.yaml; did you mean '425M'?" in failed.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_the_cluster_check_runs_eight_steps_on_a_cpu(root, tmp_path, n_ranks) -> None:
    small = [
        "dist.cpu_only=true", "lr_scheduler.total_iterations=8", "model.hf_config.hidden_size=64",
        "model.hf_config.num_hidden_layers=2", "model.hf_config.num_attention_heads=4", "model.n_tokens=300",
        "dataset.batch_size=4", "dataset.seq_len=32", "logging.every_iterations=1", "misc.n_threads=1",
        f"checkpoint.directory={tmp_path / 'chkpts'}", f"logging.run_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    command = [sys.executable]
    if n_ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    done = start(root, [*command, "tools/pretrain.py", f"{TRAINING}/verify_cluster.yaml", *small])
    assert done.returncode == 0, done.stderr
    assert "the run ends after 8 of its 10 warm-up steps" in done.stderr
    lines = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["lr"] for line in lines] == pytest.approx([3e-4 * step / 10 for step in range(1, 9)])
    (saved,) = layout.find(tmp_path / "chkpts")
    assert saved.prefix == "dummy-0.1"
    assert json.loads((saved.path / "meta.json").read_text())["step"] == 8


LAUNCHERS = {
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus=2"],
    "deepspeed --no_local_rank": ["-m", "deepspeed.launcher.runner", "--num_gpus=2", "--no_local_rank"],
    "torch.distributed.launch": ["-m", "torch.distributed.launch", "--nproc_per_node=2"],
    "torch.distributed.launch --use-env": [
        "-m",
        "torch.distributed.launch",
        "--nproc_per_node=2",
        "--use-env",
    ],
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=pytest.mark.slow if " " in name else []) for name in LAUNCHERS]
)
def test_the_launchers_of_deepspeed_and_of_older_torch_start_a_training(root, tmp_path, launcher) -> None:
    if "deepspeed" in launcher:
        pytest.importorskip("deepspeed", reason="the DeepSpeed engine is optional: pip install deepspeed")
    run, small = tmp_path / "run", [word for word in SMALL if "seq_len" not in word]
    words = [
        *small, "dataset.path_train=synthetic", "dataset.path_eval=null", "model.n_tokens=100",
        "dataset.seq_len=16", "model.d_model=16", "model.n_heads=2", "model.n_layers=1",
        "lr_scheduler.total_tokens=null", "lr_scheduler.warmup_tokens=null",
        "lr_scheduler.total_iterations=4", f"logging.run_dir={run}",
    ]  # fmt: skip
    port = f"--master_port={free_port()}"
    command = [
        sys.executable,
        *LAUNCHERS[launcher],
        port,
        "tools/pretrain.py",
        f"{TRAINING}/small.yaml",
        *words,
    ]
    done = start(root, command, DS_ACCELERATOR="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_json(run / RESULT)["n_ranks"] == 2
    assert (read_json(run / RESULT)["step"], "unrecognized" in done.stderr) == (4, False)
