"""Write checkpoints whole, read them verified, fall back to the one before a broken one."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.layout import FILES, META, PARTIAL, Found, find, new_name
from megatron.log import get_logger

log = get_logger(__name__)


def save(
    directory: Path, prefix: str, parts: dict[str, Any], meta: dict[str, Any], preempt: bool = False
) -> Path:
    """Write `parts` (keys of FILES) and meta.json as one folder that appears under its name only when whole.

    `meta` gains the sha256 and size of each file. OSError (a full disk, say) leaves nothing behind.
    """
    final = directory / new_name(prefix, preempt)
    partial = final.with_name(final.name + PARTIAL)
    try:
        partial.mkdir(parents=True)
        files = {}
        for part, name in FILES.items():
            torch.save(parts[part], partial / name)
            files[name] = {"sha256": _sha256(partial / name), "bytes": (partial / name).stat().st_size}
        (partial / META).write_text(json.dumps({**meta, "files": files}, indent=1))
        for path in partial.iterdir():
            _sync(path)
        _sync(partial)
        partial.rename(final)
        _sync(directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parts, meta) of one checkpoint, every file checked against its sum.

    Raises ValueError for anything not as it was written, FileNotFoundError where there is no checkpoint.
    """
    meta = read_meta(path)
    for name, told in meta["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: missing; the checkpoint is not whole, delete it")
        size = file.stat().st_size
        if size != told["bytes"] or _sha256(file) != told["sha256"]:
            raise ValueError(
                f"{file}: {size:,} bytes are not the {told['bytes']:,} that were saved; delete the checkpoint"
            )
    try:
        parts = {
            part: torch.load(path / name, map_location="cpu", weights_only=True)
            for part, name in FILES.items()
        }
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path}: not a checkpoint of this project ({error})") from error
    return parts, meta


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Errors as `load`."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    try:
        meta = json.loads((path / META).read_text())
        files = meta["files"]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path / META}: cannot be read ({error}); the checkpoint is not whole") from error
    if set(files) != set(FILES.values()):
        raise ValueError(f"{path / META}: lists {sorted(files)}, wanted {sorted(FILES.values())}")
    return meta


def load_newest(directory: Path, prefix: str) -> tuple[Path, dict[str, Any], dict[str, Any]] | None:
    """(path, parts, meta) of the newest whole checkpoint; broken ones are passed over with a warning."""
    for found in reversed(find(directory, prefix)):
        try:
            parts, meta = load(found.path)
        except ValueError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
            continue
        return found.path, parts, meta
    return None


def remove_old(directory: Path, prefix: str, keep_last: int | None) -> list[Found]:
    """Delete all but the newest `keep_last` checkpoints, and what an interrupted save left; says which."""
    if directory.is_dir():
        for leftover in directory.glob(f"{prefix}.*{PARTIAL}"):
            shutil.rmtree(leftover, ignore_errors=True)
    old = find(directory, prefix)[:-keep_last] if keep_last else []
    for found in old:
        # renamed first: a deletion cut short must not leave a half folder under a checkpoint's name
        doomed = found.path.with_name(found.path.name + PARTIAL)
        found.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
