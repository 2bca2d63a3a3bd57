"""One piece of the input to one shard a key."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.data.documents import COLUMNS, Piece, checked_text, lines_before, lines_of, rows_of, text_of
from megatron.data.shards import Done, Shards
from megatron.tokenizer.encoder import Encoder, FastEncoder

BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Settings:
    """How documents become ids. `eod` -1: none is appended."""

    eod: int
    dtype: str
    skip_bad_lines: bool


class Sink:
    """The open shard of one key of one piece."""

    def __init__(self, shards: Shards, piece: int, key: str, settings: Settings) -> None:
        self.ids = shards.ids(piece, key).open("wb", buffering=0)
        self.lengths = shards.lengths(piece, key).open("wb", buffering=0)
        self.settings = settings
        self.n_documents = self.n_tokens = 0

    def __enter__(self) -> "Sink":
        return self

    def __exit__(self, *error: object) -> None:
        self.ids.close()
        self.lengths.close()

    def write(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents."""
        _write_all(self.ids.fileno(), ids.astype(self.settings.dtype, copy=False).tobytes())
        _write_all(self.lengths.fileno(), lengths.astype("<i4", copy=False).tobytes())
        self.n_documents += len(lengths)
        self.n_tokens += len(ids)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def encode_piece(piece: Piece, number: int, shards: Shards, settings: Settings, encoder: Encoder) -> Done:
    """Encode one piece and mark it done.

    Raises ValueError with file, line and reason for a line that is no document, unless those are skipped:
    then they stand in the piece's rejects. OSError for a full disk.
    """
    bad = _BadLines(piece, settings.skip_bad_lines)
    with ExitStack() as stack:
        sinks = {key: stack.enter_context(Sink(shards, number, key, settings)) for key in shards.keys}
        if piece.path.name.endswith(COLUMNS):
            n_lines = _columns(piece, sinks, settings, encoder, bad)
        elif piece.is_plain and isinstance(encoder, FastEncoder) and len(sinks) == 1:
            n_lines = _plain_fast(piece, next(iter(sinks.items())), settings, encoder, bad)
        else:
            n_lines = _lines(piece, sinks, settings, encoder, bad)
    if bad.rejects:
        shards.rejects(number).write_text("".join(json.dumps(one) + "\n" for one in bad.rejects))
    done = Done(
        n_lines=n_lines,
        n_documents=next(iter(sinks.values())).n_documents,
        n_tokens=sum(sink.n_tokens for sink in sinks.values()),
        n_rejected=len(bad.rejects),
        n_bytes=sum(sink.n_tokens for sink in sinks.values()) * np.dtype(settings.dtype).itemsize,
    )
    shards.mark_done(number, done)
    return done


class _BadLines:
    """Lines that are no documents: the first one ends the work, or all are kept for the rejects."""

    def __init__(self, piece: Piece, skip: bool) -> None:
        self.piece, self.skip = piece, skip
        self.rejects: list[dict[str, Any]] = []

    def add(self, line: int, error: ValueError) -> None:
        """Take note of line `line` of the piece, from 0. ValueError with its number in the file."""
        if not self.skip:
            where = line + 1 + (lines_before(self.piece) if self.piece.is_plain else 0)
            unit = "row" if self.piece.path.name.endswith(COLUMNS) else "line"
            raise ValueError(f"{self.piece.path}, {unit} {where}: {error}") from error
        self.rejects.append({"line": line, "reason": str(error)})


def _plain_fast(
    piece: Piece, keyed: tuple[str, Sink], settings: Settings, encoder: FastEncoder, bad: _BadLines
) -> int:
    """Byte range to shard in C++; a line that it refuses is judged here, then it goes on behind that."""
    key, sink = keyed
    at, n_lines = piece.begin, 0
    wide = np.dtype(settings.dtype).itemsize == 4
    with piece.path.open("rb") as file:
        while at < piece.end:
            at, documents, tokens, lines, refused = _csrc.encode_lines(
                encoder.worker, file.fileno(), at, piece.end, key, encoder.special, settings.eod, wide,
                sink.ids.fileno(), sink.lengths.fileno(),
            )  # fmt: skip
            sink.n_documents += documents
            sink.n_tokens += tokens
            n_lines += lines
            if not refused:
                continue
            file.seek(at)
            line = file.readline(piece.end - at)
            at += len(line)
            if line.strip():
                try:
                    text = text_of(line, key)
                except ValueError as error:
                    bad.add(n_lines, error)
                else:
                    sink.write(*encoder.encode([text], settings.eod))
            n_lines += 1
    return n_lines


def _lines(piece: Piece, sinks: dict[str, Sink], settings: Settings, encoder: Encoder, bad: _BadLines) -> int:
    """JSON lines of any file, parsed here."""
    n_lines = 0

    def documents() -> Iterator[tuple[int, Callable[[str], str]]]:
        nonlocal n_lines
        for i, line in lines_of(piece):
            n_lines = i + 1
            if line.strip():
                yield i, lambda key, line=line: text_of(line, key)

    _encode_batches(documents(), sinks, settings, encoder, bad)
    return n_lines


def _columns(
    piece: Piece, sinks: dict[str, Sink], settings: Settings, encoder: Encoder, bad: _BadLines
) -> int:
    """Rows of a parquet or arrow file."""
    n_rows = 0

    def documents() -> Iterator[tuple[int, Callable[[str], str]]]:
        nonlocal n_rows
        columns = [rows_of(piece.path, key) for key in sinks]
        for batches in zip(*columns, strict=True):
            for values in zip(*batches, strict=True):
                row = dict(zip(sinks, values, strict=True))
                n_rows += 1
                yield n_rows - 1, lambda key, row=row: checked_text(row[key], key)

    _encode_batches(documents(), sinks, settings, encoder, bad)
    return n_rows


def _encode_batches(
    documents: Iterator[tuple[int, Callable[[str], str]]],
    sinks: dict[str, Sink],
    settings: Settings,
    encoder: Encoder,
    bad: _BadLines,
) -> None:
    """Encode documents a few at a time; one that lacks a key is none, for all keys."""
    batch: dict[str, list[str]] = {key: [] for key in sinks}
    n_characters = 0

    def flush() -> None:
        for key, sink in sinks.items():
            if batch[key]:
                sink.write(*encoder.encode(batch[key], settings.eod))
                batch[key] = []

    for i, text in documents:
        try:
            texts = {key: text(key) for key in sinks}
        except ValueError as error:
            bad.add(i, error)
            continue
        for key, one in texts.items():
            batch[key].append(one)
            n_characters += len(one)
        if len(next(iter(batch.values()))) >= BATCH_DOCUMENTS or n_characters >= BATCH_CHARACTERS:
            flush()
            n_characters = 0
    flush()


def rejected_lines(shards: Shards, number: int, path: Path, lines_of_file_before: int) -> Iterator[str]:
    """The rejects of a piece as lines for people: file, line in the file from 1, reason."""
    held = shards.rejects(number)
    if not held.is_file():
        return
    for line in held.read_text().splitlines():
        told = json.loads(line)
        where = told["line"] + 1 + lines_of_file_before
        yield json.dumps({"file": str(path), "line": where, "reason": told["reason"]}) + "\n"
