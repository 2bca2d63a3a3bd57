"""Encode one piece of the input to a unit file."""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from megatron import _csrc
from megatron.io import DISK_FULL_ERRNOS
from megatron.text.columns import concat_texts, iter_slices
from megatron.text.inputs import COLUMN_SUFFIXES, find_line_end
from megatron.text.text_readers import (
    MAX_PARSED_LINE,
    DamagedFileError,
    InputPiece,
    ReadCallback,
    check_text,
    count_lines_before,
    ignore_progress,
    iter_blocks,
    iter_columns,
    iter_lines,
    parse_text,
)
from megatron.text.units import EncodeSettings, TokenWriter, UnitRecord, open_writers, write_record
from megatron.tokenizer.encoder import Encoder, FastEncoder

BATCH_DOCUMENTS = 128
BATCH_CHARACTERS = 1 << 20
BATCH_BYTES = 1 << 20  # UTF-8 bytes per column


def encode_piece(
    piece: InputPiece, path: Path, settings: EncodeSettings, encoder: Encoder,
    on_read: ReadCallback = ignore_progress,
) -> UnitRecord:  # fmt: skip
    """Encode one piece to the unit `path`; `on_read` is called repeatedly and may raise.

    If bad lines are skipped, they are in the unit's rejects, and a damaged file has
    no documents: its checksum comes last, so content before the damage may be wrong.
    Raises ValueError with file, line and reason for a bad line otherwise; OSError for
    a full disk, a file that the system cannot read, or the network.
    """
    with open_writers(path, settings) as writers:
        job = _PieceEncoder(piece, path.parent, writers, settings, encoder, on_read)
        damage = None
        try:
            job.run()
        except DamagedFileError as cause:
            if not settings.skip_bad_lines:
                raise
            damage = cause.reason
            job.clear()
        except ValueError as cause:
            raise ValueError(
                str(cause) if str(piece.path) in str(cause) else f"{piece.path}: {cause}"
            ) from cause
        except OSError as cause:
            if cause.errno is not None and cause.filename is None:
                cause.filename = str(path.parent if cause.errno in DISK_FULL_ERRNOS else piece.path)
            raise
        record = UnitRecord(
            n_lines=job.n_lines,
            n_documents=job.first_writer.n_documents,
            n_tokens=[writer.n_tokens for writer in writers.values()],
            rejects=job.rejects,
            damage=damage,
        )
    write_record(path, record)
    return record


class _PieceEncoder:
    """Encoding of the documents of one piece, with its counts."""

    def __init__(
        self, piece: InputPiece, scratch: Path, writers: dict[str, TokenWriter], settings: EncodeSettings,
        encoder: Encoder, on_read: ReadCallback,
    ) -> None:  # fmt: skip
        self.piece, self.scratch, self.settings, self.encoder = piece, scratch, settings, encoder
        self.writers, self.on_read = writers, on_read
        self.first_writer = writers[settings.keys[0]]
        self.n_lines, self.rejects = 0, list[dict[str, Any]]()

    def run(self) -> None:
        """Encode all documents. Raises ValueError for a bad line, unless bad lines are skipped."""
        piece, is_fast = self.piece, isinstance(self.encoder, FastEncoder)
        if piece.path.name.endswith(COLUMN_SUFFIXES):
            if is_fast and len(self.writers) == 1:
                self._encode_column()
            else:
                self._encode_batches(self._iter_rows())
        elif is_fast and piece.is_plain:
            with piece.path.open("rb") as file:  # type: ignore[union-attr]  # plain pieces are local
                self._encode_range(file, piece.begin, piece.end)
        elif is_fast:
            self._encode_blocks(iter_blocks(piece.path, self.on_read))
        else:
            self._encode_batches(self._iter_lines())

    def reject(self, line: int, error: ValueError) -> None:
        """Reject line `line` of the piece, counted from 0. Raises ValueError unless bad lines are skipped."""
        if self.first_writer.has_enough:
            return  # it is after the documents that are used
        if not self.settings.skip_bad_lines:
            # `line` counts from the start of the piece. Counting the earlier lines
            # reads the file up to the piece, which is done only for this message.
            number = line + 1 + (count_lines_before(self.piece) if self.piece.is_plain else 0)
            label = "row" if self.piece.path.name.endswith(COLUMN_SUFFIXES) else "line"
            raise ValueError(f"{self.piece.path}, {label} {number}: {error}") from error
        self.rejects.append({"line": line, "reason": str(error)})

    def clear(self) -> None:
        """Discard all documents and rejected lines."""
        self.n_lines, self.rejects = 0, []
        for writer in self.writers.values():
            writer.clear()

    def _iter_lines(self) -> Iterator[tuple[int, Callable[[str], str]]]:
        for i, line in iter_lines(self.piece, self.on_read):
            self.n_lines = i + 1
            if line.strip():
                yield i, functools.partial(parse_text, line)

    def _iter_rows(self) -> Iterator[tuple[int, Callable[[str], str]]]:
        for columns in iter_columns(self.piece.path, list(self.writers), on_read=self.on_read):
            for values in zip(*(column.to_pylist() for column in columns), strict=True):
                row = dict(zip(self.writers, values, strict=True))
                self.n_lines += 1
                yield self.n_lines - 1, lambda key, row=row: check_text(row[key], key)  # type: ignore[misc]

    def _encode_batches(self, documents: Iterator[tuple[int, Callable[[str], str]]]) -> None:
        """Encode documents in batches: (line, function that returns the text of a key).

        A document that lacks a key, or cannot be encoded for one key, is rejected
        for all keys.
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
            # limited by text too: 128 books would
            # give about a gigabyte of Python integers
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
        # for all keys before the first write: if a key
        # fails, no key has a document that the others lack
        encoded = {
            key: self.encoder.encode([texts[key] for _, texts in items], self.settings.eod)
            for key in self.writers
        }
        for key, (ids, lengths) in encoded.items():
            self.writers[key].write(ids, lengths)

    def _encode_column(self) -> None:
        """Encode one column from arrow's buffers; arrays with nulls are read row by row."""
        encoder, ((key, writer),) = self.encoder, self.writers.items()
        assert isinstance(encoder, FastEncoder), "only C++ encodes arrow's buffers"
        for (column,) in iter_columns(self.piece.path, [key], on_read=self.on_read):
            for first, texts in iter_slices(column, BATCH_BYTES):  # in parts, to limit the memory for ids
                if (joined := concat_texts(texts)) is not None:
                    writer.write(*encoder.encode_concatenated(*joined, self.settings.eod))
                    continue
                values = enumerate(texts.to_pylist(), self.n_lines + first)
                self._encode_batches((i, functools.partial(check_text, value)) for i, value in values)
            self.n_lines += len(column)
            if writer.has_enough:
                return

    def _encode_range(self, file: IO[bytes], begin: int, end: int) -> None:
        """Encode the lines in bytes [begin, end) of a plain file in C++."""
        while begin < end:
            begin, is_refused = self._encode_accepted(file, begin, end)
            if is_refused:
                # C++ reads by descriptor with pread,
                # so the position of `file` is free
                file.seek(begin)
                line = file.readline(MAX_PARSED_LINE + 1)
                is_cut = len(line) > MAX_PARSED_LINE and not line.endswith(b"\n")
                line_end = find_line_end(file) if is_cut else file.tell()
                self._encode_refused_line(line, line_end - begin)
                begin = line_end

    def _encode_accepted(self, file: IO[bytes], begin: int, end: int) -> tuple[int, bool]:
        """Encode lines for all keys, up to the first line that C++ refuses for any of them.

        Returns (offset of this line or `end`, whether a line was refused).
        """
        # Lines 0 to 9: key a encodes all, b refuses line 6, c
        # refuses line 4. Then a and b are rewound, and encode lines
        # 0 to 3 again: no line has documents for some keys only.
        stop, is_refused = end, False
        results = {}
        for key in self.writers:
            results[key] = self._encode_key(file, begin, stop, key)
            stop, is_refused = results[key][0], is_refused or results[key][4]
        for key, writer in self.writers.items():
            if results[key][0] > stop:
                writer.rewind()
                results[key] = self._encode_key(file, begin, stop, key)
            _, n_documents, n_tokens, n_lines, _ = results[key]
            writer.count_documents(n_documents, n_tokens)
        self.n_lines += n_lines
        return stop, is_refused

    def _encode_key(self, file: IO[bytes], begin: int, end: int, key: str) -> tuple[int, int, int, int, bool]:
        """Encode lines for one key as `_csrc.encode_lines`: (next, documents, tokens, lines, refused)."""
        encoder, writer = self.encoder, self.writers[key]
        assert isinstance(encoder, FastEncoder), "only C++ reads lines by descriptor"
        is_wide, outputs = writer.dtype.itemsize == 4, (writer.ids.fileno(), writer.lengths.fileno())
        settings = key, encoder.special, self.settings.eod, is_wide, *outputs
        return _csrc.encode_lines(encoder.worker, file.fileno(), begin, end, *settings)

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
