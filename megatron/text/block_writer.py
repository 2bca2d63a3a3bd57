"""Writer of a dataset from shards: threads copy and hash its blocks at their final places, in any order.

The place of a shard is known once the sizes of all earlier shards are. So one thread only assigns shards to
blocks of the output, and a block is read from its shards, hashed, counted and written by a thread of a pool,
once. Nothing is read again, at the end or after a restart.
"""

import hashlib
import os
import threading
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.block_hash import combine_digests
from megatron.data.indexed_writer import SPOOL_SUFFIX, IdCounts, IndexedWriter

COPY_BYTES = 1 << 20  # read at a time: hashing, counting and writing then use a core's private cache


@dataclass(frozen=True)
class WriterCounts:
    """Documents and tokens that were added up to some shard, empty documents and the longest document."""

    n_documents: int = 0
    n_tokens: int = 0
    n_empty: int = 0
    longest: int = 0


@dataclass(frozen=True)
class WrittenBlocks:
    """The blocks that are on disk: the SHA-256 digest of each, and the occurrences of each id in them."""

    digests: tuple[bytes, ...]
    counts: np.ndarray | None


@dataclass(frozen=True)
class ShardRange:
    """Bytes [offset, offset + n_bytes) of a file of ids."""

    path: Path
    offset: int
    n_bytes: int


class BlockWriter(IndexedWriter):
    """Context manager as `IndexedWriter`; `add_shard` instead of documents. One thread calls its methods.

    A writer that was killed is continued by another one with `counts` and `blocks` of its last `sync`, to
    which the shards that followed `counts` are added again.
    """

    def __init__(
        self, prefix: Path, dtype: np.dtype, meta: dict[str, Any], scratch: Path, pool: Executor,
        counts: WriterCounts, blocks: WrittenBlocks | None,
    ) -> None:  # fmt: skip
        """`pool`: its threads write the blocks. It must be shut down before the writer is closed."""
        super().__init__(prefix, dtype, meta, scratch)
        self.pool = pool
        self.n_documents, self.n_tokens = counts.n_documents, counts.n_tokens
        self.n_empty, self.longest = counts.n_empty, counts.longest
        self._digests: dict[int, bytes] = {}
        if blocks is not None:
            self._digests = dict(enumerate(blocks.digests))
            self._counts.counts = blocks.counts
        self._n_blocks = len(self._digests)  # that are submitted
        self._ranges: list[ShardRange] = []  # of the block that is not complete yet
        self._n_pending = 0  # bytes of `_ranges`
        self._futures: deque[Future[None]] = deque()
        self._lock = threading.Lock()  # of `_digests` and `_counts`

    @property
    def added(self) -> WriterCounts:
        """Counts of all shards added so far."""
        return WriterCounts(self.n_documents, self.n_tokens, self.n_empty, self.longest)

    @property
    def block_end(self) -> int:
        """Tokens in the blocks that are complete, written after the next `sync`."""
        return self._n_blocks * self.block_bytes // self.dtype.itemsize

    def has_partial_files(self) -> bool:
        """Return whether the partial files contain all that is not added again."""
        # larger is valid: a killed writer has appended what its last `sync` does not know
        sizes = {".bin": self._n_blocks * self.block_bytes, SPOOL_SUFFIX: 4 * self.n_documents}
        paths = {self._partial_path(suffix): size for suffix, size in sizes.items() if size}
        return all(path.is_file() and path.stat().st_size >= size for path, size in paths.items())

    def _open_spool(self) -> None:
        assert self._bin is not None, "called by __enter__"
        self._bin.truncate(self._n_blocks * self.block_bytes)
        self._spool = self._partial_path(SPOOL_SUFFIX).open("r+b" if self.n_documents else "w+b")
        self._spool.truncate(4 * self.n_documents)
        self._spool.seek(0, os.SEEK_END)

    def add_shard(self, path: Path, lengths: np.ndarray) -> None:
        """Append the first documents of a shard. `path`: their ids; it must exist until they are in blocks.

        lengths [n] int32   tokens of each document

        Raises the OSError of a block that could not be written.
        """
        while self._futures and self._futures[0].done():
            self._futures.popleft().result()
        size = self.dtype.itemsize
        n_bytes = int(lengths.sum(dtype=np.int64)) * size
        # After a restart, blocks may contain the beginning of this shard, or all of it. Example: blocks of 8
        # bytes, one is written, shards of 6 bytes: the second shard begins at byte 6, so 2 bytes are skipped.
        offset = min(n_bytes, max(0, self._n_blocks * self.block_bytes - self.n_tokens * size))
        while offset < n_bytes:
            part = min(n_bytes - offset, self.block_bytes - self._n_pending)
            self._ranges.append(ShardRange(path, offset, part))
            self._n_pending += part
            offset += part
            if self._n_pending == self.block_bytes:
                self._submit_block()
        self._end_documents(lengths)

    def _submit_block(self) -> None:
        ranges, self._ranges, self._n_pending = self._ranges, [], 0
        self._futures.append(self.pool.submit(self._write_block, self._n_blocks, ranges))
        self._n_blocks += 1

    def _write_block(self, number: int, ranges: list[ShardRange]) -> None:
        """Copy one block, and add its digest and counts. Runs in a thread of the pool."""
        assert self._bin is not None, "blocks are written inside the `with` block"
        digest, counts, position = hashlib.sha256(), IdCounts(), number * self.block_bytes
        buffer = np.empty(COPY_BYTES, np.uint8)
        for source in ranges:
            with source.path.open("rb", buffering=0) as file:
                file.seek(source.offset)
                left = source.n_bytes
                while left:
                    part = buffer[: min(left, COPY_BYTES)]
                    _read_into(file.fileno(), part, source.path)
                    digest.update(part.data)
                    counts.add(part.view(self.dtype))
                    _write_at(self._bin.fileno(), part, position)
                    position += len(part)
                    left -= len(part)
        with self._lock:
            self._digests[number] = digest.digest()
            self._counts.merge(counts)

    def wait(self) -> None:
        """Wait until all submitted blocks are written. Raises the OSError of a block."""
        while self._futures:
            self._futures.popleft().result()

    def sync(self) -> WrittenBlocks:
        """Write complete blocks and lengths to the disk, and return what a later writer continues from."""
        assert self._bin is not None and self._spool is not None, "call sync inside the `with` block"
        self.wait()
        self._spool.flush()
        for file in (self._bin, self._spool):
            os.fsync(file.fileno())
        return WrittenBlocks(self._ordered_digests(), self._counts.counts)

    def _ordered_digests(self) -> tuple[bytes, ...]:
        return tuple(self._digests[number] for number in range(self._n_blocks))

    def _finish_data(self) -> str:
        if self._ranges:  # the last block is shorter
            self._submit_block()
        self.wait()
        return combine_digests(self._ordered_digests())


def _read_into(descriptor: int, part: np.ndarray, path: Path) -> None:
    """Fill an array of bytes. Raises ValueError at the end of the file."""
    view = part.data  # os.readv may read a part only
    while view:
        n_bytes = os.readv(descriptor, [view])
        if not n_bytes:
            raise ValueError(f"{path}: the shard ended early. Run the same command again.")
        view = view[n_bytes:]


def _write_at(descriptor: int, part: np.ndarray, position: int) -> None:
    """Write an array of bytes at a position of a file."""
    view = part.data
    while view:
        n_bytes = os.pwrite(descriptor, view, position)
        view, position = view[n_bytes:], position + n_bytes
