"""Atomic writes and file locks, JSON without NaN, and errors of a full disk.

A file or folder is complete or absent: it is written under a temporary name
beside its own, synced and renamed. The sync of the content before the rename
and of the parent folder after it makes this true also after a power loss.
Two processes that may write one path at the same time hold a lock meanwhile.

A lock is the kernel's (flock) and ends with the process, also after kill -9:
no lock file can block a rerun. `filelock.lock_descriptor` sets it on the file
that is written. filelock's path lock is not used: it leaves a file beside
every output, and accepts a file that its last owner has renamed meanwhile.
"""

import errno
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PARTIAL = ".partial"  # suffix of a file or folder that is being written
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota or size limit reached
WITHOUT_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # flock on a file system without locks
# fsync of a folder on a file system that supports it
# for files only, and of a folder that is not readable
WITHOUT_FOLDER_FSYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES)
POLL_S = 0.1  # between two attempts to lock

LockedFile = io.BufferedRandom  # open for reading and writing, and locked until it is closed


class LockedError(Exception):
    """Raised if another process has the lock."""


def is_url(name: object) -> bool:
    """Return whether a name is a URL, of any scheme."""
    return re.match(r"[a-z][a-z0-9+.-]*://", str(name)) is not None


def write_atomic(path: Path, text: str) -> None:
    """Write a text file atomically: write beside it, sync, rename."""
    write_atomic_bytes(path, text.encode())


def write_atomic_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_path(path) as partial:
        partial.write_bytes(content)


@contextmanager
def atomic_path(
    path: Path, *, exclusive: bool = False, resume: bool = False, partial_name: str | None = None
) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write and close; sync and rename it to `path` on success.

    exclusive      lock the temporary file: ValueError if another process is writing it
    resume         the same, and keep it after an exception,
                   unless it is empty: the next call continues it
    partial_name   name of the temporary file, for writers
                   that choose the format by its suffix
    """
    # in the same folder, hence on the same file system, where
    # a rename is atomic: readers get the old or the new file
    partial = path.with_name(partial_name or path.name + PARTIAL)
    lock = open_exclusive(partial, path) if exclusive or resume else None
    try:
        try:
            yield partial
            fsync_path(partial)
            partial.rename(path)
        except BaseException:
            # the rename is the last statement above: after it,
            # the partial name may belong to another writer
            if not resume or (partial.is_file() and not partial.stat().st_size):
                partial.unlink(missing_ok=True)
            raise
        fsync_path(path.parent)
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder beside `path` to write into; sync and rename it to `path` on success.

    An exception removes it. Raises FileExistsError if `path`
    exists, ValueError if another process is writing it.
    """
    with open_partial_folder(path) as partial:
        yield partial
        commit_folder(partial, path)


@contextmanager
def open_partial_folder(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder beside `path`, locked, and remove what the caller has not renamed.

    Leftovers of a killed process are removed, the folder of a running one is not.
    Errors as in `atomic_folder`; with `replace` the folder `path` may exist.
    """
    partial = path.with_name(path.name + PARTIAL)
    descriptor = _lock_folder(partial, path, replace)
    try:
        # The lock is granted, so the writer of these
        # files has ended. A link is deleted,
        # never followed: rmtree of a link's target
        # would delete data outside the folder.
        for leftover in partial.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        yield partial
    finally:
        # Still locked: no other process can have begun to fill this folder.
        # After a rename the name is free, or it belongs to another process.
        with suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(descriptor)):
                shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def _lock_folder(partial: Path, path: Path, replace: bool) -> int:
    """Create and lock the folder `partial`. Return its descriptor."""
    while True:
        # checked again after every failed attempt: the
        # previous owner of the lock may have completed `path`
        if path.exists() and not replace:
            raise FileExistsError(f"{path}: already exists; choose another name or delete it")
        partial.mkdir(parents=True, exist_ok=True)
        try:
            # flock needs a descriptor, and a folder can be opened only for reading
            return _open_and_lock(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process renamed or removed it since mkdir
        except LockedError:
            raise ValueError(
                f"{path}: got another process writing it, expected none. Wait for it, or choose another name."
            ) from None


def create_partial_folder(path: Path) -> Path:
    """Create an empty folder beside `path`, for `commit_folder`. Raises OSError if either path exists.

    For a folder that several processes write together,
    maybe in background threads: not a `with` block, and not locked.
    A lock of the callers (the run's lock) excludes other writers.
    """
    if path.exists():
        raise FileExistsError(f"{path}: already exists; choose another name")
    partial = path.with_name(path.name + PARTIAL)
    # no exist_ok: two writers of one name must not mix their files
    partial.mkdir(parents=True)
    return partial


def commit_folder(partial: Path, path: Path) -> None:
    """Sync a folder with everything in it, and rename it to `path`."""
    # rglob yields subfolders too: after a power loss a
    # file exists only if its folder entry is on disk too
    for written in (*partial.rglob("*"), partial):
        fsync_path(written)
    partial.rename(path)
    fsync_path(path.parent)


def publish_files(files: Sequence[tuple[Path, Path]]) -> None:
    """Rename synced files, pairs of (partial, final), that belong together. The last one completes the set.

    An older set is deleted first: files of two sets never exist
    side by side. After a kill the same call completes the set.
    """
    # If the first partial file is gone, an earlier call was killed after its
    # rename: the first final file is then the new one and must not be deleted.
    if files[0][0].exists():
        for _, path in reversed(files):
            path.unlink(missing_ok=True)
    for partial, path in files:
        if partial.exists():
            partial.rename(path)
    for folder in {path.parent for _, path in files}:
        fsync_path(folder)


def fsync_path(path: Path) -> None:
    """fsync a file, or a folder's entries if its file system supports that."""
    # fsync writes all of a file's pages, also those written through
    # another descriptor. Without it some file systems store a rename
    # before the content, and a power loss leaves an empty file.
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in WITHOUT_FOLDER_FSYNC):
            # fsync reports a full disk or quota of some
            # network file systems, and names no file
            raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def explain_disk_full(folder: Path) -> Iterator[None]:
    """Add the folder, its free space and the required space to a disk-full error of a `with` block.

    The operating system names no path in these errors. The required space is reported
    if the OSError has the attribute `n_bytes`, the number of additional bytes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL_ERRNOS:
            raise
        raise OSError(
            f"{folder.resolve()}: {error.strerror}{_describe_free_space(folder, error)}; "
            "make room and run the same command again"
        ) from error


def _describe_free_space(folder: Path, error: OSError) -> str:
    details = []
    with suppress(OSError):
        details.append(f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free")
    if (n_bytes := getattr(error, "n_bytes", None)) is not None:
        details.append(f"about {n_bytes / 1e6:,.1f} MB more are needed")
    return f" ({', '.join(details)})" if details else ""


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write indented JSON atomically. Raises ValueError for NaN and Inf, and then writes nothing."""
    try:
        # serialized before the file is opened: a value
        # that is not JSON leaves the old file as it is
        text = json.dumps(content, indent=1, allow_nan=False)
    except ValueError as error:
        nonfinite_keys = ", ".join(_find_nonfinite(content)) or str(error)
        raise ValueError(f"{path}: got NaN or Inf in {nonfinite_keys}, expected finite numbers.") from error
    write_atomic(path, text + "\n")


def replace_nonfinite(content: Any) -> Any:
    """Return a copy with None (JSON's null) for every float that is NaN or Inf."""
    if isinstance(content, float) and not math.isfinite(content):
        return None
    if isinstance(content, dict):
        return {key: replace_nonfinite(value) for key, value in content.items()}
    return [replace_nonfinite(value) for value in content] if isinstance(content, list | tuple) else content


def _find_nonfinite(content: Any, key_path: str = "") -> Iterator[str]:
    """Yield the path of each float that is NaN or Inf, its keys joined by dots."""
    if isinstance(content, float) and not math.isfinite(content):
        yield key_path
    pairs: Iterable[tuple[Any, Any]] = content.items() if isinstance(content, dict) else ()
    pairs = enumerate(content) if isinstance(content, list | tuple) else pairs
    for key, value in pairs:
        yield from _find_nonfinite(value, f"{key_path}.{key}".lstrip("."))


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing. ValueError for other content."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: got invalid JSON ({error}), expected a JSON object. Delete it, or copy it again."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: got {type(content).__name__}, expected a JSON object. Delete it, or copy it again."
        )
    return content


def open_locked(path: Path, wait_s: float = 0.0) -> LockedFile:
    """Open a file for reading and writing, created if missing, and lock it until it is closed.

    Raises LockedError if another process still has the lock
    after `wait_s`, and OSError on a file system without locks.
    """
    # O_CREAT without O_TRUNC: before the lock is
    # granted the content is another process's
    return os.fdopen(_open_and_lock(path, os.O_RDWR | os.O_CREAT, wait_s), "r+b")


def acquire_lock(path: Path, wait_s: float = 0.0) -> LockedFile | None:
    """Lock a file as `open_locked` does. Return None if another process has the lock."""
    try:
        return open_locked(path, wait_s)
    except LockedError:
        return None


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Lock `path` for a `with` block. Wait without limit for another process to release it."""
    with open_locked(path, math.inf):
        yield


def open_exclusive(path: Path, name: Path | None = None) -> LockedFile:
    """Open a file, created if missing, and lock it for this process until it is closed.

    Raises ValueError, with `name` in the message, if another process has the lock.
    """
    try:
        return open_locked(path)
    except LockedError:
        raise ValueError(
            f"{name or path}: in use by another process. Wait until it has ended, or choose another name."
        ) from None


def _open_and_lock(path: Path, flags: int, wait_s: float = 0.0) -> int:
    """Open and lock a file or folder. Return its descriptor, whose end releases the lock."""
    # Imported on demand, as few commands need a lock, and before a file
    # is created: a stop signal during an import ends the process at once.
    import filelock  # noqa: F401

    end = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            is_locked = _try_lock(descriptor, path)
            # The lock belongs to an inode. If the previous owner renamed
            # or removed the file before this lock was granted, the path
            # now names another inode or none: release the lock and retry.
            with suppress(FileNotFoundError):
                if is_locked and os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not is_locked:
            if time.monotonic() >= end:
                raise LockedError(path)
            time.sleep(POLL_S)


def _try_lock(descriptor: int, path: Path) -> bool:
    """Lock an open file at `path`. Return False if another process has the lock; OSError without flock."""
    from filelock import lock_descriptor

    try:
        # one attempt: filelock's own wait has no limit
        return lock_descriptor(descriptor, blocking=False)
    except OSError as error:
        if error.errno not in WITHOUT_FLOCK:
            raise
        # where no process can lock, an empty file or
        # folder was made for this lock: remove it
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif path.stat().st_size == 0:
                path.unlink()
        raise OSError(
            f"{path.parent.resolve()}: got a file system without file locks (flock: {error.strerror}), "
            "expected one with them. Choose a folder on another file system, or mount this one with flock."
        ) from error


def code_revision(folder: Path = Path(__file__).parent) -> str | None:
    """Return the git commit of this package's checkout, with `+` if tracked files are modified, or None."""
    import subprocess  # imported on demand: few commands record it

    # Without optional locks `status` does not refresh
    # the index: a killed run would leave index.lock.
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # the first line is "# branch.oid COMMIT"; modified
    # files follow the lines that begin with "#"
    head, *lines = done.stdout.splitlines()
    is_modified = any(not line.startswith("#") for line in lines)
    return head.split()[-1][:12] + ("+" if is_modified else "")
