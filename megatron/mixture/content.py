"""Sums of registered files: what a catalog knows of their content."""

import hashlib
import json
from pathlib import Path

PART_BYTES = 4 << 20


def hash_content(path: Path) -> str:
    """64 hex digits of a file's bytes (SHA-256); of a .bin those of its .idx as well, from one list."""
    if path.suffix == ".bin":
        sums = [_sha256(path), _sha256(path.with_suffix(".idx"))]
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    return _sha256(path)


def _sha256(path: Path) -> str:
    sums, part = hashlib.sha256(), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(part):
            sums.update(memoryview(part)[:n])
    return sums.hexdigest()
