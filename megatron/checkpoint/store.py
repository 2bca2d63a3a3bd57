"""Write checkpoints whole, read them verified, fall back to the one before a broken one."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import sharded
from megatron.checkpoint.folder import sha256_of, sync
from megatron.checkpoint.layout import FILES, META, NAME, PARTIAL, Found, find, new_name
from megatron.log import get_logger
from megatron.run_dir import CHECKPOINTS, read_json

log = get_logger(__name__)
OWN_SUM = "sha256"  # key of meta.json: of all its other keys
IN_BOTH = ("lr", "iter")  # parts that are files of their own in the sharded layout too


def save(
    directory: Path, prefix: str, parts: dict[str, Any], meta: dict[str, Any], preempt: bool = False
) -> Path:
    """Write `parts` (keys of FILES) and meta.json as one folder that appears under its name only when whole.

    `meta` gains the sha256 and size of each file. OSError (a full disk, say) leaves nothing behind.
    """
    final = directory / new_name(prefix, preempt)
    save_as(final, parts, meta)
    return final


def save_as(final: Path, parts: dict[str, Any], meta: dict[str, Any]) -> None:
    """`save` under a given name."""
    partial = begin(final)
    try:
        write_parts(partial, parts, tuple(FILES))
        seal(partial, final, {**meta, "state_dict_type": "full"})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def begin(final: Path) -> Path:
    """An empty folder beside the name it will get. OSError where there is one already."""
    if final.exists():
        raise FileExistsError(f"{final}: is there already; choose another name")
    partial = final.with_name(final.name + PARTIAL)
    partial.mkdir(parents=True)
    return partial


def write_parts(partial: Path, parts: dict[str, Any], names: tuple[str, ...]) -> None:
    """Write some of the parts as files. OSError where the disk is full."""
    for part in names:
        path = partial / FILES[part]
        try:
            with path.open("wb") as file:
                torch.save(parts[part], file)
        except RuntimeError as error:  # torch's writer hides what the system said
            raise OSError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from error


def seal(partial: Path, final: Path, meta: dict[str, Any]) -> None:
    """Sum up what was written, sync it all, and let the folder appear under its name."""
    written = sorted(partial.iterdir())
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        sums = list(pool.map(sha256_of, written))
    files = {
        path.name: {"sha256": told, "bytes": path.stat().st_size}
        for path, told in zip(written, sums, strict=True)
    }
    told = {**meta, "files": files}
    (partial / META).write_text(json.dumps({**told, OWN_SUM: _sum_of(told)}, indent=1))
    for path in partial.iterdir():
        sync(path)
    sync(partial)
    partial.rename(final)
    sync(final.parent)


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parts, meta) of one checkpoint of either layout, whole, every file checked against its sum.

    Raises ValueError for anything not as it was written, FileNotFoundError where there is no checkpoint.
    """
    meta = verify(path)
    return read_parts(path, meta), meta


def verify(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint of which every file is as it was written. Errors as `load`."""
    meta = read_meta(path)
    for name, told in meta["files"].items():
        file = path / name
        if not file.is_file():
            raise ValueError(f"{file}: missing; the checkpoint is not whole, delete it")
        size = file.stat().st_size
        if size != told["bytes"] or sha256_of(file) != told["sha256"]:
            raise ValueError(
                f"{file}: {size:,} bytes are not the {told['bytes']:,} that were saved; delete the checkpoint"
            )
    return meta


def is_sharded(meta: dict[str, Any]) -> bool:
    """Which of the two layouts."""
    return meta.get("state_dict_type") == "sharded"


def read_parts(path: Path, meta: dict[str, Any], names: tuple[str, ...] = tuple(FILES)) -> dict[str, Any]:
    """Some parts of a verified checkpoint, on the CPU. ValueError for files of another kind."""
    own = [part for part in names if not is_sharded(meta) or part in IN_BOTH]
    try:
        parts = {part: torch.load(path / FILES[part], map_location="cpu", weights_only=True) for part in own}
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path}: not a checkpoint of this project ({error})") from error
    if len(own) < len(names):
        whole = sharded.read_whole(path)
        whole["optim"] |= parts["iter"].get("engine", {})
        parts |= {part: whole[part] for part in names if part not in IN_BOTH}
    return parts


def refuse_folder_of_checkpoints(path: Path) -> None:
    """ValueError for a run's folder, or that of its checkpoints, where one of them is wanted."""
    if (path / META).exists():
        return
    found = find(path) or find(path / CHECKPOINTS)
    if found:
        steps = [(read_json(one.path / META) or {}).get("step", "unknown") for one in found]
        told = [f"{one.path.name} (step {step})" for one, step in zip(found, steps, strict=True)]
        where = found[0].path.parent
        raise ValueError(f"{where}: a folder of checkpoints; give one of those in it: {', '.join(told[-8:])}")


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Errors as `load`."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    refuse_folder_of_checkpoints(path)
    try:
        meta = json.loads((path / META).read_text())
        files, own_sum = set(meta["files"]), meta.pop(OWN_SUM, None)  # older checkpoints have none
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / META}: cannot be read ({error}); the checkpoint is not whole") from error
    if own_sum is not None and own_sum != _sum_of(meta):
        raise ValueError(f"{path / META}: not as it was written; delete the checkpoint")
    wanted = {FILES[part] for part in (IN_BOTH if is_sharded(meta) else FILES)}
    wanted |= {sharded.METADATA} if is_sharded(meta) else set()
    if not wanted <= files or not is_sharded(meta) and files != wanted:
        raise ValueError(f"{path / META}: lists {sorted(files)}, wanted {sorted(wanted)}")
    return meta


def _sum_of(meta: dict[str, Any]) -> str:
    """Of what meta.json says beside its own sum."""
    return hashlib.sha256(json.dumps(meta, indent=1).encode()).hexdigest()


def newest_whole(directory: Path, prefix: str) -> tuple[Path, dict[str, Any]] | None:
    """(path, meta) of the newest whole checkpoint; broken ones are passed over with a warning."""
    for found in reversed(find(directory, prefix)):
        try:
            return found.path, verify(found.path)
        except ValueError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
    return None


def remove_old(
    directory: Path,
    prefix: str,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_at: Sequence[int] = (),
) -> list[Found]:
    """Delete all but the newest `keep_last` checkpoints, and what an interrupted save left; says which.

    Those of a multiple of `keep_every` steps and of the steps `keep_at` stay as well, unless they were made
    for a preemption.
    """
    if directory.is_dir():
        for leftover in directory.glob(f"*{PARTIAL}"):
            # by the whole name: `run.*` would also be what a run of prefix `run.b` is just writing
            named = NAME.fullmatch(leftover.name.removesuffix(PARTIAL))
            if named and named["prefix"] == prefix:
                shutil.rmtree(leftover, ignore_errors=True)
    old = find(directory, prefix)[:-keep_last] if keep_last else []
    old = [found for found in old if not _is_kept(found, keep_every, keep_at)]
    for found in old:
        # renamed first: a deletion cut short must not leave a half folder under a checkpoint's name
        doomed = found.path.with_name(found.path.name + PARTIAL)
        found.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def _is_kept(found: Found, keep_every: int | None, keep_at: Sequence[int]) -> bool:
    if keep_every is None and not keep_at or found.is_preempt:
        return False
    try:
        step = read_meta(found.path)["step"]
        return step in keep_at or keep_every is not None and step % keep_every == 0
    except (ValueError, KeyError):
        return False
