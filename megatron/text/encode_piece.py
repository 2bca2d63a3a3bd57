"""Encode one piece of the input to a shard per key."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import DISK_FULL_ERRNOS
from megatron.remote_files import RemotePath
from megatron.remote_requests import RemoteMissingError, RemoteUnreachableError
from megatron.text.columns import concat_texts, decode_values
from megatron.text.fast_lines import FastLineEncoder
from megatron.text.inputs import COLUMN_SUFFIXES, STDIN
from megatron.text.shard_writer import EncodeSettings, RejectLog, ShardWriter
from megatron.text.shards import PieceResult, ShardFolder
from megatron.text.sources import hash_source
from megatron.text.text_readers import (
    DamagedFileError,
    InputPiece,
    ReadPosition,
    check_text,
    iter_blocks,
    iter_columns,
    iter_lines,
    iter_piece_blocks,
    iter_rows,
    parse_text,
)
from megatron.tokenizer.encoder import Encoder, FastEncoder

BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 20
SKIP_HINT = ", or skip it with --on-error skip"  # for a damaged file

ProgressCallback = Callable[[int, int, int], object]  # (bytes read of the piece's file, documents, tokens)


def ignore_progress(n_bytes: int, n_documents: int, n_tokens: int) -> None:
    """Do nothing: a `ProgressCallback` for callers that do not show progress."""


def encode_piece(
    piece: InputPiece, number: int, shards: ShardFolder, settings: EncodeSettings, encoder: Encoder,
    on_progress: ProgressCallback = ignore_progress,
) -> PieceResult:  # fmt: skip
    """Encode one piece and write its result; `on_progress` is called repeatedly and may raise.

    An invalid line ends the piece, and `PieceResult.error` contains file, line and reason. It is not raised:
    only the joiner can decide whether the line is needed at all. If bad lines are skipped, they are written
    to the piece's rejects, and so is a damaged file. No content of a damaged file is used: how much of it is
    readable depends on the library, and its checksum comes last, so content before the damage may be wrong.
    A remote file that cannot be read after all attempts is skipped in the same way if it is a single piece.
    Raises OSError for a full disk, and for a file that the system cannot read, or the network.
    """
    error = damage = None
    with ExitStack() as stack:
        writers = {
            key: stack.enter_context(ShardWriter(shards, number, key, settings)) for key in shards.keys
        }
        rejects = (
            stack.enter_context(shards.rejects_path(number).open("w")) if settings.skip_bad_lines else None
        )
        first_writer, position = next(iter(writers.values())), ReadPosition()
        reject_log = RejectLog(piece, rejects, first_writer)

        def report_progress() -> None:
            on_progress(
                position.offset, first_writer.n_documents, sum(writer.n_tokens for writer in writers.values())
            )

        first_writer.on_write = report_progress  # keys advance together, so one of them reports
        try:
            n_lines = _encode_input(piece, number, shards, settings, encoder, writers, reject_log, position)
        except DamagedFileError as cause:
            n_lines = 0
            if rejects is None:
                error = str(DamagedFileError(cause.path, cause.reason, SKIP_HINT))
            else:
                damage = cause.reason
                # an empty shard, not a missing one: the joiner expects the files of every piece
                for writer in writers.values():
                    writer.clear()
                reject_log.replace_by_file(damage, position.offset)
        except (RemoteMissingError, RemoteUnreachableError) as cause:
            # a part of a file must not be missing: only a whole file can be skipped
            if rejects is None or (piece.begin, piece.end) != (0, piece.path.stat().st_size):
                raise
            n_lines, damage = 0, str(cause)
            for writer in writers.values():
                writer.clear()
            reject_log.replace_by_file(damage, position.offset)
        except ValueError as cause:
            n_lines, error = 0, str(cause)
            if (
                reason := find_damage(piece, shards.keys, report_progress)
            ) is not None:  # the bad line may result from the damage
                error = str(DamagedFileError(piece.path, reason, SKIP_HINT))
            error = error if str(piece.path) in error else f"{piece.path}: {error}"
        except OSError as cause:
            if cause.errno is not None and cause.filename is None:
                cause.filename = str(shards.folder if cause.errno in DISK_FULL_ERRNOS else piece.path)
            raise
    # The writers are closed here: the marker below makes the shard valid, so the shard must be complete.
    # After an OSError there is no marker, and the next call encodes the piece again.
    result = PieceResult(
        n_lines=n_lines,
        n_documents=next(iter(writers.values())).n_documents,
        n_tokens=sum(writer.n_tokens for writer in writers.values()),
        n_rejected=reject_log.n_rejected,
        n_bytes=sum(writer.n_tokens for writer in writers.values()) * np.dtype(settings.dtype).itemsize,
        error=error,
        damage=damage,
        # now: its bytes are likely still in the page cache; a remote piece is not read again
        source_sha256=[position.sha256 or ""] if isinstance(piece.path, RemotePath) else hash_source(piece),
    )
    shards.write_result(number, result)
    return result


def find_damage(
    piece: InputPiece, keys: Sequence[str], on_block: Callable[[], None] | None = None
) -> str | None:
    """Read a compressed or columnar file to its end; return the damage, or None for an intact file.

    on_block  called after each block: an exception of it ends the reading

    Returns None for a plain file and for standard input: they have no checksum or end marker.
    """
    path = piece.path
    if piece.is_plain or path == STDIN:
        return None
    is_column = path.name.endswith(COLUMN_SUFFIXES)
    # parquet stores columns separately: reading the column of one key does not verify another one
    readers = [iter_columns(path, key) for key in keys] if is_column else [iter_blocks(path)]
    try:
        for reader in readers:
            for _ in reader:
                if on_block is not None:
                    on_block()
    except DamagedFileError as error:
        return error.reason
    except ValueError:  # another error, which the caller has already
        return None
    return None


def _encode_input(
    piece: InputPiece,
    number: int,
    shards: ShardFolder,
    settings: EncodeSettings,
    encoder: Encoder,
    writers: dict[str, ShardWriter],
    reject_log: RejectLog,
    position: ReadPosition,
) -> int:
    """Encode the documents of one piece; return its number of lines. Raises ValueError for a bad line."""
    if piece.path.name.endswith(COLUMN_SUFFIXES):
        if isinstance(encoder, FastEncoder) and len(writers) == 1:
            return _encode_column_fast(
                piece, next(iter(writers.items())), settings, encoder, reject_log, position
            )
        return _encode_columns(piece, writers, settings, encoder, reject_log, position)
    if isinstance(encoder, FastEncoder):
        line_encoder = FastLineEncoder(writers, settings, encoder, reject_log)
        if piece.is_plain and not isinstance(piece.path, RemotePath):
            with piece.path.open("rb") as file:
                line_encoder.encode_range(file, piece.begin, piece.end)
        else:
            blocks = iter_piece_blocks(piece, position)
            line_encoder.encode_blocks(blocks, shards.long_line_path(number))
        return line_encoder.n_lines
    return _encode_lines(piece, writers, settings, encoder, reject_log, position)


def _encode_lines(
    piece: InputPiece,
    writers: dict[str, ShardWriter],
    settings: EncodeSettings,
    encoder: Encoder,
    reject_log: RejectLog,
    position: ReadPosition,
) -> int:
    """Encode JSON lines, parsed in Python."""
    n_lines = 0

    def iter_documents() -> Iterator[tuple[int, Callable[[str], str]]]:
        nonlocal n_lines
        for i, line in iter_lines(piece, position):
            n_lines = i + 1
            if line.strip():
                yield i, partial(parse_text, line)

    _encode_batches(iter_documents(), writers, settings, encoder, reject_log)
    return n_lines


def _encode_columns(
    piece: InputPiece,
    writers: dict[str, ShardWriter],
    settings: EncodeSettings,
    encoder: Encoder,
    reject_log: RejectLog,
    position: ReadPosition,
) -> int:
    """Encode rows of a parquet or arrow file; only the first key's column updates `position`."""
    n_rows = 0

    def iter_documents() -> Iterator[tuple[int, Callable[[str], str]]]:
        nonlocal n_rows
        columns = [
            iter_rows(piece.path, key, ReadPosition() if i else position) for i, key in enumerate(writers)
        ]
        for batches in zip(*columns, strict=True):
            for values in zip(*batches, strict=True):
                row = dict(zip(writers, values, strict=True))
                n_rows += 1
                yield n_rows - 1, partial(_check_row_text, row)

    _encode_batches(iter_documents(), writers, settings, encoder, reject_log)
    return n_rows


def _check_row_text(row: dict[str, Any], key: str) -> str:
    return check_text(row[key], key)


def _encode_column_fast(
    piece: InputPiece,
    key_and_writer: tuple[str, ShardWriter],
    settings: EncodeSettings,
    encoder: FastEncoder,
    reject_log: RejectLog,
    position: ReadPosition,
) -> int:
    """Encode one column directly from arrow's buffers; arrays with invalid values are read row by row."""
    key, writer = key_and_writer
    n_rows = 0
    for column in iter_columns(piece.path, key, position=position):
        joined = concat_texts(column)
        if joined is None:
            _encode_batches(
                (
                    (n_rows + i, partial(check_text, value))
                    for i, value in enumerate(decode_values(column))
                ),
                {key: writer}, settings, encoder, reject_log,
            )  # fmt: skip
        else:
            text, ends = joined
            begin = 0
            # `ends` are cumulative byte offsets: find the last text that ends within BATCH_CHARACTERS bytes
            while begin < len(ends):  # in parts, to limit the memory for the ids of long texts
                # Texts of 3, 4 and 2 bytes have ends [3, 7, 9]. A part that begins with text 1 has base 3,
                # the bytes text[3:9] and the relative ends [4, 6].
                base = int(ends[begin - 1]) if begin else 0
                end = max(begin + 1, int(np.searchsorted(ends, base + BATCH_CHARACTERS, side="right")))
                part = text[base : int(ends[end - 1])]
                writer.write(*encoder.encode_concatenated(part, ends[begin:end] - base, settings.eod))
                begin = end
        n_rows += len(column)
        if writer.has_enough:
            break
    return n_rows


def _encode_batches(
    documents: Iterator[tuple[int, Callable[[str], str]]],
    writers: dict[str, ShardWriter],
    settings: EncodeSettings,
    encoder: Encoder,
    reject_log: RejectLog,
) -> None:
    """Encode documents in batches.

    A document that lacks a key, or cannot be encoded for one key, is rejected for all keys.
    """
    batch: list[tuple[int, dict[str, str]]] = []
    n_characters = 0
    first_writer = next(iter(writers.values()))

    def write_documents(items: Sequence[tuple[int, dict[str, str]]]) -> None:
        # Encode for all keys before the first write: if a key fails, no key has a document that the others
        # lack.
        encoded = {key: encoder.encode([texts[key] for _, texts in items], settings.eod) for key in writers}
        for key, (ids, lengths) in encoded.items():
            writers[key].write(ids, lengths)

    def flush_batch() -> None:
        if not batch:
            return
        try:
            write_documents(batch)
        except ValueError:  # the library does not report which document: try them one by one
            for item in batch:
                try:
                    write_documents([item])
                except ValueError as error:
                    reject_log.add(item[0], error)
        batch.clear()

    for i, text in documents:
        try:
            batch.append((i, {key: text(key) for key in writers}))
        except ValueError as error:
            flush_batch()  # errors of earlier documents come first
            reject_log.add(i, error)
            continue
        # the batch is limited by text too: 128 books would give about a gigabyte of Python integers
        n_characters += sum(map(len, batch[-1][1].values()))
        if len(batch) >= BATCH_DOCUMENTS or n_characters >= BATCH_CHARACTERS:
            flush_batch()
            n_characters = 0
            # only tested after a flush: `has_enough` counts written documents, not those in `batch`
            if first_writer.has_enough:
                return
    flush_batch()


def iter_rejected_lines(
    shards: ShardFolder, number: int, path: Path, n_lines_before: int, n_documents: int | None
) -> Iterator[str]:
    """Yield the rejects of a piece as JSON lines: file, line number in the file from 1, reason.

    A skipped file has the line null, and the byte up to which it was read, in the file as stored.

    Only rejects before the last of the piece's first `n_documents` documents; None: all.
    """
    rejects = shards.rejects_path(number)
    if not rejects.is_file():
        return
    with rejects.open() as lines:
        for record in map(json.loads, lines):
            # `documents_before` never decreases within a piece, so all later records are out of range too.
            # With 2 used documents, a line rejected between them has 1 document before it; one after them has
            # 2.
            if n_documents is not None and record["documents_before"] >= n_documents:
                return
            line_number = None if record["line"] is None else record["line"] + 1 + n_lines_before
            place = {"byte": record["byte"]} if "byte" in record else {}
            entry = {"file": str(path), "line": line_number, **place, "reason": record["reason"]}
            yield json.dumps(entry) + "\n"
