"""The identity of documents is their content; an edit is detected at opening or by verification."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.input_files import hash_content
from megatron.mixture.catalog.query import Query, QueryResult
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import MixtureDataset
from megatron.mixture.source import MixtureSamples
from megatron.mixture.spec import prepare_mixture
from megatron.mixture.titan import TitanLoader
from tests.mixture.conftest import write_lines


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    write_lines(tmp_path / "a.jsonl", 40)
    (tmp_path / "m.yaml").write_text("catalog: c\ncount: documents\n")
    register(tmp_path / "m.yaml")
    return tmp_path / "m.yaml"


def register(mixture: Path, verify: bool = False) -> tuple[int, int]:
    """Return (registered files, those of them with unchanged size and modification time)."""
    with Catalog(mixture.parent / "c", n_threads=1) as catalog:
        done = catalog.register("a", [str(mixture.parent / "a.jsonl")], (), quiet=True, verify=verify)
    return done.n_files, done.n_edited


def edit_file(mixture: Path, keep_time: bool) -> None:
    """Replace words without a change of the size."""
    path = mixture.parent / "a.jsonl"
    before = path.stat()
    path.write_text(path.read_text().replace("document", "DOCUMENT"))
    ns = before.st_mtime_ns if keep_time else before.st_mtime_ns + 10**9
    os.utime(path, ns=(ns, ns))
    assert path.stat().st_size == before.st_size


def query_all(mixture: Path) -> QueryResult:
    with Catalog(mixture.parent / "c", read_only=True) as catalog:
        return Query().run(catalog)


def test_the_checksum_of_a_file_is_its_sha256(mixture) -> None:
    content = (mixture.parent / "a.jsonl").read_bytes()
    assert query_all(mixture).files[0].sha256 == hashlib.sha256(content).hexdigest()


def test_an_edit_of_the_same_size_is_refused_at_opening_and_has_another_identity_when_registered(
    mixture,
) -> None:
    before = query_all(mixture)
    dataset = MixtureDataset(lambda: DocumentChunks(mixture, chunk_size=8))
    next(iter(dataset))
    state = dataset.state_dict()
    edit_file(mixture, keep_time=False)
    with pytest.raises(ValueError, match=r"a\.jsonl: has changed since it was registered"):
        DocumentChunks(mixture)
    assert register(mixture) == (1, 0)
    assert query_all(mixture).compute_identity() != before.compute_identity()
    dataset.load_state_dict(state)
    with pytest.raises(ValueError, match="documents of the mixture have changed"):
        next(iter(dataset))


def test_an_edit_that_keeps_size_and_time_is_detected_by_verification(mixture, root) -> None:
    DocumentChunks(mixture, verify=True).close()
    before = query_all(mixture)
    edit_file(mixture, keep_time=True)
    DocumentChunks(mixture).close()
    with pytest.raises(ValueError, match=r"a\.jsonl: got other content than was registered"):
        DocumentChunks(mixture, verify=True)
    tool = [sys.executable, str(root / "tools" / "prepare_mixture.py"), str(mixture), "--verify"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=240)
    assert (done.returncode, "got other content" in done.stderr) == (1, True)
    assert register(mixture) == (0, 0)
    assert register(mixture, verify=True) == (1, 1)
    assert query_all(mixture).compute_identity() != before.compute_identity()
    with DocumentChunks(mixture, chunk_size=8, verify=True) as source:
        assert source.read(0, 1).column("text").to_pylist()[0].startswith("DOCUMENT")


def write_pair(prefix: Path, seed: int, lengths: tuple[int, ...] = (30, 50, 40)) -> None:
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16), {}) as writer:
        for n in lengths:
            writer.add_document(rng.integers(0, 1000, n))


def test_the_checksum_of_an_indexed_dataset_covers_tokens_and_index(tmp_path) -> None:
    write_pair(tmp_path / "p", 0)
    first = hash_content(tmp_path / "p.bin")
    write_pair(tmp_path / "p", 0, (50, 30, 40))  # the same tokens, other documents
    second = hash_content(tmp_path / "p.bin")
    write_pair(tmp_path / "p", 1)
    assert len({first, second, hash_content(tmp_path / "p.bin")}) == 3


def test_training_on_an_edited_dataset_is_refused(tmp_path) -> None:
    write_pair(tmp_path / "p", 0)
    mixture = tmp_path / "m.yaml"
    mixture.write_text("catalog: c\n")
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("p", [str(tmp_path / "p")], (), quiet=True)
    prepare_mixture(mixture)
    state = TitanLoader(mixture, 8, 2, 0, 1).state_dict()
    write_pair(tmp_path / "p", 1)
    os.utime(tmp_path / "p.bin", ns=(1, 1))
    with pytest.raises(ValueError, match=r"p\.bin: has changed since it was registered"):
        MixtureSamples(mixture, 8, 2, 0)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("p", [str(tmp_path / "p")], (), quiet=True)
    prepare_mixture(mixture)
    with pytest.raises(ValueError, match="documents of the mixture have changed"):
        TitanLoader(mixture, 8, 2, 0, 1).load_state_dict(state)
