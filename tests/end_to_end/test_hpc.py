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
        ["bash", *words], cwd=root, env=environment, capture_output=True, text=True, timeout=240
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


SLOW_KILL = 'kill() { builtin kill "$@"; local status=$?; sleep 0.5; return "$status"; }\n'
REQUEUE = "examples_scaling/training/requeue.sh"


def started_then_told(root: Path, words: list[str], number: signal.Signals, heard: str, folder: Path) -> int:
    """The status of a bash script whose command was told to stop: after `words` comes the command's own text.

    The kill in the script returns half a second late: the command has ended when the shell goes on,
    which else happens once in thousands of runs. `heard`: the signal at which the command ends with 75.
    """
    (folder / "slow_kill.sh").write_text(SLOW_KILL)
    ready = folder / "ready"
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.{heard}, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "BASH_ENV": str(folder / "slow_kill.sh")}
    process = subprocess.Popen(
        [*words, code], cwd=root, env={**environment, "CACHE_ROOT": str(folder / "caches")}
    )
    try:
        end = time.monotonic() + 30
        while not ready.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        return process.wait(timeout=240)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "number, heard",
    [
        (signal.SIGUSR1, "SIGUSR1"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGINT, "SIGTERM"),
        (signal.SIGHUP, "SIGHUP"),
    ],
)
def test_a_signal_reaches_the_command_and_the_cache_is_still_removed(
    root: Path, tmp_path: Path, number: signal.Signals, heard: str
) -> None:
    (tmp_path / "caches").mkdir()
    words = ["bash", f"{HPC}/with_private_cache.sh", sys.executable, "-c"]
    assert started_then_told(root, words, number, heard, tmp_path) == 75
    assert not list((tmp_path / "caches").iterdir())


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_step_that_ends_at_the_signal_is_put_into_the_queue_again(
    root: Path, tmp_path: Path, number: signal.Signals
) -> None:
    for name, text in {"squeue": "echo RUNNING", "scontrol": f'echo "$@" >{tmp_path}/asked; exit 3'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = f'set -euo pipefail; export SLURM_JOB_ID=7; source {REQUEUE}; requeue {sys.executable} -c "$0"'
    assert started_then_told(root, ["bash", "-c", script], number, "SIGUSR1", tmp_path) == 3
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_controller_that_is_away_for_a_moment_does_not_keep_the_job_out_of_the_queue(
    root: Path, tmp_path: Path
) -> None:
    squeue = f"echo >>{tmp_path}/tries; [ $(wc -l <{tmp_path}/tries) -gt 3 ] || exit 1; echo RUNNING"
    for name, text in {"squeue": squeue, "scontrol": f'echo "$@" >{tmp_path}/asked; exit 3'}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = "set -euo pipefail; export SLURM_JOB_ID=7 REQUEUE_PAUSE=0.05; "
    script += f'source {REQUEUE}; requeue {sys.executable} -c "$0"'
    assert started_then_told(root, ["bash", "-c", script], signal.SIGUSR1, "SIGUSR1", tmp_path) == 3
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_run_that_is_done_at_the_signal_is_not_put_into_the_queue_again(root: Path, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_text("#!/usr/bin/env bash\nexit 9\n")
    (tmp_path / "squeue").chmod(0o755)
    script = f'set -euo pipefail; source {REQUEUE}; requeue {sys.executable} -c "${{0/exit(75)/exit(0)}}"'
    assert started_then_told(root, ["bash", "-c", script], signal.SIGUSR1, "SIGUSR1", tmp_path) == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_its_stop_file_has_stopped_is_not_put_into_the_queue_again(
    root: Path, tmp_path: Path, is_there: bool
) -> None:
    for name, text in {"squeue": "echo RUNNING", "scontrol": f"touch {tmp_path}/asked; exit 3"}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"misc:\n  seed: 0\n  stop_file: {tmp_path}/STOP\n")
    if is_there:
        (tmp_path / "STOP").touch()
    script = f"set -euo pipefail; export SLURM_JOB_ID=7; source {REQUEUE}; requeue "
    script += f"{sys.executable} -c 'exit(75)' train.yaml logging.run_dir={run}"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=root,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, (tmp_path / "asked").exists()) == ((75, False) if is_there else (3, True))
    assert (f"{tmp_path}/STOP is there; remove it" in done.stderr) == is_there


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
