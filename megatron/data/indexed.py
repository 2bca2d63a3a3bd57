"""Reader of datasets: Megatron's format MMIDIDX, version 1.

Layout of the index, little endian: 9 bytes of magic, u64 version,
u8 dtype code, u64 number of sequences, u64 number of documents + 1;
then int32 lengths [sequences], int64 byte positions
[sequences], int64 boundaries [documents + 1] in sequences.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron import _csrc
from megatron.data.parts import ConcatenatedTokens, DatasetPart, check_parts, read_parts_list
from megatron.data.sidecar import DTYPE_NAMES, HEADER, HINT, load_sidecar, locate_dataset, read_header

# little endian on every machine
DTYPES = {code: np.dtype(name).newbyteorder("<") for code, name in DTYPE_NAMES.items()}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
BLOCK_DOCUMENTS = 1 << 18  # documents whose lengths are computed at a time


class IndexedTokens:
    """Documents of a dataset, memory-mapped on first use. Opening reads and checks the index.

    sidecar  dict|None, <prefix>.json
    parts    parts of a dataset of parts, in the order of their documents; else empty
    """

    def __init__(self, uri: str | Path) -> None:
        """Open and check. Raises FileNotFoundError, or ValueError if index and data are inconsistent.

        Raises RemoteError for a URL that cannot be read.
        """
        self.prefix, self.files = str(uri), locate_dataset(uri)
        self.n_ids: int | None = None  # vocabulary size of the model, for `check_ids`; None: unknown
        if not self.files.exists():
            raise FileNotFoundError(
                f"{self.files.index} or {self.prefix}.bin: no such file, expected the prefix of a .bin/.idx "
                "dataset or list of parts"
            )
        self.sidecar = load_sidecar(uri)  # other programs write none
        header = name, self.n_sequences, self.n_documents = read_header(self.files.index)
        self.dtype = np.dtype(name).newbyteorder("<")
        self.parts: list[DatasetPart] = []
        self.n_tokens, self._longest = check_index(self.files.index, *header)
        if self.files.has_parts:
            assert self.sidecar is not None, "a list of parts is a sidecar"
            self.parts = read_parts_list(self.files, self.sidecar)
            # a document is a sequence of this index
            counts = (self.n_sequences, self.n_documents, self.n_tokens)
            check_parts(self.files, self.sidecar, self.parts, counts, name)
        # a truncated .bin is detected without reading it
        n_bytes, size = self.files.count_bytes(), self.n_tokens * self.dtype.itemsize
        if n_bytes != size:
            raise ValueError(
                f"{self.prefix}.bin: got {n_bytes:,} bytes, expected {size:,} as in its index. {HINT}."
            )

    def __reduce__(self) -> tuple[type["IndexedTokens"], tuple[str]]:
        """Pickle the prefix only: pickling the memory maps would copy the files."""
        return IndexedTokens, (self.prefix,)

    @cached_property
    def tokens(self) -> np.ndarray | ConcatenatedTokens:
        """All documents concatenated, [n_tokens]: the .bin file, memory-mapped on first access.

        The .bin of a URL is downloaded to the cache before.
        """
        if self.parts:
            return ConcatenatedTokens(self.parts, self.dtype)
        # an empty file cannot be mapped
        if not self.n_tokens:
            return np.empty(0, self.dtype)
        # a plain ndarray: slicing a np.memmap is three times slower
        return np.memmap(self.files.data, self.dtype, mode="r").view(np.ndarray)

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Lengths, byte positions and document boundaries, as in the index."""
        # One map and three views: each map counts as an open file. The arrays begin
        # at byte 34, not aligned; numpy reads unaligned views correctly.
        body = np.memmap(self.files.index, np.uint8, mode="r", offset=HEADER.size).view(np.ndarray)
        n, n_bounds = self.n_sequences, self.n_documents + 1
        bounds = body[12 * n : 12 * n + 8 * n_bounds]
        return body[: 4 * n].view("<i4"), body[4 * n : 12 * n].view("<i8"), bounds.view("<i8")

    def unmap(self) -> None:
        """Close the memory maps, which count as open files. The next access maps again."""
        for name in ("tokens", "_arrays"):
            self.__dict__.pop(name, None)

    @cached_property
    def document_tokens(self) -> np.ndarray:
        """Tokens of each document, int64 [n_documents]; read from the index on first access."""
        return np.concatenate([np.empty(0, np.int64), *self.iter_document_lengths()])

    def sequence_tokens(self) -> np.ndarray:
        """Read the tokens of each sequence: [n_sequences], uint16 if they fit, else int32.

        In most datasets a document is a single sequence.
        """
        # a memory map of the lengths would count as memory of the process
        lengths = np.fromfile(self.files.index, "<i4", self.n_sequences, offset=HEADER.size)
        return lengths.astype(np.uint16) if self._longest < 1 << 16 else lengths

    def sequence_spans(self, sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (start in `tokens`, number of tokens) of sequences int [n], each int64 [n]."""
        lengths, positions, _ = self._arrays
        return positions[sequences] // self.dtype.itemsize, lengths[sequences].astype(np.int64)

    def document_spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (start in `tokens`, number of tokens) of documents int [n], each int64 [n]."""
        bounds = self._arrays[2]
        begins, ends = (self._sequence_starts(bounds[documents + i]) for i in (0, 1))
        return begins, ends - begins

    def iter_document_lengths(self) -> Iterator[np.ndarray]:
        """Yield the number of tokens of all documents in blocks, each int64."""
        for first in range(0, self.n_documents, BLOCK_DOCUMENTS):
            bounds = self._arrays[2][first : first + BLOCK_DOCUMENTS + 1]
            # sequences of 4, 3, 5 tokens, boundaries [0, 2, 3]: starts [0, 7, 12]
            yield np.diff(self._sequence_starts(bounds))

    def read_copy(self, begin: int, n: int) -> np.ndarray:
        """Return a copy of tokens[begin : begin + n]."""
        if self.parts:
            return np.array(self.tokens[begin : begin + n])
        # pages read through a memory map count as memory of the process
        return np.fromfile(self.files.data, self.dtype, n, offset=begin * self.dtype.itemsize)

    def check_ids(self, ids: np.ndarray) -> None:
        """Check int64 ids of this dataset against the model's vocabulary size, if it is known."""
        if self.n_ids is not None:
            check_ids(ids, self.n_ids, self.prefix)

    def get_document(self, i: int) -> np.ndarray:
        """Return the tokens of document i, a view of the file."""
        if not 0 <= i < self.n_documents:
            raise IndexError(f"{self.prefix}: no document {i}, the file has {self.n_documents:,}")
        begins, lengths = self.document_spans(np.array([i]))
        return self.tokens[int(begins[0]) : int(begins[0] + lengths[0])]

    def _sequence_starts(self, sequences: np.ndarray) -> np.ndarray:
        """Return the first token of each sequence; n_tokens for n_sequences."""
        # The end of the last document is sequence
        # n_sequences, which has no position:
        # its start is the end of the data.
        starts = np.full(len(sequences), self.n_tokens, dtype=np.int64)
        inside = sequences < self.n_sequences
        starts[inside] = self._arrays[1][sequences[inside]] // self.dtype.itemsize
        return starts


def check_ids(ids: np.ndarray, n_ids: int, name: str) -> None:
    """Raise ValueError if any of int64 `ids` is outside 0..n_ids - 1."""
    # as unsigned, a negative id is very large: one comparison covers both ends
    if not ids.size or int(ids.view(np.uint64).max()) < n_ids:
        return
    odd = int(ids[(ids < 0) | (ids >= n_ids)][0])
    raise ValueError(
        f"{name}: got id {odd}, expected 0 to {n_ids - 1} (model.n_tokens={n_ids}). "
        "Preprocess with the model's tokenizer, or raise model.n_tokens."
    )


def check_index(path: Path, dtype: str, n_sequences: int, n_documents: int) -> tuple[int, int]:
    """Return (tokens, longest sequence) of an index with this header.

    Raises ValueError for a negative length, sequences that are not contiguous,
    or boundaries that do not ascend from 0 to n_sequences.
    """
    with path.open("rb") as file:
        n_tokens, longest, in_order, sound = _csrc.check_index(
            file.fileno(), HEADER.size, n_sequences, n_documents, np.dtype(dtype).itemsize
        )
    # readers compute spans from positions, and
    # `tokens` assumes that there are no gaps
    if not (sound and in_order):
        raise ValueError(f"{path}: got inconsistent lengths, positions or document boundaries. {HINT}.")
    return n_tokens, longest
