"""Convert checkpoints between the full and the sharded layout, in one process."""

from pathlib import Path
from typing import Any

from megatron.checkpoint import sharded, store
from megatron.checkpoint.layout import FILES
from megatron.io import atomic_folder


def reshard_to_full(src: Path, dst: Path) -> None:
    """Convert the sharded checkpoint `src` to the full checkpoint `dst`.

    Raises ValueError if `src` is not a valid sharded checkpoint, FileExistsError if `dst` exists.
    """
    meta = _verify_layout(src, expected="sharded")
    parts = store.read_parts(src, meta)
    with atomic_folder(dst) as partial:
        store.write_parts(partial, parts, tuple(FILES))
        store.write_meta(partial, {**_drop_file_records(meta), "state_dict_type": "full"})


def reshard_to_sharded(src: Path, dst: Path) -> None:
    """Convert the full checkpoint `src` to the sharded checkpoint `dst`. Errors as in `reshard_to_full`."""
    meta = _verify_layout(src, expected="full")
    parts = store.read_parts(src, meta)
    with atomic_folder(dst) as partial:
        # DCP stores tensors only: the other optimizer values move to part `iter`
        # read_parts restores these to part `optim` when it loads the sharded layout
        parts["iter"]["engine"] = {key: value for key, value in parts["optim"].items() if key != "state"}
        store.write_parts(partial, parts, store.SHARED_PARTS)
        sharded.write_sharded(partial, parts)
        store.write_meta(partial, {**_drop_file_records(meta), "state_dict_type": "sharded"})


def _verify_layout(src: Path, expected: str) -> dict[str, Any]:
    meta = store.verify_checkpoint(src)
    if store.is_sharded_checkpoint(meta) != (expected == "sharded"):
        raise ValueError(f"{src}: got the {meta.get('state_dict_type', 'full')} layout, expected {expected}")
    return meta


def _drop_file_records(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key != "files"}
