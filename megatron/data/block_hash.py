"""SHA-256 of a file as a hash of block hashes, which several threads can compute.

The digest of a file of at most one block is its plain SHA-256. For a longer
file it is the SHA-256 of the concatenated SHA-256 digests (32 bytes each) of its
blocks, and its record names `block_bytes`. A shell computes it by `split -b 8M
--filter=sha256sum FILE | cut -c-64 | xxd -r -p | sha256sum`.
"""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK_BYTES = 8 << 20
READ_BYTES = 1 << 20


class BlockHash:
    """Hash of a stream of bytes. `block_bytes` None: plain SHA-256, whatever the length.

    digests   of complete blocks that are followed by more bytes, in hexadecimal digits
    """

    def __init__(self, block_bytes: int | None) -> None:
        self.block_bytes = block_bytes or sys.maxsize  # 0 in a damaged sidecar
        self.digests: list[str] = []
        self._block, self._room = hashlib.sha256(), self.block_bytes  # bytes that the block still takes

    def update(self, data: Any) -> None:
        """Append bytes, or a contiguous array."""
        view = memoryview(data).cast("B")
        while view:
            if self._room == 0:
                self.digests.append(self._block.hexdigest())
                self._block, self._room = hashlib.sha256(), self.block_bytes
            part = view[: self._room]
            self._block.update(part)
            view = view[len(part) :]
            self._room -= len(part)

    def list_digests(self) -> list[str]:
        """Return the digests of all blocks so far, at least one."""
        return [*self.digests, self._block.hexdigest()]

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        return combine_digests(self.list_digests())


def combine_digests(digests: Sequence[str]) -> str:
    """Return the digest of a file from the SHA-256 digests of its blocks, in hexadecimal digits."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(bytes.fromhex("".join(digests))).hexdigest()


def describe_sums(data: Sequence[str], index: Sequence[str], block_bytes: int) -> dict[str, Any]:
    """Return the entry `sha256` of a sidecar from the digests of the blocks of both files."""
    sums = {"bin": combine_digests(data), "idx": combine_digests(index)}
    return sums | ({"block_bytes": block_bytes} if max(len(data), len(index)) > 1 else {})


def hash_file(path: Path, block_bytes: int | None = None, begin: int = 0, end: int | None = None) -> str:
    """Return the digest of bytes [begin, end) of a file, read in small buffers."""
    digest = BlockHash(block_bytes)
    position, end = begin, path.stat().st_size if end is None else end
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while position < end and (data := file.read(min(end - position, READ_BYTES))):
            digest.update(data)
            position += len(data)
    return digest.hexdigest()
