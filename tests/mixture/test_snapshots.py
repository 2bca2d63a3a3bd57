"""Snapshots: earlier states stay readable, runs resume on theirs, and a prune deletes what nothing needs."""

import os
from pathlib import Path

import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.spec import read_spec
from tests.mixture.conftest import PROPERTIES, write_lines


@pytest.fixture
def mixture(catalog: Path) -> Path:
    path = catalog.with_name("m.yaml")
    path.write_text("catalog: catalog\ncount: documents\n")
    return path


def add(catalog: Path, path: Path) -> None:
    with Catalog(catalog, n_threads=1) as opened:
        opened.register("code", [str(path)], read_properties(PROPERTIES), quiet=True)


def read_all(mixture: Path) -> tuple[str, list[str]]:
    """Return (identity, documents of an epoch)."""
    with DocumentChunks(mixture, chunk_size=10) as source:
        n = int(source.counts.sum())
        return source.identity, source.read(0, n // 10).column("text").to_pylist()


def test_a_run_resumes_on_its_snapshot_after_the_catalog_has_changed(catalog, mixture) -> None:
    before = read_all(mixture)
    with Catalog(catalog, read_only=True) as opened:
        (snapshot,) = opened.list_snapshots()  # stored by the first reading
        assert snapshot == opened.snapshot.id
    write_lines(catalog.with_name("three.jsonl"), 10, first=50)
    add(catalog, catalog.with_name("three.jsonl"))
    assert read_all(mixture)[0] != before[0]  # another identity: a resumed run is refused
    digest = read_spec(mixture).compute_sha256()
    mixture.write_text(f"catalog: catalog\nsnapshot: '{snapshot[:16]}'\ncount: documents\n")
    assert read_all(mixture) == before
    assert read_spec(mixture).compute_sha256() == digest  # adaptive runs compare this too
    with Catalog(catalog) as opened:
        opened.remove("code")
        assert opened.list_corpora() == []
    assert read_all(mixture) == before
    with Catalog(catalog) as opened:
        opened.prune(keep=[snapshot[:12]])
    assert read_all(mixture) == before
    with Catalog(catalog) as opened:
        n_files, n_bytes = opened.prune()
        assert n_files >= 4
        assert n_bytes > 500
    with pytest.raises(ValueError, match="got 0 snapshots"):
        read_all(mixture)
    assert [path.name for path in catalog.rglob("*") if path.is_file()] == ["catalog.json"]


def test_an_updated_file_replaces_its_documents_and_the_old_ones_stay_readable(catalog, mixture) -> None:
    with Catalog(catalog, read_only=True) as opened:
        before = opened.snapshot.id
    path = catalog.with_name("two.jsonl")
    write_lines(path, 7, first=100)
    os.utime(path, ns=(5 * 10**9, 5 * 10**9))  # older than the registered one: it replaces it all the same
    add(catalog, path)
    with Catalog(catalog, read_only=True) as opened:
        assert opened.connection.execute("SELECT count(*), max(stars) FROM documents_1").fetchall() == [
            (37, 106)
        ]
        assert [file.entry.n_documents for file in opened.files] == [30, 7]
    with Catalog(catalog, read_only=True, snapshot=before) as opened:
        assert opened.connection.execute("SELECT count(*), max(stars) FROM documents_1").fetchall() == [
            (50, 49)
        ]
    mixture.write_text(f"catalog: catalog\nsnapshot: '{before}'\ncount: documents\n")
    with pytest.raises(ValueError, match=r"two\.jsonl: has changed since it was registered"):
        read_all(mixture)  # the text of the old documents is gone
    with Catalog(catalog) as opened:
        opened.prune()
        assert [file.entry.n_documents for file in opened.files] == [30, 7]
        # the part that the registration of both files made is still in use
        assert opened.connection.execute("SELECT count(*) FROM documents_1").fetchall() == [(37,)]


def test_the_order_of_documents_depends_on_content_not_on_folders_or_order(
    catalog, tmp_path, mixture
) -> None:
    for folder, names in (("x", ("two", "one")), ("y", ("one", "two"))):
        for name in names:
            path = tmp_path / folder / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes((tmp_path / f"{name}.jsonl").read_bytes())
            add(tmp_path / f"c{folder}", path)
    seen = [read_all(mixture)]
    for folder in "xy":
        mixture.write_text(f"catalog: c{folder}\ncount: documents\n")
        seen.append(read_all(mixture))
    assert seen[0] == seen[1] == seen[2]


def test_a_prune_keeps_parts_that_a_running_registration_may_commit(catalog) -> None:
    orphan = catalog / "corpus=code" / f"part-{'0' * 32}.parquet"
    for age_s, stays in ((60, True), (2 * 24 * 3600, False)):
        orphan.write_bytes(b"x")
        now = catalog.stat().st_mtime
        os.utime(orphan, (now - age_s, now - age_s))
        with Catalog(catalog) as opened:
            opened.prune()
        assert orphan.exists() == stays


def test_a_catalog_that_was_opened_to_be_read_is_not_changed(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened:
        for change in (lambda: opened.remove("code"), opened.prune, lambda: opened.register("x", ["a"], ())):
            with pytest.raises(ValueError, match="was opened to be read"):
                change()


def test_an_ambiguous_or_invalid_snapshot_is_refused(catalog, mixture) -> None:
    with pytest.raises(ValueError, match="got 0 snapshots 'abcdef01'"):
        Catalog(catalog, read_only=True, snapshot="abcdef01")
    for wrong in ("'short'", "12345678", "'../x/abcdef'", "[a]"):
        mixture.write_text(f"catalog: catalog\nsnapshot: {wrong}\n")
        with pytest.raises(ValueError, match="expected 8 to 64 hex digits"):
            read_spec(mixture)
    (catalog / "snapshots").mkdir()
    (catalog / "snapshots" / "abcdef01.json").write_text(
        '{"commits": ["../../x"], "time": 1, "documents": 2}'
    )
    with pytest.raises(ValueError, match="is not a snapshot"):
        Catalog(catalog, read_only=True, snapshot="abcdef01")


def test_a_reader_that_may_not_write_reads_all_the_same(catalog, mixture, monkeypatch, caplog) -> None:
    from megatron.mixture.catalog.storage import LocalStorage

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStorage, "write_bytes", refuse)
    assert len(read_all(mixture)[1]) == 50
    assert "the snapshot was not stored" in caplog.text
