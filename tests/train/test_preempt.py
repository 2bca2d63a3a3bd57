"""Asked to stop, all ranks save once and leave with 75; nothing is lost."""

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
from megatron.run_dir import read_metrics


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run) if line["kind"] == "train"]


@pytest.mark.ranks
def test_one_rank_is_signalled_and_all_save_once_and_exit_75(start, pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=30000"]
    ranks = start(words, n_ranks=2)
    deadline = time.monotonic() + 240
    while len(losses(run)) < 3:
        assert time.monotonic() < deadline and ranks[1].poll() is None
        time.sleep(0.02)
    ranks[1].send_signal(signal.SIGUSR1)
    told = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75], told
    saved = layout.find(run / "checkpoints")
    assert [found.is_preempt for found in saved] == [True]
    step = store.verify(saved[0].path)["step"]
    assert 3 <= step < 30000
    # the time is up at once: whoever goes on saves where it began
    again = pretrain([*words, "misc.max_hours=1e-9"])
    assert again.returncode == 75
    assert f"going on after step {step}" in again.stderr
    assert "misc.max_hours=1e-09" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_while_the_process_ends_does_not_change_its_status(root, number) -> None:
    code = (
        "import atexit, os, pathlib, sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from megatron.command import load_tool\n"
        f"atexit.register(lambda: os.kill(os.getpid(), {int(number)}))\n"
        f"load_tool(pathlib.Path({str(root / 'tools' / 'pretrain.py')!r})).leave(75)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=240).returncode == 75


def test_checkpoints_to_go_on_from_are_made_by_the_clock(pretrain, words, tmp_path) -> None:
    run = tmp_path / "run"
    words = [*words, f"logging.run_dir={run}", "checkpoint.preempt_every_minutes=1e-9"]
    done = pretrain([*words, "checkpoint.keep_last=100", "checkpoint.keep_every=6"])
    assert done.returncode == 0, done.stderr
    saved = layout.find(run / "checkpoints")
    # before each of the 12 steps, and at the end
    assert [found.is_preempt for found in saved] == [True] * 12 + [False]
    assert [store.verify(found.path)["step"] for found in saved] == list(range(13))


def start_in_a_terminal(command: list[str], run: Path) -> tuple[int, int]:
    """(process, terminal) of a command in a terminal of its own, when it has reported three steps."""
    process, terminal = pty.fork()
    if not process:
        os.execv(command[0], command)
    deadline = time.monotonic() + 240
    while len(losses(run)) < 3:
        assert time.monotonic() < deadline
        os.set_blocking(terminal, False)
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 16)
        time.sleep(0.02)
    return process, terminal


def end_of(process: int, seconds: float = 120) -> int:
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
            raise AssertionError("it does not end")
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
    assert end_of(process) == 75
    assert [found.is_preempt for found in layout.find(run / "checkpoints")] == [True]


def test_a_run_under_nohup_does_not_mind_that_its_terminal_is_closed(root, words, tmp_path) -> None:
    run, config = tmp_path / "run", tmp_path / "empty.yaml"
    config.write_text("name: test\n")
    words = [*words, f"logging.run_dir={run}", "lr_scheduler.total_iterations=30000"]
    words = [sys.executable, str(root / "tools" / "pretrain.py"), str(config), *words]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(["nohup", *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while len(losses(run)) < 3:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGHUP)
        n = len(losses(run))
        while len(losses(run)) < n + 20:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75
    finally:
        process.kill()
        process.wait()
