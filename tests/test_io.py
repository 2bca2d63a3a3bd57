"""File locks with the kernel's locks and without: one process at a time, and none waits for a dead one."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron import io
from megatron.run_dir import LOCK, lock, open_alone

HOLD = (
    "import fcntl, os, sys, time\n"
    "from pathlib import Path\n"
    "def refuse(*_): raise OSError({number}, os.strerror({number}))\n"
    "if {number}: fcntl.flock = refuse\n"
    "from megatron.io import take_lock\n"
    "lock = take_lock(Path({path!r}))\n"
    "print('locked' if lock else 'refused', flush=True)\n"
    "time.sleep({seconds}) if lock else None\n"
)
Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture(
    params=[0, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=["flock", "ENOSYS", "ENOTSUP", "ENOLCK"]
)
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """0, or what flock fails with in this process and in those of `hold`."""
    if request.param:
        refuse_flock(monkeypatch, request.param)
    return request.param


def refuse_flock(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def hold(root: Path):
    """Start a process that takes a lock and keeps it; the fixture returns when it has reported."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, number: int, seconds: float = 60) -> subprocess.Popen[str]:
        code = HOLD.format(number=number, path=str(path), seconds=seconds)
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        process.first = process.stdout.readline().strip()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_process_is_refused_and_a_killed_one_is_not_waited_for(tmp_path, number, hold) -> None:
    path = tmp_path / ".lock"
    holder = hold(path, number)
    assert holder.first == "locked"
    assert hold(path, number).first == "refused"
    assert io.take_lock(path) is None
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    started = time.monotonic()
    held = io.take_lock(path)
    assert held is not None
    assert time.monotonic() - started < 5
    held.close()
    held.close()
    assert names(tmp_path) == [".lock"]


def test_the_lock_ends_with_close_and_with_the_process(tmp_path, number, hold) -> None:
    path = tmp_path / ".lock"
    first = io.take_lock(path)
    assert first is not None and io.take_lock(path) is None
    first.close()
    assert hold(path, number, seconds=0).wait(60) == 0
    assert hold(path, number).first == "locked"


def test_who_waits_gets_the_lock_when_it_is_released(tmp_path, number) -> None:
    path = tmp_path / ".lock"
    held = io.take_lock(path)
    threading.Timer(0.5, held.close).start()
    started = time.monotonic()
    with io.wait_for_lock(path):
        assert 0.3 < time.monotonic() - started < 30
        assert io.take_lock(path, wait_s=0.2) is None


def test_the_error_names_the_process_where_it_is_known(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    with open_alone(tmp_path / "x.partial") as file:
        file.write(b"half")
        with pytest.raises(ValueError, match=rf"process {os.getpid()} on \S+ is at work on it"):
            open_alone(tmp_path / "x.partial")
    assert names(tmp_path) == ["x.partial"]
    assert (tmp_path / "x.partial").read_bytes() == b"half"


def test_another_error_of_the_file_system_is_not_taken_for_missing_locks(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        lock(tmp_path)
    assert names(tmp_path) == [LOCK]


def leave_record(path: Path, **changes: object) -> Path:
    """The lock file of a process of another machine."""
    owner = path.with_name(path.name + io.OWNER)
    record = {**io._this_process(), "host": "elsewhere", "machine": "another", "token": "theirs", **changes}
    owner.write_text(json.dumps(record))
    return owner


def test_a_process_of_another_machine_is_dead_when_it_shows_no_sign_of_life(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(io, "WATCH_S", 0.6)
    owner = leave_record(tmp_path / "x")
    os.utime(owner, (1, 1))  # its clock, or ours, may be years off
    assert io.take_lock(tmp_path / "x", watch=False) is None
    started = time.monotonic()
    held = io.take_lock(tmp_path / "x")
    assert held is not None and time.monotonic() - started > 0.4
    assert json.loads(owner.read_text())["pid"] == os.getpid()
    held.close()
    assert names(tmp_path) == ["x"]


def test_a_process_of_another_machine_that_shows_a_sign_of_life_keeps_its_lock(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(io, "WATCH_S", 30.0)
    owner = leave_record(tmp_path / "x")
    threading.Timer(0.5, lambda: os.utime(owner, (5, 5))).start()
    started = time.monotonic()
    assert io.take_lock(tmp_path / "x") is None
    assert time.monotonic() - started < 10
    assert json.loads(owner.read_text())["token"] == "theirs"


def test_the_process_that_has_a_lock_file_shows_signs_of_life(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(io, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(io, "_heart", io._Heart())
    held = io.take_lock(tmp_path / "x")
    owner = tmp_path / f"x{io.OWNER}"
    os.utime(owner, (1, 1))
    end = time.monotonic() + 30
    while owner.stat().st_mtime == 1:
        assert time.monotonic() < end
        time.sleep(0.02)
    held.close()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00\xff"])
def test_a_lock_file_that_says_nothing_is_watched_like_one_of_another_machine(
    tmp_path, monkeypatch, content
) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(io, "WATCH_S", 0.3)
    (tmp_path / f"x{io.OWNER}").write_text(content)
    assert io.take_lock(tmp_path / "x", watch=False) is None
    held = io.take_lock(tmp_path / "x")
    assert held is not None
    held.close()


def test_a_number_that_another_process_has_now_is_not_the_dead_one(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    here = io._this_process()
    leave_record(tmp_path / "x", machine=here["machine"], pid=1, started="before the machine was on")
    held = io.take_lock(tmp_path / "x")
    assert held is not None
    held.close()


@pytest.mark.parametrize("links", [True, False])
def test_many_processes_at_once_never_have_it_together(tmp_path, monkeypatch, links, root) -> None:
    """Each adds 1 to a number it has read before, again and again, over the lock file of a dead process."""
    code = (
        "import fcntl, os, sys, time\n"
        "from pathlib import Path\n"
        "def refuse(*_): raise OSError(38, 'Function not implemented')\n"
        "fcntl.flock = refuse\n"
        f"os.link = os.link if {links} else lambda *_: (_ for _ in ()).throw(OSError(1, 'no links'))\n"
        "from megatron.io import wait_for_lock\n"
        "folder = Path(sys.argv[1])\n"
        "for _ in range(20):\n"
        "    with wait_for_lock(folder / 'x'):\n"
        "        n = int((folder / 'n').read_text())\n"
        "        time.sleep(0.002)\n"
        "        (folder / 'n').write_text(str(n + 1))\n"
    )
    leave_record(tmp_path / "x", machine=io._this_process()["machine"], pid=2**22 + 1)
    (tmp_path / "n").write_text("0")
    words = [sys.executable, "-c", code, str(tmp_path)]
    several = [subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    told = [process.communicate(timeout=120)[1] for process in several]
    assert [process.returncode for process in several] == [0] * 4, told
    assert (tmp_path / "n").read_text() == "80"
    assert names(tmp_path) == ["n", "x"]
    assert all(words.count("has no file locks") == 1 for words in told)
