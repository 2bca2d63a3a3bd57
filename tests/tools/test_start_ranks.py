"""Ranks of one machine: who they are, and the status that tells what became of them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.processes import die_with_parent
from megatron.train import local_ranks

# one write a line: under PYTHONUNBUFFERED print makes several, and those of two ranks get mixed
WORDS = """import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def start(root: Path, tmp_path: Path, n_ranks: int, body: str) -> subprocess.Popen:
    """The tool on a script of the given lines, which know their `rank` and how to `say`."""
    script = tmp_path / "script.py"
    script.write_text(WORDS + body)
    command = [sys.executable, str(root / "tools" / "start_ranks.py"), str(n_ranks), str(script), "--word"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_each_rank_knows_its_number_and_all_one_address(root, tmp_path) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    body = f"say(*(os.environ[name] for name in '{names}'.split()), *sys.argv[1:])"
    tool = start(root, tmp_path, 3, body)
    said = sorted(line.split() for line in tool.communicate(timeout=240)[0].splitlines())
    assert tool.returncode == 0
    port = said[0][5]
    assert said == [[str(k), str(k), "3", "3", "127.0.0.1", port, "--word"] for k in range(3)]


def test_the_port_is_for_the_ranks_alone(root, tmp_path) -> None:
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
    said = start(root, tmp_path, 1, body).communicate(timeout=240)[0].splitlines()
    wanted = "Address already in use" if sys.platform == "linux" else "has it"
    assert said == ["a rank has it", f"another {wanted}"]


@pytest.mark.parametrize(
    ("n_ranks", "own", "told"), [(1, None, ["None"]), (2, None, ["1", "1"]), (2, "3", ["3", "3"])]
)
def test_one_of_several_ranks_has_one_core_and_a_single_one_all(
    root, tmp_path, monkeypatch, n_ranks, own, told
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if own is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", own)
    tool = start(root, tmp_path, n_ranks, "say(os.environ.get('OMP_NUM_THREADS'))")
    assert tool.communicate(timeout=240)[0].split() == told


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
    tool = start(root, tmp_path, 2, body)
    # its output ends when the last rank has ended, far before 600 s
    tool.communicate(timeout=240)
    assert tool.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_they_have_time_to_save(root, tmp_path, number) -> None:
    body = (
        "save = lambda *_: (time.sleep(1), say('saved', rank), os._exit(75))\n"
        f"signal.signal({int(number)}, save)\n"
        "say('ready'); time.sleep(600)"
    )
    tool = start(root, tmp_path, 2, body)
    assert tool.stdout is not None
    assert [tool.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    tool.send_signal(number)
    began = time.monotonic()
    said = tool.communicate(timeout=240)[0].split()
    assert (tool.returncode, sorted(said)) == (75, ["0", "1", "saved", "saved"])
    assert time.monotonic() - began < 300


def test_a_signal_that_comes_before_there_are_ranks_is_kept_for_them(monkeypatch) -> None:
    class Early(subprocess.Popen):
        """A rank just before whose start the tool is told to stop."""

        def __init__(self, *words: object, **more: object) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)
            super().__init__(*words, **more)

    monkeypatch.setattr(local_ranks.subprocess, "Popen", Early)
    # what has no handler is ended by it
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert local_ranks.run_ranks(command, 1) == 128 + signal.SIGUSR1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with the one that started it")
def test_a_rank_whose_starter_is_gone_already_does_not_begin(monkeypatch) -> None:
    ask_the_kernel = die_with_parent()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    begun = subprocess.run(["echo", "begun"], preexec_fn=ask_the_kernel, capture_output=True, timeout=240)
    assert (begun.returncode, begun.stdout) == (1, b"")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with the one that started it")
def test_killing_the_tool_leaves_no_rank_behind(root, tmp_path) -> None:
    tool = start(root, tmp_path, 2, "say(os.getpid()); time.sleep(600)")
    assert tool.stdout is not None
    ranks = [int(tool.stdout.readline()) for _ in range(2)]
    tool.kill()
    # its output ends when the last rank has ended, far before 600 s
    assert tool.communicate(timeout=240)[0] == ""
    assert tool.returncode == -signal.SIGKILL
    assert len(set(ranks)) == 2


def test_no_ranks_at_all_is_a_usage_error(root) -> None:
    command = [sys.executable, str(root / "tools" / "start_ranks.py"), "0", "x.py"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert told.returncode == 2
    assert "N: found '0', wanted a whole number of 1 or more" in told.stderr
