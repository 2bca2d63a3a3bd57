"""Checksums of registered files, by which a catalog detects other content."""

import hashlib
import json
from pathlib import Path

PART_BYTES = 4 << 20


def hash_content(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. The hash of a .bin covers its .idx as well."""
    if path.suffix == ".bin":
        # a hash of two hashes: of the two contents in sequence, the border between them could move
        sums = [_hash_file(path), _hash_file(path.with_suffix(".idx"))]
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    return _hash_file(path)


def _hash_file(path: Path) -> str:
    # one buffer for all parts, without a copy: a file may have hundreds of GB
    sums, part = hashlib.sha256(), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(part):
            sums.update(memoryview(part)[:n])
    return sums.hexdigest()
