"""Tests of examples_scaling/hpc: the environment and the commands that it sets, without a cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import run_process, wait_until

HPC = "examples_scaling/hpc"
SETTINGS = "examples_scaling/training/settings.sh"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def run_bash(root: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run bash from the checkout's root, with this Python first on the path."""
    return run_process(["bash", *words], root, {"HOME": os.environ.get("HOME", "/")}, **variables)


def variables_of(root: Path, **given: str) -> dict[str, str]:
    """Return the environment after settings.sh, with the wrapper command as AROUND."""
    script = f'source {SETTINGS}; env; echo "AROUND=${{around[*]}}"'
    done = run_bash(root, "-euo", "pipefail", "-c", script, **given)
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_a_cluster_sets_the_network_and_keeps_variables_that_are_set(root: Path, tmp_path: Path) -> None:
    plain = variables_of(root)
    assert plain["AROUND"] == ""
    assert not [name for name in plain if name.startswith(("NCCL_", "FI_", "GLOO_"))]
    hub = f"{plain['HOME']}/.cache/huggingface/hub"
    expected = {
        "NCCL_SOCKET_IFNAME": "eth7", "GLOO_SOCKET_IFNAME": "hsn0", "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "AROUND": f"bash {HPC}/with_private_cache.sh", "NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "1",
        "MASTER_PORT": "3442", "TRANSFORMERS_CACHE": hub, "HF_HUB_CACHE": hub,
    }  # fmt: skip
    assert expected.items() <= variables_of(root, CLUSTER="frontier", NCCL_SOCKET_IFNAME="eth7").items()
    variables = variables_of(root, CLUSTER="frontier", TRANSFORMERS_CACHE="/scratch/hub")
    assert variables["HF_HUB_CACHE"] == "/scratch/hub"
    (tmp_path / "ours.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    assert variables_of(root, CLUSTER=str(tmp_path / "ours.sh"))["NCCL_SOCKET_IFNAME"] == "ib0"
    failed = run_bash(root, "examples_scaling/training/train.sh", CLUSTER="frontire", GPUS="1")
    assert failed.returncode == 2
    assert failed.stderr.startswith(f"error: CLUSTER=frontire: no file {HPC}/clusters/frontire.sh")


def test_each_command_has_a_private_cache_that_is_removed_afterwards(root: Path, tmp_path: Path) -> None:
    script = (
        'stat -c "%a %n" "$MIOPEN_USER_DB_PATH/.." && ls -d "$MIOPEN_CUSTOM_CACHE_DIR" "$TRITON_CACHE_DIR"'
    )
    script += "; exit 7"
    done = [
        run_bash(root, f"{HPC}/with_private_cache.sh", "bash", "-c", script, CACHE_ROOT=str(tmp_path))
        for _ in range(2)
    ]
    assert [process.returncode for process in done] == [7, 7]
    assert all(process.stdout.startswith(f"700 {tmp_path}/cache-") for process in done)
    assert done[0].stdout != done[1].stdout
    assert not list(tmp_path.iterdir())


SLOW_KILL = 'kill() { builtin kill "$@"; local status=$?; sleep 0.5; return "$status"; }\n'
REQUEUE = "examples_scaling/training/requeue.sh"


def stop_started_script(
    root: Path, words: list[str], number: signal.Signals, heard: str, folder: Path
) -> int:
    """Run a bash script whose command is stopped by a signal, and return its exit status.

    The code of the command is appended to `words`. `heard` is the signal at which the command ends with 75.
    The kill in the script returns half a second late, so the command has ended before the shell continues.
    Otherwise this race occurs once in thousands of runs.
    """
    (folder / "slow_kill.sh").write_text(SLOW_KILL)
    ready = folder / "ready"
    code = (
        "import pathlib, signal, sys, time\n"
        f"signal.signal(signal.{heard}, lambda *_: sys.exit(75))\n"
        f"pathlib.Path({str(ready)!r}).touch()\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PATH": f"{folder}:{PATH}", "BASH_ENV": str(folder / "slow_kill.sh")}
    environment["CACHE_ROOT"] = str(folder / "caches")
    process = subprocess.Popen([*words, code], cwd=root, env=environment)
    try:
        wait_until(ready.exists)
        process.send_signal(number)
        return process.wait(timeout=240)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "number, heard", [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "SIGTERM"), (signal.SIGHUP, "SIGHUP")]
)
def test_a_signal_reaches_the_command_and_the_cache_is_still_removed(
    root: Path, tmp_path: Path, number: signal.Signals, heard: str
) -> None:
    (tmp_path / "caches").mkdir()
    words = ["bash", f"{HPC}/with_private_cache.sh", sys.executable, "-c"]
    assert stop_started_script(root, words, number, heard, tmp_path) == 75
    assert not list((tmp_path / "caches").iterdir())


def write_programs(folder: Path, **bodies: str) -> None:
    """Write executable scripts in place of Slurm's commands."""
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)


STEP = (
    f"set -euo pipefail; export SLURM_JOB_ID=7 REQUEUE_PAUSE=0.05; source {REQUEUE}; requeue {sys.executable}"
)
RUNNING = "echo RUNNING"
BUSY = "echo >>{0}/tries; [ $(wc -l <{0}/tries) -gt 3 ] || exit 1; echo RUNNING"  # no answer three times


@pytest.mark.parametrize(("number", "squeue"), [(signal.SIGTERM, RUNNING), (signal.SIGUSR1, BUSY)])
def test_a_step_stopped_is_requeued(root: Path, tmp_path: Path, number: signal.Signals, squeue: str) -> None:
    scontrol = f'echo "$@" >{tmp_path}/requeued; exit 3'
    write_programs(tmp_path, squeue=squeue.format(tmp_path), scontrol=scontrol)
    words = ["bash", "-c", f'{STEP} -c "$0"']
    assert stop_started_script(root, words, number, "SIGUSR1", tmp_path) == 3
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_a_run_that_is_done_at_the_signal_is_not_requeued(root: Path, tmp_path: Path) -> None:
    write_programs(tmp_path, squeue="exit 9")
    words = ["bash", "-c", f'{STEP} -c "${{0/exit(75)/exit(0)}}"']
    assert stop_started_script(root, words, signal.SIGUSR1, "SIGUSR1", tmp_path) == 0


@pytest.mark.parametrize("exists", [True, False])
def test_a_run_stopped_by_its_stop_file_is_not_requeued(root: Path, tmp_path: Path, exists: bool) -> None:
    write_programs(tmp_path, squeue=RUNNING, scontrol=f"touch {tmp_path}/requeued; exit 3")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"misc:\n  seed: 0\n  stop_file: {tmp_path}/STOP\n")
    if exists:
        (tmp_path / "STOP").touch()
    command = f"{STEP} -c 'exit(75)' train.yaml logging.run_dir={run}"
    done = run_bash(root, "-c", command, PATH=f"{tmp_path}:{PATH}")
    assert (done.returncode, (tmp_path / "requeued").exists()) == ((75, False) if exists else (3, True))
    assert (f"{tmp_path}/STOP exists. Remove it" in done.stderr) == exists


@pytest.fixture
def submitted(root: Path, tmp_path: Path) -> dict[str, str]:
    """Environment of a Slurm job whose srun records its arguments."""
    write_programs(tmp_path, srun='printf "%s\\n" "$PWD" "$@" >"$RECORD"')
    variables = {"SLURM_SUBMIT_DIR": str(root), "SLURM_JOB_ID": "1", "RECORD": str(tmp_path / "record")}
    return variables | {"PATH": f"{tmp_path}:{PATH}"}


MOUNTS = "{root}/experiments:/opt/scaling/experiments,/scratch/tokens:/tokens"
PYXIS = ["--container-image=/images/x.sqsh", f"--container-mounts={MOUNTS}"]
PYXIS += ["--container-workdir=/opt/scaling", "--no-container-mount-home"]


@pytest.mark.parametrize(
    ("script", "given", "expected"),
    [
        ("train_slurm_container", {"IMAGE": "/images/x.sqsh", "MOUNTS": "/scratch/tokens:/tokens"}, PYXIS),
        ("train_slurm_edf", {"EDF": "/cluster/alps.toml"}, ["--environment=/cluster/alps.toml"]),
    ],
)
def test_a_container_job_passes_its_image_mounts_and_arguments_to_srun(
    root: Path, submitted: dict[str, str], script: str, given: dict[str, str], expected: list[str]
) -> None:
    settings = {"MODEL": "425M", "DATA": "/tokens/c4", "STEPS": "10", "ENGINE": "torch"}
    words = (f"{HPC}/{script}.sh", "dist.sharding_stage=zero1")
    done = run_bash(root, *words, **submitted, **settings, **given)
    assert done.returncode == 0, done.stderr
    folder, *arguments = Path(submitted["RECORD"]).read_text().splitlines()
    assert folder == str(root)
    start = ["--kill-on-bad-exit=1", *(word.format(root=root) for word in expected)]
    start += ["python", "tools/pretrain.py", "examples_scaling/training/train.yaml"]
    assert arguments[: len(start)] == start
    overrides = {"model.size=425M", "dataset.path_train=/tokens/c4", "dist.sharding_stage=zero1"}
    assert overrides <= set(arguments[len(start) :])
    assert "WORKDIR /opt/scaling\n" in (root / "Dockerfile").read_text()


NO_JOB = "error: not a Slurm job. Submit this script with sbatch.\n"
MISUSES = [  # script, whether it is a job of Slurm, message
    ("examples_scaling/training/train_slurm.sh", False, NO_JOB),
    (f"{HPC}/train_slurm_container.sh", False, NO_JOB),
    (f"{HPC}/train_slurm_edf.sh", False, NO_JOB),
    (f"{HPC}/train_slurm_container.sh", True,
     "error: IMAGE: not set, expected a .sqsh file or registry#name:tag\n"),
    (f"{HPC}/train_slurm_edf.sh", True, "error: EDF: not set, expected an environment definition file\n"),
    ("examples_scaling/training/sweep.sh", False, "usage: sweep.sh STUDY.yaml [--dry-run] [key=value ...]\n"),
    ("examples_scaling/evaluation/validate.sh", False, "usage: "),
    ("examples_scaling/downstream/downstream.sh", False, "usage: "),
    (f"{HPC}/with_private_cache.sh", False, "usage: with_private_cache.sh COMMAND [WORD ...]\n"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "is_job", "message"), MISUSES)
def test_a_script_started_the_wrong_way_prints_its_usage_and_exits_with_2(
    root: Path, submitted: dict[str, str], script: str, is_job: bool, message: str
) -> None:
    failed = run_bash(root, script, **(submitted if is_job else {"SLURM_SUBMIT_DIR": ""}))
    assert failed.returncode == 2 and failed.stderr.startswith(message)
    assert not Path(submitted["RECORD"]).exists()
