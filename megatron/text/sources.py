"""The input of a job: its part of the files, by bytes, and the record of what was read with its hashes."""

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.data.block_hash import BLOCK_BYTES, combine_digests, hash_range
from megatron.remote_files import RemotePath, find_remote_line_end
from megatron.text.inputs import PLAIN_SUFFIXES, STDIN
from megatron.text.text_readers import InputPiece, find_line_end


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
class Sources:
    """The files that a job reads. `ranges`: (begin, end) of plain files of which it reads a part.

    inputs_sha256   hash of the names and sizes of the files of all parts; None without parts
    """

    paths: list[Path]
    ranges: dict[Path, tuple[int, int]] = field(default_factory=dict)
    inputs_sha256: str | None = None


def select_part(paths: Sequence[Path], part: Part | None) -> Sources:
    """Return the input of one part: a contiguous range of the bytes of all files, in their order.

    A plain file is cut at the first line end at or after a border. Any other file belongs as a whole to the
    part that contains its middle. So every document is in exactly one part, for any number of parts. Only the
    sizes of the files are read, and a line at each end. Raises ValueError for standard input.
    """
    if part is None:
        return Sources(list(paths))
    if STDIN in paths:
        raise ValueError("--part: got standard input, expected files, which several jobs can read")
    sizes = [path.stat().st_size for path in paths]
    total, position = sum(sizes), 0
    # integers: the same borders on every machine, and border `count` is exactly the end
    first, last = (total * number // part.count for number in (part.number - 1, part.number))
    is_last = part.number == part.count
    selected: list[Path] = []
    ranges: dict[Path, tuple[int, int]] = {}
    for path, size in zip(paths, sizes, strict=True):
        begin, end = max(first - position, 0), min(last - position, size)
        if not size or not path.name.endswith(PLAIN_SUFFIXES):
            middle = position + size // 2
            # an empty file at the very end has its middle at the border of the last part
            if first <= middle < last or is_last and middle == total:
                selected.append(path)
        elif begin < end:
            begin, end = (find_line_start(path, at, size) for at in (begin, end))
            if begin < end:  # else the range is within a line that begins in an earlier part
                selected.append(path)
                if (begin, end) != (0, size):
                    ranges[path] = begin, end
        position += size
    listing = json.dumps([[path.name, size] for path, size in zip(paths, sizes, strict=True)])
    return Sources(selected, ranges, hashlib.sha256(listing.encode()).hexdigest())


def find_line_start(path: Path, at: int, size: int) -> int:
    """Return the first line start at or after byte `at`; the end of the file counts as one."""
    if at in (0, size):
        return at
    if isinstance(path, RemotePath):
        return find_remote_line_end(path, at - 1)
    with path.open("rb") as file:
        file.seek(at - 1)
        return find_line_end(file)


def hash_source(piece: InputPiece) -> list[str]:
    """Return the SHA-256 of each block of the input that begins in a piece; of a packed file, of the file.

    Blocks are counted from the begin of what the job reads of the file. A packed file is read by one worker,
    so it needs no blocks.
    """
    if piece.path == STDIN:
        return []
    if not piece.is_plain:
        return [hash_range(piece.path, piece.begin, piece.end).hex()]
    end = piece.end if piece.source_end is None else piece.source_end
    # blocks begin at source_begin + n * BLOCK_BYTES; pieces end at line ends, so a block may cross their ends
    skip = -(piece.begin - piece.source_begin) % BLOCK_BYTES
    begins = range(piece.begin + skip, piece.end, BLOCK_BYTES)
    return [hash_range(piece.path, begin, min(begin + BLOCK_BYTES, end)).hex() for begin in begins]


@dataclass
class SourceRecord:
    """Range of one file that was read, with its hashes."""

    path: Path
    begin: int = 0
    n_bytes: int = 0
    n_documents: int = 0
    digests: list[str] = field(default_factory=list)
    damage: str | None = None
    is_cut: bool = False  # a plain file that was read up to a point before the end of the job's range

    def add_piece(self, piece: InputPiece, n_documents: int, digests: Sequence[str]) -> None:
        """Add a piece, in order."""
        self.begin = piece.source_begin
        self.is_cut = piece.is_plain and piece.source_end is not None and piece.end < piece.source_end
        self.n_bytes += piece.end - piece.begin
        self.n_documents += n_documents
        self.digests += digests

    def describe(self) -> dict[str, Any]:
        """Return the entry of a sidecar.

        of_bytes      size of the file, if only a part of it was read
        from_byte     begin of this part, if it is not the begin of the file
        block_bytes   the hash is one of the hashes of blocks (megatron/data/block_hash.py)
        """
        if self.path == STDIN:
            return {"path": "-", "documents_read": self.n_documents}
        if isinstance(self.path, RemotePath):
            return self._describe_remote(self.path)
        digests = [bytes.fromhex(digest) for digest in self.digests]
        if self.is_cut:
            # the last block was hashed beyond the end of what was used
            n_last = (self.n_bytes - 1) // BLOCK_BYTES
            begin = self.begin + n_last * BLOCK_BYTES
            digests[n_last:] = [hash_range(self.path, begin, self.begin + self.n_bytes)]
        size = self.path.stat().st_size
        entry = {"path": self.path.name, "sha256": combine_digests(digests), "bytes": self.n_bytes}
        entry |= {"block_bytes": BLOCK_BYTES} if len(digests) > 1 else {}
        entry |= {"from_byte": self.begin} if self.begin else {}
        entry |= {"of_bytes": size} if self.n_bytes < size else {}
        entry["documents_read"] = self.n_documents
        return entry | ({} if self.damage is None else {"damage": self.damage})

    def _describe_remote(self, path: RemotePath) -> dict[str, Any]:
        """Return the entry of a remote file: URL without secrets, version, and hash of the bytes as read.

        sha256 is that of a file that was read in order in a single piece; else null. Plain files have several
        pieces, read in parallel: `pieces_sha256` is the hash over their concatenated hexadecimal hashes.
        """
        entry = {"path": str(path), "version": path.info.version, "sha256": None, "bytes": self.n_bytes}
        if all(self.digests) and len(self.digests) == 1:
            entry["sha256"] = self.digests[0]
        elif all(self.digests) and self.digests:
            entry["pieces_sha256"] = hashlib.sha256("".join(self.digests).encode()).hexdigest()
        entry |= {"from_byte": self.begin} if self.begin else {}
        entry |= {"of_bytes": path.info.size} if self.n_bytes < path.info.size else {}
        entry["documents_read"] = self.n_documents
        return entry | ({} if self.damage is None else {"damage": self.damage})
