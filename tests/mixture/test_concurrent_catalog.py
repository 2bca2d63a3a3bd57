"""Writers register at the same time, without a lock, and every reader sees whole registrations."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.mixture.catalog import registration
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from tests.mixture.conftest import PROPERTIES, write_lines

DOCUMENTS = 40  # of each file
WRITER = """
import pathlib, sys, time
from megatron.mixture.catalog import small_files
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
path, properties, *files = sys.argv[1:]
small_files.BATCH_FILES = 2
print("ready", flush=True)
sys.stdin.readline()
with Catalog(pathlib.Path(path), n_threads=1) as catalog:
    done = catalog.register("code", files, read_properties(properties.split(";")), quiet=True)
print(done.n_files, done.n_duplicates, done.n_known, flush=True)
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{i:02}.jsonl" for i in range(12)]
    for i, path in enumerate(paths):
        write_lines(path, DOCUMENTS, first=i * DOCUMENTS)
    return paths


def register(catalog: Path | str, files: list[Path], properties: tuple[str, ...] = PROPERTIES) -> object:
    with Catalog(catalog, n_threads=1) as opened:
        return opened.register("code", [str(path) for path in files], read_properties(properties), quiet=True)


def start_writers(catalog: Path, batches: list[list[Path]]) -> list[subprocess.Popen[str]]:
    """Start a process for each batch, which all begin to register at the same time."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(catalog), ";".join(PROPERTIES), *map(str, batch)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for batch in batches
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    return writers


def read_documents(catalog: Path) -> list[str]:
    """Return the documents of three chunks of a mixture."""
    spec = catalog.with_name(f"{catalog.name}.yaml")
    spec.write_text(f"catalog: {catalog.name}\nby: [language]\ncount: documents\n")
    with DocumentChunks(spec, seed=3, chunk_size=100) as source:
        return source.read(0, 3).column("text").to_pylist()


def test_processes_that_register_at_once_make_the_catalog_of_one_process(tmp_path, files) -> None:
    # files 4 to 7 are registered by two writers each
    writers = start_writers(tmp_path / "many", [files[0:6], files[4:8], files[6:12]])
    n_seen = []
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / "many" / "catalog.json").exists():
            with Catalog(tmp_path / "many", read_only=True, n_threads=1) as opened:
                n_documents = opened.count_documents(opened.list_corpora())
                assert n_documents == DOCUMENTS * len(opened.files)
                for corpus in opened.list_corpora():
                    query = f"SELECT count(*), count(DISTINCT stars) FROM {corpus.table}"
                    assert opened.connection.execute(query).fetchall() == [(n_documents, n_documents)]
                n_seen.append(n_documents)
    counts = [writer.communicate(timeout=240)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    # every file was registered by one writer, and skipped by the other
    assert sum(int(n_files) for n_files, *_ in counts) >= 12
    assert [sum(map(int, count)) for count in counts] == [6, 4, 6]
    assert n_seen == sorted(n_seen)
    for i in reversed(range(12)):  # one at a time, in the opposite order
        register(tmp_path / "one", files[i : i + 1])
    with (
        Catalog(tmp_path / "one", read_only=True) as single,
        Catalog(tmp_path / "many", read_only=True) as many,
    ):
        assert single.snapshot.id == many.snapshot.id
        assert (
            Query().run(single, ["stars"]).compute_identity()
            == Query().run(many, ["stars"]).compute_identity()
        )
    assert read_documents(tmp_path / "one") == read_documents(tmp_path / "many")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("batches", [([0, 1], [0, 1]), ([0, 1], [1, 2])])
def test_a_file_that_two_writers_register_is_in_the_catalog_once(
    tmp_path, files, monkeypatch, order, batches
) -> None:
    # neither has seen the commit of the other when it begins
    monkeypatch.setattr(registration, "_list_registered", lambda *_: {})
    monkeypatch.setattr(Catalog, "list_replaced_keys", lambda *_: ())
    done = [register(tmp_path / "c", [files[i] for i in batches[k]]) for k in order]
    n_files = len({i for batch in batches for i in batch})
    with Catalog(tmp_path / "c", read_only=True) as opened:
        assert len(opened.files) == n_files
        query = "SELECT count(*), count(DISTINCT stars) FROM documents_1"
        assert opened.connection.execute(query).fetchall() == [(n_files * DOCUMENTS,) * 2]
        winner = {file.entry.path: file.entry.key for file in opened.files}
        spans = opened.locate_texts(list(winner.values()))
        assert [len(begins) for begins, _ in spans.values()] == [DOCUMENTS] * n_files
    # the same commit for the same files; of different ones, the hashes decide, in either order
    assert len(list((tmp_path / "c" / "commits").iterdir())) == (1 if batches[0] == batches[1] else 2)
    assert done[0].n_files == 2
    assert done[1].n_files + done[1].n_duplicates == 2
    other = tmp_path / "other"
    for k in reversed(order):
        register(other, [files[i] for i in batches[k]])
    with Catalog(other, read_only=True) as opened:
        assert {file.entry.path: file.entry.key for file in opened.files} == winner


def test_of_two_writers_with_other_settings_the_later_one_is_refused_and_leaves_nothing(
    tmp_path, files, monkeypatch
) -> None:
    register(tmp_path / "c", files[:2])
    monkeypatch.setattr(registration, "_check_settings", lambda *_: None)
    with pytest.raises(ValueError, match="corpus 'code' has the properties meta.language AS language"):
        register(tmp_path / "c", files[2:4], PROPERTIES[:1])
    with Catalog(tmp_path / "c", read_only=True) as opened:
        assert [Path(file.entry.path) for file in opened.files] == files[:2]
        assert opened.snapshot.ignored == ()


def test_settings_that_a_killed_writer_left_are_ignored_by_every_reader(
    tmp_path, files, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(registration, "_check_settings", lambda *_: None)
    monkeypatch.setattr(registration, "_withdraw_conflict", lambda *_: None)
    register(tmp_path / "c", files[:1])
    register(tmp_path / "c", files[1:2], PROPERTIES[:1])
    seen = set()
    for _ in range(2):
        with Catalog(tmp_path / "c", read_only=True) as opened:
            (ignored,) = opened.snapshot.ignored
            (file,) = opened.files
            seen.add((ignored, file.commit))
    assert len(seen) == 1
    assert "has other settings in an earlier commit" in caplog.text


def test_a_removal_does_not_remove_what_another_writer_adds_meanwhile(tmp_path, files) -> None:
    register(tmp_path / "c", files[:1])
    with Catalog(tmp_path / "c", n_threads=1) as remover:
        refresh = Catalog.refresh

        def register_meanwhile(catalog: Catalog) -> None:
            refresh(catalog)
            Catalog.refresh = refresh
            register(tmp_path / "c", files[1:2])

        Catalog.refresh = register_meanwhile
        try:
            remover.remove("code")
        finally:
            Catalog.refresh = refresh
        assert [Path(file.entry.path) for file in remover.files] == files[1:2]
    # a removed file can be registered again
    register(tmp_path / "c", files[:2])
    with Catalog(tmp_path / "c", read_only=True) as opened:
        assert [Path(file.entry.path) for file in opened.files] == files[:2]


def test_of_two_versions_of_a_file_the_later_modification_counts_in_any_order(
    tmp_path, files, monkeypatch
) -> None:
    monkeypatch.setattr(registration, "_list_registered", lambda *_: {})
    monkeypatch.setattr(Catalog, "list_replaced_keys", lambda *_: ())
    identities = set()
    for i, times in enumerate(itertools.permutations([10**9, 2 * 10**9])):
        for time in times:
            write_lines(files[0], 3 if time == 10**9 else 5)
            os.utime(files[0], ns=(time, time))
            register(tmp_path / f"c{i}", files[:1])
        with Catalog(tmp_path / f"c{i}", read_only=True) as opened:
            assert opened.summarize_corpora()[0].n_documents == 5
            assert opened.connection.execute("SELECT count(*) FROM documents_1").fetchall() == [(5,)]
            identities.add(opened.snapshot.id)
    assert len(identities) == 1


def test_shards_divide_the_files_among_processes(root, tmp_path, files) -> None:
    tool = [sys.executable, str(root / "tools" / "register_corpus.py"), str(tmp_path / "c")]
    words = ["add", "code", *map(str, files), "--property", PROPERTIES[1]]
    shards = [subprocess.Popen([*tool, *words, "--shard", f"{k}/3"], stdout=subprocess.PIPE, text=True)
              for k in range(3)]  # fmt: skip
    outputs = [shard.communicate(timeout=240)[0] for shard in shards]
    assert all("160 documents of 4 files registered" in output for output in outputs), outputs
    bad = subprocess.run([*tool, *words, "--shard", "3/3"], capture_output=True, text=True, timeout=240)
    assert bad.returncode == 2
    assert "expected K/N with K from 0 to N - 1" in bad.stderr
