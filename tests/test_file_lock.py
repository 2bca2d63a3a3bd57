"""File locks with and without flock: one process at a time, and no wait for a dead process."""

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

from megatron import owner_file
from megatron.io import acquire_lock, open_exclusive, wait_for_lock
from megatron.plan.run_dir import LOCK, lock_run

HOLDER_CODE = (
    "import fcntl, os, sys, time\n"
    "from pathlib import Path\n"
    "def refuse(*_): raise OSError({number}, os.strerror({number}))\n"
    "if {number}: fcntl.flock = refuse\n"
    "from megatron.io import acquire_lock\n"
    "lock = acquire_lock(Path({path!r}))\n"
    "print('locked' if lock else 'refused', flush=True)\n"
    "time.sleep({seconds}) if lock else None\n"
)
StartHolder = Callable[..., subprocess.Popen[str]]


@pytest.fixture(
    params=[0, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK], ids=["flock", "ENOSYS", "ENOTSUP", "ENOLCK"]
)
def number(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Errno of flock in this process and in the processes of `hold`; 0: flock works."""
    if request.param:
        refuse_flock(monkeypatch, request.param)
    return request.param


def refuse_flock(monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSYS) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.fixture
def hold(root: Path):
    """Return a function that starts a process, which acquires and keeps a lock, and waits for its report."""
    started: list[subprocess.Popen[str]] = []

    def start(path: Path, number: int, seconds: float = 60) -> subprocess.Popen[str]:
        code = HOLDER_CODE.format(number=number, path=str(path), seconds=seconds)
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


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_process_is_refused_and_a_killed_owner_is_replaced_at_once(tmp_path, number, hold) -> None:
    path = tmp_path / ".lock"
    holder = hold(path, number)
    assert holder.first == "locked"
    assert hold(path, number).first == "refused"
    assert acquire_lock(path) is None
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    started = time.monotonic()
    lock = acquire_lock(path)
    assert lock is not None
    assert time.monotonic() - started < 5
    lock.close()
    lock.close()
    assert list_names(tmp_path) == [".lock"]


def test_the_lock_ends_with_close_and_with_the_process(tmp_path, number, hold) -> None:
    path = tmp_path / ".lock"
    first = acquire_lock(path)
    assert first is not None and acquire_lock(path) is None
    first.close()
    assert hold(path, number, seconds=0).wait(60) == 0
    assert hold(path, number).first == "locked"


def test_a_waiting_process_gets_the_released_lock(tmp_path, number) -> None:
    path = tmp_path / ".lock"
    lock = acquire_lock(path)
    threading.Timer(0.5, lock.close).start()
    started = time.monotonic()
    with wait_for_lock(path):
        assert 0.3 < time.monotonic() - started < 30
        assert acquire_lock(path, wait_s=0.2) is None


def test_the_error_names_the_owner_if_it_is_recorded(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    with open_exclusive(tmp_path / "x.partial") as file:
        file.write(b"half")
        with pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on \S+\. Wait until"):
            open_exclusive(tmp_path / "x.partial")
    assert list_names(tmp_path) == ["x.partial"]
    assert (tmp_path / "x.partial").read_bytes() == b"half"


def test_another_file_system_error_is_raised(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        lock_run(tmp_path)
    assert list_names(tmp_path) == [LOCK]


def write_foreign_record(path: Path, **changes: object) -> Path:
    """Write the lock file of a process of another machine."""
    owner = path.with_name(path.name + owner_file.OWNER)
    record = {
        **owner_file._process_record(),
        "host": "elsewhere",
        "machine": "another",
        "token": "theirs",
        **changes,
    }
    owner.write_text(json.dumps(record))
    return owner


def test_a_remote_process_without_heartbeat_is_treated_as_dead(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(owner_file, "WATCH_S", 0.6)
    owner = write_foreign_record(tmp_path / "x")
    os.utime(owner, (1, 1))  # the clocks of the two machines may differ by years
    assert acquire_lock(tmp_path / "x") is None
    started = time.monotonic()
    lock = acquire_lock(tmp_path / "x")
    assert lock is not None and time.monotonic() - started > 0.4
    assert json.loads(owner.read_text())["pid"] == os.getpid()
    lock.close()
    assert list_names(tmp_path) == ["x"]


def test_a_remote_process_with_a_heartbeat_keeps_its_lock(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(owner_file, "WATCH_S", 30.0)
    owner = write_foreign_record(tmp_path / "x")
    threading.Timer(0.5, lambda: os.utime(owner, (5, 5))).start()
    started = time.monotonic()
    assert acquire_lock(tmp_path / "x") is None
    assert time.monotonic() - started < 10
    assert json.loads(owner.read_text())["token"] == "theirs"


def test_the_owner_of_a_lock_file_touches_it(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(owner_file, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(owner_file, "_heartbeat", owner_file._Heartbeat())
    lock = acquire_lock(tmp_path / "x")
    owner = tmp_path / f"x{owner_file.OWNER}"
    os.utime(owner, (1, 1))
    end = time.monotonic() + 30
    while owner.stat().st_mtime == 1:
        assert time.monotonic() < end
        time.sleep(0.02)
    lock.close()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": 1}', "\x00\xff"])
def test_an_unreadable_lock_file_is_treated_like_a_remote_one(tmp_path, monkeypatch, content) -> None:
    refuse_flock(monkeypatch)
    monkeypatch.setattr(owner_file, "WATCH_S", 0.3)
    (tmp_path / f"x{owner_file.OWNER}").write_text(content)
    assert acquire_lock(tmp_path / "x") is None
    lock = acquire_lock(tmp_path / "x")
    assert lock is not None
    lock.close()


def test_a_reused_process_id_is_not_the_dead_owner(tmp_path, monkeypatch) -> None:
    refuse_flock(monkeypatch)
    current = owner_file._process_record()
    write_foreign_record(
        tmp_path / "x", machine=current["machine"], pid=1, started="before the machine was on"
    )
    lock = acquire_lock(tmp_path / "x")
    assert lock is not None
    lock.close()


@pytest.mark.parametrize("links", [True, False])
def test_concurrent_processes_never_have_the_lock_together(tmp_path, monkeypatch, links, root) -> None:
    """Four processes increment a number in a file 20 times each, after a dead process left its lock file."""
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
    write_foreign_record(tmp_path / "x", machine=owner_file._process_record()["machine"], pid=2**22 + 1)
    (tmp_path / "n").write_text("0")
    words = [sys.executable, "-c", code, str(tmp_path)]
    several = [subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    error_outputs = [process.communicate(timeout=120)[1] for process in several]
    assert [process.returncode for process in several] == [0] * 4, error_outputs
    assert (tmp_path / "n").read_text() == "80"
    assert list_names(tmp_path) == ["n", "x"]
    assert all(words.count("has no file locks") == 1 for words in error_outputs)
