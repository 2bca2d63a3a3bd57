"""Preemption: on a signal all ranks save once and exit with 75."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from megatron.checkpoint import store
from tests.train.conftest import list_saved, read_step
from tests.train.faults import ignore_hangup

LONG = "lr_scheduler.total_iterations=30000"


@pytest.mark.ranks
def test_a_signal_to_a_rank_makes_all_save_and_exit_75(start, pretrain, tmp_path) -> None:
    run = tmp_path / "run"
    ranks = start(run, LONG)
    ranks[1].wait_for(lambda: read_step(run) >= 3)
    ranks[1].send_signal(signal.SIGUSR1)
    assert [rank.wait().status for rank in ranks] == [75, 75]
    saved = list_saved(run)
    assert [checkpoint.is_preempt for checkpoint in saved] == [True]
    step = store.verify_checkpoint(saved[0].path)["step"]
    assert 3 <= step < 30000
    # the time limit is reached at once: the resumed run saves at the step where it began
    again = pretrain(run, LONG, "misc.max_hours=1e-9", status=75)
    assert f"resuming after step {step}" in again.error and "misc.max_hours=1e-09" in again.error
    # the stop file exists: it saves again before the next step
    again = pretrain(run, LONG, f"misc.stop_file={run / 'config.yaml'}", status=75)
    assert f"resuming after step {step}" in again.error


def test_a_run_under_nohup_ignores_sighup(start, tmp_path) -> None:
    (rank,) = start(tmp_path / "run", LONG, n_ranks=1, change=ignore_hangup)
    rank.wait_for(lambda: read_step(tmp_path / "run") >= 3)
    rank.send_signal(signal.SIGHUP)
    n = read_step(tmp_path / "run")
    rank.wait_for(lambda: read_step(tmp_path / "run") >= n + 20)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait().status == 75


def test_a_late_signal_does_not_change_the_status(root) -> None:
    code = (
        "import atexit, os, pathlib, sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from tests.tool_modules import load_tool\n"
        f"for number in ({int(signal.SIGTERM)}, {int(signal.SIGUSR1)}):\n"
        "    atexit.register(os.kill, os.getpid(), number)\n"
        f"load_tool(pathlib.Path({str(root / 'tools' / 'pretrain.py')!r})).exit_process(75)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 75


def test_resume_checkpoints_are_saved_by_the_clock(pretrain, tmp_path) -> None:
    every_step = "checkpoint.preempt_every_minutes=1e-9"
    pretrain(tmp_path, every_step, "checkpoint.keep_last=100", "checkpoint.keep_every=6")
    saved = list_saved(tmp_path)
    # before each of the 12 steps, and at the end
    assert [checkpoint.is_preempt for checkpoint in saved] == [True] * 12 + [False]
    assert [store.verify_checkpoint(checkpoint.path)["step"] for checkpoint in saved] == list(range(13))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_exits_75(root, words, config_file, tmp_path, n_ranks) -> None:
    run = tmp_path / "run"
    start = [] if n_ranks == 1 else [str(root / "tools" / "start_ranks.py"), str(n_ranks)]
    command = [sys.executable, *start, str(root / "tools" / "pretrain.py"), str(config_file)]
    process, terminal = pty.fork()
    if not process:
        os.execv(command[0], [*command, *words, LONG, f"logging.run_dir={run}"])
    while read_step(run) < 3:
        os.read(terminal, 1 << 16)  # waits for the next line; fails if the process has ended
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 75
    assert [checkpoint.is_preempt for checkpoint in list_saved(run)] == [True]
