"""A mixture without shares delivers each document exactly once per epoch, to any groups."""

from functools import partial
from itertools import chain, islice
from pathlib import Path

import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import MixtureDataset
from tests.mixture.conftest import write_lines

N = 1057  # of documents; no multiple of the chunk size, and the last chunk of 64 has 33 of them
CHUNK = 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a catalog of N documents in two files, without tokens."""
    write_lines(tmp_path / "a.jsonl", 1000)
    write_lines(tmp_path / "b.jsonl", N - 1000, first=1000)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("code", [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")], (), quiet=True)
    return tmp_path


def write_mixture(folder: Path, keys: str) -> Path:
    path = folder / "m.yaml"
    path.write_text(f"catalog: c\nweights: arbitrary\n{keys}")
    return path


@pytest.mark.parametrize("dry", ["stop", "redistribute"])
@pytest.mark.parametrize("n_groups", [1, 3])
def test_each_document_is_delivered_once(folder, dry, n_groups) -> None:
    path = write_mixture(folder, f"dry: {dry}\n")
    read = [
        list(MixtureDataset(partial(DocumentChunks, path, 0, CHUNK), group, n_groups))
        for group in range(n_groups)
    ]
    texts = [text for chunk in chain(*read) for text in chunk.documents]
    assert sorted(texts) == sorted(f"document {i}" for i in range(N))
    assert texts != sorted(texts)
    assert sorted(chunk.number for chunk in chain(*read)) == list(range(-(-N // CHUNK)))


def test_each_epoch_of_repeated_documents_contains_each_once(folder) -> None:
    path = write_mixture(folder, "dry: repeat\n")
    with DocumentChunks(path, 0, CHUNK) as source:
        chunks = islice(MixtureDataset(lambda: source), 4 * N // CHUNK)
        texts = [text for chunk in chunks for text in chunk.documents]
    epochs = [texts[i * N : (i + 1) * N] for i in range(3)]
    assert all(sorted(epoch) == sorted(f"document {i}" for i in range(N)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_without_shuffling_documents_keep_their_registered_order(folder) -> None:
    path = write_mixture(folder, "dry: stop\nshuffle: false\n")
    with DocumentChunks(path, 0, CHUNK) as source:
        texts = [text for chunk in MixtureDataset(lambda: source) for text in chunk.documents]
    assert texts == [f"document {i}" for i in range(N)]


def test_an_arbitrary_mixture_has_no_domains(folder) -> None:
    path = write_mixture(folder, "by: corpus\n")
    with pytest.raises(ValueError, match=r"got arbitrary with by: corpus, expected no domains"):
        DocumentChunks(path)
