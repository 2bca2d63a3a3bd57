"""Prepared mixtures: documents and weights are always of one preparation, also after a kill."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import QueryResult
from megatron.mixture.source import MixtureSamples
from megatron.mixture.spec import DOCUMENTS, prepare_mixture
from megatron.plan.mixture_use import RESOLVED, mixture_folder

KINDS = ["a", "a", "a", "b"] * 10


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    """Return a mixture of 30 documents of kind a and 10 of kind b, of 50 tokens each."""
    with IndexedWriter(tmp_path / "p", np.dtype(np.uint16), {}) as writer:
        for _ in KINDS:
            writer.add_document(np.arange(50))
    pyarrow.parquet.write_table(pyarrow.table({"kind": KINDS}), tmp_path / "p.parquet")
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("p", [str(tmp_path / "p")], read_properties(["kind AS kind"]), quiet=True)
    return select_kind(tmp_path / "m.yaml", "a")


def select_kind(path: Path, kind: str) -> Path:
    path.write_text(f"catalog: c\nby: [kind]\nwhere: \"kind = '{kind}'\"\n")
    return path


def count_documents(path: Path) -> list[int]:
    return QueryResult.load(mixture_folder(path) / DOCUMENTS).n_documents.tolist()


@pytest.mark.parametrize("n_changes", range(6))
def test_a_killed_preparation_of_an_edit_that_is_reverted_leaves_no_documents_of_the_edit(
    mixture: Path, monkeypatch: pytest.MonkeyPatch, n_changes: int
) -> None:
    """A kill after each of the deletions and renames: of two files in the folder, and of two old ones."""
    assert prepare_mixture(mixture).documents == (30,)
    left = [n_changes]

    def count(change):
        def wrapped(path, *words, **options):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return change(path, *words, **options)

        return wrapped

    select_kind(mixture, "b")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", count(Path.unlink))
        patch.setattr(Path, "rename", count(Path.rename))
        with pytest.raises(KeyboardInterrupt):
            prepare_mixture(mixture)
    select_kind(mixture, "a")
    assert prepare_mixture(mixture).documents == (30,)
    assert count_documents(mixture) == [30]
    assert MixtureSamples(mixture, 8, 2, 0).tokens.tolist() == [30 * 50]
    names = {path.name for path in mixture_folder(mixture).iterdir()}
    assert names == {DOCUMENTS, RESOLVED, ".lock"}


@pytest.mark.parametrize("version", ["this", "older"])
def test_documents_of_another_preparation_are_prepared_again(mixture: Path, version: str) -> None:
    folder = mixture_folder(mixture)
    prepare_mixture(select_kind(mixture, "b"))
    stale = QueryResult.load(folder / DOCUMENTS)
    prepare_mixture(select_kind(mixture, "a"))
    # an older version did not record the mixture in the documents
    (stale if version == "this" else replace(stale, mixture=None)).save(folder / DOCUMENTS)
    if version == "this":
        with pytest.raises(ValueError, match=r"documents\.arrow: got documents of another preparation"):
            MixtureSamples(mixture, 8, 2, 0)
    assert prepare_mixture(mixture).documents == (30,)
    assert count_documents(mixture) == [30]


def test_a_failed_preparation_keeps_the_previous_one(mixture: Path) -> None:
    prepare_mixture(mixture)
    before = shutil.copytree(mixture_folder(mixture), mixture.parent / "before")
    mixture.write_text("catalog: c\nby: [kind]\nwhere: \"kind = 'b'\"\nweights: {a: 1}\n")
    with pytest.raises(ValueError, match="no document has kind=a"):
        prepare_mixture(mixture)
    for name in (DOCUMENTS, RESOLVED):
        assert (mixture_folder(mixture) / name).read_bytes() == (before / name).read_bytes()
