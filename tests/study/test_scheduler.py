"""The scheduler of a sweep: retries, preemption, trunks, stopping; with fake runs that end at once."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from megatron.cli import STOPPED
from megatron.plan.memory import estimate_memory
from megatron.plan.run_dir import EXIT
from megatron.study.ladder import PlannedRun
from megatron.study.launchers.launch import Job, Launcher, SweepState, find_checkpoint, prepare_run, run_all
from megatron.study.launchers.local import Device, LocalLauncher
from megatron.study.price import Speed
from megatron.study.sweep import LiveTable, format_job_row
from tests.screen import TerminalStream, read_screen
from tests.study.conftest import SHARED_TRUNK, write_result


@pytest.fixture
def runs(runs_of) -> list[PlannedRun]:
    """10, 20 and 40 steps; the first two branch from the third, at 5 and 10."""
    return runs_of("size: small, tokens: [640, 1280, 2560]", SHARED_TRUNK)


def leave_checkpoint(run: PlannedRun, step: int, suffix: str = "") -> Path:
    path = run.folder / "checkpoints" / f"step.20260101-000000-{step:06d}{suffix}"
    path.mkdir(parents=True)
    (path / "meta.json").write_text(json.dumps({"step": step}))
    return path


class FakeLauncher(Launcher):
    """Launcher that ends each job at once with the next status of its run's script (default 0).

    Without a script no job ends.
    """

    def __init__(
        self, script: dict[int, list[int]] | None, at_poll: Callable[[], object] = lambda: None
    ) -> None:
        self.script, self.at_poll = script, at_poll
        self.started, self.stopped, self.left = [], [], []

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        for run in runs:
            prepare_run(run)
            self.started.append(run.plan.n_steps)
        return [Job(run, None) for run in runs]

    def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        self.at_poll()
        over = []
        for job in jobs if self.script is not None else []:
            left = self.script.get(job.run.plan.n_steps, [])
            status = left.pop(0) if left else 0
            if status == 0:
                write_result(job.run)
            over.append((job, status))
        return over

    def stop(self, jobs: Sequence[Job]) -> None:
        self.stopped += jobs

    def detach(self, jobs: Sequence[Job]) -> None:
        self.left += jobs


def run_sweep(
    runs: Sequence[PlannedRun], fake: FakeLauncher, retries: int = 1, is_whole: bool = True
) -> tuple[SweepState, list[tuple]]:
    """Return the state at the end, and the reports of ended jobs. Assert that the sweep is whole or not."""
    reported: list[tuple] = []

    def report(job: Job, *how: object) -> None:
        reported.append((job.run.plan.n_steps, *how))

    state, whole = run_all(runs, fake, lambda state: None, report, retries, 0)
    assert whole == is_whole
    return state, reported


def test_a_failed_run_is_retried_up_to_the_limit_and_then_given_up_with_its_error(runs) -> None:
    trunk = runs[2]
    trunk.folder.mkdir(parents=True)
    (trunk.folder / "log.txt").write_text("step 1\nerror: no luck\n")
    state, reported = run_sweep([trunk], fake := FakeLauncher({40: [1, 3]}))
    assert (fake.started, reported) == ([40, 40], [(40, 1, True), (40, 3, False)])
    assert (state.done, state.failed) == ([], [trunk])
    assert json.loads((trunk.folder / EXIT).read_text()) == {"status": 3, "last_words": "error: no luck"}
    state, reported = run_sweep([trunk], fake := FakeLauncher({40: [1, 3]}), retries=2)
    assert (fake.started, reported) == ([40, 40, 40], [(40, 1, True), (40, 3, True), (40, 0, False)])
    assert (state.done, state.failed) == ([trunk], [])


def test_preempted_runs_resume_without_limit(runs) -> None:
    state, _ = run_sweep([runs[2]], fake := FakeLauncher({40: [STOPPED] * 5}), retries=0)
    assert len(fake.started) == 6 and not state.failed


def test_a_stop_file_ends_the_sweep_instead_of_restarting_the_run_forever(runs, tmp_path) -> None:
    stop_file = tmp_path / "STOP"
    config = replace(runs[2].config, misc=replace(runs[2].config.misc, stop_file=str(stop_file)))
    trunk = replace(runs[2], config=config)
    fake = FakeLauncher({40: [STOPPED]}, at_poll=stop_file.touch)
    state, _ = run_sweep([trunk], fake, is_whole=False)
    assert (fake.started, state.waiting, state.failed) == ([40], [trunk], [])


def test_branches_wait_for_their_trunk_and_start_at_its_checkpoint(runs) -> None:
    state = SweepState(list(runs))
    assert [run.plan.n_steps for run in state.find_ready()] == [40]
    leave_checkpoint(runs[2], 5)
    assert [run.plan.n_steps for run in state.find_ready()] == [40, 10]
    leave_checkpoint(runs[2], 10, ".preempt")  # is deleted when the trunk resumes
    assert len(state.find_ready()) == 2
    at_10 = leave_checkpoint(runs[2], 10)
    assert [run.plan.n_steps for run in state.find_ready()] == [40, 20, 10]
    prepare_run(runs[1])
    assert f"branch_from: {at_10}" in (runs[1].folder / "config.yaml").read_text()


def test_without_its_trunk_a_branch_starts_from_the_last_checkpoint(runs) -> None:
    _, reported = run_sweep(runs, fake := FakeLauncher({40: [1, 1]}))
    assert fake.started[:2] == [40, 40]
    assert sorted(fake.started[2:]) == [10, 20]
    assert "branch_from: null" in (runs[0].folder / "config.yaml").read_text()
    leave_checkpoint(runs[2], 7)
    assert find_checkpoint(runs[2].folder, 10).name.endswith("000007")
    assert find_checkpoint(runs[2].folder, 10, exact=True) is None
    assert find_checkpoint(runs[2].folder, 6) is None


def test_one_signal_stops_running_jobs_and_starts_no_more(runs) -> None:
    fake = FakeLauncher(None, at_poll=lambda: os.kill(os.getpid(), signal.SIGINT))
    state, _ = run_sweep(runs, fake, is_whole=False)
    assert [job.run.plan.n_steps for job in fake.stopped] == fake.started == [40]
    assert len(state.waiting) == 2


def test_a_closed_terminal_or_an_error_detaches_the_jobs(runs) -> None:
    fake = FakeLauncher(None, at_poll=lambda: os.kill(os.getpid(), signal.SIGHUP))
    run_sweep(runs, fake, is_whole=False)
    assert not fake.stopped and [job.run.plan.n_steps for job in fake.left] == [40]
    fake = FakeLauncher(None, at_poll=Mock(side_effect=OSError("no answer")))
    with pytest.raises(OSError, match="no answer"):
        run_sweep(runs, fake)
    assert (len(fake.left), fake.stopped) == (1, [])


def test_runs_are_packed_by_places_and_by_memory(runs) -> None:
    need = estimate_memory(runs[0].config)
    for memory, places, expected in ((need * 10, 3, 3), (need * 2.5, 3, 2), (need * 0.1, 3, 1)):
        launcher = LocalLauncher([Device(places, memory)], on_gpus=True)
        while (devices := launcher.choose_devices(runs[0])) is not None:
            launcher.active.append(Job(runs[0], None, devices))
        assert len(launcher.active) == expected


def test_runs_go_to_the_emptiest_device_and_several_gpus_are_taken_whole(runs) -> None:
    launcher = LocalLauncher([Device(2, 1e12)] * 3, on_gpus=True)
    for expected in ([0], [1], [2], [0]):
        devices = launcher.choose_devices(runs[0])
        assert devices == expected
        launcher.active.append(Job(runs[0], None, devices))
    wide = LocalLauncher([Device(2, 1e12)] * 5, on_gpus=True, gpus_per_run=2)
    for expected in ([0, 1], [2, 3], None):
        devices = wide.choose_devices(runs[0])
        assert devices == expected
        wide.active.append(Job(runs[0], None, devices or []))


def test_the_table_shows_the_progress_of_each_run_and_is_redrawn_in_place(runs, monkeypatch) -> None:
    trunk = runs[2]
    prepare_run(trunk)
    line = {"kind": "train", "step": 10, "loss": 3.5, "tps": 64.0}
    (trunk.folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    state = SweepState(list(runs[:2]), [Job(trunk, None)])
    name, counts = (
        "autoregressive-small-2.56ktok-seed0",
        "0 of 3 runs done, 1 running, 2 waiting; about 35 s left",
    )
    # 30 steps of 64 tokens at 64 tokens a second are left
    assert format_job_row(state.running[0]) == (name, "10", "40", "25%", "3.5000", "64", "30 s")

    out = TerminalStream(monkeypatch)
    # 20 s for each run, of which the trunk has done a quarter: 15 s and 20 s in one lane, 20 s in the other
    speed = Speed("a test", lambda run: 1e99, startup_s=20.0)
    live = LiveTable(3, speed, 2, out, clock=iter(range(100)).__next__)
    live.draw(state)
    live.draw(state)
    head, row, last = read_screen(out.getvalue())[-3:]
    assert head.split() == ["running", "step", "of", "done", "loss", "tokens/s", "left"]
    assert row.split() == [name, "10", "40", "25%", "3.5000", "64", "30", "s"] and last == counts


def test_the_progress_of_a_branch_counts_its_own_steps(runs) -> None:
    middle = runs[1]
    prepare_run(middle)
    (middle.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 15}\n')
    assert Job(middle, None).fraction_done() == 0.5  # steps 11 to 20
