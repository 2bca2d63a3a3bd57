"""One piece of the input to one shard a key."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from megatron import _csrc
from megatron.data.documents import (
    COLUMNS,
    LINE_PART,
    LONGEST_ODD_LINE,
    Piece,
    blocks_of,
    checked_text,
    columns_of,
    joined_text,
    lines_before,
    lines_of,
    rows_of,
    text_of,
)
from megatron.data.shards import Done, Shards
from megatron.tokenizer.encoder import Encoder, FastEncoder

HELD_LINE = 4 << 20  # bytes of a line of a stream that are held in memory
BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 20


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

    @property
    def has_enough(self) -> bool:
        """Whether no more is wanted of this piece."""
        return self.settings.enough is not None and self.n_tokens >= self.settings.enough


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def encode_piece(piece: Piece, number: int, shards: Shards, settings: Settings, encoder: Encoder) -> Done:
    """Encode one piece and mark it done.

    A line that is no document ends the piece, and `Done.error` has file, line and reason: whether it is
    needed at all who joins the pieces knows. Where bad lines are skipped they stand in the piece's rejects.
    Raises OSError for a full disk.
    """
    error = None
    with ExitStack() as stack:
        sinks = {key: stack.enter_context(Sink(shards, number, key, settings)) for key in shards.keys}
        rejects = stack.enter_context(shards.rejects(number).open("w")) if settings.skip_bad_lines else None
        bad = _BadLines(piece, rejects, next(iter(sinks.values())))
        try:
            n_lines = _encode(piece, number, shards, settings, encoder, sinks, bad)
        except ValueError as found:
            n_lines, error = 0, str(found)
            error = error if str(piece.path) in error else f"{piece.path}: {error}"
    done = Done(
        n_lines=n_lines,
        n_documents=next(iter(sinks.values())).n_documents,
        n_tokens=sum(sink.n_tokens for sink in sinks.values()),
        n_rejected=bad.n_rejected,
        n_bytes=sum(sink.n_tokens for sink in sinks.values()) * np.dtype(settings.dtype).itemsize,
        error=error,
    )
    shards.mark_done(number, done)
    return done


def _encode(
    piece: Piece,
    number: int,
    shards: Shards,
    settings: Settings,
    encoder: Encoder,
    sinks: dict[str, Sink],
    bad: "_BadLines",
) -> int:
    """The documents of one piece to the sinks; returns how many lines it has. ValueError for a bad one."""
    if piece.path.name.endswith(COLUMNS):
        if isinstance(encoder, FastEncoder) and len(sinks) == 1:
            return _column_fast(piece, next(iter(sinks.items())), settings, encoder, bad)
        return _columns(piece, sinks, settings, encoder, bad)
    if isinstance(encoder, FastEncoder) and len(sinks) == 1:
        fast = _FastLines(next(iter(sinks.items())), settings, encoder, bad)
        if piece.is_plain:
            with piece.path.open("rb") as file:
                fast.of_range(file, piece.begin, piece.end)
        else:
            fast.of_blocks(blocks_of(piece.path), shards.long_line(number))
        return fast.n_lines
    return _lines(piece, sinks, settings, encoder, bad)


class _BadLines:
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


class _FastLines:
    """JSON lines to a shard in C++. A line that it refuses is judged here, then it goes on behind that."""

    def __init__(
        self, keyed: tuple[str, Sink], settings: Settings, encoder: FastEncoder, bad: _BadLines
    ) -> None:
        self.key, self.sink = keyed
        self.settings, self.encoder, self.bad = settings, encoder, bad
        self.n_lines = 0
        self.how = (
            self.key, encoder.special, settings.eod, np.dtype(settings.dtype).itemsize == 4,
            self.sink.ids.fileno(), self.sink.lengths.fileno(),
        )  # fmt: skip

    def of_range(self, file: IO[bytes], at: int, end: int) -> None:
        """The lines in bytes [at, end) of a plain file."""
        while at < end:
            told = _csrc.encode_lines(self.encoder.worker, file.fileno(), at, end, *self.how)
            at = self._count(told)
            if told[-1]:
                file.seek(at)
                n_bytes = 0
                while part := file.readline(min(LINE_PART, end - at - n_bytes)):
                    n_bytes += len(part)
                    if part.endswith(b"\n"):
                        break
                file.seek(at)
                self._judge(file.read(n_bytes) if n_bytes <= LONGEST_ODD_LINE else None, n_bytes)
                at += n_bytes

    def of_buffer(self, lines: bytes) -> None:
        """Whole lines."""
        at = 0
        while at < len(lines):
            told = _csrc.encode_buffer(self.encoder.worker, memoryview(lines)[at:], *self.how)
            at += self._count(told)
            if told[-1]:
                end = lines.find(b"\n", at) + 1 or len(lines)
                self._judge(lines[at:end], end - at)
                at = end

    def of_blocks(self, blocks: Iterator[bytes], spool: Path) -> None:
        """The lines of a stream; a very long one goes through a file of its own, not through memory."""
        held = b""
        for block in blocks:
            held += block
            n_whole = held.rfind(b"\n") + 1
            if n_whole:
                self.of_buffer(held[:n_whole])
                held = held[n_whole:]
            elif len(held) > HELD_LINE:
                held = self._of_long_line(held, blocks, spool)
            if self.sink.has_enough:
                return
        self.of_buffer(held)

    def _of_long_line(self, begun: bytes, blocks: Iterator[bytes], spool: Path) -> bytes:
        """Spool a line that has begun to its end; returns what follows it in its last block."""
        rest = b""
        with spool.open("w+b") as file:
            file.write(begun)
            for block in blocks:
                end = block.find(b"\n") + 1
                file.write(block[:end] if end else block)
                if end:
                    rest = block[end:]
                    break
            file.flush()
            self.of_range(file, 0, file.tell())
        spool.unlink()
        return rest

    def _count(self, told: tuple[int, int, int, int, bool]) -> int:
        at, n_documents, n_tokens, n_lines, _ = told
        self.sink.n_documents += n_documents
        self.sink.n_tokens += n_tokens
        self.n_lines += n_lines
        return at

    def _judge(self, line: bytes | None, n_bytes: int) -> None:
        """Encode a line that the C++ refused, or say what is wrong with it."""
        try:
            if line is None:
                raise ValueError(f"no plain JSON, and with {n_bytes:,} bytes too long to be parsed otherwise")
            if line.strip():
                self.sink.write(*self.encoder.encode([text_of(line, self.key)], self.settings.eod))
        except ValueError as error:
            self.bad.add(self.n_lines, error)
        self.n_lines += 1


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


def _column_fast(
    piece: Piece, keyed: tuple[str, Sink], settings: Settings, encoder: FastEncoder, bad: _BadLines
) -> int:
    """One column, from arrow's buffers as they are; values that are no strings are judged one by one."""
    key, sink = keyed
    n_rows = 0
    for column in columns_of(piece.path, key):
        joined = joined_text(column)
        if joined is None:
            _encode_batches(
                (
                    (n_rows + i, lambda key, value=value: checked_text(value, key))
                    for i, value in enumerate(column.to_pylist())
                ),
                {key: sink}, settings, encoder, bad,
            )  # fmt: skip
        else:
            text, ends = joined
            begin = 0
            while begin < len(ends):  # not all ids of many long texts at once
                base = int(ends[begin - 1]) if begin else 0
                end = max(begin + 1, int(np.searchsorted(ends, base + BATCH_CHARACTERS, side="right")))
                part = text[base : int(ends[end - 1])]
                sink.write(*encoder.encode_joined(part, ends[begin:end] - base, settings.eod))
                begin = end
        n_rows += len(column)
        if sink.has_enough:
            break
    return n_rows


def _encode_batches(
    documents: Iterator[tuple[int, Callable[[str], str]]],
    sinks: dict[str, Sink],
    settings: Settings,
    encoder: Encoder,
    bad: _BadLines,
) -> None:
    """Encode documents a few at a time; one that lacks a key, or cannot be encoded, is none, for all keys."""
    batch: list[tuple[int, dict[str, str]]] = []
    n_characters = 0
    first = next(iter(sinks.values()))

    def write(some: Sequence[tuple[int, dict[str, str]]]) -> None:
        encoded = {key: encoder.encode([texts[key] for _, texts in some], settings.eod) for key in sinks}
        for key, (ids, lengths) in encoded.items():
            sinks[key].write(ids, lengths)

    def flush() -> None:
        if not batch:
            return
        try:
            write(batch)
        except ValueError:  # of which document the library does not say
            for one in batch:
                try:
                    write([one])
                except ValueError as error:
                    bad.add(one[0], error)
        batch.clear()

    for i, text in documents:
        try:
            batch.append((i, {key: text(key) for key in sinks}))
        except ValueError as error:
            flush()  # a bad one before it is said first
            bad.add(i, error)
            continue
        n_characters += sum(map(len, batch[-1][1].values()))
        if len(batch) >= BATCH_DOCUMENTS or n_characters >= BATCH_CHARACTERS:
            flush()
            n_characters = 0
            if first.has_enough:
                return
    flush()


def rejected_lines(
    shards: Shards, number: int, path: Path, lines_of_file_before: int, n_documents: int | None
) -> Iterator[str]:
    """The rejects of a piece as lines for people: file, line in the file from 1, reason.

    Those only that stand before the last of its first `n_documents` documents; None: all.
    """
    held = shards.rejects(number)
    if not held.is_file():
        return
    with held.open() as lines:
        for told in map(json.loads, lines):
            if n_documents is not None and told["documents_before"] >= n_documents:
                return
            where = told["line"] + 1 + lines_of_file_before
            yield json.dumps({"file": str(path), "line": where, "reason": told["reason"]}) + "\n"
