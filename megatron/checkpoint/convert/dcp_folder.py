"""Read torch's distributed checkpoints (DCP) with a pickled index, for conversion.

    .metadata       pickled index: tensors, their chunks, and the place of each chunk in the files
    __0_0.distcp    torch.save archives in a row, one per chunk

Every name in the index becomes an inert record: no name is imported, looked up
or called. torch's own weights-only reader cannot read the index, which has a
newer pickle protocol.
"""

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.layout import METADATA
from megatron.checkpoint.torch_file import check_records, check_tensors, wrap_read_errors

# no "/" and no "..": a file of the index is always in the checkpoint's folder
SHARD = re.compile(r"[\w-]+\.distcp")
_METADATA = (
    "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
    "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_NAMES = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _METADATA),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.Size",
    "torch.serialization._get_layout",
    "builtins.getattr",  # early versions of Python 3.11 pickle an enum member as getattr(class, name)
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
}
_DTYPE = re.compile(r"torch\.(b?float|u?int|bool)\w*")


class _Record:
    """An object that the index would construct, as data: its arguments and its state."""

    args: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *args: Any) -> "_Record":
        record = super().__new__(cls)
        record.args = args
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle._Unpickler):
    """Unpickler that resolves every name to a new class of records.

    It is Python's version: C's would allocate
    32 GB for the number 2^31 of a memo entry.

    any_name   accept names outside the list, as other
               programs store plans of their own in the index
    """

    def __init__(self, content: bytes, any_name: bool) -> None:
        super().__init__(io.BytesIO(content))
        self.any_name = any_name

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if not self.any_name and full not in _NAMES and not _DTYPE.fullmatch(full):
            raise ValueError(f"got the name {full[:100]!r}, which is not allowed in a checkpoint")
        return type(name, (_Record,), {})


def read_dcp_tensors(folder: Path, select: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, for any number of ranks that wrote it.

    select   chooses tensors by name, for checkpoints of other
             programs, whose other objects are skipped

    Raises ValueError for an invalid index, other objects than tensors, and
    chunks that are missing.
    """
    with wrap_read_errors(folder / METADATA):
        index = _IndexUnpickler((folder / METADATA).read_bytes(), select is not None).load().state
        sizes = {
            name: _read_size(entry.state["size"])
            for name, entry in index["state_dict_metadata"].items()
            if select is None or select(name)
        }
        places = [
            (key.state["fqn"], _read_size(key.state["offset"]), place.state)
            for key, place in index["storage_data"].items()
            if key.state["fqn"] in sizes
        ]
    tensors: dict[str, Tensor] = {}
    n_read = dict.fromkeys(sizes, 0)
    for name, offset, place in places:
        chunk = _read_chunk(folder, place)
        with wrap_read_errors(folder / METADATA):
            # empty: pages that no chunk fills use no
            # memory, whatever size the index gives
            whole = tensors.setdefault(name, torch.empty(sizes[name], dtype=chunk.dtype))
            box = [slice(begin, begin + n) for begin, n in zip(offset, chunk.shape, strict=True)]
            if whole[tuple(box)].shape != chunk.shape:
                raise ValueError(f"{name}: got a chunk outside its tensor")
            whole[tuple(box)] = chunk
        n_read[name] += chunk.numel()
    for name, size in sizes.items():
        if name not in tensors or n_read[name] != size.numel():
            raise ValueError(f"{folder}: {name}: got {n_read[name]} elements, expected {size.numel()}")
    return tensors


def _read_chunk(folder: Path, place: dict[str, Any]) -> Tensor:
    """Return one chunk. Raises ValueError for a file outside the folder and for other objects."""
    name = str(place["relative_path"])
    if not SHARD.fullmatch(name):
        raise ValueError(f"{folder}: got {name[:100]!r}, expected the name of a file of this checkpoint")
    with wrap_read_errors(folder / name):
        with (folder / name).open("rb") as file:
            file.seek(place["offset"])
            archive = io.BytesIO(file.read(place["length"]))
        check_records(archive, len(archive.getbuffer()))
        archive.seek(0)
        chunk = torch.load(archive, map_location="cpu", weights_only=True)
        check_tensors(chunk)
        if not isinstance(chunk, Tensor):
            raise ValueError(f"got {type(chunk).__name__}, expected a tensor")
    return chunk


def _read_size(record: Any) -> torch.Size:
    if type(record).__name__ != "Size":
        raise ValueError(f"got {type(record).__name__}, expected the shape of a tensor")
    return torch.Size(*record.args)
