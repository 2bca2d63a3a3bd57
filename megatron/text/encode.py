"""Encode one piece of the input to a unit file."""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron import _csrc
from megatron.data.block_hash import BLOCK_BYTES, hash_range
from megatron.io import DISK_FULL_ERRNOS
from megatron.text.columns import concat_texts, decode_values, iter_slices
from megatron.text.inputs import COLUMN_SUFFIXES, STDIN, find_line_end
from megatron.text.text_readers import (
    MAX_PARSED_LINE,
    DamagedFileError,
    InputPiece,
    ReadPosition,
    check_text,
    count_lines_before,
    iter_blocks,
    iter_columns,
    iter_lines,
    parse_text,
)
from megatron.text.units import EncodeSettings, TokenWriter, UnitRecord, open_writers, write_record
from megatron.tokenizer.encoder import Encoder, FastEncoder

BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 20
BATCH_BYTES = 1 << 20  # of UTF-8 in a column
SKIP_HINT = ", or skip it with --on-error skip"  # for a damaged file

ProgressCallback = Callable[[int, int, int], object]  # (bytes read of the piece's file, documents, tokens)


def ignore_progress(n_bytes: int, n_documents: int, n_tokens: int) -> None:
    """Do nothing: a `ProgressCallback` for callers that do not show progress."""


def encode_piece(
    piece: InputPiece, path: Path, settings: EncodeSettings, encoder: Encoder,
    on_progress: ProgressCallback = ignore_progress,
) -> UnitRecord:  # fmt: skip
    """Encode one piece to the unit `path`; `on_progress` is called repeatedly and may raise.

    An invalid line ends the piece, and `UnitRecord.error` contains file, line and reason. It is not raised:
    only the caller can decide whether the line is needed at all. If bad lines are skipped, they are in the
    unit's rejects, and so is a damaged file. No content of a damaged file is used: its checksum comes last,
    so content before the damage may be wrong. A remote file that cannot be read after all attempts is skipped
    in the same way. Raises OSError for a full disk, a file that the system cannot read, or the network.
    """
    with open_writers(path, settings) as writers:
        job = _PieceEncoder(piece, path.parent, writers, settings, encoder, on_progress)
        error = damage = None
        try:
            job.run()
        except DamagedFileError as cause:
            error, damage = str(DamagedFileError(cause.path, cause.reason, SKIP_HINT)), cause.reason
        except ValueError as cause:
            error = str(cause) if str(piece.path) in str(cause) else f"{piece.path}: {cause}"
        except OSError as cause:
            if cause.errno is not None and cause.filename is None:
                cause.filename = str(path.parent if cause.errno in DISK_FULL_ERRNOS else piece.path)
            if not (settings.skip_bad_lines and _is_lost(cause)):
                raise
            damage = str(cause)
        if damage is not None and settings.skip_bad_lines:
            error = None
            job.replace_by_file(damage)
        record = UnitRecord(
            n_lines=0 if damage or error else job.n_lines,
            n_documents=job.first_writer.n_documents,
            n_tokens=[writer.n_tokens for writer in writers.values()],
            rejects=job.rejects,
            source_sha256=_hash_source(piece, job.position),
            error=error,
            damage=None if error else damage,
        )
    write_record(path, record)
    return record


def _is_lost(error: OSError) -> bool:
    """Return whether a remote file is missing or cannot be downloaded."""
    # compared by attribute: only URLs import the module of RemoteError
    is_temporary = getattr(error, "is_temporary", None)
    return is_temporary is not None and (is_temporary or isinstance(error, FileNotFoundError))


def _hash_source(piece: InputPiece, position: ReadPosition) -> list[str]:
    """Return the SHA-256 of each block of the input that begins in a piece; of a packed file, of the file.

    Blocks are counted from the begin of what the job reads of the file. A packed file is read by one worker,
    so it needs no blocks. A remote file that was not read as a whole and in order has none.
    """
    if piece.path == STDIN:
        return []
    if not piece.is_plain:
        if position.n_hashed == piece.end > 0:
            return [position.digest.hexdigest()]
        return [hash_range(piece.path, 0, piece.end).hex()] if isinstance(piece.path, Path) else [""]
    assert isinstance(piece.path, Path), "plain pieces are local"
    end = piece.end if piece.source_end is None else piece.source_end
    # blocks begin at source_begin + n * BLOCK_BYTES; pieces end at line ends, so a block may cross their ends
    skip = -(piece.begin - piece.source_begin) % BLOCK_BYTES
    begins = range(piece.begin + skip, piece.end, BLOCK_BYTES)
    return [hash_range(piece.path, begin, min(begin + BLOCK_BYTES, end)).hex() for begin in begins]


class _PieceEncoder:
    """Encoding of the documents of one piece, with its counts."""

    def __init__(
        self, piece: InputPiece, scratch: Path, writers: dict[str, TokenWriter], settings: EncodeSettings,
        encoder: Encoder, on_progress: ProgressCallback,
    ) -> None:  # fmt: skip
        self.piece, self.scratch, self.settings, self.encoder = piece, scratch, settings, encoder
        self.writers, self.position = dict(writers), ReadPosition()
        self.first_writer = writers[settings.keys[0]]
        self.n_lines, self.rejects = 0, list[dict[str, Any]]()

        def report_progress() -> None:
            n_tokens = sum(writer.n_tokens for writer in writers.values())
            on_progress(self.position.offset, self.first_writer.n_documents, n_tokens)

        self.first_writer.on_write = report_progress  # keys advance together, so one of them reports

    def run(self) -> None:
        """Encode all documents. Raises ValueError for a bad line, unless bad lines are skipped."""
        piece, encoder = self.piece, self.encoder
        # C++ reads one key of lines and columns; texts of several keys are parsed here
        is_fast = isinstance(encoder, FastEncoder) and len(self.writers) == 1
        if piece.path.name.endswith(COLUMN_SUFFIXES):
            if is_fast:
                self._encode_column()
            else:
                self._encode_batches(self._iter_rows())
        elif is_fast and piece.is_plain:
            with piece.path.open("rb") as file:  # type: ignore[union-attr]  # plain pieces are local
                self._encode_range(file, piece.begin, piece.end)
        elif is_fast:
            self._encode_blocks(iter_blocks(piece.path, self.position))
        else:
            self._encode_batches(self._iter_lines())

    def reject(self, line: int, error: ValueError) -> None:
        """Reject line `line` of the piece, counted from 0. Raises ValueError unless bad lines are skipped."""
        if not self.settings.skip_bad_lines:
            # `line` counts from the start of the piece. Counting the earlier lines reads the file up to the
            # piece, which is done only for this message.
            number = line + 1 + (count_lines_before(self.piece) if self.piece.is_plain else 0)
            label = "row" if self.piece.path.name.endswith(COLUMN_SUFFIXES) else "line"
            raise ValueError(f"{self.piece.path}, {label} {number}: {error}") from error
        n_before = self.first_writer.n_documents
        self.rejects.append({"line": line, "reason": str(error), "documents_before": n_before})

    def replace_by_file(self, reason: str) -> None:
        """Discard all documents and rejected lines, and reject the whole file instead."""
        for writer in self.writers.values():
            writer.clear()
        byte = self.position.offset
        self.rejects = [{"line": None, "byte": byte, "reason": reason, "documents_before": 0}]

    def _iter_lines(self) -> Iterator[tuple[int, Callable[[str], str]]]:
        for i, line in iter_lines(self.piece, self.position):
            self.n_lines = i + 1
            if line.strip():
                yield i, functools.partial(parse_text, line)

    def _iter_rows(self) -> Iterator[tuple[int, Callable[[str], str]]]:
        for columns in iter_columns(self.piece.path, list(self.writers), position=self.position):
            for values in zip(*map(decode_values, columns), strict=True):
                row = dict(zip(self.writers, values, strict=True))
                self.n_lines += 1
                yield self.n_lines - 1, lambda key, row=row: check_text(row[key], key)  # type: ignore[misc]

    def _encode_batches(self, documents: Iterator[tuple[int, Callable[[str], str]]]) -> None:
        """Encode documents in batches: (line, function that returns the text of a key).

        A document that lacks a key, or cannot be encoded for one key, is rejected for all keys.
        """
        batch: list[tuple[int, dict[str, str]]] = []
        n_characters = 0
        for i, text in documents:
            try:
                batch.append((i, {key: text(key) for key in self.writers}))
            except ValueError as error:
                self._flush(batch)  # errors of earlier documents come first
                self.reject(i, error)
                continue
            # limited by text too: 128 books would give about a gigabyte of Python integers
            n_characters += sum(map(len, batch[-1][1].values()))
            if len(batch) >= BATCH_DOCUMENTS or n_characters >= BATCH_CHARACTERS:
                self._flush(batch)
                n_characters = 0
                if self.first_writer.has_enough:
                    return
        self._flush(batch)

    def _flush(self, batch: list[tuple[int, dict[str, str]]]) -> None:
        """Encode and write a batch, and empty it."""
        try:
            self._write_documents(batch)
        except ValueError:  # the library does not report which document: try them one by one
            for item in batch:
                try:
                    self._write_documents([item])
                except ValueError as error:
                    self.reject(item[0], error)
        batch.clear()

    def _write_documents(self, items: Sequence[tuple[int, dict[str, str]]]) -> None:
        if not items:
            return
        # for all keys before the first write: if a key fails, no key has a document that the others lack
        encoded = {
            key: self.encoder.encode([texts[key] for _, texts in items], self.settings.eod)
            for key in self.writers
        }
        for key, (ids, lengths) in encoded.items():
            self.writers[key].write(ids, lengths)

    def _encode_column(self) -> None:
        """Encode one column from arrow's buffers; arrays with invalid values are read row by row."""
        encoder, ((key, writer),) = self.encoder, self.writers.items()
        assert isinstance(encoder, FastEncoder), "only C++ encodes arrow's buffers"
        for (column,) in iter_columns(self.piece.path, [key], position=self.position):
            for first, texts in iter_slices(column, BATCH_BYTES):  # in parts, to limit the memory for ids
                if (joined := concat_texts(texts)) is not None:
                    writer.write(*encoder.encode_concatenated(*joined, self.settings.eod))
                    continue
                values = enumerate(decode_values(texts), self.n_lines + first)
                self._encode_batches((i, functools.partial(check_text, value)) for i, value in values)
            self.n_lines += len(column)
            if writer.has_enough:
                return

    def _encode_range(self, file: IO[bytes], begin: int, end: int) -> None:
        """Encode the lines in bytes [begin, end) of a plain file in C++."""
        encoder, ((key, writer),) = self.encoder, self.writers.items()
        assert isinstance(encoder, FastEncoder), "only C++ reads lines by descriptor"
        is_wide = writer.dtype.itemsize == 4
        outputs = writer.ids.fileno(), writer.lengths.fileno()
        settings = key, encoder.special, self.settings.eod, is_wide, *outputs
        while begin < end:
            begin, n_documents, n_tokens, n_lines, is_refused = _csrc.encode_lines(
                encoder.worker, file.fileno(), begin, end, *settings
            )
            writer.count_documents(n_documents, n_tokens)
            self.n_lines += n_lines
            if is_refused:
                # C++ reads by descriptor with pread, so the position of `file` is free
                file.seek(begin)
                line = file.readline(MAX_PARSED_LINE + 1)
                is_cut = len(line) > MAX_PARSED_LINE and not line.endswith(b"\n")
                line_end = find_line_end(file) if is_cut else file.tell()
                self._encode_refused_line(line, line_end - begin)
                begin = line_end

    def _encode_blocks(self, blocks: Iterator[bytes]) -> None:
        """Encode the lines of a stream through a file, for C++ and for lines that are too long for memory."""
        with tempfile.TemporaryFile(dir=self.scratch) as file:
            for block in blocks:
                n_whole = block.rfind(b"\n") + 1
                file.write(block[:n_whole])
                if n_whole:
                    file.flush()
                    self._encode_range(file, 0, file.tell())
                    file.seek(0)
                    file.truncate()
                file.write(block[n_whole:])  # the incomplete last line waits for the next block
                if self.first_writer.has_enough:
                    return
            file.flush()
            self._encode_range(file, 0, file.tell())  # the last line of a file may lack its line feed

    def _encode_refused_line(self, line: bytes, n_bytes: int) -> None:
        """Encode a line that C++ refused, or reject it. `line`: its begin if it is too long for Python."""
        try:
            if n_bytes > MAX_PARSED_LINE:
                raise ValueError(
                    f"not plain JSON, and with {n_bytes:,} bytes too long for the general parser"
                )
            if line.strip():
                texts = {key: parse_text(line, key) for key in self.writers}
                self._write_documents([(self.n_lines, texts)])
        except ValueError as error:
            self.reject(self.n_lines, error)
        self.n_lines += 1
