"""Save checkpoints atomically, verify them when loading, and skip damaged ones."""

import base64
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.layout import (
    FILES,
    META,
    META_CHECKSUM,
    METADATA,
    NAME,
    RESTORE,
    CheckpointInfo,
    compute_meta_checksum,
    compute_sha256,
    find_checkpoints,
    read_meta_json,
)
from megatron.checkpoint.torch_file import load_torch_file, save_torch_file
from megatron.io import PARTIAL, atomic_folder, commit_folder
from megatron.log import get_logger
from megatron.plan.run_dir import CHECKPOINTS

log = get_logger(__name__)
SHARED_PARTS = ("lr", "iter")  # small parts; the sharded layout stores them in meta.json
STATE, SAFETENSORS = "state", ".safetensors"  # the sharded layout: key of meta.json, suffix of its files
TENSOR = "tensor_base64"  # key of an encoded tensor in meta.json


class OldLayoutError(ValueError):
    """A sharded checkpoint with a pickled index, which has to be converted once."""


def save_checkpoint(final: Path, parts: dict[str, Any], meta: dict[str, Any]) -> None:
    """Write `parts` (keys of FILES) and meta.json to a folder, renamed to its final name when complete.

    `meta` is extended by the sha256 and size of each file. On an OSError (for
    example a full disk) the partial folder is removed.
    """
    with atomic_folder(final) as partial:
        write_parts(partial, parts, tuple(FILES))
        write_meta(partial, {**meta, "state_dict_type": "full"})


def write_parts(partial: Path, parts: dict[str, Any], names: tuple[str, ...]) -> None:
    """Write the given parts, one file per part. Raises OSError on a full disk."""
    for part in names:
        save_torch_file(parts[part], partial / FILES[part])


def commit_checkpoint(partial: Path, final: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, fsync everything, then rename the folder."""
    write_meta(partial, meta)
    commit_folder(partial, final)


def write_meta(partial: Path, meta: dict[str, Any]) -> None:
    """Write meta.json with the checksums of all files of a checkpoint."""
    # The checksums are of the files as written,
    # not of the tensors in memory: they detect every later change,
    # but not a tensor that was wrong before it was saved.
    written = sorted(partial.iterdir())
    with ThreadPoolExecutor() as pool:  # hashlib releases the GIL
        digests = list(pool.map(compute_sha256, written))
    files = {
        path.name: {"sha256": digest, "bytes": path.stat().st_size}
        for path, digest in zip(written, digests, strict=True)
    }
    meta = {**meta, "files": files}
    # meta.json is not in its own `files`; it
    # has a checksum of its other keys instead
    (partial / META).write_text(json.dumps({**meta, META_CHECKSUM: compute_meta_checksum(meta)}, indent=1))


def encode_state(value: Any, name: str = STATE) -> Any:
    """Return numbers, text, lists, dictionaries and small tensors as JSON.

    Raises ValueError for other values.
    """
    if isinstance(value, Tensor):
        # flat and as bytes: numpy has no bfloat16
        content = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return {TENSOR: base64.b64encode(content).decode(), "dtype": dtype, "shape": list(value.shape)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: encode_state(item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [encode_state(item, f"{name}.{i}") for i, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{name}: got {type(value).__name__}, expected a tensor or a value of JSON")


def decode_state(value: Any) -> Any:
    """Invert `encode_state`. Raises ValueError for an invalid tensor."""
    if isinstance(value, list):
        return [decode_state(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TENSOR not in value:
        return {key: decode_state(item) for key, item in value.items()}
    try:
        content = bytearray(base64.b64decode(value[TENSOR]))
        return torch.frombuffer(content, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    except (RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"got an invalid tensor in {STATE} ({error})") from error


def load_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (parts, meta) of a complete checkpoint of either layout, with every file's checksum verified.

    Raises ValueError if a file is missing or changed, FileNotFoundError if
    there is no checkpoint.
    """
    meta = verify_checkpoint(path)
    return read_parts(path, meta), meta


def verify_checkpoint(path: Path, *, accept_old: bool = False) -> dict[str, Any]:
    """Return meta.json after checking every file's size and sha256.

    accept_old   accept a sharded checkpoint with a pickled index, for its conversion

    Errors as in `load_checkpoint`.
    """
    meta = read_meta(path, accept_old=accept_old)
    for name, record in meta["files"].items():
        verify_file(path / name, record)
    # torch reads every safetensors file of the folder
    if unlisted := sorted({file.name for file in path.glob("*" + SAFETENSORS)} - set(meta["files"])):
        raise ValueError(f"{path / unlisted[0]}: not a file of the checkpoint; delete it")
    return meta


def verify_file(file: Path, record: dict[str, Any] | None) -> None:
    """Compare a file with its entry in meta.json. Raises ValueError."""
    if record is None or not file.is_file():
        raise ValueError(f"{file}: missing; {RESTORE}")
    size = file.stat().st_size
    # the size first: it detects a truncated file without reading gigabytes
    if size != record["bytes"]:
        raise ValueError(f"{file}: got {size:,} bytes, expected {record['bytes']:,}; {RESTORE}")
    if compute_sha256(file) != record["sha256"]:
        raise ValueError(f"{file}: got content with another sha256 than was saved; {RESTORE}")


def is_sharded_checkpoint(meta: dict[str, Any]) -> bool:
    """Return True if meta.json describes the sharded layout, False for the full layout."""
    return meta.get("state_dict_type") == "sharded"


def read_parts(path: Path, meta: dict[str, Any], names: tuple[str, ...] = tuple(FILES)) -> dict[str, Any]:
    """Load the given parts of a verified checkpoint on the CPU. Raises ValueError for other files."""
    if is_sharded_checkpoint(meta):
        return _read_sharded_parts(path, meta, names)
    parts = {}
    for part in names:
        try:
            content = load_torch_file(path / FILES[part])
        except ValueError as error:
            raise ValueError(f"{path}: not a checkpoint of this project ({error})") from error
        if not isinstance(content, dict):
            raise ValueError(
                f"{path / FILES[part]}: got {type(content).__name__}, expected values by name. "
                "Load another checkpoint of the run."
            )
        parts[part] = content
    return parts


def _read_sharded_parts(path: Path, meta: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    try:
        parts = {part: decode_state(meta[STATE][part]) for part in SHARED_PARTS}
        engine = dict(parts["iter"].get("engine", {}))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{path / META}: {STATE}: got invalid content ({error}); {RESTORE}") from error
    if not set(names) <= set(SHARED_PARTS):
        from megatron.checkpoint import sharded  # import takes a second; full checkpoints skip it

        parts |= sharded.read_all_shards(path)
        # values of the optimizer that are not moments, such as the loss scale
        parts["optim"] |= engine
    return {part: parts[part] for part in names}


def read_meta(path: Path, *, accept_old: bool = False) -> dict[str, Any]:
    """Return the validated meta.json of a checkpoint. Errors as in `load_checkpoint`."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    if not (path / META).exists() and (
        infos := find_checkpoints(path) or find_checkpoints(path / CHECKPOINTS)
    ):
        names = [f"{info.path.name} (step {'unknown' if info.step is None else info.step})" for info in infos]
        raise ValueError(
            f"{infos[0].path.parent}: got a folder of checkpoints, expected one of them. "
            f"Give {', '.join(names[-8:])}."
        )
    meta = read_meta_json(path)
    files = set(meta["files"])
    if METADATA in files:
        if accept_old:
            return meta
        raise OldLayoutError(
            f"{path}: got a sharded checkpoint with a pickled index, expected {SAFETENSORS} files. "
            "Convert it once with tools/convert_checkpoint.py CHECKPOINT NEW --to sharded."
        )
    # any number of shards, which depends on the number of ranks that wrote them
    is_sharded = is_sharded_checkpoint(meta)
    is_valid = bool(files) and all(name.endswith(SAFETENSORS) for name in files)
    if not (is_valid if is_sharded else files == set(FILES.values())):
        expected = [SAFETENSORS] if is_sharded else sorted(FILES.values())
        raise ValueError(f"{path / META}: got files {sorted(files)}, expected {expected}")
    return meta


def find_newest_valid(directory: Path, prefix: str) -> tuple[Path, dict[str, Any]] | None:
    """Return (path, meta) of the newest valid checkpoint. Damaged ones are skipped with a warning.

    Raises OldLayoutError for a sharded checkpoint that has to be converted.
    """
    for info in reversed(find_checkpoints(directory, prefix)):
        try:
            return info.path, verify_checkpoint(info.path)
        except OldLayoutError:  # intact: skipping it would lose steps
            raise
        except ValueError as error:
            log.warning("%s; falling back to the previous checkpoint", error)
    return None


def next_generation(directory: Path, prefix: str, step: int) -> int:
    """Return the generation of a checkpoint of `step` that is about to be saved.

    It is the generation of the newest checkpoint, plus one if that checkpoint
    has this step or a later one. In that case the run was rewound, and its new
    checkpoints must sort after the old ones.
    """
    ordered = [
        (info.generation, info.step) for info in find_checkpoints(directory, prefix) if info.step is not None
    ]
    if not ordered:
        return 0
    # Example: steps 100, 200, 300 of generation 0, then the run resumes from
    # 100. Its next checkpoint, 200, gets generation 1 and sorts after step
    # 300; the one after it, 300, is later than 200 and keeps generation 1.
    newest_generation, newest_step = ordered[-1]
    return newest_generation + (newest_step >= step)


def remove_old_checkpoints(
    directory: Path,
    prefix: str,
    keep_last: int | None,
    keep_every: int | None = None,
    keep_at: Sequence[int] = (),
    saved: Path | None = None,
) -> list[CheckpointInfo]:
    """Delete all but the newest `keep_last` checkpoints, and leftovers of interrupted saves.

    Returns the deleted checkpoints.

    Checkpoints at a multiple of `keep_every` steps and at the steps
    `keep_at` are kept too, unless they were saved on a preemption.
    `saved`, the one just written, is always kept.
    Checkpoints without a readable step are kept and not counted.
    """
    _remove_interrupted(directory, prefix)
    ordered = [info for info in find_checkpoints(directory, prefix) if info.step is not None]
    # stable sort: moves the one just written to the end,
    # also past an equal step with a later timestamp
    ordered.sort(key=lambda info: info.path == saved)
    old = ordered[:-keep_last] if keep_last else []
    old = [info for info in old if not _is_retained(info, keep_every, keep_at)]
    for info in old:
        # rename first: an interrupted deletion must not leave
        # an incomplete folder under a checkpoint's name
        doomed = info.path.with_name(info.path.name + PARTIAL)
        info.path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return old


def _remove_interrupted(directory: Path, prefix: str) -> None:
    if directory.is_dir():
        for leftover in directory.glob(f"*{PARTIAL}"):
            # match the full name: the glob `run.*` would also
            # match a save in progress with prefix `run.b`
            match = NAME.fullmatch(leftover.name.removesuffix(PARTIAL))
            if match and match["prefix"] == prefix:
                shutil.rmtree(leftover, ignore_errors=True)


def _is_retained(info: CheckpointInfo, keep_every: int | None, keep_at: Sequence[int]) -> bool:
    if info.is_preempt or info.step is None:
        return False
    # a preemption saves at an arbitrary step: a
    # multiple of keep_every is then a coincidence
    return info.step in keep_at or keep_every is not None and info.step % keep_every == 0
