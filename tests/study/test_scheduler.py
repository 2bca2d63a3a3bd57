"""The scheduler of a sweep: retries, preemption, trunks, stopping; with fake runs that end at once."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from megatron.cli import STOPPED
from megatron.plan.memory import estimate_memory
from megatron.plan.run_dir import EXIT, RESULT
from megatron.study.ladder import PlannedRun, expand_study, read_study_plan
from megatron.study.launchers.launch import Job, Launcher, SweepState, find_checkpoint, prepare_run, run_all
from megatron.study.launchers.local import Device, LocalLauncher
from megatron.study.price import Speed
from megatron.study.sweep import LiveTable, format_job_row
from tests.screen import TerminalStream, render_screen

STUDY = """
name: tiny
directory: {folder}/study
run:
  dataset: {{path_train: {folder}/text, seq_len: 16, batch_size: 4}}
  lr_scheduler: {{kind: wsd, warmup_iterations: 2, decay_fraction: 0.5}}
sizes:
  small: {{d_model: 16, n_heads: 2, n_layers: 1}}
cells: [{{size: small, tokens: [640, 1280, 2560]}}]
"""


@pytest.fixture
def runs(tmp_path: Path) -> list[PlannedRun]:
    """10, 20 and 40 steps; the first two branch from the third, at 5 and 10."""
    (tmp_path / "text.json").write_text(json.dumps({"tokens": 6401, "tokenizer": {"n_tokens": 300}}))
    (tmp_path / "study.yaml").write_text(STUDY.format(folder=tmp_path))
    return expand_study(read_study_plan(tmp_path / "study.yaml"))


def write_result(run: PlannedRun) -> None:
    (run.folder / RESULT).write_text(json.dumps({"identity": run.plan.identity, "loss": 1.0, "wall_s": 1.0}))


def leave_checkpoint(run: PlannedRun, step: int, suffix: str = "") -> Path:
    path = run.folder / "checkpoints" / f"step.20260101-000000-{step:06d}{suffix}"
    path.mkdir(parents=True)
    (path / "meta.json").write_text(json.dumps({"step": step}))
    return path


class FakeLauncher(Launcher):
    """Launcher that ends each job at once with the next status of its run's script (default 0)."""

    def __init__(self, script: dict[int, list[int]], alive: Sequence[Job] = ()) -> None:
        self.script, self.alive, self.started, self.stopped, self.left = script, list(alive), [], [], []

    def start(self, runs: Sequence[PlannedRun]) -> list[Job]:
        for run in runs:
            if run not in [job.run for job in self.alive]:
                prepare_run(run)
                self.started.append(run.plan.n_steps)
        return [Job(run, None) for run in runs]

    def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
        over = []
        for job in jobs:
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


def run_to_end(
    runs: Sequence[PlannedRun], fake: FakeLauncher, retries: int = 1
) -> tuple[SweepState, list[tuple]]:
    reported: list[tuple] = []
    state, whole = run_all(
        runs,
        fake,
        lambda state: None,
        lambda job, *how: reported.append((job.run.plan.n_steps, *how)),
        retries,
        0,
    )
    assert whole
    return state, reported


def test_a_failed_run_is_retried_up_to_the_limit(runs) -> None:
    alone = [run for run in runs if not run.branch]
    state, reported = run_to_end(alone, fake := FakeLauncher({40: [1, 3]}), retries=2)
    assert fake.started == [40, 40, 40]
    assert reported == [(40, 1, True), (40, 3, True), (40, 0, False)]
    assert [run.plan.n_steps for run in state.done] == [40]


def test_a_run_that_fails_every_time_is_given_up_with_its_error(runs) -> None:
    trunk = runs[2]
    trunk.folder.mkdir(parents=True)
    (trunk.folder / "log.txt").write_text("step 1\nerror: no luck\n")
    state, reported = run_to_end([trunk], fake := FakeLauncher({40: [1, 3]}))
    assert (fake.started, reported[-1]) == ([40, 40], (40, 3, False))
    assert state.failed == [trunk]
    assert json.loads((trunk.folder / EXIT).read_text()) == {"status": 3, "last_words": "error: no luck"}


def test_preempted_runs_resume_without_limit(runs) -> None:
    state, reported = run_to_end([runs[2]], fake := FakeLauncher({40: [STOPPED] * 5}), retries=0)
    assert len(fake.started) == 6
    assert not state.failed


def test_a_stop_file_ends_the_sweep_instead_of_restarting_the_run_forever(runs, tmp_path) -> None:
    config = replace(runs[2].config, misc=replace(runs[2].config.misc, stop_file=str(tmp_path / "STOP")))
    trunk = replace(runs[2], config=config)

    class Stops(FakeLauncher):
        def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
            (tmp_path / "STOP").touch()
            return [(job, STOPPED) for job in jobs]

    fake = Stops({})
    state, whole = run_all([trunk], fake, lambda state: None, lambda *job: None, poll_s=0)
    assert not whole
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
    _, reported = run_to_end(runs, fake := FakeLauncher({40: [1, 1]}))
    assert fake.started[:2] == [40, 40]
    assert sorted(fake.started[2:]) == [10, 20]
    assert "branch_from: null" in (runs[0].folder / "config.yaml").read_text()
    leave_checkpoint(runs[2], 7)
    assert find_checkpoint(runs[2].folder, 10).name.endswith("000007")
    assert find_checkpoint(runs[2].folder, 10, exact=True) is None
    assert find_checkpoint(runs[2].folder, 6) is None


def test_runs_that_an_earlier_sweep_started_are_followed_and_not_started_twice(runs) -> None:
    trunk = runs[2]
    prepare_run(trunk)
    _, reported = run_to_end([trunk], fake := FakeLauncher({}, alive=[Job(trunk, None)]))
    assert (fake.started, reported) == ([], [(40, 0, False)])


def test_one_signal_stops_running_jobs_and_starts_no_more(runs) -> None:
    class Endless(FakeLauncher):
        def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
            os.kill(os.getpid(), signal.SIGINT)
            return []

    fake = Endless({})
    state, whole = run_all(runs, fake, lambda state: None, lambda *job: None, poll_s=0)
    assert not whole
    assert [job.run.plan.n_steps for job in fake.stopped] == fake.started == [40]
    assert len(state.waiting) == 2


def test_a_closed_terminal_or_an_error_detaches_the_jobs(runs) -> None:
    class HungUp(FakeLauncher):
        def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
            os.kill(os.getpid(), signal.SIGHUP)
            return []

    class Broken(FakeLauncher):
        def collect_ended(self, jobs: Sequence[Job]) -> list[tuple[Job, int]]:
            raise OSError("no answer")

    fake = HungUp({})
    _, whole = run_all(runs, fake, lambda state: None, lambda *job: None, poll_s=0)
    assert (whole, fake.stopped) == (False, [])
    assert [job.run.plan.n_steps for job in fake.left] == [40]
    fake = Broken({})
    with pytest.raises(OSError, match="no answer"):
        run_all(runs, fake, lambda state: None, lambda *job: None, poll_s=0)
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
    head, row, last = render_screen(out.getvalue())
    assert head.split() == ["running", "step", "of", "done", "loss", "tokens/s", "left"]
    assert row.split() == [name, "10", "40", "25%", "3.5000", "64", "30", "s"] and last == counts
    live.view.print_line("[1/3] done")
    assert render_screen(out.getvalue()) == ["[1/3] done", head, row, counts]
    live.view.close()
    assert render_screen(out.getvalue()) == ["[1/3] done"]
    plain = StringIO()
    LiveTable(3, speed, 2, plain).draw(state)
    assert plain.getvalue() == ""


def test_the_progress_of_a_branch_counts_its_own_steps(runs) -> None:
    middle = runs[1]
    prepare_run(middle)
    (middle.folder / "metrics.jsonl").write_text('{"kind": "train", "step": 15}\n')
    assert Job(middle, None).fraction_done() == 0.5  # of steps 11 to 20
