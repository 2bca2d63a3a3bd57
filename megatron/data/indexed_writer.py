"""Write a .bin/.idx pair with its sidecar; the names appear only when all three are whole."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from megatron.data.indexed import CODES, HEADER, MAGIC, VERSION

PARTIAL = ".partial"
SUFFIXES = (".bin", ".idx", ".json")  # renamed in this order: the sidecar is the last to appear


def dtype_for(n_tokens: int) -> np.dtype:
    """uint16 where every id fits with room for a few more (Megatron's rule: under 65,500), else int32."""
    return np.dtype("<u2") if n_tokens < 65500 else np.dtype("<i4")


class IndexedWriter:
    """A context manager: leaving it in order finishes the pair, an exception leaves nothing behind."""

    def __init__(self, prefix: str | Path, dtype: np.dtype, about: dict[str, Any] | None = None) -> None:
        """`about`: what the sidecar says beside counts and sums."""
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.about = about or {}
        self.n_tokens = 0
        self._lengths: list[np.ndarray] = []
        self._counts = np.zeros(0, dtype=np.int64)  # of each token id, for the entropy
        self._sum = hashlib.sha256()
        self._bin: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._partial(".bin").open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._bin is not None, "__enter__ comes first"
        try:
            if kind is None:
                self._finish()
        finally:
            self._bin.close()
            for suffix in SUFFIXES:
                self._partial(suffix).unlink(missing_ok=True)

    def add_document(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document. ValueError for an id that the dtype cannot hold."""
        self.add_documents(np.asarray(ids), [len(ids)])

    def add_documents(self, ids: np.ndarray, lengths: Iterable[int] | np.ndarray) -> None:
        """Append several documents laid end to end: ids [sum of lengths]."""
        assert self._bin is not None, "add documents inside the `with`"
        lengths = np.fromiter(lengths, dtype=np.int64) if not isinstance(lengths, np.ndarray) else lengths
        assert lengths.sum() == len(ids), "lengths and ids are of the same documents"
        limits = np.iinfo(self.dtype)
        if len(ids) and (ids.min() < limits.min or ids.max() > limits.max):
            raise ValueError(f"{self.prefix}: id {ids.max()} does not fit {self.dtype}; choose a wider dtype")
        raw = np.ascontiguousarray(ids, dtype=self.dtype).tobytes()
        self._bin.write(raw)
        self._sum.update(raw)
        self._lengths.append(lengths.astype(np.int32))
        self.n_tokens += len(ids)
        if len(ids):
            counts = np.bincount(ids)
            if len(counts) > len(self._counts):
                self._counts = np.pad(self._counts, (0, len(counts) - len(self._counts)))
            self._counts[: len(counts)] += counts

    def _partial(self, suffix: str) -> Path:
        return self.prefix.with_name(self.prefix.name + suffix + PARTIAL)

    def _finish(self) -> None:
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        index = index_bytes(lengths, self.dtype)
        self._partial(".idx").write_bytes(index)
        told = {
            "format": "MMIDIDX",
            "version": VERSION,
            "dtype": self.dtype.name,
            "documents": len(lengths),
            "tokens": self.n_tokens,
            "empty_documents": int((lengths == 0).sum()),
            "unigram_entropy_nats": unigram_entropy(self._counts),
            **self.about,
            "sha256": {"bin": self._sum.hexdigest(), "idx": hashlib.sha256(index).hexdigest()},
        }
        self._partial(".json").write_text(json.dumps(told, indent=1) + "\n")
        assert self._bin is not None
        self._bin.flush()
        for suffix in SUFFIXES:
            with self._partial(suffix).open("rb") as file:
                os.fsync(file.fileno())
        for suffix in SUFFIXES:
            self._partial(suffix).rename(self.prefix.with_name(self.prefix.name + suffix))


def index_bytes(lengths: np.ndarray, dtype: np.dtype) -> bytes:
    """The .idx of documents of one sequence each: lengths [n] of tokens."""
    n = len(lengths)
    positions = np.zeros(n, dtype="<i8")
    np.cumsum(lengths[:-1], dtype=np.int64, out=positions[1:])
    positions *= dtype.itemsize
    boundaries = np.arange(n + 1, dtype="<i8")
    head = HEADER.pack(MAGIC, VERSION, CODES[dtype], n, n + 1)
    return b"".join([head, lengths.astype("<i4").tobytes(), positions.tobytes(), boundaries.tobytes()])


def unigram_entropy(counts: np.ndarray) -> float | None:
    """Entropy of the ids' own frequencies, nats a token: the least loss of a model without context."""
    seen = counts[counts > 0]
    if not len(seen):
        return None
    p = seen / seen.sum()
    return float(-(p * np.log(p)).sum())
