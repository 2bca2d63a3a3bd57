"""Hashes of block hashes, against the shell and hashlib."""

import hashlib
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from megatron.data.block_hash import BLOCK_BYTES, BlockHash, combine_digests, hash_file
from megatron.data.sidecar import read_sidecar
from megatron.text.inspect_dataset import find_faults
from tests.datasets import write_dataset

COMMAND = "split -b 8M --filter=sha256sum '{}' | cut -c-64 | xxd -r -p | sha256sum"  # as in the guide


def hash_naively(content: bytes, block_bytes: int) -> str:
    digests = [
        hashlib.sha256(content[at : at + block_bytes]).digest() for at in range(0, len(content), block_bytes)
    ]
    return hashlib.sha256(content if len(digests) < 2 else b"".join(digests)).hexdigest()


@pytest.mark.parametrize("n_bytes", [0, 1, 7, 8, 9, 15, 16, 17, 100])
def test_a_stream_in_any_parts_has_the_hash_of_its_blocks(n_bytes: int) -> None:
    content = random.Random(n_bytes).randbytes(n_bytes)
    for size in range(1, 20):
        stream = BlockHash(8)
        for at in range(0, n_bytes, size):
            stream.update(content[at : at + size])
        assert stream.hexdigest() == hash_naively(content, 8)
    digests = [hashlib.sha256(content[at : at + 8]).hexdigest() for at in range(0, n_bytes, 8)]
    assert combine_digests(digests) == hash_naively(content, 8)
    plain = BlockHash(None)
    plain.update(content)
    assert plain.hexdigest() == hashlib.sha256(content).hexdigest()


def test_the_shell_computes_the_hash_of_a_long_file(tmp_path: Path) -> None:
    if not all(shutil.which(name) for name in ("split", "xxd", "sha256sum")):
        pytest.skip("no split, xxd or sha256sum")
    path = tmp_path / "a file"
    path.write_bytes(random.Random(0).randbytes(BLOCK_BYTES * 2 + 3))
    done = subprocess.run(["sh", "-c", COMMAND.format(path)], capture_output=True, text=True, check=True)
    stream = BlockHash(BLOCK_BYTES)
    stream.update(path.read_bytes())
    assert done.stdout.split()[0] == stream.hexdigest()
    assert hash_file(path, 1000, 5, 9999) == hash_naively(path.read_bytes()[5:9999], 1000)


def test_a_long_dataset_is_hashed_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.data.indexed_writer.BLOCK_BYTES", 64)
    prefix = write_dataset(tmp_path / "x", map(np.arange, (5, 0, 90, 1, 30)))
    sums = read_sidecar(prefix)["sha256"]
    assert sums["block_bytes"] == 64
    for suffix in ("bin", "idx"):
        assert sums[suffix] == hash_naively(Path(f"{prefix}.{suffix}").read_bytes(), 64)
    assert list(find_faults(prefix)) == []
