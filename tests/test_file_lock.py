"""File locks: one process at a time, no wait for a dead process, and an error where there are none."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron.io import LockedError, acquire_lock, atomic_folder, open_exclusive, open_locked, wait_for_lock
from megatron.plan.run_dir import lock_run

HOLDER = """
import sys
from pathlib import Path
from megatron.io import acquire_lock
lock = acquire_lock(Path(sys.argv[1]))
print("locked" if lock else "refused", flush=True)
sys.stdin.read()
"""


def start_holder(root: Path, path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, str(path)]
    return subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def refuse_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_second_process_is_refused_and_a_killed_owner_is_replaced_at_once(root, tmp_path) -> None:
    path = tmp_path / ".lock"
    with start_holder(root, path) as holder:
        assert holder.stdout.readline() == "locked\n"
        with start_holder(root, path) as second:
            assert second.communicate(timeout=60)[0] == "refused\n"
        assert acquire_lock(path) is None
        with pytest.raises(ValueError, match=r"^out: in use by another process\. Wait until it has ended"):
            open_exclusive(path, Path("out"))
        holder.kill()
    started = time.monotonic()
    with acquire_lock(path):
        assert time.monotonic() - started < 5
    with start_holder(root, path) as third:  # the lock ends with close
        assert third.communicate(timeout=60)[0] == "locked\n"
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def test_a_waiting_process_gets_the_released_lock(tmp_path) -> None:
    path = tmp_path / ".lock"
    lock = open_locked(path)
    threading.Timer(0.5, lock.close).start()
    started = time.monotonic()
    with wait_for_lock(path):
        assert 0.3 < time.monotonic() - started < 30
        with pytest.raises(LockedError):
            open_locked(path, wait_s=0.2)


@pytest.mark.parametrize("change", ["rename", "unlink"])
def test_a_file_that_its_owner_moved_is_not_locked(tmp_path, monkeypatch, change) -> None:
    """The owner moves it between the opening of the file and its lock."""
    path = tmp_path / "x.partial"
    first = open_locked(path)
    first.write(b"whole")
    first.flush()
    flock = fcntl.flock

    def finish_and_lock(descriptor: int, operation: int) -> None:
        if not first.closed:
            path.rename(tmp_path / "x") if change == "rename" else path.unlink()
            first.close()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", finish_and_lock)
    with open_locked(path, wait_s=30) as second:
        assert second.read() == b""
        assert os.path.samestat(path.stat(), os.fstat(second.fileno()))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_flock_is_an_error_and_nothing_stays(tmp_path, monkeypatch, number) -> None:
    refuse_flock(monkeypatch, number)
    (tmp_path / "run").mkdir()
    (tmp_path / "half.partial").write_bytes(b"half")
    sentence = r"got a file system without file locks \(flock: .*\), expected one with them\. Choose a"
    for action in (
        lambda: open_exclusive(tmp_path / "half.partial"),
        lambda: lock_run(tmp_path / "run"),
        lambda: atomic_folder(tmp_path / "folder").__enter__(),
    ):
        with pytest.raises(OSError, match=rf"^{tmp_path}(/run)?: {sentence}"):
            action()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["half.partial", "run"]
    assert (tmp_path / "half.partial").read_bytes() == b"half"
    refuse_flock(monkeypatch, errno.EIO)  # another error is raised
    with pytest.raises(OSError, match="Input/output error"):
        lock_run(tmp_path)
