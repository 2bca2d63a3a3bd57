"""Documents of text files, with the place each one stands at.

JSON lines (.jsonl, .json) plain, gzipped or zstandard, parquet, folders saved by Hugging Face `datasets`,
and standard input. A plain file is cut into byte ranges, so that no process reads for the others; every
other file is one piece.
"""

import glob
import gzip
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.data.columns import check_structure, values_of
from megatron.data.damage import DamagedFileError, name_damage
from megatron.run_dir import read_json, write_whole_bytes

PLAIN = (".jsonl", ".json")
COMPRESSED = (".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
COLUMNS = (".parquet", ".arrow")
SUFFIXES = (*PLAIN, *COMPRESSED, *COLUMNS)
PARQUET_MAGIC = b"PAR1"
STDIN = Path("-")
REJECTS = ".rejects.jsonl"
PACKED_OTHERWISE = (
    ".xz",
    ".bz2",
    ".lz4",
    ".lzma",
    ".br",
    ".7z",
    ".zip",
    ".tar",
    ".tar.gz",
    ".tgz",
    ".tar.zst",
)
LINE_PART = 1 << 20  # bytes of a long line that are held at a time
LONGEST_ODD_LINE = 16 << 20  # bytes; a longer line must be plain JSON, which is read without being held
SURROGATE = re.compile("[\ud800-\udfff]")
ESCAPE = re.compile(  # of JSON; the group is that of a surrogate without its other half
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


@dataclass(frozen=True)
class Piece:
    """A byte range of a plain file that begins and ends at line ends, or a whole file of another kind."""

    path: Path
    begin: int
    end: int

    @property
    def is_plain(self) -> bool:
        """Whether it is lines that can be read from any byte on."""
        return self.path.name.endswith(PLAIN)


@dataclass
class Reading:
    """How far a file is read: bytes of it as it lies on disk, of standard input as they come."""

    at: int = 0


def find_inputs(words: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files that words name: a file, a folder (all below it, sorted), a glob pattern (sorted), or `-`.

    In folders and patterns what preprocessing left there is passed over, in folders hidden names, too; of a
    folder that `datasets` saved the files of its state.json are taken. Raises FileNotFoundError for a word
    that names none, ValueError for a file of another kind or named twice and for a folder of several splits.
    """
    found: list[Path] = []
    for word in words:
        _refuse_unreadable(word, suffixes)
        path = Path(word)
        if path == STDIN or path.is_file():
            here = [path]
        elif path.is_dir():
            here = _files_below(path, suffixes)
        else:
            matched = [Path(p) for p in sorted(glob.glob(word, recursive=True))]
            inside = [_files_below(p, suffixes) if p.is_dir() else [p] for p in matched if not _was_left(p)]
            here = list(dict.fromkeys(p for some in inside for p in some))  # ** gives files and their folders
        if not here:
            raise FileNotFoundError(f"{word}: no such file, nor a folder or pattern of {', '.join(suffixes)}")
        found += here
    seen: set[Path] = set()
    for path in found:
        place = path if path == STDIN else path.resolve()
        if place in seen:
            raise ValueError(f"{path}: named twice; an input is read once")
        seen.add(place)
        if path != STDIN and not path.name.endswith(tuple(suffixes)):
            raise ValueError(f"{path}: wanted one of {', '.join(suffixes)}, or - for standard input")
    return found


def _refuse_unreadable(word: str, suffixes: Sequence[str]) -> None:
    """ValueError for an address, and for a packing that is not read, whether there is such a file or not."""
    if scheme := re.match(r"[a-z][a-z0-9+.-]*://", word):
        raise ValueError(
            f"{word}: got an address ({scheme[0]}), expected a file on this machine. Remote files are not "
            "supported; download it first, as tools/download_assets.py does."
        )
    if word.endswith(PACKED_OTHERWISE) and not word.endswith(tuple(suffixes)) and not Path(word).is_dir():
        raise ValueError(
            f"{word}: got {Path(word).suffix}, expected one of {', '.join(suffixes)}. Unpack it first."
        )


def named(words: Sequence[str]) -> str:
    """Inputs as sentences name them."""
    return ", ".join("standard input" if word == str(STDIN) else word for word in words)


def _files_below(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files that a folder stands for, sorted by path."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".") and not _is_loop(place, name)]
        if "dataset_dict.json" in names:
            told = read_json(Path(place, "dataset_dict.json")) or {}
            splits = [str(Path(place, split)) for split in told.get("splits", [])]
            raise ValueError(
                f"{place}: holds splits that datasets saved; name those you want: {' '.join(splits)}"
            )
        state = read_json(Path(place, "state.json")) if "dataset_info.json" in names else None
        if state is not None and "_data_files" in state:
            # what else lies there datasets may have cached from the same documents
            found += [Path(place, one["filename"]) for one in state["_data_files"]]
            folders.clear()
            continue
        here = [Path(place, name) for name in names if name.endswith(tuple(suffixes)) and name[0] != "."]
        found += [path for path in here if not _was_left(path)]
    return sorted(found)


def _is_loop(place: str, name: str) -> bool:
    """Whether a folder is a link to one that it lies in: its files are below that already."""
    path = os.path.join(place, name)
    if not os.path.islink(path):
        return False
    target = os.path.realpath(path)
    return os.path.commonpath([target, os.path.realpath(place)]) == target


def _was_left(path: Path) -> bool:
    """Whether a file is the sidecar of a pair, or the rejects of the job that made one."""
    if path.name.endswith(REJECTS):
        job = glob.escape(path.name.removesuffix(REJECTS))
        return any(path.parent.glob(f"{job}_*_document.idx"))
    return path.suffix == ".json" and path.with_suffix(".idx").is_file()


def cut(paths: Sequence[Path], piece_bytes: int) -> list[Piece]:
    """Pieces of about `piece_bytes` in the order of the input; cuts fall on line ends."""
    pieces: list[Piece] = []
    for path in paths:
        size = 0 if path == STDIN else path.stat().st_size
        if not path.name.endswith(PLAIN):
            pieces.append(Piece(path, 0, size))
            continue
        begin = 0
        with path.open("rb") as file:
            while begin < size:
                file.seek(min(size, begin + piece_bytes) - 1)
                end = _end_of_line(file)  # of the line that the cut fell into
                pieces.append(Piece(path, begin, end))
                begin = end
    return pieces


def _end_of_line(file: IO[bytes]) -> int:
    """The place behind the line that is being read, of which a part is held at a time."""
    part = file.readline(LINE_PART)
    while part and not part.endswith(b"\n"):
        part = file.readline(LINE_PART)
    return file.tell()


def lines_of(piece: Piece, reading: Reading | None = None) -> Iterator[tuple[int, bytes]]:
    """(line number within the piece from 0, line without its end). DamagedFileError as `blocks_of`."""
    if piece.is_plain:
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            left, i = piece.end - piece.begin, 0
            while left > 0:
                line = file.readline()
                left -= len(line)
                yield i, line.rstrip(b"\r\n")
                i += 1
        return
    held: list[bytes] = []  # the parts of a line that has begun
    i = 0
    for block in blocks_of(piece.path, reading):
        first, *others = block.split(b"\n")
        held.append(first)
        for part in others:
            yield i, b"".join(held).rstrip(b"\r")
            held, i = [part], i + 1
    if any(held):
        yield i, b"".join(held).rstrip(b"\r")


def blocks_of(path: Path, reading: Reading | None = None) -> Iterator[bytes]:
    """The bytes of a compressed file or of standard input, in blocks.

    Raises DamagedFileError for one that cannot be read to its end, once the bytes before that were given.
    """
    reading = reading or Reading()
    with name_damage(path):
        if path != STDIN and not path.stat().st_size:
            raise EOFError("0 bytes")
        with _opened(path) as (file, place):
            for block in _blocks(file):
                reading.at = place() if place else reading.at + len(block)
                yield block


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """The content in blocks of about LINE_PART, all that comes before an error included."""
    parts: list[bytes] = []
    n_bytes = 0
    try:
        while part := file.read1(LINE_PART):  # type: ignore[attr-defined]  # buffered files have it
            parts.append(part)
            n_bytes += len(part)
            if n_bytes >= LINE_PART:
                yield b"".join(parts)
                parts, n_bytes = [], 0
    except Exception:
        if parts:
            yield b"".join(parts)
        raise
    if parts:
        yield b"".join(parts)


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """What a compressed file holds, or standard input."""
    with _opened(path) as (file, _):
        yield file


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int] | None]]:
    """What a compressed file holds, and how far the file itself is read; standard input, and None."""
    if path == STDIN:
        yield sys.stdin.buffer, None
    elif path.name.endswith(".gz"):
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as file:
            yield file, raw.tell  # type: ignore[misc]
    else:
        import pyarrow  # for zstandard alone, and it is slow to import

        with pyarrow.OSFile(str(path)) as raw, pyarrow.CompressedInputStream(raw, "zstd") as packed:
            yield io.BufferedReader(packed), raw.tell


def columns_of(path: Path, key: str, n_rows: int = 256, reading: Reading | None = None) -> Iterator[Any]:
    """One column of a parquet file or of an .arrow file of `datasets`, as arrow arrays of some rows.

    Raises ValueError for a file without the column, DamagedFileError for one that cannot be read to its end.
    """
    with name_damage(path):
        for column in _columns_of(path, key, n_rows, reading or Reading()):
            check_structure(column)
            yield column


def _columns_of(path: Path, key: str, n_rows: int, reading: Reading) -> Iterator[Any]:
    import pyarrow  # slow to import, and only columns want it
    import pyarrow.parquet

    if path.name.endswith(".parquet"):
        with path.open("rb") as raw:
            if (magic := raw.read(len(PARQUET_MAGIC))) != PARQUET_MAGIC:  # its library reads only the end
                raise DamagedFileError(path, f"it begins with {magic!r}")
        # a buffer: else a row group of the column is read as a whole, however its writer cut them
        how = {"buffer_size": LINE_PART, "pre_buffer": False, "page_checksum_verification": True}
        with pyarrow.parquet.ParquetFile(path, **how) as file:
            if key not in file.schema_arrow.names:
                raise ValueError(f"{path}: no column '{key}'; it has {', '.join(file.schema_arrow.names)}")
            each = path.stat().st_size / max(1, file.metadata.num_rows)
            for batch in file.iter_batches(n_rows, columns=[key], use_threads=False):
                reading.at += int(each * len(batch))
                yield batch.column(0)
        return
    # not mapped: all that was read of a mapped file counts as memory held
    with pyarrow.OSFile(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
        if key not in stream.schema.names:
            raise ValueError(f"{path}: no column '{key}'; it has {', '.join(stream.schema.names)}")
        for batch in stream:
            reading.at = source.tell()
            yield batch.column(key)


def rows_of(path: Path, key: str, reading: Reading | None = None) -> Iterator[list[Any]]:
    """The values of `columns_of`."""
    for column in columns_of(path, key, reading=reading):
        yield values_of(column)


def text_of(line: bytes, key: str) -> str:
    """The text under `key` of one line. ValueError says what the line is instead."""
    try:
        told = line.decode("utf-8-sig")  # Python's json would also guess at UTF-16 and 32
        # numbers are not looked at; Python would refuse to convert very long ones
        record: Any = json.loads(told, parse_int=lambda digits: 0)
    except json.JSONDecodeError as error:  # its own words count lines, of which there is one
        found = repr(told[error.pos : error.pos + 20]) if error.pos < len(told.rstrip()) else "the line ends"
        raise ValueError(
            f"not JSON ({error.msg} at character {error.pos + 1}: {found}){_over_lines(line)}"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8 (byte {error.start + 1} of the line is 0x{line[error.start]:02x})"
        ) from error
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError(f"found {_kind(record)}, wanted an object{_over_lines(line)}")
    if key not in record:
        some = [repr(one) for one in islice(record, 10)] + ["others"] * (len(record) > 10)
        raise ValueError(f"no key '{key}'; it has {', '.join(some) or 'none'}")
    return checked_text(record[key], key)


def checked_text(text: Any, key: str) -> str:
    """A string without unpaired surrogates: such an escape stands for no character and becomes U+FFFD."""
    if isinstance(text, bytes):  # of a column
        try:
            text.decode()
        except UnicodeDecodeError as error:
            byte = f"0x{text[error.start]:02x}"
            raise ValueError(f"'{key}' is not UTF-8 (byte {error.start + 1} is {byte})") from error
    if not isinstance(text, str):
        raise ValueError(f"'{key}' is {_kind(text)}, wanted a string")
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


def _over_lines(line: bytes) -> str:
    """A way out for a file that is one array, or one object, and not an object a line."""
    if line.strip().startswith(b"["):
        return "; jq -c '.[]' FILE makes a line of each element of an array"
    return "; jq -c . FILE makes one line of an object over several" if line.strip() == b"{" else ""


def _kind(value: Any) -> str:
    """What a value is, in the words of JSON."""
    if value is None:
        return "null"
    words = {str: "a string", bool: "true or false", dict: "an object", list: "an array"}
    if type(value) in words:
        return words[type(value)]
    return "a number" if isinstance(value, int | float) else type(value).__name__


def without_lone_surrogates(lines: bytes) -> bytes:
    """Lines of JSON in which escapes of unpaired surrogates are those of U+FFFD; as long as before.

    For readers that take such a line for no JSON at all; `checked_text` does the same to a text.
    """
    return ESCAPE.sub(lambda found: b"\\ufffd" if found[1] else found[0], lines)


def lines_before(piece: Piece) -> int:
    """How many lines of its file lie before a piece; reads them, for error messages."""
    n = 0
    with piece.path.open("rb") as file:
        left = piece.begin
        while left > 0:
            block = file.read(min(left, 1 << 20))
            n += block.count(b"\n")
            left -= len(block)
    return n


def write_parquet(path: Path, columns: dict[str, np.ndarray | list[str]]) -> None:
    """Columns of one length as a parquet file that appears under its name only when whole."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    write_whole_bytes(path, sink.getvalue().to_pybytes())


def read_parquet(path: Path) -> dict[str, np.ndarray]:
    """The columns of a parquet file. FileNotFoundError, or ValueError for another kind of file."""
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such parquet file")
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not parquet ({str(error).splitlines()[0]})") from error
    return {name: table[name].to_numpy() for name in table.column_names}
