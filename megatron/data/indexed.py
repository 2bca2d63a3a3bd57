"""Reader of a .bin/.idx dataset: Megatron's format MMIDIDX, version 1.

Layout of the index, little endian: 9 bytes of magic, u64 version, u8 dtype code, u64 number of sequences, u64
number of documents + 1; then int32 lengths [sequences], int64 byte positions [sequences], and int64 document
boundaries [documents + 1], counted in sequences.
"""

from collections.abc import Iterator
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.data.remote_tokens import RemoteTokens, TokenArray
from megatron.plan.idx_header import DTYPE_NAMES, HEADER, MAGIC, VERSION
from megatron.plan.sidecar import (
    PARTS_INDEX_SUFFIX,
    PARTS_SUFFIX,
    dataset_exists,
    find_sidecar,
    read_sidecar,
)
from megatron.remote_cache import count_bin_bytes, localize, open_remote_dataset
from megatron.remote_requests import is_url

# little endian on every machine
DTYPES = {code: np.dtype(name).newbyteorder("<") for code, name in DTYPE_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK_DOCUMENTS = 1 << 18  # documents whose lengths are computed at a time
BLOCK_NUMBERS = 1 << 14  # numbers of the index read at a time: they fit into a core's private cache
HINT = "Delete the dataset and run tools/preprocess_data_many_cores.py again"


def resolve_prefix(word: str | Path) -> str:
    """Return the dataset prefix for a word: the word itself, or without the suffix of one of its files."""
    prefix = str(word)
    if is_url(prefix):
        return prefix.removesuffix(".bin").removesuffix(".idx")
    for suffix in (PARTS_SUFFIX, PARTS_INDEX_SUFFIX, ".bin", ".idx"):
        if prefix.endswith(suffix) and not dataset_exists(prefix):
            shorter = prefix.removesuffix(suffix)
            return shorter if dataset_exists(shorter) or Path(f"{shorter}.idx").is_file() else prefix
    return prefix


class IndexedTokens:
    """Documents of one .bin/.idx dataset, memory-mapped on first use. Opening reads and checks the index.

    The prefix may be a URL: the index is then downloaded, and tokens are read through a cache on disk.

    sidecar  dict|None, <prefix>.json
    """

    def __init__(self, prefix: str | Path) -> None:
        """Open and check. Raises FileNotFoundError, or ValueError if index and data are inconsistent.

        Raises RemoteError for a URL that cannot be read.
        """
        self.prefix, self._is_remote = str(prefix), is_url(prefix)
        self._index, data = Path(f"{localize(prefix)}.idx"), f"{prefix}.bin"
        for path in () if self._is_remote else (self._index, Path(data)):
            if not path.is_file():
                raise FileNotFoundError(f"{path}: no such file, expected the prefix of a .bin/.idx dataset")
        self.dtype, self.n_sequences, self.n_documents = read_index_header(self._index)
        self.n_tokens, self._longest, in_order = check_index(
            self._index, self.n_sequences, self.n_documents, self.dtype
        )
        # `check_index` has summed the lengths; a truncated .bin is detected without reading it
        n_bytes = count_bin_bytes(prefix)
        expected = self.n_tokens * self.dtype.itemsize
        if n_bytes != expected:
            raise ValueError(f"{data}: got {n_bytes:,} bytes, expected {expected:,} as in its index. {HINT}.")
        if not in_order:
            # readers compute spans from positions, and `tokens` assumes that there are no gaps
            raise ValueError(f"{self._index}: got sequences that are not contiguous. {HINT}.")
        self.n_ids: int | None = None  # vocabulary size of the model, for `check_ids`; None: unknown
        self.sidecar: dict[str, Any] | None = None
        if find_sidecar(prefix) is not None:  # other programs write none
            self.sidecar = read_sidecar(prefix)

    def __reduce__(self) -> tuple[type["IndexedTokens"], tuple[str]]:
        """Pickle the prefix only: pickling the memory maps would copy the files."""
        return IndexedTokens, (self.prefix,)

    @cached_property
    def tokens(self) -> TokenArray:
        """All documents concatenated, [n_tokens]: the .bin file, memory-mapped on first access.

        Of a URL: blocks are downloaded when they are read, and all of them if they fit into the cache.
        """
        # An empty file cannot be mapped. A view as plain ndarray: slicing a np.memmap is three times slower.
        if not self.n_tokens:
            return np.empty(0, self.dtype)
        if self._is_remote:
            dataset = open_remote_dataset(self.prefix)
            dataset.download()
            return RemoteTokens(dataset, self.dtype)
        return np.memmap(f"{self.prefix}.bin", self.dtype, mode="r").view(np.ndarray)

    @cached_property
    def _body(self) -> np.ndarray:
        # One map of bytes and three views: each map counts as an open file. The arrays begin at byte 34, so
        # int32 and int64 elements are not aligned; numpy reads unaligned views correctly.
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
        """Close the memory maps, which count as open files. The next access maps the files again."""
        for name in ("tokens", "_body", "_lengths", "_positions", "_boundaries"):
            self.__dict__.pop(name, None)

    @cached_property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each document, int64 [n_documents]; read from the index on first access."""
        # boundaries are counted in sequences: difference the cumulative tokens at the boundaries
        # Sequences of 4, 3 and 5 tokens, boundaries [0, 2, 3]: ends = [0, 4, 7, 12], documents of 12 - 7 = 5
        # and 7 tokens come from ends[[0, 2, 3]] = [0, 7, 12].
        ends = np.zeros(self.n_sequences + 1, dtype=np.int64)
        np.cumsum(self.sequence_tokens(), out=ends[1:])
        return np.diff(ends[self._boundaries])

    def sequence_tokens(self) -> np.ndarray:
        """Read the tokens of each sequence from the index: [n_sequences], uint16 if they fit, else int32.

        In most datasets a document is a single sequence.
        """
        lengths = np.empty(self.n_sequences, dtype=np.uint16 if self._longest < 1 << 16 else np.int32)
        # A copy, because all blocks share one buffer. A memory map of the lengths would count as memory of
        # the process.
        for k, block in enumerate(_iter_blocks(self._index, "<i4", HEADER.size, self.n_sequences)):
            lengths[k * BLOCK_NUMBERS : k * BLOCK_NUMBERS + len(block)] = block
        return lengths

    def sequence_spans(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (start in `tokens`, number of tokens) of sequences int [n], each int64 [n]."""
        lengths = self._lengths[sequences].astype(np.int64)
        return self._positions[sequences] // self.dtype.itemsize, lengths

    def document_spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (start in `tokens`, number of tokens) of documents int [n], each int64 [n]."""
        begins, ends = (self._sequence_starts(self._boundaries[documents + i]) for i in (0, 1))
        return begins, ends - begins

    def iter_document_lengths(self) -> Iterator[np.ndarray]:
        """Yield the number of tokens of all documents in blocks, each int32 or int64."""
        for first in range(0, self.n_documents, BLOCK_DOCUMENTS):
            bounds = self._boundaries[first : first + BLOCK_DOCUMENTS + 1]
            end = first + len(bounds) - 1
            if (bounds == np.arange(first, end + 1)).all():  # a document is a sequence, as usual
                yield self._lengths[first:end]
            else:
                yield np.diff(self._sequence_starts(bounds))

    def read(self, document: int, offset: int, n: int) -> np.ndarray:
        """Return `n` tokens from `offset` in a document, across document ends: [n], a view of the file."""
        begin = self._document_start(document) + offset
        if begin < 0 or begin + n > self.n_tokens:
            raise ValueError(
                f"{self.prefix}: no {n} tokens from {begin:,} on, the file has {self.n_tokens:,}"
            )
        return self.tokens[begin : begin + n]

    def read_copy(self, begin: int, n: int) -> np.ndarray:
        """Return a copy of tokens[begin : begin + n], read without a memory map.

        Pages read through a memory map count as memory of the process.
        """
        if self._is_remote:
            return self.tokens[begin : begin + n]
        return np.fromfile(f"{self.prefix}.bin", self.dtype, n, offset=begin * self.dtype.itemsize)

    def prefetch(self, begins: np.ndarray, n: int) -> None:
        """Begin to download tokens[b : b + n] for each of `begins` int64 [k] of a remote dataset."""
        if self._is_remote and isinstance(self.tokens, RemoteTokens):
            self.tokens.prefetch(begins, n)

    def open_index(self) -> BufferedReader:
        """Open the .idx file, of a URL that in the cache."""
        return self._index.open("rb")

    def check_ids(self, ids: np.ndarray) -> None:
        """Check int64 ids of this dataset against the model's vocabulary size, if it is known."""
        if self.n_ids is not None:
            check_ids(ids, self.n_ids, self.prefix)

    def get_document(self, i: int) -> np.ndarray:
        """Return the tokens of document i, a view of the file."""
        if not 0 <= i < self.n_documents:
            raise IndexError(f"{self.prefix}: no document {i}, the file has {self.n_documents:,}")
        return self.tokens[self._document_start(i) : self._document_start(i + 1)]

    def _sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return the first token of each sequence; n_tokens for the number after the last sequence."""
        # An empty last document, or the end of the last one, refers to sequence n_sequences, which has no
        # position: its start is the end of the data.
        starts = np.full(len(sequences), self.n_tokens, dtype=np.int64)
        inside = sequences < self.n_sequences
        starts[inside] = self._positions[sequences[inside]] // self.dtype.itemsize
        return starts

    def _document_start(self, document: int) -> int:
        """Return the first token of a document; n_tokens for the number after the last document."""
        sequence = int(self._boundaries[document])
        if sequence == self.n_sequences:
            return self.n_tokens
        return int(self._positions[sequence]) // self.dtype.itemsize


def count_index_tokens(index: Path) -> int:
    """Return the tokens that a .idx file lists, without its .bin. Raises ValueError if it is inconsistent."""
    dtype, n_sequences, n_documents = read_index_header(index)
    return check_index(index, n_sequences, n_documents, dtype)[0]


def check_ids(ids: np.ndarray, n_ids: int, name: str) -> None:
    """Raise ValueError if any of int64 `ids` is outside 0..n_ids - 1. `name`: origin of the ids."""
    if (
        not ids.size or int(ids.view(np.uint64).max()) < n_ids
    ):  # as unsigned, a negative id is very large: one comparison covers both ends
        return
    odd = int(ids[(ids < 0) | (ids >= n_ids)][0])
    raise ValueError(
        f"{name}: got id {odd}, expected 0 to {n_ids - 1} (model.n_tokens={n_ids}). "
        "Preprocess with the model's tokenizer, or raise model.n_tokens."
    )


def read_index_header(path: Path) -> tuple[np.dtype, int, int]:
    """Read (dtype, sequences, documents) of an index, and check its size against them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise ValueError(f"{path}: got {size} bytes, too few for an index. {HINT}.")
    magic, version, code, n, m = HEADER.unpack(head)
    if magic != MAGIC:
        raise ValueError(f"{path}: got {magic!r} at the start, expected {MAGIC!r}")
    if version != VERSION or code not in DTYPES:
        raise ValueError(
            f"{path}: got version {version} with dtype code {code}, expected version 1 with integer tokens"
        )
    expected = HEADER.size + 12 * n + 8 * m  # int32 length and int64 position per sequence, int64 boundaries
    if size < expected or m < 1:
        raise ValueError(f"{path}: got {size:,} bytes, expected {expected:,} as in its header. {HINT}.")
    return DTYPES[code], n, m - 1


def check_index(path: Path, n_sequences: int, n_documents: int, dtype: np.dtype) -> tuple[int, int, bool]:
    """Return (tokens, longest sequence, whether sequences are contiguous).

    Raises ValueError for a negative length, or boundaries that do not ascend from 0 to n_sequences.
    """
    with path.open("rb") as file:
        n_tokens, longest, in_order, sound = _csrc.check_index(
            file.fileno(), HEADER.size, n_sequences, n_documents, dtype.itemsize
        )
    if not sound:
        raise ValueError(f"{path}: got inconsistent lengths or document boundaries. {HINT}.")
    return n_tokens, longest, in_order


def _iter_blocks(path: Path, kind: str, offset: int, n: int) -> Iterator[np.ndarray]:
    """Yield `n` numbers of an index from byte `offset`, in blocks. All blocks share one buffer."""
    buffer = np.empty(min(n, BLOCK_NUMBERS), dtype=kind)
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        for first in range(0, n, BLOCK_NUMBERS):
            block = buffer[: n - first]
            file.readinto(block.view(np.uint8).data)
            yield block
