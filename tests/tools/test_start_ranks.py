"""Tests of tools/start_ranks.py: the variables of the ranks, signals and the exit status."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.train import local_ranks

# one write per line: with PYTHONUNBUFFERED print makes several writes, and the lines of two ranks are mixed
WORDS = """import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


@pytest.fixture
def script(tmp_path: Path):
    """A function that writes a script of the given lines, which can use `rank` and `say`."""

    def write(body: str) -> Path:
        (tmp_path / "script.py").write_text(WORDS + body)
        return tmp_path / "script.py"

    return write


def start_tool(root: Path, n_ranks: int, script: Path) -> subprocess.Popen:
    command = [sys.executable, str(root / "tools" / "start_ranks.py"), str(n_ranks), str(script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("n_ranks", "n_threads", "expected"), [(1, None, "None"), (2, "3", "3"), (3, None, "1")]
)
def test_each_rank_has_its_number_one_core_by_default_and_the_address_of_all(
    cli, script, monkeypatch: pytest.MonkeyPatch, n_ranks: int, n_threads: str | None, expected: str
) -> None:
    """A single rank uses all cores by default."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS MASTER_PORT"
    path = script(f"say(*(os.environ.get(name) for name in '{names}'.split()), *sys.argv[1:])")
    env = {} if n_threads is None else {"OMP_NUM_THREADS": n_threads}
    output = cli("ranks", n_ranks, path, "--word", env=env).output
    lines = sorted(line.split() for line in output.splitlines())
    n, port = str(n_ranks), lines[0][6]
    assert lines == [[str(k), str(k), n, n, "127.0.0.1", expected, port, "--word"] for k in range(n_ranks)]


def test_the_port_is_reserved_for_the_ranks() -> None:
    with local_ranks.reserve_port() as port:
        for is_rank in (True, False):
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_rank)
                if is_rank or sys.platform != "linux":
                    listener.bind(("127.0.0.1", port))
                    listener.listen()
                else:
                    with pytest.raises(OSError, match="Address already in use"):
                        listener.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("sys.exit(75 if rank == 1 else 0)", 75),
        ("sys.exit(3 if rank == 1 else 75)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)", 128 + 9),
        ("sys.exit(1) if rank == 0 else time.sleep(600)", 1),
    ],
)
def test_the_status_is_that_of_the_ranks_and_none_is_left(cli, script, body: str, status: int) -> None:
    path = script(f"say(os.getpid())\n{body}")
    for process in map(int, cli("ranks", 2, path, status=status).output.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_reaches_every_rank_and_they_have_time_to_save(root: Path, script, number: int) -> None:
    path = script(
        "save = lambda *_: (time.sleep(0.3), say('saved', rank), os._exit(75))\n"
        f"signal.signal({int(number)}, save)\n"
        "say('ready'); time.sleep(600)"
    )
    tool = start_tool(root, 2, path)
    assert [tool.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    tool.send_signal(number)
    words = tool.communicate(timeout=240)[0].split()
    assert (tool.returncode, sorted(words)) == (75, ["0", "1", "saved", "saved"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_killing_the_tool_leaves_no_rank_behind(root: Path, script) -> None:
    tool = start_tool(root, 2, script("say(os.getpid()); time.sleep(600)"))
    ranks = [int(tool.stdout.readline()) for _ in range(2)]
    tool.kill()
    # the output is closed when the last rank has ended, long before 600 s
    assert tool.communicate(timeout=240)[0] == ""
    assert tool.returncode == -signal.SIGKILL and len(set(ranks)) == 2
