"""Locks on file systems without flock: a file that names the process that holds the lock, its owner.

Some file systems have no flock: Lustre mounted without `flock`, some FUSE and parallel file systems.
`megatron/io.py` then locks `<path>` by creating `<path>.owner`. Another process takes the lock over when the
owner has ended: at once on the same machine, on another machine after `WATCH_S` without a heartbeat. The
waiting process measures this time by its own monotonic clock, because the clocks of two hosts differ.

filelock's locks for such file systems (version 4.2.11) do not keep these promises:

* SoftFileLease has a heartbeat and a monotonic watch, but replaces a dead owner only by an exchange of two
  names (RENAME_EXCHANGE). Where the file system refuses it (NFS, SMB), the lock of a killed process stays.
* A marker that is empty, after a kill between its creation and its content, stays too.
* Two machines with the same host name (cloned images) count as one: a live owner is replaced at once.
* StrictSoftFileLock never replaces a dead owner, and FileLock falls back for ENOSYS only.
"""

import atexit
import errno
import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.log import get_logger

OWNER = ".owner"  # appended to the name of the locked file
TAKE_OVER = (
    ".takeover"  # appended to the name of the owner file: exists while a process removes a dead owner's file
)
HEARTBEAT_S = 10.0  # seconds between two heartbeats of an owner
WATCH_S = 60.0  # seconds without a heartbeat after which a remote owner counts as dead

log = get_logger(__name__)


class LockedError(Exception):
    """Raised if another process has the lock.

    undecided   the owner may be dead, and waiting up to `WATCH_S` would decide it
    """

    def __init__(self, holder: str, undecided: bool = False) -> None:
        super().__init__(holder)
        self.holder, self.undecided = holder, undecided


class OwnerFile:
    """A lock in the form of a file that names its process. Raises LockedError if a live process has it."""

    def __init__(self, path: Path) -> None:
        self.path = path.with_name(path.name + OWNER)
        # the token distinguishes two locks of the same process, and two processes that got the same number
        self.record = {**_process_record(), "token": os.urandom(16).hex()}
        if not self._create():
            # raises if the owner is alive or undecided; otherwise this process takes the lock over
            record = _read_record(self.path)
            _raise_if_alive(self.path, record)
            self._remove(record)
            if not self._create():
                raise LockedError("another process, which created the lock file first")
        _last_seen.pop(self.path, None)
        _heartbeat.add(self)

    def release(self) -> None:
        """Remove the file. Does nothing in a forked child of the owner."""
        # The order matters: `_touch_files` reports a missing file only if its own `remove` returns True. This
        # call returns True first, so a file that is released here is never reported as another owner's.
        if self.record["pid"] == os.getpid() and _heartbeat.remove(self) and self.is_current():
            self.path.unlink(missing_ok=True)

    def is_current(self) -> bool:
        """Return whether the file still names this process."""
        return _read_record(self.path).get("token") == self.record["token"]

    def _create(self) -> bool:
        """Create the file together with its content, atomically. Return False if the file exists.

        A hard link to a finished draft fails if the target exists, so no reader sees an empty file.
        """
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
        """Create the file exclusively, then write it. An incomplete file counts as that of a remote owner."""
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return True

    def _remove(self, dead_record: dict[str, Any]) -> None:
        """Remove the file of a dead owner, and only that file.

        Two processes may judge the same owner dead at the same time. The guard file admits one of them, and
        the second look at the record protects a lock that a third process has acquired meanwhile.
        """
        guard = self.path.with_name(self.path.name + TAKE_OVER)
        try:
            os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            # an old guard: its process was killed between creating and removing it
            if (_seconds_unchanged(guard, {}) or 0) >= WATCH_S:
                guard.unlink(missing_ok=True)
            raise LockedError("another process, which is taking over the lock", undecided=True) from None
        try:
            # a dead owner's file stays as it is: a creation fails while it exists, a takeover needs the guard
            if _read_record(self.path) == dead_record:
                self.path.unlink(missing_ok=True)
        finally:
            guard.unlink(missing_ok=True)


class _Heartbeat:
    """Thread that touches the lock files of this process, as a heartbeat for other machines."""

    def __init__(self) -> None:
        self.files: set[OwnerFile] = set()
        self.lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self.process = 0

    def add(self, file: OwnerFile) -> None:
        with self.lock:
            self.files.add(file)
            if self.process != os.getpid():  # a forked child has none of its parent's threads
                self.process = os.getpid()
                self.thread = threading.Thread(target=self._touch_files, name="lock-heartbeat", daemon=True)
                self.thread.start()

    def remove(self, file: OwnerFile) -> bool:
        """Stop touching a file. Return False if it was removed before."""
        with self.lock:
            was_present = file in self.files
            self.files.discard(file)
            return was_present

    def release_all(self) -> None:
        """Release the locks that are still open at the end of the process."""
        for file in list(self.files):
            with suppress(OSError):
                file.release()

    def _touch_files(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            # the lock is not held during file system calls, which may block for long
            with self.lock:
                # A forked child inherits the parent's entries; only the process that created a file touches
                # it.
                files = [file for file in self.files if file.record["pid"] == os.getpid()]
            for file in files:
                with suppress(OSError):
                    if file.is_current():
                        # any new mtime counts, whichever clock sets it
                        os.utime(file.path)
                    elif self.remove(file):
                        log.error(
                            "%s: got another owner of the lock that this process has. Stop one of the two.",
                            file.path,
                        )


_heartbeat = _Heartbeat()
atexit.register(_heartbeat.release_all)
# lock file -> (token, mtime in ns, monotonic time at which this token and mtime were first seen)
_last_seen: dict[Path, tuple[str | None, int, float]] = {}


def _seconds_unchanged(path: Path, record: dict[str, Any]) -> float | None:
    """Return for how many seconds, by this process's clock, a file has had no heartbeat.

    None if it was touched since the last call.
    """
    token, now = record.get("token"), time.monotonic()
    try:
        with path.open("rb") as file:  # opening makes an NFS client refresh the attributes from the server
            touched = os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        touched = 0
    # a changed mtime is a heartbeat; only the change counts, since the clocks of the hosts differ
    previous = _last_seen.get(path)
    if previous is None or previous[:2] != (token, touched):
        _last_seen[path] = token, touched, now
        return None if previous is not None and previous[0] == token else 0.0
    return now - previous[2]


def _raise_if_alive(path: Path, record: dict[str, Any]) -> None:
    """Raise LockedError unless the process that a lock file names is dead."""
    holder = f"process {record.get('pid', '?')} on {record.get('host', 'an unknown host')}"
    current = _process_record()
    # process numbers can be compared only on the same boot of a machine and in the same PID namespace
    # example: a reboot changes boot_id, and a container has another namespace than its host
    if record and all(record.get(key) == current[key] for key in ("machine", "namespace")):
        if _process_start_time(record["pid"]) == record["started"]:
            raise LockedError(holder)
        return
    quiet_s = _seconds_unchanged(path, record)
    if quiet_s is None or quiet_s < WATCH_S:
        raise LockedError(holder, undecided=quiet_s is not None)


def _read_record(path: Path) -> dict[str, Any]:
    """Return the record in a lock file; {} if the file is missing or incomplete."""
    try:
        record = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    keys = {"host", "machine", "namespace", "pid", "started", "token"}
    return record if isinstance(record, dict) and keys <= record.keys() else {}


def _process_record() -> dict[str, Any]:
    host, machine, namespace = os.uname().nodename, None, None
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")  # each container of a host has its own process numbers
    pid = os.getpid()
    return {
        "host": host,
        "machine": machine or host,
        "namespace": namespace,
        "pid": pid,
        "started": _process_start_time(pid),
    }


def _process_start_time(pid: Any) -> str | None:
    """Return the start time of a process of this machine as the kernel reports it; None if it does not run.

    A process number is reused, so only number and start time together identify a process.
    """
    try:
        # "4711 (name) S 1 ...": the name may contain spaces and ")", so the fields begin after the last ")"
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None if Path("/proc/self/stat").exists() else _probe_process(pid)
    # after the command name: field 3 is the state (Z zombie, X dead), field 22 the start time in ticks
    return None if fields[0] in "ZX" else fields[19]


def _probe_process(pid: Any) -> str | None:
    """Return "running" if a process of that number exists, else None. For systems without /proc."""
    try:
        # signal 0 is never delivered: the call only checks that the process exists and may be signalled
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return None
    # EPERM: the process exists and belongs to another user
    except PermissionError:
        pass
    return "running"
