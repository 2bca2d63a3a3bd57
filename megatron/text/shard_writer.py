"""Writers for the output of one piece: its shards of encoded documents, and its rejected lines."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import numpy as np

from megatron.text.inputs import COLUMN_SUFFIXES
from megatron.text.shards import ShardFolder
from megatron.text.text_readers import InputPiece, count_lines_before


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of the encoding. `eod` -1: no end-of-document id is appended.

    max_tokens   tokens after which the rest of a piece is not needed; None: the whole piece is needed
    """

    eod: int
    dtype: str
    skip_bad_lines: bool
    max_tokens: int | None = None


class ShardWriter:
    """Writer of the shard of one key of one piece."""

    def __init__(self, shards: ShardFolder, piece: int, key: str, settings: EncodeSettings) -> None:
        self.ids = shards.ids_path(piece, key).open(
            "wb", buffering=0
        )  # unbuffered: C++ writes to the descriptor too
        self.lengths = shards.lengths_path(piece, key).open("wb", buffering=0)
        self.settings = settings
        self.n_documents = self.n_tokens = 0
        self.on_write: Callable[[], object] = lambda: None  # called after documents are appended

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.ids.close()
        self.lengths.close()

    def write(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: concatenated ids, and the length of each document."""
        # Ids before lengths, both without a buffer: Python and C++ append through the same two descriptors,
        # and buffered bytes would be written after those of C++.
        _write_all(self.ids.fileno(), ids.astype(self.settings.dtype, copy=False).tobytes())
        _write_all(self.lengths.fileno(), lengths.astype("<i4", copy=False).tobytes())
        self.count_documents(len(lengths), len(ids))

    def count_documents(self, n_documents: int, n_tokens: int) -> None:
        """Count documents that were appended, and call `on_write`."""
        self.n_documents += n_documents
        self.n_tokens += n_tokens
        self.on_write()

    def rewind(self) -> None:
        """Discard appended documents that are not counted yet."""
        # C++ writes through the same descriptors, so the offset must move back together with the size
        sizes = self.n_tokens * np.dtype(self.settings.dtype).itemsize, 4 * self.n_documents
        for file, size in zip((self.ids, self.lengths), sizes, strict=True):
            file.truncate(size)
            file.seek(size)

    def clear(self) -> None:
        """Discard all appended documents."""
        self.n_documents = self.n_tokens = 0
        self.rewind()

    @property
    def has_enough(self) -> bool:
        """True once the shard has `max_tokens`, so that the rest of the piece is not needed."""
        return self.settings.max_tokens is not None and self.n_tokens >= self.settings.max_tokens


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)  # os.write may write a part only
    while view:
        view = view[os.write(descriptor, view) :]


class RejectLog:
    """Handling of invalid lines: raise for the first one, or write all of them to the rejects file."""

    def __init__(self, piece: InputPiece, rejects: IO[str] | None, writer: ShardWriter) -> None:
        self.piece, self.rejects, self.sink = piece, rejects, writer
        self.n_rejected = 0

    def add(self, line: int, error: ValueError) -> None:
        """Reject line `line` of the piece, counted from 0.

        Without a rejects file, raises ValueError with the line's number in the file, counted from 1.
        """
        if self.rejects is None:
            # `line` counts from the start of the piece. Counting the earlier lines reads the file up to the
            # piece, which is done only for this message.
            number = line + 1 + (count_lines_before(self.piece) if self.piece.is_plain else 0)
            unit = "row" if self.piece.path.name.endswith(COLUMN_SUFFIXES) else "line"
            raise ValueError(f"{self.piece.path}, {unit} {number}: {error}") from error
        record = {"line": line, "reason": str(error), "documents_before": self.sink.n_documents}
        self.rejects.write(json.dumps(record) + "\n")
        self.n_rejected += 1

    def replace_by_file(self, reason: str, n_read: int) -> None:
        """Replace the rejected lines by one record for the whole file, of which `n_read` bytes were read."""
        assert self.rejects is not None, "called only if bad lines are skipped"
        # the rejected lines were read from damaged content, so they may be wrong as well
        self.rejects.seek(0)
        self.rejects.truncate()
        record = {"line": None, "byte": n_read, "reason": reason, "documents_before": 0}
        self.rejects.write(json.dumps(record) + "\n")
        self.n_rejected = 0
