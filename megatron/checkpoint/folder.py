"""Folders that appear whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.checkpoint.layout import PARTIAL
from megatron.io import LockedError, OwnerFile, lock_descriptor


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder to write into, which takes its name when the block ends well and is removed when it does not.

    Raises ValueError where the name is taken, or where another process writes the same folder.
    """
    if final.exists():
        raise ValueError(f"{final}: is already there; choose another name or delete it")
    with partial_folder(final) as partial:
        yield partial
        for path in partial.rglob("*"):
            sync(path)
        sync(partial)
        partial.rename(final)
        sync(final.parent)


@contextmanager
def partial_folder(final: Path) -> Iterator[Path]:
    """An empty folder beside `final` for the caller to fill and rename; an exception removes it.

    It is locked: what a killed process left there is removed, what a running one writes is not. Raises
    FileExistsError where `final` exists, ValueError where another process writes it.
    """
    partial = final.with_name(final.name + PARTIAL)
    descriptor, owner = _lock_folder(partial, final)
    try:
        for leftover in partial.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        if owner is not None:
            owner.release()
        os.close(descriptor)


def _lock_folder(partial: Path, final: Path) -> tuple[int, OwnerFile | None]:
    """Make and lock the folder: its descriptor, and what is to be released before that is closed."""
    while True:
        if final.exists():
            raise FileExistsError(f"{final}: is there already; choose another name")
        partial.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # another process has renamed or removed it in between
        try:
            owner = lock_descriptor(descriptor, partial)
        except BaseException as error:
            os.close(descriptor)
            if isinstance(error, LockedError):
                raise ValueError(
                    f"{final}: got {error.holder} that writes it, expected none. "
                    "Wait for it, or choose another name."
                ) from None
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(descriptor)):
                return descriptor, owner
        if owner is not None:
            owner.release()
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
