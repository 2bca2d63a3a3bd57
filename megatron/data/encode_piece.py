"""One piece of the input to one shard a key."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megatron.data.columns import joined_text, values_of
from megatron.data.damage import DamagedFileError
from megatron.data.documents import (
    COLUMNS,
    STDIN,
    Piece,
    Reading,
    blocks_of,
    checked_text,
    columns_of,
    lines_of,
    rows_of,
    text_of,
)
from megatron.data.fast_lines import FastLines
from megatron.data.shards import Done, Shards
from megatron.data.sink import BadLines, Settings, Sink
from megatron.run_dir import FULL
from megatron.tokenizer.encoder import Encoder, FastEncoder

BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 20
SKIP_HINT = ", or pass over it with --on-error skip"  # to a damaged file


Hear = Callable[[int, int, int], object]  # bytes of the piece's file that are read, documents, tokens


def ignore(n_bytes: int, n_documents: int, n_tokens: int) -> None:
    """A `Hear` that nobody listens to."""


def encode_piece(
    piece: Piece, number: int, shards: Shards, settings: Settings, encoder: Encoder,
    hear: Hear = ignore,
) -> Done:  # fmt: skip
    """Encode one piece and mark it done; `hear` is told how far it is, and may raise.

    A line that is no document ends the piece, and `Done.error` has file, line and reason: whether it is
    needed at all who joins the pieces knows. Where bad lines are skipped they stand in the piece's rejects.
    So does a damaged file. Nothing of it is kept: how much can be read of it depends on the library
    at work, and what was read may be wrong already, as its sum comes last.
    Raises OSError for a full disk, and for a file that the system does not read.
    """
    error = damage = None
    with ExitStack() as stack:
        sinks = {key: stack.enter_context(Sink(shards, number, key, settings)) for key in shards.keys}
        rejects = stack.enter_context(shards.rejects(number).open("w")) if settings.skip_bad_lines else None
        first, reading = next(iter(sinks.values())), Reading()
        bad = BadLines(piece, rejects, first)

        def hear_sinks() -> None:
            hear(reading.at, first.n_documents, sum(sink.n_tokens for sink in sinks.values()))

        first.hear = hear_sinks
        try:
            n_lines = _encode(piece, number, shards, settings, encoder, sinks, bad, reading)
        except DamagedFileError as found:
            n_lines = 0
            if rejects is None:
                error = str(DamagedFileError(found.path, found.reason, SKIP_HINT))
            else:
                damage = found.reason
                for sink in sinks.values():
                    sink.clear()
                bad.replace_by_file(damage)
        except ValueError as found:
            n_lines, error = 0, str(found)
            if (reason := find_damage(piece, shards.keys)) is not None:  # the line may be what came of it
                error = str(DamagedFileError(piece.path, reason, SKIP_HINT))
            error = error if str(piece.path) in error else f"{piece.path}: {error}"
        except OSError as found:
            if found.errno is not None and found.filename is None:
                found.filename = str(shards.folder if found.errno in FULL else piece.path)
            raise
    done = Done(
        n_lines=n_lines,
        n_documents=next(iter(sinks.values())).n_documents,
        n_tokens=sum(sink.n_tokens for sink in sinks.values()),
        n_rejected=bad.n_rejected,
        n_bytes=sum(sink.n_tokens for sink in sinks.values()) * np.dtype(settings.dtype).itemsize,
        error=error,
        damage=damage,
    )
    shards.mark_done(number, done)
    return done


def find_damage(piece: Piece, keys: Sequence[str]) -> str | None:
    """Read a packed file, or columns of a file, through; what is wrong with it, None for a whole one.

    A plain file and standard input are None: nothing shows whether they are whole.
    """
    path = piece.path
    if piece.is_plain or path == STDIN:
        return None
    is_column = path.name.endswith(COLUMNS)
    readers = [columns_of(path, key) for key in keys] if is_column else [blocks_of(path)]
    try:
        for reader in readers:
            for _ in reader:
                pass
    except DamagedFileError as error:
        return error.reason
    except ValueError:  # another fault, of which the caller knows
        return None
    return None


def _encode(
    piece: Piece,
    number: int,
    shards: Shards,
    settings: Settings,
    encoder: Encoder,
    sinks: dict[str, Sink],
    bad: BadLines,
    reading: Reading,
) -> int:
    """The documents of one piece to the sinks; returns how many lines it has. ValueError for a bad one."""
    if piece.path.name.endswith(COLUMNS):
        if isinstance(encoder, FastEncoder) and len(sinks) == 1:
            return _column_fast(piece, next(iter(sinks.items())), settings, encoder, bad, reading)
        return _columns(piece, sinks, settings, encoder, bad, reading)
    if isinstance(encoder, FastEncoder):
        fast = FastLines(sinks, settings, encoder, bad)
        if piece.is_plain:
            with piece.path.open("rb") as file:
                fast.of_range(file, piece.begin, piece.end)
        else:
            fast.of_blocks(blocks_of(piece.path, reading), shards.long_line(number))
        return fast.n_lines
    return _lines(piece, sinks, settings, encoder, bad, reading)


def _lines(
    piece: Piece,
    sinks: dict[str, Sink],
    settings: Settings,
    encoder: Encoder,
    bad: BadLines,
    reading: Reading,
) -> int:
    """JSON lines of any file, parsed here."""
    n_lines = 0

    def documents() -> Iterator[tuple[int, Callable[[str], str]]]:
        nonlocal n_lines
        for i, line in lines_of(piece, reading):
            n_lines = i + 1
            if line.strip():
                yield i, lambda key, line=line: text_of(line, key)

    _encode_batches(documents(), sinks, settings, encoder, bad)
    return n_lines


def _columns(
    piece: Piece,
    sinks: dict[str, Sink],
    settings: Settings,
    encoder: Encoder,
    bad: BadLines,
    reading: Reading,
) -> int:
    """Rows of a parquet or arrow file."""
    n_rows = 0

    def documents() -> Iterator[tuple[int, Callable[[str], str]]]:
        nonlocal n_rows
        columns = [rows_of(piece.path, key, Reading() if i else reading) for i, key in enumerate(sinks)]
        for batches in zip(*columns, strict=True):
            for values in zip(*batches, strict=True):
                row = dict(zip(sinks, values, strict=True))
                n_rows += 1
                yield n_rows - 1, lambda key, row=row: checked_text(row[key], key)

    _encode_batches(documents(), sinks, settings, encoder, bad)
    return n_rows


def _column_fast(
    piece: Piece,
    keyed: tuple[str, Sink],
    settings: Settings,
    encoder: FastEncoder,
    bad: BadLines,
    reading: Reading,
) -> int:
    """One column, from arrow's buffers as they are; values that are no strings are judged one by one."""
    key, sink = keyed
    n_rows = 0
    for column in columns_of(piece.path, key, reading=reading):
        joined = joined_text(column)
        if joined is None:
            _encode_batches(
                (
                    (n_rows + i, lambda key, value=value: checked_text(value, key))
                    for i, value in enumerate(values_of(column))
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
    bad: BadLines,
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
            where = None if told["line"] is None else told["line"] + 1 + lines_of_file_before
            yield json.dumps({"file": str(path), "line": where, "reason": told["reason"]}) + "\n"
