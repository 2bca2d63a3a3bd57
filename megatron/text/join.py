"""Concatenation of finished shards in the order of the input, as soon as all earlier shards are finished.

A shard is deleted once it is joined, so that the disk stores the tokens once, not twice. Most shards are
deleted before the system has written them from the page cache to the disk. The progress is stored in a file
beside the shards: a killed job resumes from it.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.data.indexed_writer import IndexedWriter
from megatron.io import DISK_FULL_ERRNOS, atomic_path
from megatron.log import get_logger
from megatron.plan.idx_header import HEADER
from megatron.plan.sidecar import read_sidecar
from megatron.text.encode_piece import iter_rejected_lines
from megatron.text.inputs import REJECTS_SUFFIX, STDIN
from megatron.text.shards import JoinState, PieceResult, ShardFolder
from megatron.text.text_readers import InputPiece

log = get_logger(__name__)
JOIN_BYTES = 1 << 20  # read at a time: hashing, counting and writing then use a core's private cache
LOOKAHEAD_DOCUMENTS = 1 << 12  # maximum documents per block


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


class ShardJoiner:
    """Context manager that joins shards to the outputs of a job.

    After an exception from which the same job can resume, partial outputs are kept.
    """

    def __init__(
        self, pieces: Sequence[InputPiece], shards: ShardFolder, prefix: Path, dtype: np.dtype,
        meta: dict[str, Any], max_tokens: int | None, results: dict[int, PieceResult],
    ) -> None:  # fmt: skip
        """`results`: the finished pieces by number. It is cleared if the partial outputs are missing.

        `meta`: entries of the sidecars. `max_tokens`: use the smallest number of first documents that has at
        least so many tokens.
        """
        self.pieces, self.shards, self.prefix, self.max_tokens = pieces, shards, prefix, max_tokens
        self.length_of_empty = int(meta["append_eod"])
        self.hashes = {piece.path: hashlib.sha256() for piece in pieces if piece.path != STDIN}
        self.hashed_bytes = dict.fromkeys(self.hashes, 0)
        empty_state = JoinState(0, dict.fromkeys(shards.keys, (0, 0)), dict.fromkeys(shards.keys, 0))
        self.state = shards.read_join_state() or empty_state
        self.writers = self._make_writers(dtype, meta)
        if not all(writer.has_partial_files() for writer in self.writers.values()):
            # killed during the final renames, or the files were deleted
            log.warning("%s: the partial outputs are missing; restarting from scratch", prefix)
            shards.delete_all()
            results.clear()
            self.state = empty_state
            self.writers = self._make_writers(dtype, meta)
        # after a restart from scratch this is the caller's dict, now empty: the caller encodes all pieces
        # again
        self.results = results
        self._stack = ExitStack()

    def _make_writers(self, dtype: np.dtype, meta: dict[str, Any]) -> dict[str, IndexedWriter]:
        return {
            key: IndexedWriter(
                dataset_prefix(self.prefix, key),
                dtype,
                meta | {"json_key": key},
                counts,
                self.shards.folder,
            )
            for key, counts in self.state.outputs.items()
        }

    def __enter__(self) -> "ShardJoiner":
        for writer in self.writers.values():
            self._stack.enter_context(writer)
        # sha256 objects cannot be stored: hash the sources of the joined pieces again
        for number in range(min(self.state.n_pieces, len(self.count_used_documents()))):
            self._hash_piece(number)
        return self

    def __exit__(self, *error: Any) -> None:
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
            number = self.state.n_pieces
            n_documents: int | None = None
            empty = dict(self.state.empty)
            if not self.has_enough:
                for key, writer in self.writers.items():
                    before = writer.n_documents
                    empty[key] += self._join_shard(number, key, writer, n_documents)
                    # max_tokens counts the first key; the other keys use the same number of documents
                    n_documents = writer.n_documents - before
                # the error is after the documents that were joined above; with enough tokens it is never
                # needed
                if (error := self.results[number].error) and not self.has_enough:
                    raise ValueError(error)
                self._hash_piece(number)
            # This order makes a kill harmless at any point: flush outputs, then record the progress, then
            # delete the shards. Data after the recorded counts is truncated on resume.
            outputs = {key: writer.flush() for key, writer in self.writers.items()}
            self.state = JoinState(number + 1, outputs, empty)
            self.shards.write_join_state(self.state)
            self.shards.delete_shards(number)

    def _join_shard(self, number: int, key: str, writer: IndexedWriter, n_documents: int | None) -> int:
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
        begin = 0
        with self.shards.ids_path(number, key).open("rb") as ids:
            while begin < len(lengths):  # in blocks: memory does not grow with the piece
                # Bytes up to the end of each remaining document. side="right" gives the number of documents
                # with sizes <= JOIN_BYTES.
                # At most LOOKAHEAD_DOCUMENTS: a cumulative sum over all that remain would be quadratic.
                ahead = lengths[begin : begin + LOOKAHEAD_DOCUMENTS]
                sizes = np.cumsum(ahead, dtype=np.int64) * writer.dtype.itemsize
                n = max(1, int(np.searchsorted(sizes, JOIN_BYTES, side="right")))
                part = lengths[begin : begin + n]
                if sizes[n - 1] > JOIN_BYTES:  # then n is 1: a single long document
                    writer.add_document_in_parts(_iter_id_parts(ids, writer.dtype, int(part[0])))
                else:
                    writer.add_documents(np.fromfile(ids, writer.dtype, int(part.sum())), part)
                begin += n
        return int((lengths == self.length_of_empty).sum())

    def _hash_piece(self, number: int) -> None:
        """Add a piece to the hash of its file, while it is likely still in the page cache."""
        piece = self.pieces[number]
        if piece.path == STDIN:
            return
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            left = piece.end - piece.begin
            while left > 0 and (block := file.read(min(left, JOIN_BYTES))):
                self.hashes[piece.path].update(block)
                self.hashed_bytes[piece.path] += len(block)
                left -= len(block)

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
        n_documents: dict[Path, int] = {path: 0 for path in paths if path not in self.hashes}
        damaged: dict[Path, str] = {}
        for number, n in enumerate(used):
            path = self.pieces[number].path
            n_documents[path] = n_documents.get(path, 0) + n
            if (reason := self.results[number].damage) is not None:
                damaged[path] = reason
        sources: list[dict[str, Any]] = []
        for path in (path for path in paths if path in n_documents):
            entry: dict[str, Any] = {"documents_read": n_documents[path]}
            if path == STDIN:
                sources.append({"path": "-", **entry})
                continue
            digest = self.hashes.get(path, hashlib.sha256())
            n_bytes, size = self.hashed_bytes.get(path, 0), path.stat().st_size
            # of_bytes is present only if max_tokens ended the reading within the file
            partial_size = {"of_bytes": size} if n_bytes < size else {}
            if path in damaged:
                entry["damage"] = damaged[path]
            sources.append(
                {"path": path.name, "sha256": digest.hexdigest(), "bytes": n_bytes, **partial_size, **entry}
            )
        # a damaged file is one record among the rejects, and not a rejected line
        n_rejected = sum(1 for _ in self._iter_rejects(used)) - len(damaged)
        meta = {"sources": sources, "rejected_lines": n_rejected, "rejected_files": len(damaged), "job": job}
        for key, writer in self.writers.items():
            writer.meta |= {"empty_documents": self.state.empty[key], **meta}
            # fsync of all files; the writers publish them later, in __exit__
            writer.prepare()
        rejects = rejects_path(self.prefix)
        if n_rejected or damaged:
            with atomic_path(rejects) as partial, partial.open("w") as file:
                file.writelines(self._iter_rejects(used))
        else:
            rejects.unlink(missing_ok=True)
        # Last: from here on every file is complete on disk. After a kill between two of the renames, the next
        # call sees this mark and only completes the renames.
        self.shards.mark_prepared(job)
        return RejectSummary(n_rejected, len(damaged), rejects if n_rejected or damaged else None)

    def _iter_rejects(self, used: Sequence[int]) -> Iterator[str]:
        """Yield the rejected lines of the pieces, up to the last used document of the last piece."""
        before: dict[Path, int] = {}
        for number, n in enumerate(used):
            source = self.pieces[number].path
            n_before = before.get(source, 0)
            # the last piece is used only up to the document that reaches max_tokens, the others as a whole
            is_last = self.has_enough and number == len(used) - 1
            yield from iter_rejected_lines(self.shards, number, source, n_before, n if is_last else None)
            before[source] = n_before + self.results[number].n_lines

    def list_outputs(self) -> list[OutputDataset]:
        """Return the counts of each output, one per key."""
        return [
            OutputDataset(w.prefix, w.n_documents, w.n_tokens, self.state.empty[key], w.longest)
            for key, w in self.writers.items()
        ]


def is_resumable(error: BaseException | None) -> bool:
    """Return whether the same call can resume after an error: interrupt, lost worker or full disk."""
    is_full = isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS
    return is_full or isinstance(error, KeyboardInterrupt | ChildProcessError)


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


def _iter_id_parts(ids: IO[bytes], dtype: np.dtype, n_tokens: int) -> Iterator[np.ndarray]:
    """Yield the next `n_tokens` ids of a file, JOIN_BYTES at a time."""
    while n_tokens:
        part = np.fromfile(ids, dtype, min(n_tokens, JOIN_BYTES // dtype.itemsize))
        assert len(part), "a finished shard contains all of its ids"
        n_tokens -= len(part)
        yield part
