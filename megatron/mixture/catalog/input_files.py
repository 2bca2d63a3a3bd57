"""Files to register: those of a pattern, and sizes, times and checksums that detect other content."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megatron.data.parts import list_data_files
from megatron.data.sidecar import PARTS_SUFFIX
from megatron.io import is_url
from megatron.mixture.catalog.tars import TAR_SUFFIXES
from megatron.text.inputs import COMPRESSED_SUFFIXES, PLAIN_SUFFIXES, describe_inputs, find_inputs

INPUTS = (*PLAIN_SUFFIXES, *COMPRESSED_SUFFIXES, ".parquet", *TAR_SUFFIXES, ".bin")
PART_BYTES = 4 << 20


def find_input_files(inputs: Sequence[str]) -> list[Path]:
    """Return the files that the patterns match. A .bin, or its prefix, stands for its .bin/.idx dataset.

    A dataset of parts stands for the .bin files of its parts.
    """
    if urls := [word for word in inputs if is_url(word)]:
        raise ValueError(
            f"{describe_inputs(urls)}: got a URL, expected files on this machine. Download them first."
        )
    patterns = []
    for word in inputs:
        patterns += list_data_files(word) or [word]
    paths = [path for path in find_inputs(patterns, INPUTS) if isinstance(path, Path)]
    return [
        path
        for path in paths
        # .parquet and .json beside a .bin/.idx dataset are parts of it
        if path.suffix not in (".parquet", ".json") or not _is_indexed_dataset(path.with_suffix(".bin"))
        if not path.name.endswith(PARTS_SUFFIX)
    ]


def stat_file(path: Path) -> tuple[int, int]:
    """Return (bytes, modification time in ns) of a file, which are compared whenever it is opened."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def hash_content(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. The hash of a .bin covers its .idx as well."""
    if path.suffix == ".bin":
        # a hash of two hashes: of the two contents in sequence, the border between them could move
        sums = [_hash_file(path), _hash_file(path.with_suffix(".idx"))]
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()
    return _hash_file(path)


def _is_indexed_dataset(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".idx").is_file()


def _hash_file(path: Path) -> str:
    # one buffer for all parts, without a copy: a file may have hundreds of GB
    sums, part = hashlib.sha256(), bytearray(PART_BYTES)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(part):
            sums.update(memoryview(part)[:n])
    return sums.hexdigest()
