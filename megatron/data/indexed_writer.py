"""Write a .bin/.idx pair with its sidecar; the names appear only when all three are whole.

Lengths are spooled to disk beside the tokens, so that memory does not grow with the number of documents.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from megatron import _csrc
from megatron.data.indexed import CODES, HEADER, MAGIC, VERSION
from megatron.run_dir import open_alone

PARTIAL = ".partial"
SUFFIXES = (".bin", ".idx", ".json")  # renamed in this order: the sidecar is the last to appear
SPOOL = ".lengths"
COUNTED_IDS = 1 << 22  # a vocabulary with more is none of text, and counting them takes memory
BLOCK = 1 << 20  # documents, or tokens, looked at a time


def dtype_for(n_tokens: int) -> np.dtype:
    """uint16 where every id fits with room for a few more (Megatron's rule: under 65,500), else int32."""
    return np.dtype("<u2") if n_tokens < 65500 else np.dtype("<i4")


class IndexedWriter:
    """A context manager: leaving it in order finishes the pair, an exception leaves nothing behind."""

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype,
        about: dict[str, Any] | None = None,
        begun: tuple[int, int] = (0, 0),
        scratch: Path | None = None,
    ) -> None:
        """`about`: what the sidecar says beside counts and sums. `scratch`: folder of the partial files.

        begun: (documents, tokens) that `flush` left in the partial files of a writer that was killed, or that
        was told `keep_partial` before an exception: they are read again, what is behind them is dropped.
        """
        self.prefix, self.begun = Path(prefix), begun
        self.scratch = scratch or self.prefix.parent
        self.keep_partial = False
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.about = about or {}
        self.n_tokens = self.n_documents = self.n_empty = self.longest = 0
        # of each token id, for the entropy; None where there are too many kinds of them
        self._counts: np.ndarray | None = np.zeros(1 << 16, dtype=np.int64)
        self._sum = hashlib.sha256()
        self._is_prepared = False
        self._bin: IO[bytes] | None = None
        self._spool: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = open_alone(self._partial(".bin"), self.prefix)
        if any(self.begun):
            self._spool = self._partial(SPOOL).open("r+b")
            self._read_again(*self.begun)
        else:
            self._bin.truncate(0)
            self._spool = self._partial(SPOOL).open("w+b")
        return self

    def has_begun(self) -> bool:
        """Whether the partial files hold what `begun` says."""
        if not any(self.begun):
            return True
        n_documents, n_tokens = self.begun
        sizes = {".bin": n_tokens * self.dtype.itemsize, SPOOL: 4 * n_documents}
        paths = {self._partial(suffix): size for suffix, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size >= size for path, size in paths.items())

    def _read_again(self, n_documents: int, n_tokens: int) -> None:
        assert self._bin is not None and self._spool is not None, "called on opening"
        self._bin.truncate(n_tokens * self.dtype.itemsize)
        self._spool.truncate(4 * n_documents)
        while len(ids := np.fromfile(self._bin, self.dtype, BLOCK)):
            self._sum.update(ids.data)
            self._count(ids)
        for lengths in self._lengths():
            self._tell(lengths)

    def flush(self) -> tuple[int, int]:
        """Hand all that was added to the system; gives what `begun` would have to say."""
        assert self._bin is not None and self._spool is not None, "flush inside the `with`"
        self._bin.flush()
        self._spool.flush()
        return self.n_documents, self.n_tokens

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bin is not None and self._spool is not None, "__enter__ comes first"
        is_whole = False
        try:
            if kind is None:
                self.prepare()
                publish(self.prefix, self.scratch)
                is_whole = True
        finally:
            if is_whole or not self.keep_partial:  # before they are closed: then another process may begin
                for suffix in (*SUFFIXES, SPOOL):
                    self._partial(suffix).unlink(missing_ok=True)
            for file in (self._bin, self._spool):
                with suppress(*(() if is_whole else (OSError,))):  # of a full disk it has been said
                    file.close()

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. ValueError for an id that the dtype cannot hold."""
        self.add_documents(np.asarray(ids), np.array([len(ids)]))

    def add_documents(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append several documents laid end to end: ids [sum of lengths]."""
        assert lengths.sum() == len(ids), "lengths and ids are of the same documents"
        self._append(ids)
        self._end_documents(lengths)

    def add_in_parts(self, parts: Iterable[np.ndarray]) -> None:
        """Append one document, of which no more than a part is held at a time."""
        n_tokens = 0
        for ids in parts:
            self._append(ids)
            n_tokens += len(ids)
        self._end_documents(np.array([n_tokens]))

    def _append(self, ids: np.ndarray) -> None:
        assert self._bin is not None, "add documents inside the `with`"
        if ids.dtype != self.dtype and len(ids):
            limits = np.iinfo(self.dtype)
            if ids.min() < limits.min or ids.max() > limits.max:
                odd = ids.min() if ids.min() < limits.min else ids.max()
                raise ValueError(f"{self.prefix}: id {odd} does not fit {self.dtype}; choose a wider dtype")
        ids = np.ascontiguousarray(ids, dtype=self.dtype)
        self._bin.write(ids.data)
        self._sum.update(ids.data)
        self._count(ids)

    def _end_documents(self, lengths: np.ndarray) -> None:
        assert self._spool is not None, "add documents inside the `with`"
        self._spool.write(lengths.astype("<i4").data)
        self._tell(lengths)

    def _tell(self, lengths: np.ndarray) -> None:
        self.n_tokens += int(lengths.sum(dtype=np.int64))
        self.n_documents += len(lengths)
        self.n_empty += int((lengths == 0).sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))

    def _count(self, ids: np.ndarray) -> None:
        if self.dtype not in (np.dtype("<u2"), np.dtype("<i4")):
            ids = ids.astype("<i4")
        if self._counts is None:
            return
        if len(ids) and self.dtype.itemsize > 2 and int(ids.max()) >= len(self._counts):
            if int(ids.max()) >= COUNTED_IDS:
                self._counts = None
                return
            self._counts = np.pad(self._counts, (0, int(ids.max()) + 1 - len(self._counts)))
        _csrc.count_ids(ids, self._counts)

    def _partial(self, suffix: str) -> Path:
        return self.scratch / (self.prefix.name + suffix + PARTIAL)

    def prepare(self) -> None:
        """Write all that is to be written, so that only the names are missing; a second call does nothing."""
        assert self._bin is not None and self._spool is not None, "prepare inside the `with`"
        if self._is_prepared:
            return
        index_sum = hashlib.sha256()
        with self._partial(".idx").open("wb") as file:
            for block in self._index():
                index_sum.update(block)
                file.write(block)
        told = {
            "format": "MMIDIDX",
            "version": VERSION,
            "dtype": self.dtype.name,
            "documents": self.n_documents,
            "tokens": self.n_tokens,
            "empty_documents": self.n_empty,
            "longest_document": self.longest,
            "unigram_entropy_nats": None if self._counts is None else unigram_entropy(self._counts),
            **self.about,
            "sha256": {"bin": self._sum.hexdigest(), "idx": index_sum.hexdigest()},
        }
        self._partial(".json").write_text(json.dumps(told, indent=1) + "\n")
        self._bin.flush()
        for suffix in SUFFIXES:
            with self._partial(suffix).open("rb") as file:
                os.fsync(file.fileno())
        self._is_prepared = True

    def _lengths(self) -> Iterator[np.ndarray]:
        assert self._spool is not None
        self._spool.seek(0)
        while block := self._spool.read(4 * BLOCK):
            yield np.frombuffer(block, dtype="<i4")

    def _index(self) -> Iterator[bytes]:
        """The .idx of documents of one sequence each, block by block."""
        n = self.n_documents
        yield HEADER.pack(MAGIC, VERSION, CODES[self.dtype], n, n + 1)
        for lengths in self._lengths():
            yield lengths.tobytes()
        begin = 0
        for lengths in self._lengths():
            ends = begin + np.cumsum(lengths, dtype="<i8")
            starts = np.concatenate([np.array([begin], dtype="<i8"), ends[:-1]])
            yield (starts * self.dtype.itemsize).tobytes()
            begin = int(ends[-1])
        for first in range(0, n + 1, BLOCK):
            yield np.arange(first, min(first + BLOCK, n + 1), dtype="<i8").tobytes()


def publish(prefix: Path, scratch: Path) -> None:
    """Give the partial files of a prepared pair their names; killed in between, it may be called again."""
    final = {suffix: prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES}
    partial = {suffix: scratch / (prefix.name + suffix + PARTIAL) for suffix in SUFFIXES}
    if partial[".bin"].exists():
        # an older pair goes first: killed in between, this must not leave new tokens under an old index
        for suffix in reversed(SUFFIXES):
            final[suffix].unlink(missing_ok=True)
    for suffix in SUFFIXES:
        if partial[suffix].exists():
            partial[suffix].rename(final[suffix])


def unigram_entropy(counts: np.ndarray) -> float | None:
    """Entropy of the ids' own frequencies, nats a token: the least loss of a model without context."""
    seen = counts[counts > 0]
    if not len(seen):
        return None
    p = seen / seen.sum()
    return float(-(p * np.log(p)).sum())
