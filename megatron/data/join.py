"""Finished shards laid end to end, in the order of the input, as soon as those before them are there.

A shard is deleted once it is joined, so that the disk holds the tokens once and not twice, and what is about
to be deleted is hardly ever written to it. How far the joining has come stands in a file beside the shards: a
killed job goes on from there.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.data.documents import STDIN, Piece
from megatron.data.encode_piece import rejected_lines
from megatron.data.indexed_writer import PARTIAL, IndexedWriter
from megatron.data.shards import Done, Joined, Shards
from megatron.log import get_logger

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


class Joining:
    """The outputs of a job while they grow: a context manager.

    Left by an exception it keeps what is there if it was told `keep`, for the same job to go on from.
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
                self.prefix.with_name(f"{self.prefix.name}_{key}_document"),
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
        for number in range(self.joined.n_pieces):
            self._sum(number)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def keep(self) -> None:
        """Leave the partial outputs on disk when an exception comes."""
        for writer in self.writers.values():
            writer.keep_partial = True

    @property
    def has_enough(self) -> bool:
        """Whether max_tokens are there."""
        first = next(iter(self.writers.values()))
        return self.max_tokens is not None and first.n_tokens >= self.max_tokens

    def take(self) -> None:
        """Join all shards whose turn it is."""
        while self.joined.n_pieces in self.done:
            number = self.joined.n_pieces
            n_documents: int | None = None
            empty = dict(self.joined.empty)
            if not self.has_enough:
                for key, writer in self.writers.items():
                    before = writer.n_documents
                    empty[key] += self._join(number, key, writer, n_documents)
                    n_documents = writer.n_documents - before  # as many of every key
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
                left -= len(block)

    def tell_sources(self, paths: Sequence[Path]) -> None:
        """Put name, sum, size and documents read of each source into the sidecars, and the empty ones."""
        n_documents = dict.fromkeys(paths, 0)
        for number, one in self.done.items():
            n_documents[self.pieces[number].path] += one.n_documents
        told: list[dict[str, Any]] = []
        for path in paths:
            held = {"documents_read": n_documents[path]}
            if path == STDIN:
                told.append({"path": "-", **held})
                continue
            sha256 = self.sums[path].hexdigest() if path in self.sums else hashlib.sha256().hexdigest()
            told.append({"path": path.name, "sha256": sha256, "bytes": path.stat().st_size, **held})
        for key, writer in self.writers.items():
            writer.about |= {"empty_documents": self.joined.empty[key], "sources": told}

    def outputs(self) -> list[Output]:
        """What came out, an output for each key."""
        return [
            Output(w.prefix, w.n_documents, w.n_tokens, self.joined.empty[key], w.longest)
            for key, w in self.writers.items()
        ]


def _parts_of(ids: IO[bytes], dtype: np.dtype, n_tokens: int) -> Iterator[np.ndarray]:
    """The next so many ids of a file, JOINED_BYTES at a time."""
    while n_tokens:
        part = np.fromfile(ids, dtype, min(n_tokens, JOINED_BYTES // dtype.itemsize))
        assert len(part), "a shard that is done holds all of its ids"
        n_tokens -= len(part)
        yield part


def write_rejects(
    pieces: Sequence[Piece], shards: Shards, done: dict[int, Done], prefix: Path
) -> Path | None:
    """<prefix>.rejects.jsonl, in the order of the input; None, and no file, where nothing was rejected."""
    path = prefix.with_name(f"{prefix.name}.rejects.jsonl")
    if not any(one.n_rejected for one in done.values()):
        path.unlink(missing_ok=True)
        return None
    partial = path.with_name(path.name + PARTIAL)
    before: dict[Path, int] = {}
    with partial.open("w") as file:
        for number in sorted(done):
            source = pieces[number].path
            file.writelines(rejected_lines(shards, number, source, before.get(source, 0)))
            before[source] = before.get(source, 0) + done[number].n_lines
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return path
