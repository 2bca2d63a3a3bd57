"""What examples_scaling/hpc does to the environment and the commands, without the clusters it is for."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HPC = "examples_scaling/hpc"
SETTINGS = "examples_scaling/training/settings.sh"
FAKE_SRUN = '#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "$@" >"$RECORD"\n'


def bash(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run bash from the checkout's root, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"HOME": os.environ.get("HOME", "/"), "PATH": path, **variables}
    return subprocess.run(
        ["bash", *words], cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )


def variables_of(root: Path, **given: str) -> dict[str, str]:
    """The environment once settings.sh was read, and under AROUND the words around a command."""
    script = f'source {SETTINGS}; env; echo "AROUND=${{around[*]}}"'
    done = bash(root, "-euo", "pipefail", "-c", script, **given)
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_a_cluster_sets_the_network_and_leaves_what_is_said_already(root: Path) -> None:
    plain = variables_of(root)
    assert plain["AROUND"] == ""
    assert not [name for name in plain if name.startswith(("NCCL_", "FI_", "GLOO_"))]
    told = variables_of(root, CLUSTER="frontier", NCCL_SOCKET_IFNAME="eth7")
    assert told["NCCL_SOCKET_IFNAME"] == "eth7"
    assert (told["GLOO_SOCKET_IFNAME"], told["FI_CXI_DEFAULT_CQ_SIZE"]) == ("hsn0", "131072")
    assert told["AROUND"] == f"bash {HPC}/with_private_cache.sh"


def test_a_cluster_of_ones_own_is_a_path(root: Path, tmp_path: Path) -> None:
    own = tmp_path / "ours.sh"
    own.write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    assert variables_of(root, CLUSTER=str(own))["NCCL_SOCKET_IFNAME"] == "ib0"


def test_an_unknown_cluster_is_a_usage_error_before_anything_starts(root: Path) -> None:
    failed = bash(root, "examples_scaling/training/train.sh", CLUSTER="frontire", GPUS="1")
    assert failed.returncode == 2
    assert failed.stderr.startswith(
        "error: CLUSTER=frontire: no file examples_scaling/hpc/clusters/frontire.sh"
    )


def test_each_command_has_a_cache_of_its_own_that_is_gone_afterwards(root: Path, tmp_path: Path) -> None:
    say = 'stat -c "%a %n" "$MIOPEN_USER_DB_PATH/.." && ls -d "$MIOPEN_CUSTOM_CACHE_DIR" "$TRITON_CACHE_DIR"'
    say += "; exit 7"
    done = [
        bash(root, f"{HPC}/with_private_cache.sh", "bash", "-c", say, CACHE_ROOT=str(tmp_path))
        for _ in range(2)
    ]
    assert [one.returncode for one in done] == [7, 7]
    assert all(one.stdout.startswith(f"700 {tmp_path}/cache-") for one in done)
    assert done[0].stdout != done[1].stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_reaches_the_command_and_the_cache_is_still_removed(
    root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    ready, root_of_caches = tmp_path / "ready", tmp_path / "caches"
    root_of_caches.mkdir()
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(50)\n"
    )
    words = ["bash", f"{HPC}/with_private_cache.sh", sys.executable, "-c", code]
    environment = {**os.environ, "CACHE_ROOT": str(root_of_caches)}
    process = subprocess.Popen(words, cwd=root, env=environment)
    try:
        end = time.monotonic() + 30
        while not ready.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        assert len(list(root_of_caches.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(timeout=30) == 75
    finally:
        process.kill()
        process.wait()
    assert not list(root_of_caches.iterdir())


@pytest.fixture
def submitted(root: Path, tmp_path: Path) -> dict[str, str]:
    """As inside a job of Slurm whose srun writes down what it is asked."""
    (tmp_path / "srun").write_text(FAKE_SRUN)
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        "SLURM_SUBMIT_DIR": str(root),
        "SLURM_JOB_ID": "1",
        "RECORD": str(tmp_path / "asked"),
        "PATH": path,
    }


def test_a_container_job_asks_pyxis_for_the_image_the_mounts_and_the_folder(
    root: Path, tmp_path: Path, submitted: dict[str, str]
) -> None:
    script = f"{HPC}/train_slurm_container.sh"
    settings = {"MODEL": "425M", "DATA": "/tokens/c4", "STEPS": "10", "ENGINE": "torch"}
    image = {"IMAGE": "/images/scaling.sqsh", "MOUNTS": "/scratch/tokens:/tokens"}
    done = bash(root, script, "dist.sharding_stage=zero1", **submitted, **settings, **image)
    assert done.returncode == 0, done.stderr
    folder, *asked = Path(submitted["RECORD"]).read_text().splitlines()
    assert folder == str(root)
    assert asked[:5] == [
        "--kill-on-bad-exit=1",
        "--container-image=/images/scaling.sqsh",
        f"--container-mounts={root}/experiments:/opt/scaling/experiments,/scratch/tokens:/tokens",
        "--container-workdir=/opt/scaling",
        "--no-container-mount-home",
    ]
    assert asked[5:8] == ["python", "tools/pretrain.py", "examples_scaling/training/train.yaml"]
    assert {"model.size=425M", "dataset.path_train=/tokens/c4", "dist.sharding_stage=zero1"} <= set(asked[8:])


def test_a_container_job_without_an_image_says_what_to_set(root: Path, submitted: dict[str, str]) -> None:
    failed = bash(root, f"{HPC}/train_slurm_container.sh", **submitted)
    told = "error: set IMAGE to a .sqsh file or registry#name:tag\n"
    assert (failed.returncode, failed.stderr) == (2, told)
    assert not Path(submitted["RECORD"]).exists()


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "examples_scaling/training/train_slurm.sh",
            "error: no job of Slurm; submit this script with sbatch\n",
        ),
        (f"{HPC}/train_slurm_container.sh", "error: no job of Slurm; submit this script with sbatch\n"),
        ("examples_scaling/training/sweep.sh", "usage: sweep.sh STUDY.yaml [--dry-run] [key=value ...]\n"),
        (f"{HPC}/with_private_cache.sh", "usage: with_private_cache.sh COMMAND [WORD ...]\n"),
    ],
)
def test_a_script_started_the_wrong_way_says_the_right_one_and_ends_with_2(
    root: Path, script: str, told: str
) -> None:
    failed = bash(root, script, SLURM_SUBMIT_DIR="")
    assert (failed.returncode, failed.stderr) == (2, told)


def test_the_folder_inside_is_the_folder_of_the_image(root: Path) -> None:
    script = (root / HPC / "train_slurm_container.sh").read_text()
    (inside,) = [line.split("=")[1] for line in script.splitlines() if line.startswith("inside=")]
    assert f"WORKDIR {inside}\n" in (root / "Dockerfile").read_text()


def test_the_two_slurm_scripts_ask_slurm_for_the_same(root: Path) -> None:
    headers = [
        [line for line in (root / script).read_text().splitlines() if line.startswith("#SBATCH")]
        for script in ("examples_scaling/training/train_slurm.sh", f"{HPC}/train_slurm_container.sh")
    ]
    assert headers[0] == headers[1] and headers[0]
