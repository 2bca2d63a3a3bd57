"""Convert checkpoints between the full and the sharded layout, in one process."""

from pathlib import Path
from typing import Any

from megatron.checkpoint import sharded, store
from megatron.checkpoint.convert.dcp_folder import read_dcp_tensors
from megatron.checkpoint.layout import FILES, METADATA
from megatron.checkpoint.torch_file import load_torch_file
from megatron.io import atomic_folder


def reshard_to_full(src: Path, dst: Path) -> None:
    """Convert the sharded checkpoint `src` to the full checkpoint `dst`.

    Raises ValueError if `src` is not a valid sharded checkpoint,
    FileExistsError if `dst` exists.
    """
    parts, meta = _read_checkpoint(src)
    if not store.is_sharded_checkpoint(meta):
        raise ValueError(f"{src}: got the full layout, expected sharded")
    with atomic_folder(dst) as partial:
        store.write_parts(partial, parts, tuple(FILES))
        store.write_meta(partial, {**_drop_layout(meta), "state_dict_type": "full"})


def reshard_to_sharded(src: Path, dst: Path) -> None:
    """Convert a checkpoint of the full layout, or with a pickled index, to the sharded checkpoint `dst`.

    Errors as in `reshard_to_full`.
    """
    parts, meta = _read_checkpoint(src)
    if store.is_sharded_checkpoint(meta) and METADATA not in meta["files"]:
        raise ValueError(f"{src}: got the sharded layout, expected full")
    # read_parts returns these values of the engine to part `optim`
    parts["iter"]["engine"] = {key: value for key, value in parts["optim"].items() if key != "state"}
    state = store.encode_state({part: parts[part] for part in store.SHARED_PARTS})
    with atomic_folder(dst) as partial:
        sharded.write_sharded(partial, parts)
        meta = {**_drop_layout(meta), "state_dict_type": "sharded", store.STATE: state}
        store.write_meta(partial, meta)


def _read_checkpoint(src: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (parts, meta) of a checkpoint of either layout, also with a pickled index."""
    meta = store.verify_checkpoint(src, accept_old=True)
    if METADATA not in meta["files"]:
        return store.read_parts(src, meta), meta
    parts: dict[str, Any] = {part: load_torch_file(src / FILES[part]) for part in store.SHARED_PARTS}
    parts |= sharded.unflatten_state(read_dcp_tensors(src))
    parts["optim"] |= parts["iter"].get("engine", {})
    return parts, meta


def _drop_layout(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key not in ("files", store.STATE)}
