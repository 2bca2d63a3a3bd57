"""Read a .bin/.idx pair: Megatron's MMIDIDX version 1.

The index is 9 bytes of magic, u64 version, u8 dtype code, u64 sequences, u64 documents + 1, then int32
lengths, int64 byte positions and int64 document boundaries (in sequences), all little endian.
"""

import struct
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.config.sidecar import read_sidecar

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK = 1 << 14  # numbers of the index looked at a time: they stay in the cache of the core
REMEDY = "delete the pair and run tools/preprocess_data_many_cores.py again"


def prefix_of(word: str | Path) -> str:
    """The prefix of the pair that a word names: as it is, or without the .bin or .idx behind it."""
    cut = str(word).removesuffix(".bin").removesuffix(".idx")
    return cut if Path(f"{cut}.idx").is_file() and not Path(f"{word}.idx").is_file() else str(word)


class IndexedTokens:
    """The documents of one pair, mapped where they are used. Opening reads the index once and keeps nothing.

    sidecar  dict|None, <prefix>.json
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open and check. FileNotFoundError, or ValueError where index and data do not fit each other."""
        self.prefix = str(prefix)
        self._index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for path in (self._index, data):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file; wanted the prefix of a .bin/.idx pair")
        self.dtype, self.n_sequences, self.n_documents = _read_header(self._index)
        self.n_tokens, self._longest, in_order = _check_index(
            self._index, self.n_sequences, self.n_documents, self.dtype
        )
        held = data.stat().st_size
        wanted = self.n_tokens * self.dtype.itemsize
        if held != wanted:
            raise ValueError(f"{data}: holds {held:,} bytes, its index lists {wanted:,}; {REMEDY}")
        if not in_order:
            raise ValueError(f"{self._index}: sequences do not lie one after another; {REMEDY}")
        self.n_ids: int | None = None  # of the model that reads them, for `check_ids`
        self.sidecar: dict[str, Any] | None = None
        if Path(f"{prefix}.json").is_file():  # another program writes none
            self.sidecar = read_sidecar(prefix)

    def __reduce__(self) -> tuple[type["IndexedTokens"], tuple[str]]:
        """Sent to another process, a pair is its name: the mapped files would be copied whole."""
        return IndexedTokens, (self.prefix,)

    @cached_property
    def tokens(self) -> np.ndarray:
        """All documents laid end to end, [n_tokens]: the .bin, mapped when first asked for."""
        # an empty file cannot be mapped; a plain array because slices of a memmap are three times slower
        if not self.n_tokens:
            return np.empty(0, self.dtype)
        return np.memmap(f"{self.prefix}.bin", self.dtype, mode="r").view(np.ndarray)

    @cached_property
    def _body(self) -> np.ndarray:
        return np.memmap(self._index, np.uint8, mode="r", offset=HEADER.size).view(np.ndarray)

    @cached_property
    def _lengths(self) -> np.ndarray:
        return self._body[: 4 * self.n_sequences].view("<i4")

    @cached_property
    def _positions(self) -> np.ndarray:
        return self._body[4 * self.n_sequences : 12 * self.n_sequences].view("<i8")

    @cached_property
    def _boundaries(self) -> np.ndarray:
        return self._body[12 * self.n_sequences :][: 8 * self.n_documents + 8].view("<i8")

    def unmap(self) -> None:
        """Close the mapped files, each of which is an open file; the next use maps them again."""
        for name in ("tokens", "_body", "_lengths", "_positions", "_boundaries"):
            self.__dict__.pop(name, None)

    @cached_property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each document, int64 [n_documents]; read from the index when first asked for."""
        ends = np.zeros(self.n_sequences + 1, dtype=np.int64)
        np.cumsum(self.sequence_tokens(), out=ends[1:])
        return np.diff(ends[self._boundaries])

    def sequence_tokens(self) -> np.ndarray:
        """Tokens of each sequence, [n_sequences], read from the index; most documents are one sequence.

        uint16 where they fit, else int32.
        """
        found = np.empty(self.n_sequences, dtype=np.uint16 if self._longest < 1 << 16 else np.int32)
        for k, block in enumerate(_blocks(self._index, "<i4", HEADER.size, self.n_sequences)):
            found[k * BLOCK : k * BLOCK + len(block)] = block
        return found

    def sequence_spans(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where sequences int [n] begin in `tokens`, and how many tokens they have: two int64 arrays [n]."""
        lengths = self._lengths[sequences].astype(np.int64)
        return self._positions[sequences] // self.dtype.itemsize, lengths

    def document_spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where documents int [n] begin in `tokens`, and how many tokens they have: two int64 arrays [n]."""
        begins, ends = (self._starts(self._boundaries[documents + i]) for i in (0, 1))
        return begins, ends - begins

    def read(self, document: int, offset: int, n: int) -> np.ndarray:
        """`n` tokens from `offset` in a document on, across ends of documents: [n], a view of the file."""
        begin = self._start(document) + offset
        if begin < 0 or begin + n > self.n_tokens:
            raise ValueError(
                f"{self.prefix}: no {n} tokens from {begin:,} on, the file holds {self.n_tokens:,}"
            )
        return self.tokens[begin : begin + n]

    def copied(self, begin: int, n: int) -> np.ndarray:
        """As tokens[begin : begin + n], read, not mapped: what was read of a mapped file counts as held."""
        return np.fromfile(f"{self.prefix}.bin", self.dtype, n, offset=begin * self.dtype.itemsize)

    def check_ids(self, ids: np.ndarray) -> None:
        """`check_ids` of some int64 ids of this dataset, where the number of a model's ids is known."""
        if self.n_ids is not None:
            check_ids(ids, self.n_ids, self.prefix)

    def document(self, i: int) -> np.ndarray:
        """The tokens of document i, a view of the file."""
        if not 0 <= i < self.n_documents:
            raise IndexError(f"{self.prefix}: no document {i}, the file holds {self.n_documents:,}")
        return self.tokens[self._start(i) : self._start(i + 1)]

    def _starts(self, sequences: np.ndarray) -> np.ndarray:
        """Token at which sequences begin; of the one after the last, where the file ends."""
        starts = np.full(len(sequences), self.n_tokens, dtype=np.int64)
        there = sequences < self.n_sequences
        starts[there] = self._positions[sequences[there]] // self.dtype.itemsize
        return starts

    def _start(self, document: int) -> int:
        """Token at which a document begins; of the one after the last, where the file ends."""
        sequence = int(self._boundaries[document])
        if sequence == self.n_sequences:
            return self.n_tokens
        return int(self._positions[sequence]) // self.dtype.itemsize


def check_ids(ids: np.ndarray, n_ids: int, name: str) -> None:
    """ValueError where one of some int64 ids is not in 0..n_ids - 1. `name`: what they are read from."""
    if not ids.size or int(ids.view(np.uint64).max()) < n_ids:  # as unsigned, a negative one is very large
        return
    odd = int(ids[(ids < 0) | (ids >= n_ids)][0])
    raise ValueError(
        f"{name}: got id {odd}, expected 0 to {n_ids - 1} (model.n_tokens={n_ids}). "
        "Preprocess with the model's tokenizer, or raise model.n_tokens."
    )


def _read_header(path: Path) -> tuple[np.dtype, int, int]:
    """(dtype, sequences, documents) of an index whose size fits them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise ValueError(f"{path}: {size} bytes are no index; {REMEDY}")
    magic, version, code, n, m = HEADER.unpack(head)
    if magic != MAGIC:
        raise ValueError(f"{path}: begins with {magic!r}, an index begins with {MAGIC!r}")
    if version != VERSION or code not in DTYPES:
        raise ValueError(
            f"{path}: version {version} with dtype code {code}, wanted version 1 with integer tokens"
        )
    wanted = HEADER.size + 12 * n + 8 * m
    if size < wanted or m < 1:
        raise ValueError(f"{path}: {size:,} bytes, its header promises {wanted:,}; {REMEDY}")
    return DTYPES[code], n, m - 1


def _check_index(path: Path, n_sequences: int, n_documents: int, dtype: np.dtype) -> tuple[int, int, bool]:
    """(tokens, longest sequence, whether sequences lie one after another).

    ValueError for lengths or boundaries of no sense.
    """
    with path.open("rb") as file:
        n_tokens, longest, in_order, sound = _csrc.check_index(
            file.fileno(), HEADER.size, n_sequences, n_documents, dtype.itemsize
        )
    if not sound:
        raise ValueError(f"{path}: lengths or document boundaries make no sense; {REMEDY}")
    return n_tokens, longest, in_order


def _blocks(path: Path, kind: str, offset: int, n: int) -> Iterator[np.ndarray]:
    """`n` numbers of an index from a byte on, in blocks; each is overwritten by the next."""
    held = np.empty(min(n, BLOCK), dtype=kind)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for first in range(0, n, BLOCK):
            block = held[: n - first]
            file.readinto(block.view(np.uint8))
            yield block
