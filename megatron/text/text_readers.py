"""Readers of documents in text files, with the position of each document.

Formats: JSON lines (.jsonl, .json), plain or compressed with gzip, zstandard, bzip2 or xz; parquet; folders
saved by Hugging Face `datasets`; standard input. A plain file is split into byte ranges that are read
independently. Any other file is a single piece. A file may be remote (megatron/remote_files.py).
"""

import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.io import write_atomic_bytes
from megatron.remote_files import RangeReader, RemotePath, split_remote_lines
from megatron.remote_requests import RemoteError
from megatron.text.columns import check_structure, decode_values
from megatron.text.inputs import PLAIN_SUFFIXES, STDIN
from megatron.text.packed_streams import SUFFIXES as STREAM_SUFFIXES
from megatron.text.packed_streams import PackedStream

PARQUET_MAGIC = b"PAR1"
READ_BYTES = 1 << 20  # bytes of a file or a long line that are read at a time
MAX_PARSED_LINE = 16 << 20  # bytes; a longer line must be plain JSON, which C++ streams
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPE = re.compile(  # any JSON escape; group 1 matches an unpaired surrogate: pairs are matched first
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


class DamagedFileError(ValueError):
    """A compressed or columnar file that cannot be read to its end. `reason`: message of the library.

    `hint`: an alternative to a new file that the command offers, appended to the message.
    """

    def __init__(self, path: Path, reason: str, hint: str = "") -> None:
        super().__init__(path, reason, hint)
        self.path, self.reason, self.hint = path, reason, hint

    def __str__(self) -> str:
        return (
            f"{self.path}: got damaged content ({self.reason}), expected an intact file. Write or download "
            f"it again{self.hint}."
        )


@contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Convert exceptions that libraries raise for damaged content to DamagedFileError.

    An error of the operating system (no permission, a failing disk) is not damage: it stays an OSError, with
    the file name added. So does a RemoteError.
    """
    try:
        yield
    except RemoteError:
        raise
    except OSError as error:
        # pyarrow and gzip raise OSError without an errno for bad content. An errno comes from the system:
        # reporting a failing disk as damage would let --on-error skip drop intact files.
        if error.errno is not None and not isinstance(error, gzip.BadGzipFile):
            if error.filename is None:
                error.filename = str(path)
            raise
        raise _make_damage_error(path, error) from error
    except MemoryError as error:  # may be a damaged size field or a large row; it does not prove damage
        raise ValueError(f"{path}: out of memory for its content. Write it with smaller rows.") from error
    except (EOFError, zlib.error, lzma.LZMAError, UnicodeDecodeError) as error:
        raise _make_damage_error(path, error) from error
    except Exception as error:
        if not type(error).__module__.startswith(
            "pyarrow"
        ):  # compared by name: pyarrow is not imported for plain files
            raise
        raise _make_damage_error(path, error) from error


def _make_damage_error(path: Path, error: BaseException) -> DamagedFileError:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    return DamagedFileError(path, lines[0][:200])


@dataclass(frozen=True)
class InputPiece:
    """A byte range of a plain file, delimited by line ends, or a whole file of another format.

    source_begin, source_end   the range of the file that the job reads, in one or several pieces
    """

    path: Path
    begin: int
    end: int
    source_begin: int = 0
    source_end: int | None = None  # None: the end of this piece

    @property
    def is_plain(self) -> bool:
        """True if the file consists of lines and can be read from any byte."""
        return self.path.name.endswith(PLAIN_SUFFIXES)


@dataclass
class ReadPosition:
    """Progress in a file: bytes as on disk, compressed or not; for standard input bytes received.

    sha256   of a remote file that was read completely and in order, else None
    """

    offset: int = 0
    sha256: str | None = None


def split_into_pieces(
    paths: Sequence[Path], piece_bytes: int, ranges: Mapping[Path, tuple[int, int]] | None = None
) -> list[InputPiece]:
    """Split files into pieces of about `piece_bytes`, at line ends, in the order of the input.

    ranges   (begin, end) at line ends, for plain files of which a part is read
    """
    pieces: list[InputPiece] = []
    for path in paths:
        size = 0 if path == STDIN else path.stat().st_size
        if not path.name.endswith(PLAIN_SUFFIXES):
            pieces.append(InputPiece(path, 0, size))
            continue
        source_begin, source_end = (ranges or {}).get(path, (0, size))
        if isinstance(path, RemotePath):
            spans = split_remote_lines(path, piece_bytes, source_begin, source_end)
            pieces += [InputPiece(path, *span, source_begin, source_end) for span in spans]
            continue
        begin = source_begin
        with path.open("rb") as file:
            while begin < source_end:
                # one byte earlier: a cut directly after a line feed must not add the next line
                file.seek(min(source_end, begin + piece_bytes) - 1)
                end = find_line_end(file)  # extend the piece to the end of the line at the cut
                pieces.append(InputPiece(path, begin, end, source_begin, source_end))
                begin = end
    return pieces


def find_line_end(file: IO[bytes]) -> int:
    """Return the offset after the current line; reads at most READ_BYTES at a time."""
    part = file.readline(READ_BYTES)
    while part and not part.endswith(b"\n"):
        part = file.readline(READ_BYTES)
    return file.tell()


def iter_lines(piece: InputPiece, position: ReadPosition | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (line number within the piece, from 0; line without its end). Raises as `iter_blocks`."""
    if piece.is_plain and not isinstance(piece.path, RemotePath):
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            left, i = piece.end - piece.begin, 0
            while left > 0:
                line = file.readline()
                left -= len(line)
                yield i, line.rstrip(b"\r\n")
                i += 1
        return
    parts: list[bytes] = []  # of an incomplete line, joined once at its end: no quadratic copies
    i = 0
    for block in iter_piece_blocks(piece, position):
        first, *others = block.split(b"\n")
        parts.append(first)
        for part in others:
            yield i, b"".join(parts).rstrip(b"\r")
            parts, i = [part], i + 1
    if any(parts):
        yield i, b"".join(parts).rstrip(b"\r")


def iter_piece_blocks(piece: InputPiece, position: ReadPosition | None = None) -> Iterator[bytes]:
    """Yield the bytes of a piece of a remote plain file, or as `iter_blocks` those of any other file."""
    position = position or ReadPosition()
    if not piece.is_plain or not isinstance(piece.path, RemotePath):
        yield from iter_blocks(piece.path, position)
        return
    with piece.path.open_range(piece.begin, piece.end) as file:
        for block in _read_blocks(file):
            position.offset = file.tell()
            yield block
        position.sha256 = _get_sha256(file)


def _get_sha256(file: Any) -> str | None:
    """Return the hash of a remote file that was read in order, None for a local one."""
    raw = getattr(file, "raw", None)
    return raw.sha256() if isinstance(raw, RangeReader) else None


def iter_blocks(path: Path, position: ReadPosition | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, or the bytes of standard input, in blocks.

    Raises DamagedFileError for a file that cannot be read to its end, after the bytes before the damage.
    """
    position = position or ReadPosition()
    with translate_read_errors(path):
        if path != STDIN and not path.stat().st_size:
            raise EOFError("0 bytes")
        with _open_with_position(path) as (file, raw):
            for block in _read_blocks(file):
                position.offset = raw.tell() if raw else position.offset + len(block)
                yield block
            position.sha256 = _get_sha256(raw)


def _read_blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the content in blocks of about READ_BYTES, including all content before an error."""
    parts: list[bytes] = []
    n_bytes = 0
    try:
        while part := file.read1(READ_BYTES):  # type: ignore[attr-defined]  # all files here are buffered
            parts.append(part)
            n_bytes += len(part)
            if n_bytes >= READ_BYTES:
                yield b"".join(parts)
                parts, n_bytes = [], 0
    except Exception:
        if parts:
            yield b"".join(parts)
        raise
    if parts:
        yield b"".join(parts)


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open the decompressed content of a file, or standard input."""
    with _open_with_position(path) as (file, _):
        yield file


@contextmanager
def _open_with_position(path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """Open the decompressed content, and the file as stored (None for standard input)."""
    if path == STDIN:
        yield sys.stdin.buffer, None
    elif path.name.endswith(".gz"):
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            yield file, raw  # type: ignore[misc]  # typeshed: a GzipFile is no IO
    elif path.name.endswith(STREAM_SUFFIXES):
        with path.open("rb") as raw:
            yield io.BufferedReader(PackedStream(raw, path.suffix)), raw
    else:
        import pyarrow  # slow to import, and only zstandard requires it

        with _open_for_arrow(path) as (source, raw), pyarrow.CompressedInputStream(source, "zstd") as packed:
            yield io.BufferedReader(packed), raw


@contextmanager
def _open_for_arrow(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a file for pyarrow, and a file with its position."""
    import pyarrow

    if isinstance(path, RemotePath):
        with path.open("rb") as raw, pyarrow.PythonFile(raw, mode="r") as source:
            yield source, raw
    else:
        # no memory map: pages read of a mapped file count as memory of the process
        with pyarrow.OSFile(str(path)) as source:
            yield source, source


def iter_columns(
    path: Path, key: str, n_rows: int = 256, position: ReadPosition | None = None
) -> Iterator[Any]:
    """Yield a column of a parquet file, or of an .arrow file of `datasets`, as arrow arrays.

    Raises ValueError for a file without the column, and DamagedFileError for one that cannot be read to its
    end. Arrays of a parquet file have up to `n_rows` rows, those of an .arrow file the size of its batches.
    """
    with translate_read_errors(path):
        for column in _read_columns(path, key, n_rows, position or ReadPosition()):
            check_structure(column)
            yield column


def _read_columns(path: Path, key: str, n_rows: int, position: ReadPosition) -> Iterator[Any]:
    import pyarrow  # slow to import, and only columnar files require it
    import pyarrow.parquet

    if path.name.endswith(".parquet"):
        with path.open("rb") as raw:
            if (magic := raw.read(len(PARQUET_MAGIC))) != PARQUET_MAGIC:  # pyarrow checks only the footer
                raise DamagedFileError(path, f"it begins with {magic!r}")
        # without a buffer a whole row group of the column is read, whatever its size
        options = {"buffer_size": READ_BYTES, "pre_buffer": False, "page_checksum_verification": True}
        with _open_for_arrow(path) as (source, _), pyarrow.parquet.ParquetFile(source, **options) as file:
            if key not in file.schema_arrow.names:
                raise ValueError(f"{path}: no column '{key}'; it has {', '.join(file.schema_arrow.names)}")
            # parquet has no read offset: estimate progress by rows
            row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(n_rows, columns=[key], use_threads=False):
                position.offset += int(row_bytes * len(batch))
                yield batch.column(0)
        return
    with _open_for_arrow(path) as (source, raw), pyarrow.ipc.open_stream(source) as stream:
        if key not in stream.schema.names:
            raise ValueError(f"{path}: no column '{key}'; it has {', '.join(stream.schema.names)}")
        for batch in stream:
            position.offset = raw.tell()
            yield batch.column(key)


def iter_rows(path: Path, key: str, position: ReadPosition | None = None) -> Iterator[list[Any]]:
    """Yield the values of `iter_columns` as lists."""
    for column in iter_columns(path, key, position=position):
        yield decode_values(column)


def parse_text(line: bytes, key: str) -> str:
    """Return the text under `key` of one JSON line. Raises ValueError that describes an invalid line."""
    try:
        decoded = line.decode("utf-8-sig")  # json.loads(bytes) would also detect UTF-16 and UTF-32
        # parse_int: numbers are not used, and int() rejects very long ones
        record: Any = json.loads(decoded, parse_int=lambda digits: 0)
    except json.JSONDecodeError as error:  # its own message counts lines, and there is a single one
        context = (
            repr(decoded[error.pos : error.pos + 20])
            if error.pos < len(decoded.rstrip())
            else "the line ends"
        )
        raise ValueError(
            f"not JSON ({error.msg} at character {error.pos + 1}: {context}){_multiline_hint(line)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})"
        ) from error
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError(f"got {_json_type(record)}, expected an object{_multiline_hint(line)}")
    if key not in record:
        keys = [repr(name) for name in islice(record, 10)] + ["others"] * (len(record) > 10)
        raise ValueError(f"no key '{key}'; it has {', '.join(keys) or 'none'}")
    return check_text(record[key], key)


def check_text(text: Any, key: str) -> str:
    """Return the text with each unpaired surrogate, which encodes no character, replaced by U+FFFD.

    Raises ValueError for a value that is not a string, and for bytes that are not UTF-8.
    """
    if isinstance(text, bytes):  # a value of a column that is not UTF-8, see decode_values
        try:
            text.decode()
        except UnicodeDecodeError as error:
            byte = f"0x{text[error.start]:02x}"
            raise ValueError(f"'{key}' is not UTF-8 (byte {error.start + 1} is {byte})") from error
    if not isinstance(text, str):
        raise ValueError(f"'{key}' is {_json_type(text)}, expected a string")
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def _multiline_hint(line: bytes) -> str:
    """Return a hint for a file with a single array or a multi-line object instead of one object per line."""
    if line.strip().startswith(b"["):
        return "; jq -c '.[]' FILE writes each element of an array as a line"
    return "; jq -c . FILE writes an object on several lines as one line" if line.strip() == b"{" else ""


def _json_type(value: Any) -> str:
    """Return the JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    words = {str: "a string", bool: "true or false", dict: "an object", list: "an array"}
    if type(value) in words:
        return words[type(value)]
    return "a number" if isinstance(value, int | float) else type(value).__name__


def replace_lone_surrogates(lines: bytes) -> bytes:
    """Replace escapes of unpaired surrogates in JSON lines by the escape of U+FFFD, of the same length.

    For parsers that reject a line with such an escape. `check_text` does the same for a decoded text.
    """
    return ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], lines)


def count_lines_before(piece: InputPiece) -> int:
    """Count the lines of the file before a piece, by reading them; for error messages."""
    n = 0
    with piece.path.open("rb") as file:
        left = piece.begin
        while left > 0:
            block = file.read(min(left, 1 << 20))
            n += block.count(b"\n")
            left -= len(block)
    return n


def write_parquet_columns(path: Path, columns: dict[str, np.ndarray | list[str]]) -> None:
    """Write columns of equal length to a parquet file, atomically."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    write_atomic_bytes(path, sink.getvalue().to_pybytes())


def read_parquet_columns(path: Path) -> dict[str, np.ndarray]:
    """Read the columns of a parquet file. Raises FileNotFoundError, or ValueError for another format."""
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such parquet file")
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: got a file that is not parquet ({str(error).splitlines()[0]})") from error
    return {name: table[name].to_numpy() for name in table.column_names}
