"""Write folders atomically: they exist under their final name only when complete."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.checkpoint.layout import PARTIAL
from megatron.file_lock import LockedError, OwnerFile, lock_descriptor


@contextmanager
def atomic_folder(final: Path) -> Iterator[Path]:
    """Yield a folder to write into; rename it to `final` on success, remove it on an exception.

    Raises ValueError if `final` exists or another process is writing it.
    """
    if final.exists():
        raise ValueError(f"{final}: already exists; choose another name or delete it")
    with open_partial_folder(final) as partial:
        yield partial
        # rglob yields subfolders too: after a power loss a file exists only if its folder entry is on disk
        # too
        for path in partial.rglob("*"):
            fsync_path(path)
        fsync_path(partial)
        # The rename is atomic. fsync of the contents before it and of the parent after it makes the folder
        # complete and visible also after a power loss.
        partial.rename(final)
        fsync_path(final.parent)


@contextmanager
def open_partial_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder next to `final`. The caller fills and renames it; an exception removes it.

    The folder is locked: leftovers of a killed process are removed, the folder of a running one is not.
    Raises FileExistsError if `final` exists, ValueError if another process is writing it.
    """
    # next to `final`, hence on the same file system: a rename between file systems fails
    partial = final.with_name(final.name + PARTIAL)
    descriptor, owner = _lock_folder(partial, final)
    try:
        # The lock is granted, so the writer of these files has ended. A link is deleted, never followed:
        # rmtree of a link's target would delete data outside the folder.
        for leftover in partial.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        yield partial
    except BaseException:
        # still locked: no other process can have begun to fill this folder
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if owner is not None:
            owner.release()
        os.close(descriptor)


def _lock_folder(partial: Path, final: Path) -> tuple[int, OwnerFile | None]:
    """Create and lock the folder. Return its descriptor and an owner file to release before closing it."""
    while True:
        # checked again after every failed attempt: the previous owner of the lock may have completed `final`
        if final.exists():
            raise FileExistsError(f"{final}: already exists; choose another name")
        partial.mkdir(parents=True, exist_ok=True)
        try:
            # flock needs a descriptor, and a folder can be opened only for reading
            descriptor = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process renamed or removed it since mkdir
        try:
            owner = lock_descriptor(descriptor, partial)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, LockedError):
                raise ValueError(
                    f"{final}: got {error.holder} writing it, expected none. "
                    "Wait for it, or choose another name."
                ) from None
            raise
        # The lock belongs to an inode. If the previous owner renamed or removed the folder before this lock
        # was granted, the path now names another inode or none: release it and retry.
        with suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(descriptor)):
                return descriptor, owner
        if owner is not None:
            owner.release()
        os.close(descriptor)


def fsync_path(path: Path) -> None:
    """fsync a file, or a folder's directory entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_sha256(path: Path) -> str:
    """Return the sha256 of a file's content as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
