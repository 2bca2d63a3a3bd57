"""Write checkpoints whole, read them verified, fall back to the one before a broken one."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megatron.checkpoint.folder import sha256_of, sync
from megatron.checkpoint.layout import (
    FILES,
    META,
    METADATA,
    NAME,
    OWN_SUM,
    PARTIAL,
    RESTORE,
    Found,
    find,
    new_name,
    read_meta_json,
    sum_of,
)
from megatron.checkpoint.torch_file import load_torch_file, save_torch_file
from megatron.log import get_logger
from megatron.run_dir import CHECKPOINTS

log = get_logger(__name__)
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
        save_torch_file(parts[part], partial / FILES[part])


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
    (partial / META).write_text(json.dumps({**told, OWN_SUM: sum_of(told)}, indent=1))
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
            raise ValueError(f"{file}: missing; {RESTORE}")
        size = file.stat().st_size
        if size != told["bytes"]:
            raise ValueError(f"{file}: got {size:,} bytes, expected {told['bytes']:,}; {RESTORE}")
        if sha256_of(file) != told["sha256"]:
            raise ValueError(f"{file}: got other content than was saved (its sha256 differs); {RESTORE}")
    return meta


def is_sharded(meta: dict[str, Any]) -> bool:
    """Which of the two layouts."""
    return meta.get("state_dict_type") == "sharded"


def read_parts(path: Path, meta: dict[str, Any], names: tuple[str, ...] = tuple(FILES)) -> dict[str, Any]:
    """Some parts of a verified checkpoint, on the CPU. ValueError for files of another kind."""
    own = [part for part in names if not is_sharded(meta) or part in IN_BOTH]
    try:
        parts = {part: load_torch_file(path / FILES[part]) for part in own}
    except ValueError as error:
        raise ValueError(f"{path}: not a checkpoint of this project ({error})") from error
    for part, content in parts.items():
        if not isinstance(content, dict) or not isinstance(content.get("engine", {}), dict):
            raise ValueError(
                f"{path / FILES[part]}: got {type(content).__name__}, expected values by name. "
                "Load another checkpoint of the run."
            )
    if len(own) < len(names):
        from megatron.checkpoint import sharded  # imports for a second; full checkpoints do without

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
        told = [f"{one.path.name} (step {'unknown' if one.step is None else one.step})" for one in found]
        where = found[0].path.parent
        raise ValueError(f"{where}: a folder of checkpoints; give one of those in it: {', '.join(told[-8:])}")


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Errors as `load`."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    refuse_folder_of_checkpoints(path)
    meta = read_meta_json(path)
    listed = meta.get("files")
    if not isinstance(listed, dict) or not all(is_listed(name, told) for name, told in listed.items()):
        raise ValueError(f"{path / META}: expected under files a size and a sha256 for each; {RESTORE}")
    files = set(listed)
    wanted = {FILES[part] for part in (IN_BOTH if is_sharded(meta) else FILES)}
    wanted |= {METADATA} if is_sharded(meta) else set()
    if not wanted <= files or not is_sharded(meta) and files != wanted:
        raise ValueError(f"{path / META}: lists {sorted(files)}, wanted {sorted(wanted)}")
    return meta


def is_listed(name: str, told: Any) -> bool:
    """Whether an entry of `files` is of a file in the folder itself, with a size and a sum."""
    of = (told.get("bytes"), told.get("sha256")) if isinstance(told, dict) else ()
    return name == Path(name).name and [type(one) for one in of] == [int, str]


def newest_whole(directory: Path, prefix: str) -> tuple[Path, dict[str, Any]] | None:
    """(path, meta) of the newest whole checkpoint; broken ones are passed over with a warning."""
    for found in reversed(find(directory, prefix)):
        try:
            return found.path, verify(found.path)
        except ValueError as error:
            log.warning("%s; falling back to the checkpoint before it", error)
    return None


def next_generation(directory: Path, prefix: str, step: int) -> int:
    """Generation of a checkpoint of `step` that is about to be saved.

    It is that of the newest checkpoint, or the next where the newest is of this step or a later one: then the
    run was taken back, and what it saves is newer than what it left behind.
    """
    ordered = [found for found in find(directory, prefix) if found.step is not None]
    if not ordered:
        return 0
    newest = ordered[-1]
    return newest.generation + (newest.step >= step)


def remove_old(
    directory: Path,
    prefix: str,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_at: Sequence[int] = (),
    saved: Path | None = None,
) -> list[Found]:
    """Delete all but the newest `keep_last` checkpoints, and what an interrupted save left; says which.

    Those of a multiple of `keep_every` steps and of the steps `keep_at` stay as well, unless they were made
    for a preemption. `saved`, the one just written, stays whatever the others say, and so do those of which
    no step can be read: they are not counted either.
    """
    _remove_interrupted(directory, prefix)
    ordered = [found for found in find(directory, prefix) if found.step is not None]
    # stable: the one just written comes last, behind those of an equal step under a later clock
    ordered.sort(key=lambda found: found.path == saved)
    old = ordered[:-keep_last] if keep_last else []
    old = [found for found in old if not _is_kept(found, keep_every, keep_at)]
    for found in old:
        # renamed first: a deletion cut short must not leave a half folder under a checkpoint's name
        doomed = found.path.with_name(found.path.name + PARTIAL)
        found.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def _remove_interrupted(directory: Path, prefix: str) -> None:
    if directory.is_dir():
        for leftover in directory.glob(f"*{PARTIAL}"):
            # by the whole name: `run.*` would also be what a run of prefix `run.b` is just writing
            named = NAME.fullmatch(leftover.name.removesuffix(PARTIAL))
            if named and named["prefix"] == prefix:
                shutil.rmtree(leftover, ignore_errors=True)


def _is_kept(found: Found, keep_every: int | None, keep_at: Sequence[int]) -> bool:
    if found.is_preempt or found.step is None:
        return False
    return found.step in keep_at or keep_every is not None and found.step % keep_every == 0
