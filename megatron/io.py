"""File locks: the one implementation for runs, studies, datasets and mixture logs.

The lock is the kernel's (flock) and ends with the process. Some file systems have none (Lustre mounted
without `flock`, some FUSE and parallel file systems): there a lock is a file `<path>.owner` that names its
process. It is taken over when that process is gone: at once on the same machine, elsewhere after it has given
no sign of life for `WATCH_S`, which the waiting process measures by its own clock: those of two hosts differ.
"""

import atexit
import errno
import fcntl
import io
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.log import get_logger

OWNER = ".owner"  # appended to the name of the locked file
TAKE_OVER = ".takeover"  # appended to that: exists while a process removes the file of a dead one
UNSUPPORTED = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of flock: this file system has no locks
HEARTBEAT_S = 10.0  # between two signs of life of a process that has a lock file
WATCH_S = 60.0  # without one of them, the process of another machine is taken for dead
POLL_S = 0.1

log = get_logger(__name__)


class LockedError(Exception):
    """Another process has the lock. `undecided`: its process may be dead, which takes longer to find out."""

    def __init__(self, holder: str, undecided: bool = False) -> None:
        super().__init__(holder)
        self.holder, self.undecided = holder, undecided


class FileLock:
    """A lock that this process has until `close`, or until it ends."""

    def __init__(self, file: io.IOBase, owner: "OwnerFile | None") -> None:
        self._file, self._owner = file, owner

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._owner is not None:
            self._owner.release()
        self._file.close()


class LockedFile(io.BufferedRandom):
    """A file opened for reading and writing, locked until it is closed."""

    owner: "OwnerFile | None" = None

    def close(self) -> None:
        """Close the file and release the lock."""
        if self.owner is not None:
            self.owner.release()
        super().close()


def take_lock(path: Path, wait_s: float = 0.0, watch: bool = True) -> FileLock | None:
    """Lock `path`, created where it is missing. None where another process still has it after `wait_s`.

    watch   where only signs of life can tell whether the other process lives, wait for one, up to `WATCH_S`
    """
    file = path.open("ab")
    try:
        return FileLock(file, lock_descriptor(file.fileno(), path, wait_s, watch))
    except LockedError:
        file.close()
        return None
    except BaseException:
        file.close()
        raise


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Lock `path` for a `with`, however long another process keeps it."""
    lock = None
    while lock is None:
        lock = take_lock(path, wait_s=POLL_S)
    try:
        yield
    finally:
        lock.close()


def open_locked(path: Path) -> LockedFile:
    """Open a file for reading and writing, created where it is missing, and lock it. Raises LockedError."""
    while True:
        file = LockedFile(io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+"))
        try:
            file.owner = lock_descriptor(file.fileno(), path)
        except BaseException:
            file.close()
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
        file.close()  # the process that had it has renamed or deleted it in between


def lock_descriptor(
    descriptor: int, path: Path, wait_s: float = 0.0, watch: bool = True
) -> "OwnerFile | None":
    """Lock an open file that is at `path`; what is returned has to be released before the file is closed.

    None where the kernel releases the lock with the file. Raises LockedError where another process still has
    it after `wait_s`.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return _lock_once(descriptor, path)
        except LockedError as error:
            if time.monotonic() >= end and not (watch and error.undecided):
                raise
        time.sleep(POLL_S)


def _lock_once(descriptor: int, path: Path) -> "OwnerFile | None":
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        raise LockedError("another process") from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _warn_once(path, error)
    return OwnerFile(path)


_warned = False


def _warn_once(path: Path, error: OSError) -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "%s: the file system has no file locks (%s); using lock files %s instead",
            path.parent,
            error.strerror,
            f"*{OWNER}",
        )


class OwnerFile:
    """A lock as a file that names its process. Raises LockedError where a living process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + OWNER)
        self.record = {**_this_process(), "token": uuid.uuid4().hex}
        if not self._create():
            found = _read(self.path)
            _refuse_living(self.path, found)
            self._remove(found)
            if not self._create():
                raise LockedError("another process, which was a moment faster")
        _seen.pop(self.path, None)
        _heart.add(self)

    def release(self) -> None:
        """Remove the file, unless a child of the process that has the lock does this."""
        if self.record["pid"] == os.getpid() and _heart.remove(self) and self.is_own():
            self.path.unlink(missing_ok=True)

    def is_own(self) -> bool:
        """Whether the file still names this process."""
        return _read(self.path).get("token") == self.record["token"]

    def _create(self) -> bool:
        """Make the file appear with its content at once; False where there is one."""
        content = json.dumps(self.record).encode()
        draft = self.path.with_name(f"{self.path.name}.{self.record['token']}")
        try:
            draft.write_bytes(content)
            os.link(draft, self.path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK):
                raise
            return self._create_without_links(content)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _create_without_links(self, content: bytes) -> bool:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return True

    def _remove(self, judged: dict[str, Any]) -> None:
        """Remove the file of a process that was judged dead, and no other: two may come to that at once."""
        guard = self.path.with_name(self.path.name + TAKE_OVER)
        try:
            os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            if (_unchanged_s(guard, {}) or 0) >= WATCH_S:  # its process was killed within these few lines
                guard.unlink(missing_ok=True)
            raise LockedError("another process, which is taking it over", undecided=True) from None
        try:
            if _read(self.path) == judged:
                self.path.unlink(missing_ok=True)
        finally:
            guard.unlink(missing_ok=True)


class _Heart:
    """Touches the lock files of this process from a thread, for those that watch on other machines."""

    def __init__(self) -> None:
        self.files: set[OwnerFile] = set()
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.process = 0

    def add(self, file: OwnerFile) -> None:
        with self.lock:
            self.files.add(file)
            if self.process != os.getpid():  # a child of fork has no threads of its parent
                self.process = os.getpid()
                self.thread = threading.Thread(target=self._beat, name="lock-heartbeat", daemon=True)
                self.thread.start()

    def remove(self, file: OwnerFile) -> bool:
        """False where it was removed before."""
        with self.lock:
            known = file in self.files
            self.files.discard(file)
            return known

    def release_all(self) -> None:
        """At the end of the process, for locks that nothing has closed."""
        for file in list(self.files):
            with suppress(OSError):
                file.release()

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            with self.lock:
                files = [file for file in self.files if file.record["pid"] == os.getpid()]
            for file in files:
                with suppress(OSError):
                    if file.is_own():
                        os.utime(file.path)
                    elif self.remove(file):
                        log.error(
                            "%s: got another owner while this process had it; stop one of them", file.path
                        )


_heart = _Heart()
atexit.register(_heart.release_all)
_seen: dict[Path, tuple[str | None, int, float]] = {}  # (token, time of last touch, when this was first seen)


def _unchanged_s(path: Path, record: dict[str, Any]) -> float | None:
    """For how long, by this process's clock, a file has shown no sign of life; None where it just has."""
    token, now = record.get("token"), time.monotonic()
    try:
        with path.open("rb") as file:  # opening makes NFS ask the server how old the file is
            touched = os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        touched = 0
    known = _seen.get(path)
    if known is None or known[:2] != (token, touched):
        _seen[path] = token, touched, now
        return None if known is not None and known[0] == token else 0.0
    return now - known[2]


def _refuse_living(path: Path, record: dict[str, Any]) -> None:
    """LockedError unless the process that a lock file names is dead."""
    holder = f"process {record.get('pid', '?')} on {record.get('host', 'an unknown host')}"
    here = _this_process()
    if record and all(record.get(key) == here[key] for key in ("machine", "namespace")):
        if _start_of(record["pid"]) == record["started"]:
            raise LockedError(holder)
        return
    quiet_s = _unchanged_s(path, record)
    if quiet_s is None or quiet_s < WATCH_S:
        raise LockedError(holder, undecided=quiet_s is not None)


def _read(path: Path) -> dict[str, Any]:
    """What a lock file says; {} where it is gone, or is being written."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    keys = {"host", "machine", "namespace", "pid", "started", "token"}
    return record if isinstance(record, dict) and keys <= record.keys() else {}


def _this_process() -> dict[str, Any]:
    host, machine, namespace = socket.gethostname(), None, None
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")  # containers of one host number their processes anew
    pid = os.getpid()
    return {
        "host": host,
        "machine": machine or host,
        "namespace": namespace,
        "pid": pid,
        "started": _start_of(pid),
    }


def _start_of(pid: Any) -> str | None:
    """When a process of this machine started, in the kernel's words; None where there is none that runs."""
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None if Path("/proc/self/stat").exists() else _answers(pid)
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: Any) -> str | None:
    """The same where there is no /proc: whether a process of that number exists."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return None
    except PermissionError:
        pass
    return "running"
