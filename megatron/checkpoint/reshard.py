"""Checkpoints from one layout to the other, in one process."""

from pathlib import Path

from megatron.checkpoint import sharded, store
from megatron.checkpoint.folder import partial_folder
from megatron.checkpoint.layout import FILES


def to_full(src: Path, dst: Path) -> None:
    """Write the sharded checkpoint `src` as the full checkpoint `dst`; both are verified whole.

    Raises ValueError where `src` is no whole sharded checkpoint, FileExistsError where `dst` is there.
    """
    meta = _verified(src, wanted="sharded")
    parts = store.read_parts(src, meta)
    with partial_folder(dst) as partial:
        store.write_parts(partial, parts, tuple(FILES))
        store.seal(partial, dst, {**_without_files(meta), "state_dict_type": "full"})


def to_sharded(src: Path, dst: Path) -> None:
    """Write the full checkpoint `src` as the sharded checkpoint `dst`. Errors as `to_full`."""
    meta = _verified(src, wanted="full")
    parts = store.read_parts(src, meta)
    with partial_folder(dst) as partial:
        parts["iter"]["engine"] = {key: told for key, told in parts["optim"].items() if key != "state"}
        store.write_parts(partial, parts, store.IN_BOTH)
        sharded.write(partial, parts)
        store.seal(partial, dst, {**_without_files(meta), "state_dict_type": "sharded"})


def _verified(src: Path, wanted: str) -> dict:
    meta = store.verify(src)
    if store.is_sharded(meta) != (wanted == "sharded"):
        raise ValueError(f"{src}: is {meta.get('state_dict_type', 'full')} already, wanted {wanted}")
    return meta


def _without_files(meta: dict) -> dict:
    return {key: told for key, told in meta.items() if key != "files"}
