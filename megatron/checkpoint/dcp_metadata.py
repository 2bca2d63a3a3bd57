"""Read the index of torch's distributed checkpoints (`.metadata`) without unpickling it.

DCP pickles its index, and unpickling an untrusted file can run code. This module interprets the pickle's
opcodes with a machine that builds only strings, integers, containers and inert records. A name in the file is
compared with a table and never imported, called or looked up. torch's objects are then built from the
records, with every field checked. The table covers the files of torch 2.7 to 2.13 under Python 3.11 to 3.13.
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
MAX_BYTES = 1 << 28  # 140 bytes per chunk: 2 million chunks; the records need about 40 times the file size
MAX_DIMENSIONS = 64
MAX_COMPARISONS = 10_000_000  # of two chunks of a tensor: a few seconds
# no "/" and no "..": a file of the index is always in the checkpoint's folder
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
    "builtins.getattr",  # early versions of Python 3.11 pickle an enum member as getattr(class, name)
    "pathlib.PosixPath",  # path of the writer; ignored
    "pathlib._local.PosixPath",
    *_DTYPES,
}


@dataclass(frozen=True, slots=True)
class _GlobalName:
    """A global name in the file. It is never resolved."""

    full: str


# eq=False keeps the identity hash, so that records can be keys of a dictionary, as in DCP's storage_data
@dataclass(slots=True, eq=False)
class _Record:
    """An object that the file would construct, as data: class or function name, arguments and state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


class _PickleInterpreter:
    """Interpreter of the opcodes in DCP's pickles. Raises ValueError for any other opcode.

    any_name   accept names outside the table, as other programs store plans of their own in the index. They
               stay inert records: no name is resolved in either case.
    """

    def __init__(self, any_name: bool) -> None:
        self.any_name = any_name
        # A pickle is a program for a stack machine. {"a": (1, 2)} is: EMPTY_DICT, "a", 1, 2, TUPLE2, SETITEM.
        # MARK records the height of the stack, and TUPLE, APPENDS and SETITEMS consume everything above the
        # last mark.
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        """Return the object that the pickle describes."""
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
            "GLOBAL": lambda words: self._push_name(*words.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._push_name(*self._pop(2)),
            "REDUCE": lambda _: self._push_record(*self._pop(2)),
            "NEWOBJ": lambda _: self._push_record(*self._pop(2)),
            "BUILD": lambda _: self._set_state(*self._pop(1)),
        }
        # A missing mark, an empty stack or an unset memo entry raises IndexError or KeyError, which
        # `read_metadata` converts. The memo returns references: a value may occur many times, and a list may
        # contain itself.
        # genops only parses opcodes and their arguments; it never executes them.
        for opcode, arg, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return self._pop(1)[0]
            step = steps.get(opcode.name)
            if step is None:
                raise ValueError(f"got opcode {opcode.name}, which is not allowed in a checkpoint")
            step(arg)
        raise ValueError("got no STOP opcode at the end")

    def _pop(self, n: int) -> list[Any]:
        # items below the last mark belong to an enclosing container and must not be popped
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < n:
            raise ValueError("got an opcode that needs more stack items than there are")
        popped = self.stack[-n:]
        del self.stack[-n:]
        return popped

    def _pop_mark(self) -> list[Any]:
        mark = self.marks.pop()
        popped = self.stack[mark:]
        del self.stack[mark:]
        return popped

    def _append(self, items: list[Any]) -> None:
        _check_type(self.stack[-1], list, "APPEND").extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = _check_type(self.stack[-1], dict, "SETITEM")
        # [key, value, key, value, ...]; zip with strict=True below rejects an odd number
        keys = items[::2]
        # Hashing is recursive in C: a tuple nested a million times would overflow the C stack.
        if not all(type(key) in (str, _Record) for key in keys):
            raise ValueError("got a key that is neither a string nor an index")
        target.update(zip(keys, items[1::2], strict=True))

    def _push_name(self, module: Any, name: Any) -> None:
        full = f"{_check_type(module, str, 'a module')}.{_check_type(name, str, 'a name')}"
        if full not in _NAMES and not self.any_name:
            raise ValueError(f"got the name {full[:100]!r}, which is not allowed in a checkpoint")
        self.stack.append(_GlobalName(full))

    def _push_record(self, name: Any, args: Any) -> None:
        self.stack.append(
            _Record(_check_type(name, _GlobalName, "a class").full, _check_type(args, tuple, "arguments"))
        )

    def _set_state(self, state: Any) -> None:
        _check_type(self.stack[-1], _Record, "BUILD").state = state


def read_metadata(folder: Path, select: Callable[[str], bool] | None = None) -> Metadata:
    """Return the names, shapes and storage locations of all tensors in a sharded checkpoint.

    select   chooses tensors by name, for checkpoints of other programs, whose other objects are skipped

    Guarantees: the chunks of a tensor have as many elements as it, every chunk is in a file of the folder, no
    two chunks share bytes, and no chunk is larger than its bytes. Reading therefore needs no more memory than
    the file sizes.
    Raises ValueError for an invalid index, or one with other objects than tensors.
    """
    path = folder / METADATA
    try:
        n_bytes = path.stat().st_size
        # before the file is read: the limit must also bound the memory of a file that is no index
        if n_bytes > MAX_BYTES:
            raise ValueError(f"got {n_bytes:,} bytes, expected {MAX_BYTES:,} at most")
        return _build_metadata(_PickleInterpreter(select is not None).run(path.read_bytes()), folder, select)
    except (OSError, ValueError, TypeError, LookupError, RecursionError, MemoryError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(
            f"{path}: cannot be read ({reason}); the checkpoint is damaged or of another program"
        ) from error


def _build_metadata(root: Any, folder: Path, select: Callable[[str], bool] | None = None) -> Metadata:
    """Build torch's Metadata from records."""
    fields = _get_state(root, f"{_CLASSES}Metadata")
    tensors = _check_type(fields["state_dict_metadata"], dict, "state_dict_metadata")
    entries = _check_type(fields["storage_data"], dict, "storage_data")
    if select is not None:
        tensors = {key: value for key, value in tensors.items() if type(key) is str and select(key)}
        entries = {key: value for key, value in entries.items() if _get_fqn(key) in tensors}
    odd = [key for key, value in tensors.items() if not _is_record(value, f"{_CLASSES}TensorStorageMetadata")]
    if not tensors or odd:
        # Only strings are formatted: the text of a tuple nested through the memo doubles with each level.
        names = [key[:30] if type(key) is str else type(key).__name__ for key in odd[:3]]
        raise ValueError(f"expected tensors only, got {', '.join(names) if odd else 'nothing'}")
    storage = dict(_build_storage(key, value) for key, value in entries.items())
    # Count before iterating: through the memo, a file may reference one long list of chunks a million times.
    n_chunks = sum(len(_check_type(value.state["chunks"], list, "chunks")) for value in tensors.values())
    # The keys of `entries` are records, of `storage` (tensor, offset): fewer keys in `storage` means that two
    # entries are of the same chunk.
    if not n_chunks == len(entries) == len(storage):
        raise ValueError(
            f"got {n_chunks} chunks of tensors, expected {len(storage)}, the number of storage entries"
        )
    _check_places(storage.values(), folder)
    return Metadata(
        state_dict_metadata={
            _check_type(key, str, "a key"): _build_tensor(key, value, storage)
            for key, value in tensors.items()
        },
        storage_data=storage,
        storage_meta=StorageMeta(),
    )


def _get_fqn(key: Any) -> str:
    """Return the name of the object that a storage entry belongs to."""
    return _check_type(_get_state(key, f"{_CLASSES}MetadataIndex")["fqn"], str, "a key")


def _build_tensor(
    key: str, record: _Record, storage: dict[MetadataIndex, _StorageInfo]
) -> TensorStorageMetadata:
    """Build one tensor's metadata. Raises ValueError if its chunks have another number of elements."""
    fields = record.state
    dtype_name, layout = _check_type(
        _get_state(fields["properties"], f"{_CLASSES}TensorProperties"), tuple, key
    )[:2]
    if _check_type(dtype_name, _GlobalName, key).full not in _DTYPES:
        raise ValueError(f"{key}: got {dtype_name.full}, expected a dtype")
    if not _is_record(layout, "torch.serialization._get_layout") or layout.args != ("torch.strided",):
        raise ValueError(f"{key}: expected a dense tensor")
    dtype, size = _DTYPES[dtype_name.full], _parse_size(fields["size"])
    chunks: dict[tuple[int, ...], ChunkStorageMetadata] = {}
    covered = 0
    for chunk in fields["chunks"]:
        chunk_fields = _get_state(chunk, f"{_CLASSES}ChunkStorageMetadata")
        offsets, sizes = _parse_size(chunk_fields["offsets"]), _parse_size(chunk_fields["sizes"])
        # the chunk is the box [offset, end) of the tensor
        ends = [offset + n for offset, n in zip(offsets, sizes, strict=True)]
        if len(ends) != len(size) or any(end > whole for end, whole in zip(ends, size, strict=True)):
            raise ValueError(f"{key}: got a chunk outside its tensor")
        # A chunk is stored as a whole torch.save archive, which is longer than its elements. Fewer bytes
        # would let a small file allocate a large tensor.
        place = storage.get(MetadataIndex(key, offsets))
        if place is None or place.length < prod(sizes) * dtype.itemsize:
            raise ValueError(f"{key}: got a chunk with fewer bytes than elements")
        if tuple(offsets) in chunks:
            raise ValueError(f"{key}: got two chunks at one offset")
        covered += prod(sizes)
        chunks[tuple(offsets)] = ChunkStorageMetadata(offsets, sizes)
    if covered != prod(size):
        raise ValueError(f"{key}: got {covered} elements in chunks, expected {prod(size)}")
    _check_disjoint(key, list(chunks.values()))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, list(chunks.values()))


def _check_disjoint(key: str, chunks: list[ChunkStorageMetadata]) -> None:
    """Raise ValueError if chunks of a tensor share elements.

    Chunks that are disjoint and have as many elements as the tensor cover it. Without this check, elements
    that no chunk contains would keep whatever was in memory.
    """
    boxes = [
        (tuple(chunk.offsets), tuple(begin + n for begin, n in zip(chunk.offsets, chunk.sizes, strict=True)))
        for chunk in chunks
        if prod(chunk.sizes)
    ]
    if not boxes or not boxes[0][0]:
        return  # no element, or a scalar, which has a single offset
    # Sweep along the axis with the most distinct begins: there the fewest boxes are open at the same time.
    axis = max(range(len(boxes[0][0])), key=lambda i: len({begin[i] for begin, _ in boxes}))
    boxes.sort(key=lambda box: box[0][axis])
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    n_compared = 0
    for begin, end in boxes:
        # boxes that end at or before this begin cannot meet this or a later box
        open_boxes = [box for box in open_boxes if box[1][axis] > begin[axis]]
        n_compared += len(open_boxes)
        if n_compared > MAX_COMPARISONS:
            raise ValueError(f"{key}: got {len(boxes):,} chunks in a grid that is too fine to check")
        for other_begin, other_end in open_boxes:
            if all(a < d and c < b for a, b, c, d in zip(begin, end, other_begin, other_end, strict=True)):
                raise ValueError(f"{key}: got two chunks that share elements")
        open_boxes.append((begin, end))


def _build_storage(key: Any, value: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """Build the storage location of one chunk."""
    index, info = _get_state(key, f"{_CLASSES}MetadataIndex"), _get_state(value, _INFO)
    if info.get("transform_descriptors"):
        raise ValueError("got a transformed chunk, which this project never writes")
    name = _check_type(info["relative_path"], str, "a file's name")
    if not SHARD.fullmatch(name):
        raise ValueError(f"got {name[:100]!r}, expected the name of a file of this checkpoint")
    place = _StorageInfo(name, _parse_count(info["offset"]), _parse_count(info["length"]))
    return MetadataIndex(_check_type(index["fqn"], str, "a key"), _parse_size(index["offset"])), place


def _check_places(places: Iterable[_StorageInfo], folder: Path) -> None:
    """Raise ValueError if chunks share bytes or end past their file."""
    by_file: dict[str, list[_StorageInfo]] = {}
    for place in places:
        by_file.setdefault(place.relative_path, []).append(place)
    for name, chunks in by_file.items():
        # Sorted by begin, it is enough to compare neighbours: if any two intervals overlap, two neighbours
        # do. The last interval then has the greatest end. This costs n log n instead of n^2 comparisons.
        chunks.sort(key=lambda place: (place.offset, place.length))
        if any(a.offset + a.length > b.offset for a, b in pairwise(chunks)):
            raise ValueError(f"{name}: got two chunks that share bytes")
        n_bytes = (folder / name).stat().st_size
        if chunks[-1].offset + chunks[-1].length > n_bytes:
            raise ValueError(f"{name}: got a chunk that ends past the file's {n_bytes:,} bytes")


def _is_record(value: Any, name: str) -> bool:
    return isinstance(value, _Record) and value.name == name


def _get_state(value: Any, name: str) -> Any:
    """Return the state of a record. Raises ValueError if the value is not a record of that name."""
    if not _is_record(value, name):
        raise ValueError(f"expected {name.rpartition('.')[2]}")
    return value.state


def _parse_size(value: Any) -> torch.Size:
    if not _is_record(value, "torch.Size") or len(value.args) > 1:
        raise ValueError("expected a shape")
    values = _check_type(value.args[0], tuple, "a shape") if value.args else ()
    sizes = [_parse_count(n) for n in values[:MAX_DIMENSIONS]]
    # the product must stay within int64, in which torch computes it
    if len(values) > MAX_DIMENSIONS or prod(sizes) >= 1 << 62:
        raise ValueError("got a shape of more than 2^62 elements or 64 dimensions")
    return torch.Size(sizes)


def _parse_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError("expected a count")
    return value


def _check_type(value: Any, kind: type[Kind], what: str) -> Kind:
    """Return the value if it has exactly that type. Raises ValueError otherwise."""
    if type(value) is not kind:
        raise ValueError(f"{what[:100]}: got {type(value).__name__}, expected {kind.__name__.strip('_')}")
    return value
