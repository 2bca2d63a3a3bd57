"""SHA-256 of a file as a hash of block hashes, which several threads can compute.

The digest of a file of at most one block is its plain SHA-256. That of a longer file is the SHA-256 of the
concatenated SHA-256 digests (32 bytes each) of its blocks, and its record names `block_bytes`. A shell
computes it by `split -b 8M --filter=sha256sum FILE | cut -c-64 | xxd -r -p | sha256sum`.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BLOCK_BYTES = 8 << 20
READ_BYTES = 1 << 20


class BlockHash:
    """Hash of a stream of bytes. `block_bytes` None: plain SHA-256, whatever the length.

    n_blocks   complete blocks that are followed by more bytes
    """

    def __init__(self, block_bytes: int | None) -> None:
        self.block_bytes = block_bytes or sys.maxsize  # 0 in a damaged sidecar
        self.n_blocks = 0
        self._block, self._room = hashlib.sha256(), self.block_bytes  # bytes that the block still takes
        # of the digests: their number is not limited by memory
        self._digests = hashlib.sha256()

    def update(self, data: Any) -> None:
        """Append bytes, or a contiguous array."""
        view = memoryview(data).cast("B")
        while view:
            if self._room == 0:
                self._digests.update(self._block.digest())
                self.n_blocks += 1
                self._block, self._room = hashlib.sha256(), self.block_bytes
            part = view[: self._room]
            self._block.update(part)
            view = view[len(part) :]
            self._room -= len(part)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        if not self.n_blocks:
            return self._block.hexdigest()
        digests = self._digests.copy()
        digests.update(self._block.digest())
        return digests.hexdigest()


def hash_blocks(path: Path, block_bytes: int | None) -> BlockHash:
    """Return the hash of a file, read in small buffers."""
    digest = BlockHash(block_bytes)
    for data in _read_range(path, 0, path.stat().st_size):
        digest.update(data)
    return digest


def describe_sums(data: BlockHash, index: BlockHash) -> dict[str, Any]:
    """Return the entry `sha256` of a sidecar; without `block_bytes` both are plain SHA-256."""
    sums = {"bin": data.hexdigest(), "idx": index.hexdigest()}
    return sums | ({"block_bytes": data.block_bytes} if data.n_blocks or index.n_blocks else {})


def combine_digests(digests: Sequence[bytes]) -> str:
    """Return the digest of a file from the SHA-256 digests of its blocks."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def hash_range(path: Path, begin: int, end: int) -> bytes:
    """Return the plain SHA-256 digest of bytes [begin, end) of a file, read in small buffers."""
    digest = hashlib.sha256()
    for data in _read_range(path, begin, end):
        digest.update(data)
    return digest.digest()


def _read_range(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while begin < end and (data := file.read(min(end - begin, READ_BYTES))):
            yield data
            begin += len(data)
