"""A sweep while Slurm fails or hangs: no task that is queued is submitted twice, and a lost one is again."""

import os
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.cli import STOPPED
from megatron.plan.run_dir import lock_run
from megatron.study.ladder import PlannedRun
from megatron.study.launchers import slurm
from megatron.study.launchers.launch import SweepState, is_free, run_all
from megatron.study.launchers.slurm import SlurmLauncher
from tests.study.conftest import write_result

# the fake cluster is a folder: `queue` has a line per task, `fail_<command>` makes that command fail
COMMAND = """#!/bin/sh
cd {cluster}
name=$(basename $0)
echo "$name $*" >>calls
if [ -e fail_$name ]; then sh ./fail_$name >&2; exit 1; fi
case $name in
sbatch)
    n=$(cat number 2>/dev/null || echo 0); n=$((n + 1)); echo $n >number
    last=${{2#--array=0-}}
    for i in $(seq 0 $last); do echo "${{n}}_$i RUNNING $n $*" >>queue; done
    echo $n ;;
squeue) cut -d' ' -f1,2 queue ;;
scancel) : >queue ;;
esac
"""


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fail(
        self, name: str, text: str = "slurm_load_jobs error: Unable to contact slurm controller"
    ) -> None:
        (self.folder / f"fail_{name}").write_text(f"echo '{name}: error: {text}'\n")

    def heal(self, name: str) -> None:
        (self.folder / f"fail_{name}").unlink()

    def calls(self, name: str) -> int:
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return sum(line.split()[0] == name for line in lines)

    def end(self, task: str) -> None:
        queue = self.folder / "queue"
        left = [line for line in queue.read_text().splitlines() if line.split()[0] != task]
        queue.write_text("".join(line + "\n" for line in left))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    folder, commands = tmp_path / "cluster", tmp_path / "commands"
    folder.mkdir()
    commands.mkdir()
    (folder / "queue").touch()
    for name in ("sbatch", "squeue", "scancel"):
        (commands / name).write_text(COMMAND.format(cluster=folder))
        (commands / name).chmod(0o755 | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "POLL_INTERVAL_S", 0.02)
    monkeypatch.setattr(slurm, "RETRY_INTERVAL_S", 0.05)
    return Cluster(folder)


@pytest.fixture
def runs(runs_of) -> list[PlannedRun]:
    return runs_of("size: small, tokens: [640, 1280]")


def run_to_end(runs: Sequence[PlannedRun], cluster: Cluster, at_tick, launcher: SlurmLauncher | None = None):
    """Run all runs and call `at_tick(n, state)` at each poll. Return the state and reports of ended jobs."""
    launcher = launcher or SlurmLauncher(cluster.folder / "lists", None)
    reported: list[tuple] = []
    ticks = iter(range(10_000))
    state, whole = run_all(
        runs, launcher, lambda state: at_tick(next(ticks), state),
        lambda job, status, again: reported.append((job.run.plan.n_steps, status, again)), 1, 0.02,
    )  # fmt: skip
    assert whole
    return state, reported


def end_all(cluster: Cluster, state: SweepState) -> None:
    for job in state.running:
        write_result(job.run)
        cluster.end(job.handle)


@pytest.mark.parametrize("failure", ["error", "timeout"])
def test_a_queue_that_fails_for_a_while_costs_no_task(
    runs, cluster, caplog, monkeypatch, failure: str
) -> None:
    def at_tick(n: int, state: SweepState) -> None:
        if n == 3 and failure == "error":
            cluster.fail("squeue")
        elif n == 3:
            (cluster.folder / "fail_squeue").write_text("exec sleep 60\n")
        if n == 8:
            cluster.heal("squeue")
        if n == 12:
            end_all(cluster, state)

    monkeypatch.setattr(slurm, "COMMAND_TIMEOUT_S", 0.3)
    state, reported = run_to_end(runs, cluster, at_tick)
    assert len(state.done) == 2 and sorted(reported) == [(10, 0, False), (20, 0, False)]
    assert (cluster.calls("sbatch"), cluster.calls("scancel")) == (1, 0)
    if failure == "error":
        assert "squeue: error: slurm_load_jobs error" in caplog.text
        assert "the tasks keep running, retrying in" in caplog.text


def test_the_next_call_follows_the_tasks_and_submits_a_lost_one_again(runs, cluster) -> None:
    first = SlurmLauncher(cluster.folder / "lists", None)
    first.start(runs)
    cluster.end("1_0")  # without a result
    cluster.fail("squeue")
    second = SlurmLauncher(cluster.folder / "lists", None)
    assert second.start(runs) == [], "without an answer no run may be submitted"
    cluster.heal("squeue")

    def at_tick(n: int, state: SweepState) -> None:
        if n == 3:
            assert sorted(job.handle for job in state.running) == ["1_1", "2_0"]
            end_all(cluster, state)

    state, _ = run_to_end(runs, cluster, at_tick, second)
    assert (len(state.done), cluster.calls("sbatch")) == (2, 2)


def test_a_task_that_left_a_preempt_checkpoint_is_preempted_and_another_one_has_failed(runs, cluster) -> None:
    (runs[0].folder / "checkpoints" / "step.20260101-000000.preempt").mkdir(parents=True)
    launcher = SlurmLauncher(cluster.folder / "lists", None)
    jobs = launcher.start(runs)
    for job in jobs:
        cluster.end(job.handle)
    launcher.next_poll_s = 0.0
    assert [status for _, status in launcher.collect_ended(jobs)] == [STOPPED, 1]


def test_an_invalid_submission_ends_the_sweep_at_once(runs, cluster) -> None:
    cluster.fail("sbatch", "invalid partition specified: gpuu")
    with pytest.raises(OSError, match="sbatch: error: invalid partition specified: gpuu"):
        run_to_end(runs, cluster, lambda n, state: None)
    assert cluster.calls("sbatch") == 1


def test_tasks_that_cannot_be_cancelled_are_named(runs, cluster) -> None:
    launcher = SlurmLauncher(cluster.folder / "lists", None)
    jobs = launcher.start(runs)
    cluster.fail("scancel")
    with pytest.raises(OSError, match="2 tasks still run: scancel 1_0 1_1"):
        launcher.stop(jobs)


def test_a_run_of_another_process_is_started_if_that_ends_without_a_result(runs, cluster) -> None:
    training = lock_run(runs[0].folder)
    assert training is not None and not is_free(runs[0])

    def at_tick(n: int, state: SweepState) -> None:
        if n == 5:
            assert (state.waiting, [job.run for job in state.running]) == (runs[:1], runs[1:])
            training.close()
        if n > 5 and len(state.running) == 2:
            end_all(cluster, state)

    state, _ = run_to_end(runs, cluster, at_tick)
    assert (len(state.done), cluster.calls("sbatch")) == (2, 2)


def test_a_run_that_another_process_has_ended_is_reported_and_not_run_again(runs, cluster) -> None:
    runs[0].folder.mkdir(parents=True)
    write_result(runs[0])
    state, reported = run_to_end(runs[:1], cluster, lambda n, state: None)
    assert (state.done, reported) == (runs[:1], [(10, 0, False)])
    assert cluster.calls("sbatch") == 0


def test_the_script_of_an_array_finds_requeue_in_a_wheel(root: Path, tmp_path: Path) -> None:
    """In a checkout the tests with Slurm run it."""
    source = root / "examples_scaling" / "training"
    pretrain = tmp_path / "commands" / "pretrain.py"  # beside both scripts, as setup.py copies them
    pretrain.parent.mkdir()
    for script in ("sweep_slurm.sh", "requeue.sh"):
        shutil.copy(source / script, pretrain.parent)
    script = shutil.copy(source / "sweep_slurm.sh", tmp_path / "slurm_script")  # Slurm runs a copy
    (tmp_path / "run").mkdir()
    (tmp_path / "list.txt").write_text(f"{tmp_path}/run\n")
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\necho "srun $*"\nexit 3\n')
    srun.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_ARRAY_TASK_ID": "0",
    }
    words = ["bash", script, str(tmp_path / "list.txt"), str(pretrain)]
    assert subprocess.run(words, env=environment, timeout=60).returncode == 3  # the status of the step
    printed = (tmp_path / "run" / "log.txt").read_text()
    assert printed == f"srun --kill-on-bad-exit=1 python {pretrain} {tmp_path}/run/config.yaml\n"
