"""Documents of JSON-lines files, plain or gzipped, with the place each one stands at."""

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")


@dataclass(frozen=True)
class Piece:
    """A byte range of a plain file that begins and ends at line ends, or a whole gzipped file."""

    path: Path
    begin: int
    end: int
    is_gzip: bool


def find_inputs(words: Sequence[str]) -> list[Path]:
    """Files that words name: a file, a folder (its JSON-lines files, sorted) or a glob pattern (sorted).

    Raises FileNotFoundError for a word that names none, ValueError for a file of another kind.
    """
    found: list[Path] = []
    for word in words:
        path = Path(word)
        if path.is_dir():
            here = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith(SUFFIXES))
        elif path.is_file():
            here = [path]
        else:
            here = [Path(p) for p in sorted(glob.glob(word, recursive=True)) if Path(p).is_file()]
        if not here:
            raise FileNotFoundError(
                f"{word}: no such file, nor a folder or pattern with {', '.join(SUFFIXES)} files"
            )
        found += here
    for path in found:
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"{path}: wanted one of {', '.join(SUFFIXES)}")
    return found


def cut(paths: Sequence[Path], piece_bytes: int) -> list[Piece]:
    """Pieces of about `piece_bytes` in the order of the input; cuts fall on line ends."""
    pieces: list[Piece] = []
    for path in paths:
        size = path.stat().st_size
        if path.name.endswith(".gz"):
            pieces.append(Piece(path, 0, size, True))
            continue
        begin = 0
        with path.open("rb") as file:
            while begin < size:
                file.seek(min(size, begin + piece_bytes))
                file.readline()  # to the end of the line that the cut fell into
                end = file.tell()
                pieces.append(Piece(path, begin, end, False))
                begin = end
    return pieces


def lines_of(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """(line number within the piece from 0, line without its end). ValueError for broken gzip."""
    if piece.is_gzip:
        try:
            with gzip.open(piece.path, "rb") as file:
                for i, line in enumerate(file):
                    yield i, line.rstrip(b"\r\n")
        except (gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{piece.path}: broken gzip ({error})") from error
        return
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        left, i = piece.end - piece.begin, 0
        while left > 0:
            line = file.readline()
            left -= len(line)
            yield i, line.rstrip(b"\r\n")
            i += 1


def text_of(line: bytes, key: str) -> str:
    """The text under `key` of one line. ValueError says what the line is instead.

    An unpaired surrogate escape (`\\ud800` alone) stands for no character and becomes U+FFFD.
    """
    try:
        record: Any = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise ValueError(f"wanted an object, found {type(record).__name__}")
    if key not in record:
        raise ValueError(f"no key '{key}'; it has {', '.join(map(repr, record)) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise ValueError(f"'{key}' is {type(text).__name__}, wanted a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def line_number(piece: Piece, line_in_piece: int) -> int:
    """Number of a line in its whole file, from 1; counts the lines before the piece, for error messages."""
    n_before = 0
    if not piece.is_gzip:
        with piece.path.open("rb") as file:
            left = piece.begin
            while left > 0:
                block = file.read(min(left, 1 << 20))
                n_before += block.count(b"\n")
                left -= len(block)
    return n_before + line_in_piece + 1
