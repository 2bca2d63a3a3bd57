"""Checksums of registered files, by which a catalog detects other content."""

import hashlib
import json
from pathlib import Path

PART_BYTES = 4 << 20


def hash_content(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. The hash of a .bin covers its .idx as well."""
    if path.suffix == ".bin":
        sums = [_hash_file(path), _hash_file(path.with_suffix(".idx"))]
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    return _hash_file(path)


def _hash_file(path: Path) -> str:
    sums, part = hashlib.sha256(), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(part):
            sums.update(memoryview(part)[:n])
    return sums.hexdigest()
