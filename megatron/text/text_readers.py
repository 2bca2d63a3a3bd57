"""Readers of documents in text files, with the position of each document.

Formats: JSON lines (.jsonl, .json), plain or compressed with gzip, zstandard, bzip2
or xz; parquet; folders saved by Hugging Face `datasets`; standard input. A local
plain file is split into byte ranges that are read independently. Any other file is
a single piece. A file may be remote (megatron/data/remote.py).
"""

import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any, cast

from megatron.text.inputs import (
    PLAIN_SUFFIXES,
    READ_BYTES,
    STDIN,
    Source,
    find_line_end,
    is_divisible,
    open_source,
    stat_source,
)

PARQUET_MAGIC = b"PAR1"
ONE_OBJECT = "Write an object per line, as jq -c . FILE does; jq -c '.[]' FILE does so for an array"
MAX_PARSED_LINE = 16 << 20  # bytes; a longer line must be plain JSON, which C++ streams
SURROGATE = re.compile("[\ud800-\udfff]")

ReadCallback = Callable[[int], object]  # takes the bytes of a file, as stored, that were read so far


def ignore_progress(n_bytes: int) -> None:
    """Do nothing: a `ReadCallback` for callers that do not show progress."""


class DamagedFileError(ValueError):
    """A compressed or columnar file that cannot be read to its end. `reason`: message of the library."""

    def __init__(self, path: Source, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return (
            f"{self.path}: got damaged content ({self.reason}), expected an intact file. Write or download "
            "it again, or preprocess with --on-error skip."
        )


@contextmanager
def translate_read_errors(path: Source) -> Iterator[None]:
    """Convert exceptions that libraries raise for damaged content to DamagedFileError.

    An error of the system (no permission, a failing disk) or of the network is not
    damage: it stays an OSError, so that --on-error skip does not drop intact files.
    """
    try:
        yield
    except Exception as error:
        # compared by name: pyarrow and the module of
        # RemoteError are not imported for plain files
        module = type(error).__module__
        # for bad content pyarrow, gzip and bz2 raise an OSError without an errno
        is_system = isinstance(error, OSError) and (error.errno is not None or module.endswith(".remote"))
        is_damage = isinstance(error, OSError | EOFError | zlib.error | lzma.LZMAError | UnicodeDecodeError)
        if is_system or not (is_damage or module.startswith("pyarrow")):
            raise
        lines = (str(error).strip() or type(error).__name__).splitlines()
        raise DamagedFileError(path, lines[0][:200]) from error


@dataclass(frozen=True)
class InputPiece:
    """A byte range of a plain local file, delimited by line ends, or a whole file of another kind."""

    path: Source
    begin: int
    end: int

    @property
    def is_plain(self) -> bool:
        """True if the file is local and consists of lines: it can be read from any byte."""
        return is_divisible(self.path)


def split_into_pieces(
    paths: Sequence[Source], piece_bytes: int, ranges: Mapping[Source, tuple[int, int]] | None = None
) -> list[InputPiece]:
    """Split files into pieces of about `piece_bytes`, at line ends, in the order of the input.

    ranges   (begin, end) at line ends, for plain files of which a part is read
    """
    pieces: list[InputPiece] = []
    for path in paths:
        size, _ = stat_source(path)
        if not is_divisible(path):
            pieces.append(InputPiece(path, 0, size))
            continue
        begin, last = (ranges or {}).get(path, (0, size))
        with open_source(path) as file:
            while begin < last:
                # one byte earlier: a cut directly after
                # a line feed must not add the next line
                file.seek(min(last, begin + piece_bytes) - 1)
                end = find_line_end(file)  # extend the piece to the end of the line at the cut
                pieces.append(InputPiece(path, begin, end))
                begin = end
    return pieces


def iter_lines(piece: InputPiece, on_read: ReadCallback = ignore_progress) -> Iterator[tuple[int, bytes]]:
    """Yield (line number within the piece, from 0; line without its end). Raises as `iter_blocks`."""
    with translate_read_errors(piece.path), open_decompressed(piece.path, on_read, piece.begin) as file:
        left, i = piece.end - piece.begin, 0
        while (left > 0 or not piece.is_plain) and (line := file.readline()):
            left -= len(line)
            yield i, line.rstrip(b"\r\n")
            i += 1


def iter_blocks(path: Source, on_read: ReadCallback = ignore_progress) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, or the bytes of standard input, in blocks.

    Raises DamagedFileError for a file that cannot be read to its end.
    """
    with translate_read_errors(path), open_decompressed(path, on_read) as file:
        # a pipe may deliver less than a block for a long time
        read = getattr(file, "read1", file.read) if path == STDIN else file.read
        while block := read(READ_BYTES):
            yield block


class _CountingReader(io.RawIOBase):
    """Raw file that reports how far it was read."""

    def __init__(self, file: IO[bytes], on_read: ReadCallback) -> None:
        self._file, self._on_read, self._n_read = file, on_read, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = int(cast(Any, self._file).readinto1(buffer))
        self._n_read += n
        self._on_read(self._n_read)
        return n


@contextmanager
def open_decompressed(
    path: Source, on_read: ReadCallback = ignore_progress, begin: int = 0
) -> Iterator[IO[bytes]]:
    """Open the decompressed content of a file, or standard input. `begin`: first byte of a plain file."""
    packing = "" if path == STDIN or path.name.endswith(PLAIN_SUFFIXES) else path.name.rpartition(".")[2]
    if packing and not stat_source(path)[0]:
        raise DamagedFileError(path, "0 bytes")
    with open_source(path) as raw:
        if begin:
            raw.seek(begin)
        stored = cast(IO[bytes], io.BufferedReader(_CountingReader(raw, on_read), READ_BYTES))
        if packing in ("gz", "xz"):
            with (gzip if packing == "gz" else lzma).open(stored) as content:
                yield cast(IO[bytes], content)
        elif packing:
            import pyarrow  # slow to import, and only zstandard and bzip2 require it

            name = {"zst": "zstd"}.get(packing, packing)
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, mode="r"), name) as packed:
                yield cast(IO[bytes], io.BufferedReader(packed))
        else:
            yield stored


def iter_columns(
    path: Source, keys: Sequence[str], n_rows: int = 256, on_read: ReadCallback = ignore_progress
) -> Iterator[list[Any]]:
    """Yield columns of a parquet file, or of an .arrow file of `datasets`, as one arrow array per key.

    Raises ValueError for a file without a column, and DamagedFileError for one that
    cannot be read to its end. Arrays of a parquet file have up to `n_rows` rows,
    arrays of an .arrow file the size of its batches.
    """
    import pyarrow  # slow to import, and only columnar files require it

    read = _read_parquet if path.name.endswith(".parquet") else _read_arrow
    with translate_read_errors(path), open_source(path) as raw, pyarrow.PythonFile(raw, mode="r") as source:
        for batch in read(source, path, keys, n_rows, on_read):
            columns = [batch.column(key) for key in keys]
            for column in columns:
                # offsets outside the text would read other memory;
                # a string that is not UTF-8 is damage, too
                column.validate(full=True)
            yield columns


def _read_parquet(
    source: Any, path: Source, keys: Sequence[str], n_rows: int, on_read: ReadCallback
) -> Iterator[Any]:
    import pyarrow.parquet

    if (magic := source.read(len(PARQUET_MAGIC))) != PARQUET_MAGIC:  # pyarrow checks only the footer
        raise DamagedFileError(path, f"it begins with {magic!r}")
    # without a buffer a whole row group of the column is read, whatever its size
    options = {"buffer_size": READ_BYTES, "pre_buffer": False, "page_checksum_verification": True}
    with pyarrow.parquet.ParquetFile(source, **options) as file:
        _check_columns(path, keys, file.schema_arrow.names)
        # parquet has no read offset: estimate progress by rows
        row_bytes, n_read = stat_source(path)[0] / max(1, file.metadata.num_rows), 0
        for batch in file.iter_batches(n_rows, columns=list(keys), use_threads=False):
            n_read += len(batch)
            on_read(int(row_bytes * n_read))
            yield batch


def _read_arrow(
    source: Any, path: Source, keys: Sequence[str], n_rows: int, on_read: ReadCallback
) -> Iterator[Any]:
    import pyarrow

    with pyarrow.ipc.open_stream(source) as stream:
        _check_columns(path, keys, stream.schema.names)
        for batch in stream:
            on_read(source.tell())
            yield batch


def _check_columns(path: Source, keys: Sequence[str], names: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise ValueError(f"{path}: no column '{key}'; it has {', '.join(names)}")


def parse_text(line: bytes, key: str) -> str:
    """Return the text under `key` of one JSON line. Raises ValueError that describes an invalid line."""
    # numbers are not used, and int() rejects very long ones
    return find_text(parse_record(line, lambda digits: 0), key)


def parse_record(line: bytes, parse_int: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Return the object of one JSON line. Raises ValueError that describes an invalid line."""
    try:
        # json.loads(bytes) would also detect UTF-16 and UTF-32
        record: Any = json.loads(line.decode("utf-8-sig"), parse_int=parse_int)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start + 1} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}). {ONE_OBJECT}") from error
    if not isinstance(record, dict):
        raise ValueError(f"got {type(record).__name__}, expected an object. {ONE_OBJECT}")
    return record


def find_text(record: dict[str, Any], key: str) -> str:
    """Return the text under `key`, as `check_text`. Raises ValueError if it is missing."""
    if key not in record:
        keys = [repr(name) for name in islice(record, 10)] + ["others"] * (len(record) > 10)
        raise ValueError(f"no key '{key}'; it has {', '.join(keys) or 'none'}")
    return check_text(record[key], key)


def check_text(text: Any, key: str) -> str:
    """Return the text with each unpaired surrogate, which encodes no character, replaced by U+FFFD.

    Raises ValueError for a value that is not a string.
    """
    if not isinstance(text, str):
        raise ValueError(f"'{key}' is {type(text).__name__}, expected a string")
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def check_texts(texts: Sequence[Any], key: str, locations: Sequence[str]) -> list[str]:
    """Return the texts as `check_text` does. Its ValueError begins with the location of the text."""
    checked = []
    for text, location in zip(texts, locations, strict=True):
        try:
            checked.append(check_text(text, key))
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
    return checked


def count_lines_before(piece: InputPiece) -> int:
    """Count the lines of a local plain file before a piece, by reading them."""
    n, left = 0, piece.begin
    if not left:
        return 0
    with open_source(piece.path) as file:
        while left > 0:
            block = file.read(min(left, READ_BYTES))
            n += block.count(b"\n")
            left -= len(block)
    return n
