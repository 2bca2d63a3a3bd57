"""Reads the index of torch's distributed checkpoints (`.metadata`) without unpickling it.

DCP pickles its index, and unpickling a file of a stranger runs what the file says. Here the pickle's opcodes
are interpreted by a machine that builds strings, integers, containers and inert records only: a name in the
file is compared with a table and never imported, called or looked up. torch's own objects are then built from
the records, each field checked. What torch 2.7 to 2.13 write under Python 3.11 to 3.13 is in the table.
"""

import pickletools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.checkpoint.layout import METADATA

Kind = TypeVar("Kind")
MAX_BYTES = 1 << 28  # 140 bytes a chunk: two million chunks; the records take about 40 times the file
MAX_DIMENSIONS = 64
SHARD = re.compile(r"[\w-]+\.distcp")
_CLASSES = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
_NAMES = {
    *(f"{_CLASSES}{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *(f"{_CLASSES}{name}" for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *(f"{_CLASSES}{name}" for name in ("BytesStorageMetadata", "_MEM_FORMAT_ENCODING")),
    _INFO,
    "torch.Size",
    "torch.serialization._get_layout",
    "builtins.getattr",  # early 3.11 pickles a member of an enumeration as getattr(class, name)
    "pathlib.PosixPath",  # where the checkpoint was written: not read
    "pathlib._local.PosixPath",
    *_DTYPES,
}


@dataclass(frozen=True, slots=True)
class _Name:
    """A name that the file says. It is never resolved."""

    full: str


@dataclass(slots=True, eq=False)
class _Record:
    """What the file would call or make, not called: the name, its arguments, and its state."""

    name: str
    args: tuple
    state: Any = None


class _Machine:
    """Interprets the opcodes that DCP's pickles consist of; ValueError for every other."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """The object that the pickle describes."""
        steps: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), self.stack.append),
            **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), self.stack.append),
            **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda i: self.stack.append(self.memo[i])),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda i: self.memo.update({i: self.stack[-1]})),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            "MEMOIZE": lambda _: self.memo.update({len(self.memo): self.stack[-1]}),
            "NONE": self.stack.append,
            "NEWTRUE": lambda _: self.stack.append(True),
            "NEWFALSE": lambda _: self.stack.append(False),
            "EMPTY_TUPLE": lambda _: self.stack.append(()),
            "EMPTY_LIST": lambda _: self.stack.append([]),
            "EMPTY_DICT": lambda _: self.stack.append({}),
            "MARK": lambda _: self.marks.append(len(self.stack)),
            "TUPLE": lambda _: self.stack.append(tuple(self._pop_mark())),
            "TUPLE1": lambda _: self.stack.append(tuple(self._pop(1))),
            "TUPLE2": lambda _: self.stack.append(tuple(self._pop(2))),
            "TUPLE3": lambda _: self.stack.append(tuple(self._pop(3))),
            "APPEND": lambda _: self._append(self._pop(1)),
            "APPENDS": lambda _: self._append(self._pop_mark()),
            "SETITEM": lambda _: self._set_items(self._pop(2)),
            "SETITEMS": lambda _: self._set_items(self._pop_mark()),
            "GLOBAL": lambda words: self._name(*words.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*self._pop(2)),
            "REDUCE": lambda _: self._record(*self._pop(2)),
            "NEWOBJ": lambda _: self._record(*self._pop(2)),
            "BUILD": lambda _: self._build(*self._pop(1)),
        }
        for opcode, arg, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self._pop(1)[0]
            step = steps.get(opcode.name)
            if step is None:
                raise ValueError(f"opcode {opcode.name} has no place in a checkpoint")
            step(arg)
        raise ValueError("it has no end")

    def _pop(self, n: int) -> list[Any]:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < n:
            raise ValueError("its stack is empty")
        popped = self.stack[-n:]
        del self.stack[-n:]
        return popped

    def _pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        popped = self.stack[mark:]
        del self.stack[mark:]
        return popped

    def _append(self, items: list[Any]) -> None:
        _check(self.stack[-1], list, "APPEND").extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = _check(self.stack[-1], dict, "SETITEM")
        keys = items[::2]
        # a tuple nested a million times would overflow the C stack when it is hashed
        if not all(type(key) in (str, _Record) for key in keys):
            raise ValueError("a key is neither a string nor an index")
        target.update(zip(keys, items[1::2], strict=True))

    def _name(self, module: Any, name: Any) -> None:
        full = f"{_check(module, str, 'a module')}.{_check(name, str, 'a name')}"
        if full not in _NAMES:
            raise ValueError(f"{full[:100]!r} has no place in a checkpoint")
        self.stack.append(_Name(full))

    def _record(self, name: Any, args: Any) -> None:
        self.stack.append(_Record(_check(name, _Name, "a class").full, _check(args, tuple, "arguments")))

    def _build(self, state: Any) -> None:
        _check(self.stack[-1], _Record, "BUILD").state = state


def read_metadata(folder: Path) -> Metadata:
    """Names, shapes and places of all tensors in a sharded checkpoint.

    Every tensor is covered by its chunks, every chunk is in a file of the folder, no two share bytes, and no
    chunk is larger than its bytes: reading takes no more memory than the files have.
    ValueError for what is no such index, or holds more than tensors.
    """
    path = folder / METADATA
    try:
        n_bytes = path.stat().st_size
        if n_bytes > MAX_BYTES:
            raise ValueError(f"got {n_bytes:,} bytes, expected {MAX_BYTES:,} at most")
        return _convert(_Machine().run(path.read_bytes()), folder)
    except (OSError, ValueError, TypeError, LookupError, RecursionError, MemoryError) as error:
        told = str(error) or type(error).__name__
        raise ValueError(f"{path}: cannot be read ({told}); the checkpoint is damaged or not ours") from error


def _convert(root: Any, folder: Path) -> Metadata:
    """torch's Metadata from records."""
    fields = _state(root, f"{_CLASSES}Metadata")
    tensors = _check(fields["state_dict_metadata"], dict, "state_dict_metadata")
    entries = _check(fields["storage_data"], dict, "storage_data")
    odd = [key for key, value in tensors.items() if not _is(value, f"{_CLASSES}TensorStorageMetadata")]
    if not tensors or odd:
        raise ValueError(f"expected tensors only, got {str(odd[:3])[:100] if odd else 'nothing'}")
    storage = dict(_storage(key, value) for key, value in entries.items())
    # counted before they are looked at: the file may name one list of chunks a million times
    n_chunks = sum(len(_check(value.state["chunks"], list, "chunks")) for value in tensors.values())
    if not n_chunks == len(entries) == len(storage):
        raise ValueError(f"{n_chunks} chunks of tensors, {len(storage)} places for them")
    _check_places(storage.values(), folder)
    return Metadata(
        state_dict_metadata={
            _check(key, str, "a key"): _tensor(key, value, storage) for key, value in tensors.items()
        },
        storage_data=storage,
        storage_meta=StorageMeta(),
    )


def _tensor(key: str, record: _Record, storage: dict[MetadataIndex, _StorageInfo]) -> TensorStorageMetadata:
    """One tensor, whose chunks cover it."""
    fields = record.state
    dtype_name, layout = _check(_state(fields["properties"], f"{_CLASSES}TensorProperties"), tuple, key)[:2]
    if _check(dtype_name, _Name, key).full not in _DTYPES:
        raise ValueError(f"{key}: {dtype_name.full} is no type of numbers")
    if not _is(layout, "torch.serialization._get_layout") or layout.args != ("torch.strided",):
        raise ValueError(f"{key}: expected a dense tensor")
    dtype, size = _DTYPES[dtype_name.full], _size(fields["size"])
    chunks, covered = [], 0
    for chunk in fields["chunks"]:
        told = _state(chunk, f"{_CLASSES}ChunkStorageMetadata")
        offsets, sizes = _size(told["offsets"]), _size(told["sizes"])
        ends = [offset + n for offset, n in zip(offsets, sizes, strict=True)]
        if len(ends) != len(size) or any(end > whole for end, whole in zip(ends, size, strict=True)):
            raise ValueError(f"{key}: a chunk lies outside of its tensor")
        place = storage.get(MetadataIndex(key, offsets))
        if place is None or place.length < prod(sizes) * dtype.itemsize:
            raise ValueError(f"{key}: a chunk without bytes")
        covered += prod(sizes)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    if covered != prod(size):
        raise ValueError(f"{key}: {covered} numbers in chunks, {prod(size)} in the tensor")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _storage(key: Any, value: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """Where one chunk is."""
    index, info = _state(key, f"{_CLASSES}MetadataIndex"), _state(value, _INFO)
    if info.get("transform_descriptors"):
        raise ValueError("a chunk is transformed; this project writes none")
    name = _check(info["relative_path"], str, "a file's name")
    if not SHARD.fullmatch(name):
        raise ValueError(f"{name[:100]!r} is no name of a file of this checkpoint")
    place = _StorageInfo(name, _count(info["offset"]), _count(info["length"]))
    return MetadataIndex(_check(index["fqn"], str, "a key"), _size(index["offset"])), place


def _check_places(places: Iterable[_StorageInfo], folder: Path) -> None:
    """ValueError where chunks share bytes, or end past their file."""
    by_file: dict[str, list[_StorageInfo]] = {}
    for place in places:
        by_file.setdefault(place.relative_path, []).append(place)
    for name, within in by_file.items():
        within.sort(key=lambda place: (place.offset, place.length))
        if any(a.offset + a.length > b.offset for a, b in pairwise(within)):
            raise ValueError(f"{name}: two chunks share bytes")
        n_bytes = (folder / name).stat().st_size
        if within[-1].offset + within[-1].length > n_bytes:
            raise ValueError(f"{name}: a chunk ends past the file's {n_bytes:,} bytes")


def _is(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and value.name == name


def _state(value: Any, name: str) -> Any:
    """Fields of a record of that name."""
    if not _is(value, name):
        raise ValueError(f"expected {name.rpartition('.')[2]}")
    return value.state


def _size(value: Any) -> torch.Size:
    if not _is(value, "torch.Size") or len(value.args) > 1:
        raise ValueError("expected a shape")
    given = _check(value.args[0], tuple, "a shape") if value.args else ()
    whole = [_count(n) for n in given[:MAX_DIMENSIONS]]
    if len(given) > MAX_DIMENSIONS or prod(whole) >= 1 << 62:
        raise ValueError("a shape of more than 2^62 numbers")
    return torch.Size(whole)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("expected a count")
    return value


def _check(value: Any, kind: type[Kind], what: str) -> Kind:
    """The value, where it is of that type; ValueError."""
    if type(value) is not kind:
        raise ValueError(f"{what[:100]}: got {type(value).__name__}, expected {kind.__name__.strip('_')}")
    return value
