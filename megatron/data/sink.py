"""Where encoded documents go: the shards of one piece, and its lines that are none."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import numpy as np

from megatron.data.documents import COLUMNS, Piece, lines_before
from megatron.data.shards import Shards


@dataclass(frozen=True)
class Settings:
    """How documents become ids. `eod` -1: none is appended.

    enough   tokens after which no more of a piece need be encoded; None: all of it
    """

    eod: int
    dtype: str
    skip_bad_lines: bool
    enough: int | None = None


class Sink:
    """The open shard of one key of one piece."""

    def __init__(self, shards: Shards, piece: int, key: str, settings: Settings) -> None:
        self.ids = shards.ids(piece, key).open("wb", buffering=0)
        self.lengths = shards.lengths(piece, key).open("wb", buffering=0)
        self.settings = settings
        self.n_documents = self.n_tokens = 0
        self.hear: Callable[[], object] = lambda: None  # called when documents were appended

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, *error: object) -> None:
        self.ids.close()
        self.lengths.close()

    def write(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents."""
        _write_all(self.ids.fileno(), ids.astype(self.settings.dtype, copy=False).tobytes())
        _write_all(self.lengths.fileno(), lengths.astype("<i4", copy=False).tobytes())
        self.count(len(lengths), len(ids))

    def count(self, n_documents: int, n_tokens: int) -> None:
        """Take note of documents that were appended."""
        self.n_documents += n_documents
        self.n_tokens += n_tokens
        self.hear()

    def rewind(self) -> None:
        """Drop what was appended and not counted."""
        sizes = self.n_tokens * np.dtype(self.settings.dtype).itemsize, 4 * self.n_documents
        for file, size in zip((self.ids, self.lengths), sizes, strict=True):
            file.truncate(size)
            file.seek(size)

    def clear(self) -> None:
        """Drop all that was appended."""
        self.n_documents = self.n_tokens = 0
        self.rewind()

    @property
    def has_enough(self) -> bool:
        """Whether no more is wanted of this piece."""
        return self.settings.enough is not None and self.n_tokens >= self.settings.enough


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


class BadLines:
    """Lines that are no documents: the first one ends the work, or all are written to the rejects."""

    def __init__(self, piece: Piece, rejects: IO[str] | None, sink: Sink) -> None:
        self.piece, self.rejects, self.sink = piece, rejects, sink
        self.n_rejected = 0

    def add(self, line: int, error: ValueError) -> None:
        """Take note of line `line` of the piece, from 0. ValueError with its number in the file."""
        if self.rejects is None:
            where = line + 1 + (lines_before(self.piece) if self.piece.is_plain else 0)
            unit = "row" if self.piece.path.name.endswith(COLUMNS) else "line"
            raise ValueError(f"{self.piece.path}, {unit} {where}: {error}") from error
        told = {"line": line, "reason": str(error), "documents_before": self.sink.n_documents}
        self.rejects.write(json.dumps(told) + "\n")
        self.n_rejected += 1

    def replace_by_file(self, reason: str) -> None:
        """Write the whole file to the rejects, in place of its lines."""
        assert self.rejects is not None, "only where bad lines are skipped"
        self.rejects.seek(0)
        self.rejects.truncate()
        self.rejects.write(json.dumps({"line": None, "reason": reason, "documents_before": 0}) + "\n")
        self.n_rejected = 0
