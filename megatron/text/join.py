"""Concatenation of finished shards in the order of the input, as soon as all earlier shards are finished.

Joined shards are deleted every CHECKPOINT_S seconds or CHECKPOINT_BYTES, so that the disk stores the tokens
once, not twice. Most shards are deleted before the system has written them from the page cache to the disk.
Before that the outputs are synced and the progress is stored beside the shards: a killed job resumes from it.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.sidecar import HEADER, read_sidecar
from megatron.io import DISK_FULL_ERRNOS, atomic_path
from megatron.log import get_logger
from megatron.remote_requests import RemoteError
from megatron.text.block_writer import BlockWriter, WriterCounts
from megatron.text.encode_piece import iter_rejected_lines
from megatron.text.inputs import REJECTS_SUFFIX
from megatron.text.shards import JoinState, PieceResult, ShardFolder
from megatron.text.sources import SourceRecord
from megatron.text.text_readers import InputPiece, count_lines_before

log = get_logger(__name__)
CHECKPOINT_S = 5.0
CHECKPOINT_BYTES = 256 << 20
MAX_THREADS = 16  # of joining: one joins what about 15 workers encode


@dataclass(frozen=True)
class OutputDataset:
    """Counts of one output dataset. An empty document has at most the end-of-document token."""

    prefix: Path
    n_documents: int
    n_tokens: int
    n_empty: int
    longest_document: int


@dataclass(frozen=True)
class RejectSummary:
    """Skipped input: number of lines, number of damaged files, and the file that lists them."""

    n_lines: int = 0
    n_files: int = 0
    path: Path | None = None


@dataclass(frozen=True)
class _UnwrittenPiece:
    """A joined piece of which a block may not be written. ends: tokens up to its end, by key."""

    before: JoinState
    ends: dict[str, int]


class ShardJoiner:
    """Context manager that joins shards to the outputs of a job, with several threads.

    After an exception from which the same job can resume, partial outputs are kept.
    """

    def __init__(
        self, pieces: Sequence[InputPiece], shards: ShardFolder, prefix: Path, dtype: np.dtype,
        meta: dict[str, Any], max_tokens: int | None, results: dict[int, PieceResult], n_workers: int = 1,
    ) -> None:  # fmt: skip
        """`results`: the finished pieces by number. It is cleared if the partial outputs are missing.

        `meta`: entries of the sidecars. `max_tokens`: use the smallest number of first documents that has at
        least so many tokens.
        """
        self.pieces, self.shards, self.prefix, self.max_tokens = pieces, shards, prefix, max_tokens
        self.length_of_empty = int(meta["append_eod"])
        self.pool = ThreadPoolExecutor(min(n_workers, MAX_THREADS), "join")
        keys = shards.keys
        empty_state = JoinState(0, dict.fromkeys(keys, WriterCounts()), dict.fromkeys(keys, 0))
        record = shards.read_join_record()
        self.state = record.state if record else empty_state
        blocks = record.blocks if record else dict.fromkeys(keys)

        def make_writer(key: str) -> BlockWriter:
            output, content = dataset_prefix(prefix, key), meta | {"json_key": key}
            counts = self.state.counts[key]
            return BlockWriter(output, dtype, content, shards.folder, self.pool, counts, blocks[key])

        self.writers = {key: make_writer(key) for key in keys}
        if not all(writer.has_partial_files() for writer in self.writers.values()):
            # killed during the final renames, or the files were deleted
            log.warning("%s: the partial outputs are missing; restarting from scratch", prefix)
            shards.delete_all()
            results.clear()
            self.state, blocks = empty_state, dict.fromkeys(keys)
            self.writers = {key: make_writer(key) for key in keys}
        # after a restart from scratch this is the caller's dict, now empty: the caller encodes all pieces
        # again
        self.results = results
        self._unwritten: deque[_UnwrittenPiece] = deque()
        self._n_recorded = self.state.n_pieces
        self._recorded_bytes, self._next_checkpoint_s = 0, time.monotonic() + CHECKPOINT_S
        self._lines_before: dict[Path, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "ShardJoiner":
        for writer in self.writers.values():
            self._stack.enter_context(writer)
        return self

    def __exit__(self, *error: Any) -> None:
        # before the writers close their files: the number of a closed file may be that of another one
        self.pool.shutdown(wait=True, cancel_futures=True)
        # Must precede the exit of the writers, which delete their partial files otherwise. A ValueError (bad
        # input) is not resumable: the same call would fail at the same place.
        if is_resumable(error[1]):
            for writer in self.writers.values():
                writer.keep_partial = True
        self._stack.__exit__(*error)

    @property
    def has_enough(self) -> bool:
        """True once the outputs have max_tokens; always False without max_tokens."""
        first = next(iter(self.writers.values()))
        return self.max_tokens is not None and first.n_tokens >= self.max_tokens

    def join_ready(self) -> None:
        """Join every finished shard that has no unfinished shard before it.

        Raises ValueError for a piece that ended with an error, unless max_tokens are reached before it.
        """
        while self.state.n_pieces in self.results:
            number, before = self.state.n_pieces, self.state
            n_documents: int | None = None
            empty = dict(before.empty)
            if not self.has_enough:
                for key, writer in self.writers.items():
                    empty[key] += self._join_shard(number, key, writer, n_documents)
                    # max_tokens counts the first key; the other keys use the same number of documents
                    n_documents = writer.n_documents - before.counts[key].n_documents
                # the error is after the documents that were joined above; with enough tokens it is never
                # needed
                if (error := self.results[number].error) and not self.has_enough:
                    raise ValueError(error)
            counts = {key: writer.added for key, writer in self.writers.items()}
            self.state = JoinState(number + 1, counts, empty)
            ends = {key: writer.n_tokens for key, writer in self.writers.items()}
            self._unwritten.append(_UnwrittenPiece(before, ends))
        n_bytes = sum(writer.n_tokens * writer.dtype.itemsize for writer in self.writers.values())
        if n_bytes - self._recorded_bytes >= CHECKPOINT_BYTES or time.monotonic() >= self._next_checkpoint_s:
            self.record_progress()
            self._recorded_bytes, self._next_checkpoint_s = n_bytes, time.monotonic() + CHECKPOINT_S

    def _join_shard(self, number: int, key: str, writer: BlockWriter, n_documents: int | None) -> int:
        """Append one shard, or its first documents; return the number of empty documents."""
        lengths = np.fromfile(self.shards.lengths_path(number, key), dtype="<i4")
        if n_documents is not None:
            lengths = lengths[:n_documents]
        elif self.max_tokens is not None:
            # fewest documents that reach max_tokens: the document that crosses the limit is included
            # Lengths 5, 3, 4 and max_tokens 8: reached = [5, 8, 12]. searchsorted (side left) gives 1, the
            # first index with reached >= 8, so 2 documents. Without enough tokens it gives len(lengths), and
            # the slice has all.
            reached = np.cumsum(lengths, dtype=np.int64) + writer.n_tokens
            lengths = lengths[: int(np.searchsorted(reached, self.max_tokens)) + 1]
        writer.add_shard(self.shards.ids_path(number, key), lengths)
        return int((lengths == self.length_of_empty).sum())

    def record_progress(self) -> None:
        """Sync the outputs, record which shards are not needed any more, and delete these."""
        # This order makes a kill harmless at any point: sync outputs, then record the progress, then delete
        # the shards. Data after the recorded counts is truncated on resume.
        blocks = {key: writer.sync() for key, writer in self.writers.items()}
        written = {key: writer.block_end for key, writer in self.writers.items()}
        while self._unwritten and all(written[key] >= end for key, end in self._unwritten[0].ends.items()):
            self._unwritten.popleft()
        # the shard of a piece is needed until its last byte is in a complete block
        state = self._unwritten[0].before if self._unwritten else self.state
        joined = range(self._n_recorded, state.n_pieces)
        if not joined:
            return
        self.shards.record_joined(state, blocks, [self.results[number] for number in joined])
        self._n_recorded = state.n_pieces
        # exhausted, so that an error is raised
        list(self.pool.map(lambda number: self.shards.delete_shards(number, self.results[number]), joined))

    def count_used_documents(self) -> list[int]:
        """Return the number of used documents per joined piece, up to the last piece that has one."""
        # Example with max_tokens reached at document 12: pieces of 10, 5 and 7 documents give [10, 2]. The
        # third piece adds neither bytes nor rejected lines to the sidecar.
        left = next(iter(self.writers.values())).n_documents
        counts: list[int] = []
        for number in range(self.state.n_pieces):
            if self.has_enough and not left:
                break  # pieces after the last used document do not count as read
            counts.append(min(left, self.results[number].n_documents))
            left -= counts[-1]
        return counts

    def finish(self, paths: Sequence[Path], job: str | None) -> RejectSummary:
        """Write outputs, sidecars and rejects completely, except for the final renames.

        The sidecars contain name, documents, bytes and sha256 of each source that was read. A process that is
        killed during the final renames leaves a folder that is marked as prepared.
        """
        used = self.count_used_documents()
        # files without a piece (standard input, empty files) count as read with 0 documents
        records = {path: SourceRecord(path) for path in paths}
        for number, n in enumerate(used):
            piece, result = self.pieces[number], self.results[number]
            records[piece.path].add_piece(piece, n, result.source_sha256)
            records[piece.path].damage = result.damage
        read = {self.pieces[number].path for number in range(len(used))}
        unread = {piece.path for piece in self.pieces} - read  # after max_tokens
        sources = [record.describe() for path, record in records.items() if path not in unread]
        n_damaged = sum(record.damage is not None for record in records.values())
        # a damaged file is one record among the rejects, and not a rejected line
        n_rejected = sum(1 for _ in self._iter_rejects(used)) - n_damaged
        meta = {"sources": sources, "rejected_lines": n_rejected, "rejected_files": n_damaged, "job": job}
        for key, writer in self.writers.items():
            writer.meta |= {"empty_documents": self.state.empty[key], **meta}
            # fsync of all files; the writers publish them later, in __exit__
            writer.prepare()
        rejects = rejects_path(self.prefix)
        if n_rejected or n_damaged:
            with atomic_path(rejects) as partial, partial.open("w") as file:
                file.writelines(self._iter_rejects(used))
        else:
            rejects.unlink(missing_ok=True)
        # Last: from here on every file is complete on disk. After a kill between two of the renames, the next
        # call sees this mark and only completes the renames.
        self.shards.mark_prepared(job)
        return RejectSummary(n_rejected, n_damaged, rejects if n_rejected or n_damaged else None)

    def _iter_rejects(self, used: Sequence[int]) -> Iterator[str]:
        """Yield the rejected lines of the pieces, up to the last used document of the last piece."""
        before: dict[Path, int] = {}
        for number, n in enumerate(used):
            piece, result = self.pieces[number], self.results[number]
            n_before = before.get(piece.path, 0)
            # the last piece is used only up to the document that reaches max_tokens, the others as a whole
            is_last = self.has_enough and number == len(used) - 1
            if result.n_rejected or result.damage is not None:
                n_before += self._count_lines_before(piece)
                n_used = n if is_last else None
                yield from iter_rejected_lines(self.shards, number, piece.path, n_before, n_used)
            before[piece.path] = before.get(piece.path, 0) + result.n_lines

    def _count_lines_before(self, piece: InputPiece) -> int:
        """Return the lines of a file before what this job reads of it, by reading them once."""
        if not piece.source_begin:
            return 0
        if piece.path not in self._lines_before:
            self._lines_before[piece.path] = count_lines_before(InputPiece(piece.path, piece.source_begin, 0))
        return self._lines_before[piece.path]

    def list_outputs(self) -> list[OutputDataset]:
        """Return the counts of each output, one per key."""
        return [
            OutputDataset(w.prefix, w.n_documents, w.n_tokens, self.state.empty[key], w.longest)
            for key, w in self.writers.items()
        ]


def is_resumable(error: BaseException | None) -> bool:
    """Return whether the same call can resume after an error: interrupt, lost worker, network, full disk."""
    is_full = isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS
    is_offline = isinstance(error, RemoteError) and error.is_temporary
    return is_full or is_offline or isinstance(error, KeyboardInterrupt | ChildProcessError)


def rejects_path(prefix: Path) -> Path:
    """Return the path of a job's rejects file."""
    return prefix.with_name(prefix.name + REJECTS_SUFFIX)


def dataset_prefix(prefix: Path, key: str) -> Path:
    """Return the dataset prefix of one key."""
    return prefix.with_name(f"{prefix.name}_{key}_document")


def find_finished(
    prefix: Path, keys: Sequence[str], job: str | None
) -> tuple[list[OutputDataset], RejectSummary] | None:
    """Return (outputs, rejects) if they exist completely and are from the same job; else None."""
    outputs: list[OutputDataset] = []
    n_lines = n_files = 0
    for output in (dataset_prefix(prefix, key) for key in keys):
        if not is_from_job(output, job):
            return None
        sidecar = read_sidecar(output)
        n, n_tokens = sidecar["documents"], sidecar["tokens"]
        # int32 length, int64 position and int64 boundary per document, and one boundary more
        sizes = {".bin": n_tokens * np.dtype(sidecar["dtype"]).itemsize, ".idx": HEADER.size + 20 * n + 8}
        paths = {Path(f"{output}{suffix}"): size for suffix, size in sizes.items()}
        if not all(path.is_file() and path.stat().st_size == size for path, size in paths.items()):
            return None
        outputs.append(
            OutputDataset(output, n, n_tokens, sidecar["empty_documents"], sidecar["longest_document"])
        )
        n_lines, n_files = sidecar["rejected_lines"], sidecar.get("rejected_files", 0)
    path = rejects_path(prefix) if n_lines or n_files else None
    return (outputs, RejectSummary(n_lines, n_files, path)) if path is None or path.is_file() else None


def is_from_job(prefix: Path, job: str | None) -> bool:
    """Return whether a dataset is from this job, by its sidecar."""
    try:
        return job is not None and read_sidecar(prefix).get("job") == job
    except (FileNotFoundError, ValueError):
        return False
