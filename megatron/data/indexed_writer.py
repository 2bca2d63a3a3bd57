"""Writer of a .bin/.idx dataset with its sidecar. The files appear when all are complete.

Lengths are spooled to disk: memory does not grow with the number of documents.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from megatron.data.block_hash import BLOCK_BYTES, BlockHash, describe_sums
from megatron.data.indexed import DTYPE_CODES, IndexedTokens
from megatron.data.sidecar import HEADER, MAGIC, PARTS_SUFFIX, VERSION
from megatron.io import PARTIAL, fsync_path, open_exclusive, publish_files

DATASET_SUFFIXES = (".bin", ".idx", ".json")
BLOCK = 1 << 20  # tokens processed at a time
BLOCK_DOCUMENTS = 1 << 18  # processed at a time


def dtype_for(n_tokens: int) -> np.dtype:
    """Return the token dtype by Megatron's rule: uint16 for a vocabulary below 65,500, else int32."""
    return np.dtype("<u2") if n_tokens < 65500 else np.dtype("<i4")


class IndexedWriter:
    """Write a dataset in a `with` block. An exception leaves no files."""

    _bin: IO[bytes]  # both are open inside the `with` block
    _spool: IO[bytes]

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, meta: dict[str, Any] | None = None,
        scratch: Path | None = None,
    ) -> None:  # fmt: skip
        """`meta`: entries of the sidecar beside counts and hashes. `scratch`: folder of the partial files."""
        self.prefix = Path(prefix)
        self.scratch = scratch or self.prefix.parent
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.meta = meta or {}
        self.n_tokens = self.n_documents = self.n_empty = self.longest = 0
        self._hash = BlockHash(BLOCK_BYTES)
        self.sha256: dict[str, Any] = {}  # for .bin and .idx as in the sidecar, set by `prepare`
        names = [self.prefix.name + suffix for suffix in DATASET_SUFFIXES]
        # (partial, final) path of each file
        self._files = [(self.scratch / (name + PARTIAL), self.prefix.with_name(name)) for name in names]

    def __enter__(self) -> Self:
        if (parts := Path(f"{self.prefix}{PARTS_SUFFIX}")).exists():
            raise ValueError(
                f"{parts}: exists already, a dataset of parts. Choose another name, or delete it."
            )
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        # The lock is on the partial .bin. Its content
        # belongs to another process before the lock,
        # so that open_exclusive does not truncate.
        self._bin = open_exclusive(self._files[0][0], self.prefix)
        self._bin.truncate(0)
        self._spool = tempfile.TemporaryFile(dir=self.scratch)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self.prepare()
                # an older dataset is deleted first: a kill must not leave
                # new tokens with an old index. The tokens appear last.
                publish_files(self._files[::-1])
        finally:
            # before closing: the lock ends with the
            # file handle, and another process may start
            for partial, _ in self._files:
                partial.unlink(missing_ok=True)
            for file in (self._bin, self._spool):
                with suppress(OSError):  # buffers are empty, or a disk-full error propagates
                    file.close()

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. Raises ValueError for an id that the dtype cannot represent."""
        self.add_documents(np.asarray(ids), np.array([len(ids)]))

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append several documents: concatenated ids [sum of lengths], and lengths [n]."""
        assert lengths.sum() == len(ids), "lengths must sum to the number of ids"
        self._append_ids(ids)
        self._end_documents(lengths)

    def add_dataset(self, dataset: IndexedTokens, advance: Callable[[int], object]) -> None:
        """Append a dataset of the same dtype; `advance` gets the tokens of each block."""
        for begin in range(0, dataset.n_tokens, BLOCK):
            ids = dataset.read_copy(begin, BLOCK)
            self._append_ids(ids)
            advance(len(ids))
        for lengths in dataset.iter_document_lengths():
            self._end_documents(lengths)

    def _append_ids(self, ids: np.ndarray) -> None:
        if ids.dtype != self.dtype and len(ids):
            # the conversion below would wrap silently:
            # 65,536 would become 0 in uint16
            limits = np.iinfo(self.dtype)
            if ids.min() < limits.min or ids.max() > limits.max:
                odd = ids.min() if ids.min() < limits.min else ids.max()
                raise ValueError(
                    f"{self.prefix}: got id {odd}, which {self.dtype} cannot represent. Choose a wider dtype."
                )
        ids = np.ascontiguousarray(ids, dtype=self.dtype)
        self._bin.write(ids.data)
        self._hash.update(ids.data)

    def _end_documents(self, lengths: np.ndarray) -> None:
        # int32 as in the index: a document has fewer than 2^31 tokens
        self._spool.write(lengths.astype("<i4").data)
        self.n_tokens += int(lengths.sum(dtype=np.int64))
        self.n_documents += len(lengths)
        self.n_empty += int((lengths == 0).sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def prepare(self) -> None:
        """Write and fsync all partial files. A second call does nothing."""
        if self.sha256:
            return
        _, index, sidecar = [partial for partial, _ in self._files]
        index_digests = write_index(index, self.dtype, self.n_documents, self._iter_lengths, BLOCK_BYTES)
        self.sha256 = describe_sums(self._digest_tokens(), index_digests, BLOCK_BYTES)
        content = {
            "format": "MMIDIDX",
            "version": VERSION,
            "dtype": self.dtype.name,
            "documents": self.n_documents,
            "tokens": self.n_tokens,
            "empty_documents": self.n_empty,
            "longest_document": self.longest,
            # a caller's entry replaces a count:
            # `empty_documents` counts EOD-only documents
            **self.meta,
            "sha256": self.sha256,
        }
        sidecar.write_text(json.dumps(content, indent=1) + "\n")
        self._bin.flush()
        for partial, _ in self._files:
            fsync_path(partial)

    def _digest_tokens(self) -> list[str]:
        """Return the digests of the blocks of the .bin."""
        return self._hash.list_digests()

    def _iter_lengths(self) -> Iterator[np.ndarray]:
        # seek also flushes the write buffer of the spool
        self._spool.seek(0)
        while block := self._spool.read(4 * BLOCK_DOCUMENTS):
            yield np.frombuffer(block, dtype="<i4")


def write_index(
    path: Path, dtype: np.dtype, n: int, iter_lengths: Callable[[], Iterable[np.ndarray]], block_bytes: int
) -> list[str]:
    """Write the .idx file of n documents, each one sequence; return the digests of its blocks.

    iter_lengths   returns the tokens of all documents in blocks [k]; called twice
    """
    digest = BlockHash(block_bytes)
    with path.open("wb") as file:
        for block in _iter_index(dtype, n, iter_lengths):
            digest.update(block)
            file.write(block)
    return digest.list_digests()


def _iter_index(dtype: np.dtype, n: int, iter_lengths: Callable[[], Iterable[np.ndarray]]) -> Iterator[bytes]:
    # Three passes over the documents: all lengths, all positions, all
    # boundaries. The format stores the arrays one after another, and
    # their size may exceed memory; the lengths are read twice instead.
    yield HEADER.pack(MAGIC, VERSION, DTYPE_CODES[dtype], n, n + 1)
    for lengths in iter_lengths():
        yield lengths.astype("<i4").tobytes()
    begin = 0  # tokens before the block; positions in the file are in bytes
    for lengths in iter_lengths():
        # lengths [3, 0, 2], begin 0: ends [3, 3, 5],
        # starts [0, 3, 3], bytes [0, 6, 6] for uint16
        ends = begin + np.cumsum(lengths, dtype="<i8")
        yield ((ends - lengths) * dtype.itemsize).astype("<i8").tobytes()
        begin = int(ends[-1])
    # document i is sequence i, so the boundaries are 0, 1, ..., n
    for first in range(0, n + 1, BLOCK_DOCUMENTS):
        yield np.arange(first, min(first + BLOCK_DOCUMENTS, n + 1), dtype="<i8").tobytes()
