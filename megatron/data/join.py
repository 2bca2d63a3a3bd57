"""Finished shards laid end to end, in the order of the input, as soon as those before them are there.

A shard is deleted once it is joined, so that the disk holds the tokens once and not twice, and what is about
to be deleted is hardly ever written to it. How far the joining has come stands in a file beside the shards: a
killed job goes on from there.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.config.sidecar import read_sidecar
from megatron.data.documents import REJECTS, STDIN, Piece
from megatron.data.encode_piece import rejected_lines
from megatron.data.indexed import HEADER
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.shards import Done, Joined, Shards
from megatron.log import get_logger
from megatron.run_dir import FULL, written_whole

log = get_logger(__name__)
JOINED_BYTES = 1 << 20  # read at a time: what is summed, counted and written stays in the core's cache


@dataclass(frozen=True)
class Output:
    """One pair. An empty document has no token of its own, though perhaps the end-of-document token."""

    prefix: Path
    n_documents: int
    n_tokens: int
    n_empty: int
    longest_document: int


@dataclass(frozen=True)
class Rejected:
    """What was passed over: lines, whole damaged files, and the file that lists them."""

    n_lines: int = 0
    n_files: int = 0
    path: Path | None = None


class Joining:
    """The outputs of a job while they grow: a context manager.

    Left by an exception after which the same job may go on it keeps what is there.
    """

    def __init__(
        self, pieces: Sequence[Piece], shards: Shards, prefix: Path, dtype: np.dtype, about: dict[str, Any],
        max_tokens: int | None, done: dict[int, Done],
    ) -> None:  # fmt: skip
        """`done`: the finished pieces by number, emptied where what was joined of them is gone.

        `about`: what the sidecars say. `max_tokens` keeps the fewest first documents that reach so many.
        """
        self.pieces, self.shards, self.prefix, self.max_tokens = pieces, shards, prefix, max_tokens
        self.length_of_empty = int(about["append_eod"])
        self.sums = {piece.path: hashlib.sha256() for piece in pieces if piece.path != STDIN}
        self.summed = dict.fromkeys(self.sums, 0)  # bytes
        nothing = Joined(0, dict.fromkeys(shards.keys, (0, 0)), dict.fromkeys(shards.keys, 0))
        self.joined = shards.read_joined() or nothing
        self.writers = self._writers(dtype, about)
        if not all(writer.has_begun() for writer in self.writers.values()):
            # killed while the outputs got their names, or somebody has deleted them
            log.warning("%s: what was joined already is gone; beginning anew", prefix)
            shards.forget_all()
            done.clear()
            self.joined = nothing
            self.writers = self._writers(dtype, about)
        self.done = done
        self._stack = ExitStack()

    def _writers(self, dtype: np.dtype, about: dict[str, Any]) -> dict[str, IndexedWriter]:
        return {
            key: IndexedWriter(
                pair_prefix(self.prefix, key),
                dtype,
                about | {"json_key": key},
                begun,
                self.shards.folder,
            )
            for key, begun in self.joined.outputs.items()
        }

    def __enter__(self) -> "Joining":
        for writer in self.writers.values():
            self._stack.enter_context(writer)
        for number in range(min(self.joined.n_pieces, len(self.kept()))):
            self._sum(number)
        return self

    def __exit__(self, *error: Any) -> None:
        if may_go_on(error[1]):
            for writer in self.writers.values():
                writer.keep_partial = True
        self._stack.__exit__(*error)

    @property
    def has_enough(self) -> bool:
        """Whether max_tokens are there."""
        first = next(iter(self.writers.values()))
        return self.max_tokens is not None and first.n_tokens >= self.max_tokens

    def take(self) -> None:
        """Join all shards whose turn it is.

        Raises the ValueError of a piece that ended early, unless max_tokens were there before.
        """
        while self.joined.n_pieces in self.done:
            number = self.joined.n_pieces
            n_documents: int | None = None
            empty = dict(self.joined.empty)
            if not self.has_enough:
                for key, writer in self.writers.items():
                    before = writer.n_documents
                    empty[key] += self._join(number, key, writer, n_documents)
                    n_documents = writer.n_documents - before  # as many of every key
                if (error := self.done[number].error) and not self.has_enough:
                    raise ValueError(error)
                self._sum(number)
            outputs = {key: writer.flush() for key, writer in self.writers.items()}
            self.joined = Joined(number + 1, outputs, empty)
            self.shards.mark_joined(self.joined)
            self.shards.forget(number)

    def _join(self, number: int, key: str, writer: IndexedWriter, n_documents: int | None) -> int:
        """Append one shard, or its first documents; returns how many of them are empty."""
        lengths = np.fromfile(self.shards.lengths(number, key), dtype="<i4")
        if n_documents is not None:
            lengths = lengths[:n_documents]
        elif self.max_tokens is not None:
            reached = np.cumsum(lengths, dtype=np.int64) + writer.n_tokens
            lengths = lengths[: int(np.searchsorted(reached, self.max_tokens)) + 1]
        begin = 0
        with self.shards.ids(number, key).open("rb") as ids:
            while begin < len(lengths):  # a few documents at a time: memory does not grow with the piece
                sizes = np.cumsum(lengths[begin:], dtype=np.int64) * writer.dtype.itemsize
                n = max(1, int(np.searchsorted(sizes, JOINED_BYTES, side="right")))
                part = lengths[begin : begin + n]
                if sizes[n - 1] > JOINED_BYTES:
                    writer.add_in_parts(_parts_of(ids, writer.dtype, int(part[0])))
                else:
                    writer.add_documents(np.fromfile(ids, writer.dtype, int(part.sum())), part)
                begin += n
        return int((lengths == self.length_of_empty).sum())

    def _sum(self, number: int) -> None:
        """Add a piece of a source to its sum, while it is likely still in memory."""
        piece = self.pieces[number]
        if piece.path == STDIN:
            return
        with piece.path.open("rb") as file:
            file.seek(piece.begin)
            left = piece.end - piece.begin
            while left > 0 and (block := file.read(min(left, JOINED_BYTES))):
                self.sums[piece.path].update(block)
                self.summed[piece.path] += len(block)
                left -= len(block)

    def kept(self) -> list[int]:
        """Documents that are kept of each piece that is joined, up to the last one that any is wanted of."""
        left = next(iter(self.writers.values())).n_documents
        found: list[int] = []
        for number in range(self.joined.n_pieces):
            if self.has_enough and not left:
                break
            found.append(min(left, self.done[number].n_documents))
            left -= found[-1]
        return found

    def finish(self, paths: Sequence[Path], job: str | None) -> Rejected:
        """Write all there is to write, up to the names of the outputs.

        Of each source that was read the sidecars tell name, documents, bytes and the sum of these. A process
        that is killed while the outputs get their names leaves a folder that says so.
        """
        kept = self.kept()
        n_documents: dict[Path, int] = {path: 0 for path in paths if path not in self.sums}
        damaged: dict[Path, str] = {}
        for number, n in enumerate(kept):
            path = self.pieces[number].path
            n_documents[path] = n_documents.get(path, 0) + n
            if (reason := self.done[number].damage) is not None:
                damaged[path] = reason
        told: list[dict[str, Any]] = []
        for path in (path for path in paths if path in n_documents):
            held = {"documents_read": n_documents[path]}
            if path == STDIN:
                told.append({"path": "-", **held})
                continue
            sum_ = self.sums.get(path, hashlib.sha256())
            n_bytes, size = self.summed.get(path, 0), path.stat().st_size
            of = {"of_bytes": size} if n_bytes < size else {}
            if path in damaged:
                held["damage"] = damaged[path]
            told.append({"path": path.name, "sha256": sum_.hexdigest(), "bytes": n_bytes, **of, **held})
        n_rejected = sum(1 for _ in self._rejects(kept)) - len(damaged)
        about = {"sources": told, "rejected_lines": n_rejected, "rejected_files": len(damaged), "job": job}
        for key, writer in self.writers.items():
            writer.about |= {"empty_documents": self.joined.empty[key], **about}
            writer.prepare()
        rejects = rejects_of(self.prefix)
        if n_rejected or damaged:
            with written_whole(rejects) as partial, partial.open("w") as file:
                file.writelines(self._rejects(kept))
        else:
            rejects.unlink(missing_ok=True)
        self.shards.mark_prepared(job)
        return Rejected(n_rejected, len(damaged), rejects if n_rejected or damaged else None)

    def _rejects(self, kept: Sequence[int]) -> Iterator[str]:
        """The rejected lines of the pieces, in order; of the last one those before the last document."""
        before: dict[Path, int] = {}
        for number, n in enumerate(kept):
            source = self.pieces[number].path
            n_before = before.get(source, 0)
            is_last = self.has_enough and number == len(kept) - 1
            yield from rejected_lines(self.shards, number, source, n_before, n if is_last else None)
            before[source] = n_before + self.done[number].n_lines

    def outputs(self) -> list[Output]:
        """What came out, an output for each key."""
        return [
            Output(w.prefix, w.n_documents, w.n_tokens, self.joined.empty[key], w.longest)
            for key, w in self.writers.items()
        ]


def may_go_on(error: BaseException | None) -> bool:
    """Whether the same call can go on from what is finished: stopped, a worker lost, or no room."""
    is_full = isinstance(error, OSError) and error.errno in FULL
    return is_full or isinstance(error, KeyboardInterrupt | ChildProcessError)


def rejects_of(prefix: Path) -> Path:
    """Where the rejected lines of a job are written."""
    return prefix.with_name(prefix.name + REJECTS)


def pair_prefix(prefix: Path, key: str) -> Path:
    """The output of one key."""
    return prefix.with_name(f"{prefix.name}_{key}_document")


def finished(prefix: Path, keys: Sequence[str], job: str | None) -> tuple[list[Output], Rejected] | None:
    """(outputs, what was rejected) where they lie there whole, made by the same job; else None."""
    outputs: list[Output] = []
    n_lines = n_files = 0
    for one in (pair_prefix(prefix, key) for key in keys):
        if not is_of_job(one, job):
            return None
        told = read_sidecar(one)
        n, n_tokens = told["documents"], told["tokens"]
        sizes = {".bin": n_tokens * np.dtype(told["dtype"]).itemsize, ".idx": HEADER.size + 20 * n + 8}
        paths = {Path(f"{one}{suffix}"): size for suffix, size in sizes.items()}
        if not all(path.is_file() and path.stat().st_size == size for path, size in paths.items()):
            return None
        outputs.append(Output(one, n, n_tokens, told["empty_documents"], told["longest_document"]))
        n_lines, n_files = told["rejected_lines"], told.get("rejected_files", 0)
    path = rejects_of(prefix) if n_lines or n_files else None
    return (outputs, Rejected(n_lines, n_files, path)) if path is None or path.is_file() else None


def is_of_job(prefix: Path, job: str | None) -> bool:
    """Whether the sidecar of a dataset says that this job made it."""
    try:
        return job is not None and read_sidecar(prefix).get("job") == job
    except (FileNotFoundError, ValueError):
        return False


def _parts_of(ids: IO[bytes], dtype: np.dtype, n_tokens: int) -> Iterator[np.ndarray]:
    """The next so many ids of a file, JOINED_BYTES at a time."""
    while n_tokens:
        part = np.fromfile(ids, dtype, min(n_tokens, JOINED_BYTES // dtype.itemsize))
        assert len(part), "a shard that is done holds all of its ids"
        n_tokens -= len(part)
        yield part
