"""Join the finished units of a job to its datasets, in the order of the input.

The ids are copied one unit after another. Then threads hash
blocks of the output. The units are deleted after the outputs
have their names: a killed join begins again from complete units.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.block_hash import BLOCK_BYTES, combine_digests, hash_file
from megatron.data.indexed_writer import IndexedWriter
from megatron.io import atomic_path
from megatron.text.inputs import REJECTS_SUFFIX, STDIN, Source, is_divisible, stat_source
from megatron.text.text_readers import InputPiece, count_lines_before
from megatron.text.units import UnitFolder, UnitRecord, list_token_files

READ_BYTES = 1 << 20  # at a time: hashing and counting then use a core's private cache


@dataclass(frozen=True)
class OutputDataset:
    """Counts of one output dataset. An empty document has at most the end-of-document token."""

    prefix: Path | str
    n_documents: int
    n_tokens: int
    n_empty: int
    longest_document: int


@dataclass(frozen=True)
class RejectSummary:
    """Skipped input: number of lines, number of damaged files, and the file that lists them."""

    n_lines: int = 0
    n_files: int = 0
    path: Path | str | None = None


@dataclass(frozen=True)
class PreprocessResult:
    """Result of a job: an output per key."""

    outputs: list[OutputDataset]
    rejected: RejectSummary


def rejects_path(prefix: Path) -> Path:
    """Return the path of a job's rejects file."""
    return prefix.with_name(prefix.name + REJECTS_SUFFIX)


def dataset_prefix(prefix: Path, key: str) -> Path:
    """Return the dataset prefix of one key."""
    return prefix.with_name(f"{prefix.name}_{key}_document")


class _JoinedWriter(IndexedWriter):
    """Writer of a dataset from units."""

    n_threads = 1

    def add_unit(self, path: Path, lengths: np.ndarray) -> None:
        """Append the first documents of a file of ids.

        lengths [n] int32   tokens of each document
        """
        left = int(lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        with path.open("rb", buffering=0) as file:
            while left and (data := file.read(min(left, READ_BYTES))):
                self._bin.write(data)
                left -= len(data)
        if left:
            raise ValueError(f"{path}: the unit ended early. Run the same command again.")
        self._end_documents(lengths)

    def _digest_tokens(self) -> list[str]:
        self._bin.flush()  # the threads read the file
        path, n_bytes = self._files[0][0], self.n_tokens * self.dtype.itemsize
        with ThreadPoolExecutor(self.n_threads, "sum") as pool:
            return list(digest_blocks(pool, path, 0, n_bytes, self._hash.block_bytes))


def digest_blocks(
    pool: Executor, path: Path, begin: int, end: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[str]:
    """Yield the digests of the blocks in bytes [begin, end) of a file, computed by the threads of a pool."""
    begins = range(begin, max(end, begin + 1), block_bytes)
    return pool.map(lambda first: hash_file(path, None, first, min(first + block_bytes, end)), begins)


@dataclass
class UnitJoiner:
    """The finished units of a job, and the outputs that they are joined to.

    meta         entries of the sidecars
    max_tokens   use the smallest number of first documents that has at least so many tokens
    records      of the first pieces, as many as are used
    used         documents used of each of them
    n_tokens     tokens of the first key in these pieces
    """

    pieces: Sequence[InputPiece]
    units: UnitFolder
    prefix: Path
    meta: dict[str, Any]
    max_tokens: int | None
    n_threads: int
    records: list[UnitRecord] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    n_tokens: int = 0
    has_enough: bool = False

    def add_record(self, record: UnitRecord) -> None:
        """Add the record of the next piece."""
        n_documents, n_before = record.n_documents, self.n_tokens
        self.n_tokens += record.n_tokens[0]
        if self.max_tokens is not None and self.n_tokens >= self.max_tokens:
            # Fewest documents that reach max_tokens. Lengths 5,
            # 3, 4 and max_tokens 8: reached = [5, 8, 12], the
            # first index with reached >= 8 is 1, so 2 documents.
            reached = np.cumsum(self.units.read_lengths(len(self.used), 0), dtype=np.int64)
            n_documents = int(np.searchsorted(reached, self.max_tokens - n_before)) + 1
            self.has_enough = True
        self.records.append(record)
        self.used.append(n_documents)

    def join(self, sources: list[dict[str, Any]], job: str | None) -> PreprocessResult:
        """Write and publish the outputs and the rejects. `sources`: as `describe_sources` returns them."""
        n_damaged = sum("damage" in entry for entry in sources)
        lines = list(self._iter_rejects())
        n_rejected = len(lines) - n_damaged  # a damaged file is one of the rejects, and not a line
        meta = {"sources": sources, "rejected_lines": n_rejected, "rejected_files": n_damaged, "job": job}
        rejects = rejects_path(self.prefix)
        settings = self.units.settings
        with ExitStack() as stack:
            outputs = []
            for i, key in enumerate(settings.keys):
                entries = self.meta | {"json_key": key}
                target, dtype = dataset_prefix(self.prefix, key), np.dtype(settings.dtype)
                writer = stack.enter_context(_JoinedWriter(target, dtype, entries, self.units.folder))
                writer.n_threads = self.n_threads
                n_empty = self._add_units(writer, i)
                writer.meta |= {"empty_documents": n_empty, **meta}
                writer.prepare()  # published at the end of the `with` block, together with the other keys
                outputs.append(
                    OutputDataset(writer.prefix, writer.n_documents, writer.n_tokens, n_empty, writer.longest)
                )
            if not lines:
                rejects.unlink(missing_ok=True)
                return PreprocessResult(outputs, RejectSummary())
            with atomic_path(rejects) as partial, partial.open("w") as file:
                file.writelines(lines)
        return PreprocessResult(outputs, RejectSummary(n_rejected, n_damaged, rejects))

    def _add_units(self, writer: _JoinedWriter, key: int) -> int:
        """Append the used documents of one key; return the number of empty ones."""
        n_empty = 0
        for number, n_documents in enumerate(self.used):
            lengths = self.units.read_lengths(number, key)[:n_documents]
            writer.add_unit(list_token_files(self.units.path(number), key)[0], lengths)
            n_empty += int((lengths == int(self.meta["append_eod"])).sum())
        return n_empty

    def describe_sources(self, paths: Sequence[Source]) -> list[dict[str, Any]]:
        """Return the entries of the sidecars on the files that were read, with their hashes."""
        numbers: dict[Source, list[int]] = {path: [] for path in paths}
        for number in range(len(self.used)):
            numbers[self.pieces[number].path].append(number)
        # files without a piece (standard input, empty files) count as read with 0 documents
        unread = {piece.path for piece in self.pieces[len(self.used) :]}
        with ThreadPoolExecutor(self.n_threads, "hash") as pool:
            # the blocks of all files are submitted
            # before the first result is awaited
            hashed = [
                (path, read, self._hash_blocks(pool, path, read))
                for path, read in numbers.items()
                if read or path not in unread
            ]
            return [self._describe_source(*entry) for entry in hashed]

    def _hash_blocks(self, pool: ThreadPoolExecutor, path: Source, numbers: Sequence[int]) -> Iterator[str]:
        """Return the digests of the blocks that were read of a local file; a packed file is one block."""
        if not (numbers and isinstance(path, Path)) or path == STDIN:
            return iter(())
        begin, end = self.pieces[numbers[0]].begin, self.pieces[numbers[-1]].end
        if is_divisible(path):
            return digest_blocks(pool, path, begin, end)
        return pool.map(hash_file, [path])

    def _describe_source(self, path: Source, numbers: Sequence[int], blocks: Iterator[str]) -> dict[str, Any]:
        """Return the entry of one file.

        of_bytes      size of the file, if only a part of it was read
        from_byte     begin of this part, if it is not the begin of the file
        block_bytes   the hash is one of the hashes of blocks (megatron/data/block_hash.py)
        version       of a remote file, in place of its sha256
        """
        n_documents = sum(self.used[number] for number in numbers)
        if path == STDIN:
            return {"path": "-", "documents_read": n_documents}
        pieces, digests = [self.pieces[i] for i in numbers], list(blocks)
        begin, n_bytes = pieces[0].begin if pieces else 0, sum(piece.end - piece.begin for piece in pieces)
        size, version = stat_source(path)
        if isinstance(path, Path):
            entry: dict[str, Any] = {"path": path.name, "sha256": combine_digests(digests)}
        else:
            entry = {"path": str(path), "version": version, "sha256": None}
        entry["bytes"] = n_bytes
        entry |= {"block_bytes": BLOCK_BYTES} if len(digests) > 1 else {}
        entry |= {"from_byte": begin} if begin else {}
        entry |= {"of_bytes": size} if n_bytes < size else {}
        entry["documents_read"] = n_documents
        damage = self.records[numbers[-1]].damage if numbers else None
        return entry if damage is None else entry | {"damage": damage}

    def _iter_rejects(self) -> Iterator[str]:
        """Yield the rejects as JSON lines: file, line number in the file from 1, reason.

        A skipped file has the line null. Lines after the document
        that reaches `max_tokens` may be among them.
        """
        n_before = Counter[Source]()  # lines of the pieces before, by file
        first_pieces: dict[Source, InputPiece] = {}
        count_lines = functools.cache(count_lines_before)
        for piece, record in zip(self.pieces, self.records, strict=False):
            first = first_pieces.setdefault(piece.path, piece)
            if record.damage is not None:
                yield _format_reject(piece.path, None, record.damage)
            # counted from the first piece of this
            # part, which may begin within the file
            n_lines = n_before[piece.path] + (count_lines(first) if record.rejects else 0)
            n_before[piece.path] += record.n_lines
            for reject in record.rejects:
                yield _format_reject(piece.path, reject["line"] + 1 + n_lines, reject["reason"])


def _format_reject(path: Source, line: int | None, reason: str) -> str:
    return json.dumps({"file": str(path), "line": line, "reason": reason}) + "\n"
