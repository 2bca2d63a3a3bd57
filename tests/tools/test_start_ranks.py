"""Tests of tools/start_ranks.py: the variables of the ranks, signals and the exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.cli import die_with_parent
from megatron.train import local_ranks

# one write per line: with PYTHONUNBUFFERED print makes several writes, and the lines of two ranks are mixed
WORDS = """import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def start_tool(root: Path, tmp_path: Path, n_ranks: int, body: str) -> subprocess.Popen:
    """Start the tool on a script of the given lines, which can use `rank` and `say`."""
    script = tmp_path / "script.py"
    script.write_text(WORDS + body)
    command = [sys.executable, str(root / "tools" / "start_ranks.py"), str(n_ranks), str(script), "--word"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_each_rank_has_its_number_and_all_have_the_same_address(root, tmp_path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    body = f"say(*(os.environ[name] for name in '{names}'.split()), *sys.argv[1:])"
    tool = start_tool(root, tmp_path, 3, body)
    lines = sorted(line.split() for line in tool.communicate(timeout=240)[0].splitlines())
    assert tool.returncode == 0
    port = lines[0][5]
    assert lines == [[str(k), str(k), "3", "3", "127.0.0.1", port, "--word"] for k in range(3)]


def test_the_port_is_reserved_for_the_ranks(root, tmp_path) -> None:
    body = (
        "import socket\n"
        "for who in ('a rank', 'another'):\n"
        "    with socket.socket() as tried:\n"
        "        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, who == 'a rank')\n"
        "        try:\n"
        "            tried.bind(('127.0.0.1', int(os.environ['MASTER_PORT']))); tried.listen()\n"
        "            say(who, 'has it')\n"
        "        except OSError as error:\n"
        "            say(who, error.strerror)\n"
    )
    lines = start_tool(root, tmp_path, 1, body).communicate(timeout=240)[0].splitlines()
    expected = "Address already in use" if sys.platform == "linux" else "has it"
    assert lines == ["a rank has it", f"another {expected}"]


@pytest.mark.parametrize(
    ("n_ranks", "n_threads", "expected"), [(1, None, ["None"]), (2, None, ["1", "1"]), (2, "3", ["3", "3"])]
)
def test_each_of_several_ranks_uses_one_core_and_a_single_rank_uses_all(
    root, tmp_path, monkeypatch, n_ranks, n_threads, expected
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if n_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", n_threads)
    tool = start_tool(root, tmp_path, n_ranks, "say(os.environ.get('OMP_NUM_THREADS'))")
    assert tool.communicate(timeout=240)[0].split() == expected


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("sys.exit(75)", 75),
        ("sys.exit(75 if rank == 1 else 0)", 75),
        ("sys.exit(3 if rank == 1 else 75)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)", 128 + 9),
        ("sys.exit(1) if rank == 0 else time.sleep(600)", 1),
    ],
)
def test_the_status_is_that_of_the_ranks_and_none_is_left(root, tmp_path, body, status) -> None:
    tool = start_tool(root, tmp_path, 2, body)
    # the output is closed when the last rank has ended, long before 600 s
    tool.communicate(timeout=240)
    assert tool.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_they_have_time_to_save(root, tmp_path, number) -> None:
    body = (
        "save = lambda *_: (time.sleep(1), say('saved', rank), os._exit(75))\n"
        f"signal.signal({int(number)}, save)\n"
        "say('ready'); time.sleep(600)"
    )
    tool = start_tool(root, tmp_path, 2, body)
    assert tool.stdout is not None
    assert [tool.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    tool.send_signal(number)
    began = time.monotonic()
    words = tool.communicate(timeout=240)[0].split()
    assert (tool.returncode, sorted(words)) == (75, ["0", "1", "saved", "saved"])
    assert time.monotonic() - began < 300


def test_a_signal_that_arrives_before_the_ranks_start_is_passed_on_to_them(monkeypatch) -> None:
    class Early(subprocess.Popen):
        """A rank before whose start the tool receives a signal."""

        def __init__(self, *words: object, **more: object) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            super().__init__(*words, **more)

    monkeypatch.setattr(local_ranks.subprocess, "Popen", Early)
    # a rank without a handler is ended by the signal
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert local_ranks.run_ranks(command, 1) == 128 + signal.SIGUSR1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_rank_whose_starter_is_gone_already_does_not_begin(monkeypatch) -> None:
    ask_the_kernel = die_with_parent()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    begun = subprocess.run(["echo", "begun"], preexec_fn=ask_the_kernel, capture_output=True, timeout=240)
    assert (begun.returncode, begun.stdout) == (1, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_killing_the_tool_leaves_no_rank_behind(root, tmp_path) -> None:
    tool = start_tool(root, tmp_path, 2, "say(os.getpid()); time.sleep(600)")
    assert tool.stdout is not None
    ranks = [int(tool.stdout.readline()) for _ in range(2)]
    tool.kill()
    # the output is closed when the last rank has ended, long before 600 s
    assert tool.communicate(timeout=240)[0] == ""
    assert tool.returncode == -signal.SIGKILL
    assert len(set(ranks)) == 2


def test_zero_ranks_is_a_usage_error(root) -> None:
    command = [sys.executable, str(root / "tools" / "start_ranks.py"), "0", "x.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "N: got '0', expected a whole number of 1 or more" in done.stderr
