"""Preemption: on a signal all ranks save once and exit with 75."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.checkpoint import layout, store
from tests.train.conftest import read_losses


@pytest.mark.slow
@pytest.mark.ranks
def test_a_signal_to_a_single_rank_makes_all_save_once_and_exit_75(start, pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=30000"]
    ranks = start(words, n_ranks=2)
    deadline = time.monotonic() + 240
    while len(read_losses(run)) < 3:
        assert time.monotonic() < deadline and ranks[1].poll() is None
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGUSR1)
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], outputs
    saved = layout.find_checkpoints(run / "checkpoints")
    assert [checkpoint.is_preempt for checkpoint in saved] == [True]
    step = store.verify_checkpoint(saved[0].path)["step"]
    assert 3 <= step < 30000
    # the time limit is reached at once: the resumed run saves at the step where it began
    again = pretrain([*words, "misc.max_hours=1e-9"])
    assert again.returncode == 75
    assert f"resuming after step {step}" in again.stderr
    assert "misc.max_hours=1e-09" in again.stderr
    # the stop file exists: it saves again before the next step
    again = pretrain([*words, f"misc.stop_file={run / 'config.yaml'}"])
    assert again.returncode == 75 and f"resuming after step {step}" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_while_the_process_ends_does_not_change_its_status(root, number) -> None:
    code = (
        "import atexit, os, pathlib, sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from tests.tool_modules import load_tool\n"
        f"atexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n"
        f"load_tool(pathlib.Path({str(root / 'tools' / 'pretrain.py')!r})).exit_process(75)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 75


def test_resume_checkpoints_are_saved_by_the_clock(pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "checkpoint.preempt_every_minutes=1e-9"]
    done = pretrain([*words, "checkpoint.keep_last=100", "checkpoint.keep_every=6"])
    assert done.returncode == 0, done.stderr
    saved = layout.find_checkpoints(run / "checkpoints")
    # before each of the 12 steps, and at the end
    assert [checkpoint.is_preempt for checkpoint in saved] == [True] * 12 + [False]
    assert [store.verify_checkpoint(checkpoint.path)["step"] for checkpoint in saved] == list(range(13))


def start_in_a_terminal(command: list[str], run: Path) -> tuple[int, int]:
    """Start a command in its own terminal; return (process, terminal) after three logged steps."""
    process, terminal = pty.fork()
    if not process:
        os.execv(command[0], command)
    deadline = time.monotonic() + 240
    while len(read_losses(run)) < 3:
        assert time.monotonic() < deadline
        os.set_blocking(terminal, False)
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.02)
    return process, terminal


def wait_for_end(process: int, seconds: float = 120) -> int:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            raise AssertionError("the process does not end")
        time.sleep(0.05)


@pytest.mark.ranks
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_saves_and_exits_75(root, words, tmp_path, n_ranks) -> None:
    run, config = tmp_path / "run", tmp_path / "empty.yaml"
    config.write_text("name: test\n")
    words = [*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=30000"]
    start = [] if n_ranks == 1 else [str(root / "tools" / "start_ranks.py"), str(n_ranks)]
    command = [sys.executable, *start, str(root / "tools" / "pretrain.py"), str(config), *words]
    process, terminal = start_in_a_terminal(command, run)
    os.close(terminal)
    assert wait_for_end(process) == 75
    assert [checkpoint.is_preempt for checkpoint in layout.find_checkpoints(run / "checkpoints")] == [True]


def test_a_run_under_nohup_survives_the_end_of_its_terminal(root, words, tmp_path) -> None:
    run, config = tmp_path / "run", tmp_path / "empty.yaml"
    config.write_text("name: test\n")
    words = [*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=30000"]
    words = [sys.executable, str(root / "tools" / "pretrain.py"), str(config), *words]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(["nohup", *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while len(read_losses(run)) < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        n = len(read_losses(run))
        while len(read_losses(run)) < n + 20:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        process.kill()
        process.wait()
