"""Documents of text files, with the place each one stands at.

JSON lines (.jsonl, .json) plain, gzipped or zstandard, parquet, folders saved by Hugging Face `datasets`,
and standard input. A plain file is cut into byte ranges, so that no process reads for the others; every
other file is one piece.
"""

import glob
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.run_dir import write_whole_bytes

PLAIN = (".jsonl", ".json")
COMPRESSED = (".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
COLUMNS = (".parquet", ".arrow")
SUFFIXES = (*PLAIN, *COMPRESSED, *COLUMNS)
STDIN = Path("-")
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


def find_inputs(words: Sequence[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Files that words name: a file, a folder (its files, sorted), a glob pattern (sorted), or `-`.

    Raises FileNotFoundError for a word that names none, ValueError for a file of another kind or named twice.
    """
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path == STDIN:
            here = [path]
        elif path.is_dir():
            here = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(tuple(suffixes)))
            here = [p for p in here if not _belongs_to_datasets(p)]
        elif path.is_file():
            here = [path]
        else:
            here = [Path(p) for p in sorted(glob.glob(word, recursive=True)) if Path(p).is_file()]
        if not here:
            raise FileNotFoundError(f"{word}: no such file, nor a folder or pattern of {', '.join(suffixes)}")
        found += here
    seen: set[Path] = set()
    for path in found:
        if path in seen:
            raise ValueError(f"{path}: named twice; an input is read once")
        seen.add(path)
        if path != STDIN and not path.name.endswith(tuple(suffixes)):
            raise ValueError(f"{path}: wanted one of {', '.join(suffixes)}, or - for standard input")
    return found


def named(words: Sequence[str]) -> str:
    """Inputs as sentences name them."""
    return ", ".join("standard input" if word == str(STDIN) else word for word in words)


def _belongs_to_datasets(path: Path) -> bool:
    """state.json and dataset_info.json, which Dataset.save_to_disk writes beside its .arrow files."""
    return path.name in ("state.json", "dataset_info.json") and (path.parent / "dataset_info.json").is_file()


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


def lines_of(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(line number within the piece from 0, line without its end). ValueError for a broken archive."""
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
    try:
        with opened(piece.path) as file:
            for i, line in enumerate(file):
                yield i, line.rstrip(b"\r\n")
    except (gzip.BadGzipFile, EOFError, OSError) as error:
        raise ValueError(f"{piece.path}: cannot be read to its end ({error})") from error


def blocks_of(path: Path) -> Iterator[bytes]:
    """The bytes of a compressed file or of standard input, in blocks. ValueError for a broken archive."""
    try:
        with opened(path) as file:
            while block := file.read(LINE_PART):
                yield block
    except (gzip.BadGzipFile, EOFError, OSError) as error:
        raise ValueError(f"{path}: cannot be read to its end ({error})") from error


def opened(path: Path) -> IO[bytes]:
    """What a compressed file holds, or standard input."""
    if path == STDIN:
        return sys.stdin.buffer
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    import pyarrow  # for zstandard alone, and it is slow to import

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def columns_of(path: Path, key: str, n_rows: int = 1024) -> Iterator[Any]:
    """One column of a parquet file or of an .arrow file of `datasets`, as arrow arrays of some rows.

    Raises ValueError for a file of another kind or without the column.
    """
    import pyarrow  # slow to import, and only columns want it
    import pyarrow.parquet

    try:
        if path.name.endswith(".parquet"):
            with pyarrow.parquet.ParquetFile(path) as file:
                if key not in file.schema_arrow.names:
                    raise ValueError(
                        f"{path}: no column '{key}'; it has {', '.join(file.schema_arrow.names)}"
                    )
                for batch in file.iter_batches(n_rows, columns=[key]):
                    yield batch.column(0)
            return
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            if key not in stream.schema.names:
                raise ValueError(f"{path}: no column '{key}'; it has {', '.join(stream.schema.names)}")
            for batch in stream:
                yield batch.column(key)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from error


def rows_of(path: Path, key: str) -> Iterator[list[Any]]:
    """The values of `columns_of`."""
    for column in columns_of(path, key):
        yield column.to_pylist()


def joined_text(column: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """(UTF-8 bytes, int64 end of each text in them) of an arrow array of strings.

    None for an array of another kind, or with nulls.
    """
    import pyarrow

    offset = {pyarrow.string(): np.int32, pyarrow.large_string(): np.int64}.get(column.type)
    if offset is None or column.null_count or not len(column):
        return None
    _, offsets, text = column.buffers()
    bounds = np.frombuffer(offsets, dtype=offset)[column.offset : column.offset + len(column) + 1]
    held = np.frombuffer(text, dtype=np.uint8) if text is not None else np.zeros(0, dtype=np.uint8)
    return held[bounds[0] : bounds[-1]], (bounds[1:] - bounds[0]).astype(np.int64)


def text_of(line: bytes, key: str) -> str:
    """The text under `key` of one line. ValueError says what the line is instead."""
    try:
        # numbers are not looked at; Python would refuse to convert very long ones
        record: Any = json.loads(line, parse_int=lambda digits: 0)
    except json.JSONDecodeError as error:  # its own words count lines, of which there is one
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deep") from error
    if not isinstance(record, dict):
        raise ValueError(f"wanted an object, found {type(record).__name__}")
    if key not in record:
        raise ValueError(f"no key '{key}'; it has {', '.join(map(repr, record)) or 'none'}")
    return checked_text(record[key], key)


def checked_text(text: Any, key: str) -> str:
    """A string without unpaired surrogates: such an escape stands for no character and becomes U+FFFD."""
    if not isinstance(text, str):
        raise ValueError(f"'{key}' is {type(text).__name__}, wanted a string")
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)


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
