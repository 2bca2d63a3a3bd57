"""Inputs of preprocessing: the files that words name, their state, their opening, and the part of a job.

An input is a local file, an object at a URL or standard input. This is the only
module of the package that distinguishes them when it opens one.
"""

import argparse
import glob
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeAlias, cast

from megatron.io import is_url, read_json

if TYPE_CHECKING:  # imports fsspec only when a URL was given
    from megatron.data.remote import RemoteFile

Source: TypeAlias = "Path | RemoteFile"
SourceState: TypeAlias = tuple[int, int | str | None]  # bytes; mtime in ns, or version of a remote file

PLAIN_SUFFIXES = (".jsonl", ".json")
COMPRESSED_SUFFIXES = tuple(
    plain + packed for packed in (".gz", ".zst", ".bz2", ".xz") for plain in PLAIN_SUFFIXES
)
COLUMN_SUFFIXES = (".parquet", ".arrow")
INPUT_SUFFIXES = (*PLAIN_SUFFIXES, *COMPRESSED_SUFFIXES, *COLUMN_SUFFIXES)
STDIN = Path("-")
REJECTS_SUFFIX = ".rejects.jsonl"
READ_BYTES = 1 << 20  # bytes of a file or a long line that are read at a time


def find_inputs(words: Sequence[str], suffixes: Sequence[str] = INPUT_SUFFIXES) -> list[Source]:
    """Resolve words to files: a file, a folder (all files below, sorted), a glob pattern (sorted), or `-`.

    A word may be a URL of a file, or in an object store of a folder or a pattern.
    Folders and patterns skip outputs of preprocessing; folders also skip hidden
    names. A folder saved by `datasets` gives the files listed in its state.json.
    Raises FileNotFoundError for a word without files, and ValueError for a file of
    another format, a file named twice or a folder of several splits.
    """
    inputs: list[Source] = []
    for word in words:
        if is_url(word):
            from megatron.data.remote import find_remote

            paths: Sequence[Source] = find_remote(word, suffixes)
        else:
            paths = find_files(word, suffixes)
        if not paths:
            raise FileNotFoundError(
                f"{describe_inputs([word])}: no such file, and no folder or pattern of {', '.join(suffixes)}."
            )
        inputs += paths
    seen: set[str] = set()
    for path in inputs:
        identity = locate_source(path)
        if identity in seen:
            raise ValueError(f"{path}: got this file twice, expected each input once")
        seen.add(identity)
        if path != STDIN and not path.name.endswith(tuple(suffixes)):
            raise ValueError(
                f"{path}: got another format, expected one of {', '.join(suffixes)}, or - for "
                "standard input. Unpack or convert it first."
            )
    return inputs


def find_files(word: str, suffixes: Sequence[str]) -> list[Path]:
    """Return the local files that one word names, as `find_inputs`."""
    path = Path(word)
    if path == STDIN or path.is_file():
        return [path]
    if path.is_dir():
        return _list_files(path, suffixes)
    matched = [Path(p) for p in sorted(glob.glob(word, recursive=True))]
    groups = [_list_files(p, suffixes) if p.is_dir() else [p] for p in matched if not _is_output(p)]
    return list(dict.fromkeys(p for files in groups for p in files))  # ** matches folders and their files


def add_root(words: Sequence[str], root: Path) -> list[str]:
    """Return the words, with those that name nothing here but something in `root` below it.

    Megatron-DeepSpeed's script always reads its input from --root.
    """

    def names_files(word: str) -> bool:
        return word == str(STDIN) or is_url(word) or bool(glob.glob(word, recursive=True))

    return [
        str(root / word) if not names_files(word) and names_files(str(root / word)) else word
        for word in words
    ]


def describe_inputs(words: Sequence[str]) -> str:
    """Format input names for a message."""
    return ", ".join("standard input" if word == str(STDIN) else word for word in words)


def _list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """List the input files of a folder, sorted by path."""
    files: list[Path] = []
    seen: set[str] = set()  # a link to a parent folder would repeat its files without end
    for directory, folders, names in os.walk(folder, followlinks=True):
        if (target := os.path.realpath(directory)) in seen:
            folders.clear()
            continue
        seen.add(target)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if "dataset_dict.json" in names:
            splits = (read_json(Path(directory, "dataset_dict.json")) or {}).get("splits", [])
            raise ValueError(
                f"{directory}: got a folder with several splits of datasets, expected one. Give a split: "
                f"{' '.join(str(Path(directory, split)) for split in splits)}"
            )
        state = read_json(Path(directory, "state.json")) if "dataset_info.json" in names else None
        if state is not None and "_data_files" in state:
            # other files in the folder may be caches
            # that datasets made from the same documents
            files += [Path(directory, file["filename"]) for file in state["_data_files"]]
            folders.clear()
            continue
        candidates = [Path(directory, name) for name in names if name.endswith(tuple(suffixes))]
        files += [path for path in candidates if path.name[0] != "." and not _is_output(path)]
    return sorted(files)


def _is_output(path: Path) -> bool:
    """Return whether a file is the sidecar of a dataset, or the rejects file of the job that wrote one."""
    if path.name.endswith(REJECTS_SUFFIX):  # <prefix>.rejects.jsonl beside <prefix>_<key>_document.idx
        job = glob.escape(path.name.removesuffix(REJECTS_SUFFIX))
        return any(path.parent.glob(f"{job}_*_document.idx"))
    return path.suffix == ".json" and path.with_suffix(".idx").is_file()


def locate_source(source: Source) -> str:
    """Return the absolute path or the URL of an input."""
    return str(source.resolve()) if isinstance(source, Path) else source.url


def stat_source(source: Source) -> SourceState:
    """Return what changes with the content: of a local file now, of a URL when it was found."""
    if not isinstance(source, Path):
        return source.size, source.version
    if source == STDIN:
        return 0, None
    status = source.stat()
    return status.st_size, status.st_mtime_ns


@contextmanager
def open_source(source: Source) -> Iterator[IO[bytes]]:
    """Open the stored bytes of an input. A remote file is checked for changes when it is closed."""
    if source == STDIN:
        yield sys.stdin.buffer
    elif isinstance(source, Path):
        with source.open("rb") as file:
            yield file
    else:
        from megatron.data.remote import open_remote

        with open_remote(source) as remote:
            yield cast(IO[bytes], remote)


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`, from 1: one of the jobs that share the same input."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def add_to(self, prefix: Path) -> Path:
        """Return the prefix of the outputs of this part; names sort in the order of the parts."""
        return prefix.with_name(f"{prefix.name}-part-{self.number:05d}-of-{self.count:05d}")


def parse_part(word: str) -> Part:
    """Parse a part such as 3/16, for argparse's `type`. Raises argparse.ArgumentTypeError."""
    number, _, count = word.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= 99_999):
        raise argparse.ArgumentTypeError(f"got '{word}', expected I/N with I from 1 to N, such as 3/16")
    return Part(int(number), int(count))


@dataclass(frozen=True)
class Selection:
    """The files that a job reads. `ranges`: (begin, end) of plain files of which it reads a part.

    inputs_sha256   hash of the names and sizes of the files of all parts; None without parts
    """

    paths: list[Source]
    ranges: dict[Source, tuple[int, int]] = field(default_factory=dict)
    inputs_sha256: str | None = None


def select_part(paths: Sequence[Source], part: Part | None) -> Selection:
    """Return the input of one part: a contiguous range of the bytes of all files, in their order.

    A local plain file is cut at the first line end at or after a border. Any other
    file belongs as a whole to the part that contains its middle. So every document
    is in exactly one part, for any number of parts. Only the sizes of the files are
    read, and a line at each end. Raises ValueError for standard input.
    """
    if part is None:
        return Selection(list(paths))
    if STDIN in paths:
        raise ValueError("--part: got standard input, expected files, which several jobs can read")
    sizes = [stat_source(path)[0] for path in paths]
    total, position = sum(sizes), 0
    # integers: the same borders on every machine,
    # and border `count` is exactly the end
    first, last = (total * number // part.count for number in (part.number - 1, part.number))
    selected: list[Source] = []
    ranges: dict[Source, tuple[int, int]] = {}
    for path, size in zip(paths, sizes, strict=True):
        begin, end = max(first - position, 0), min(last - position, size)
        if not size or not is_divisible(path):
            middle = position + size // 2
            # an empty file at the very end has its
            # middle at the border of the last part
            if first <= middle < last or part.number == part.count and middle == total:
                selected.append(path)
        elif begin < end:
            begin, end = (find_line_start(path, offset, size) for offset in (begin, end))
            if begin < end:  # else the range is within a line that begins in an earlier part
                selected.append(path)
                if (begin, end) != (0, size):
                    ranges[path] = begin, end
        position += size
    listing = json.dumps([[path.name, size] for path, size in zip(paths, sizes, strict=True)])
    return Selection(selected, ranges, hashlib.sha256(listing.encode()).hexdigest())


def is_divisible(source: Source) -> bool:
    """Return whether several workers read byte ranges of an input: a local file of lines."""
    return isinstance(source, Path) and source.name.endswith(PLAIN_SUFFIXES)


def find_line_start(source: Source, offset: int, size: int) -> int:
    """Return the first line start at or after `offset` of a local file; the end of the file counts as one."""
    if offset in (0, size):
        return offset
    with open_source(source) as file:
        file.seek(offset - 1)
        return find_line_end(file)


def find_line_end(file: IO[bytes]) -> int:
    """Return the offset after the current line; reads at most READ_BYTES at a time."""
    part = file.readline(READ_BYTES)
    while part and not part.endswith(b"\n"):
        part = file.readline(READ_BYTES)
    return file.tell()
