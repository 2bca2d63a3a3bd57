"""Catalogs from untrusted sources and of earlier versions: no other file is read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.commits import Commit, hash_content_name, merge_commits
from megatron.mixture.catalog.convert import convert_catalog
from megatron.mixture.catalog.query import Query
from megatron.mixture.lazy_imports import connect_scratch, fetch_rows

SECRET = "a line of another file"
HOSTILE = {
    "a view": "ALTER TABLE documents_1 RENAME TO real; CREATE VIEW documents_1 AS "
    "SELECT file, row, begin, size, tokens, (SELECT content FROM read_text('{secret}')) AS language, stars "
    "FROM real",
    "a macro": "CREATE MACRO lower(x) AS 'evil'",
    "a table macro": "CREATE MACRO duckdb_functions() AS TABLE SELECT 'f' AS function_name, true AS internal",
    "an operator": 'CREATE MACRO "+"(a, b) AS 42',
    "a type": "CREATE TYPE odd AS ENUM ('a')",
    "a generated column": "CREATE TABLE other (a INTEGER, b VARCHAR GENERATED ALWAYS AS (repeat('x', a)))",
    "another schema": "CREATE SCHEMA s; CREATE TABLE s.files AS SELECT 1 AS a",
    "no files": "DROP TABLE files",
    "no column": "ALTER TABLE files DROP COLUMN path",
}


OLD_CATALOG = """
CREATE SEQUENCE numbers START 1;
CREATE TABLE corpora (id INTEGER, name VARCHAR, text_key VARCHAR, properties VARCHAR, tokenizer VARCHAR);
CREATE TABLE files (id INTEGER, corpus INTEGER, path VARCHAR, bytes BIGINT, mtime_ns BIGINT,
    n_documents BIGINT, n_broken BIGINT, sha256 VARCHAR);
CREATE TABLE broken (file INTEGER, line BIGINT, reason VARCHAR);
CREATE TABLE documents_1 (file INTEGER, row BIGINT, begin BIGINT, size BIGINT, tokens BIGINT,
    language VARCHAR, stars BIGINT);
"""


@pytest.fixture
def old_catalog(catalog: Path, tmp_path: Path) -> Path:
    """Return a DuckDB file as earlier versions made it, with the documents of `catalog`."""
    path = tmp_path / "catalog.duckdb"
    with Catalog(catalog, read_only=True) as opened, duckdb.connect(str(path)) as connection:
        connection.execute(OLD_CATALOG)
        properties = [vars(prop) for prop in opened.get_corpus("code").properties]
        row = [1, "code", "text", json.dumps(properties), None]
        connection.execute("INSERT INTO corpora VALUES (?, ?, ?, ?, ?)", row)
        for number, file in enumerate(opened.files, 3):  # numbers of earlier versions did not begin at 0
            entry = file.entry
            row = [number, 1, entry.path, entry.n_bytes, entry.mtime_ns, entry.n_documents, 1, entry.sha256]
            connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            connection.execute("INSERT INTO broken VALUES (?, 7, 'not JSON')", [number])
            rows = opened.connection.execute(
                f"SELECT {number}, * EXCLUDE (file) FROM documents_1 WHERE file = {entry.key} ORDER BY row"
            ).fetchall()
            connection.executemany("INSERT INTO documents_1 VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    return path


def test_a_converted_catalog_has_the_documents_and_the_identity_of_the_original(catalog, old_catalog) -> None:
    new = old_catalog.with_name("converted")
    with Catalog(new) as opened:
        assert convert_catalog(opened, old_catalog) == 50
        converted, snapshot = Query().run(opened, by=["language"]), opened.snapshot.id
        broken = opened.list_broken("code")
        located = opened.locate_texts([file.id for file in converted.files])
    with Catalog(catalog, read_only=True) as opened:
        original = Query().run(opened, by=["language"])
        assert snapshot == opened.snapshot.id
        spans = opened.locate_texts([file.id for file in original.files])
        for old, new_file in zip(original.files, converted.files, strict=True):
            for i in (0, 1):
                assert (spans[old.id][i] == located[new_file.id][i]).all()
    assert converted.compute_identity() == original.compute_identity()
    assert [Path(path).name for path, *_ in broken] == ["one.jsonl", "two.jsonl"]
    assert [place for _, *place in broken] == [[7, "not JSON"]] * 2


def test_a_duckdb_file_is_not_opened_but_named_as_one_to_convert(old_catalog) -> None:
    for read_only in (True, False):
        with pytest.raises(
            ValueError, match=r"earlier version. Convert it with .* convert .*catalog\.duckdb"
        ):
            Catalog(old_catalog, read_only=read_only)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_duckdb_file_with_more_or_less_than_its_tables_is_not_converted(
    old_catalog, tmp_path, kind
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    with duckdb.connect(str(old_catalog)) as connection:
        connection.execute(HOSTILE[kind].format(secret=secret))
    with (
        Catalog(tmp_path / "new") as opened,
        pytest.raises(ValueError, match=r"catalog\.duckdb: (got the|no table|no column)") as error,
    ):
        convert_catalog(opened, old_catalog)
    assert SECRET not in str(error.value)


def test_statements_over_a_catalog_read_no_file_and_change_no_setting(catalog, tmp_path) -> None:
    (tmp_path / "secret.txt").write_text(SECRET)
    for read_only in (True, False):
        with Catalog(catalog, read_only=read_only) as opened:
            for statement in (
                f"SELECT * FROM read_text('{tmp_path}/secret.txt')",
                f"SELECT * FROM '{tmp_path}/one.jsonl'",
                f"ATTACH '{tmp_path}/other.duckdb'",
                f"COPY (SELECT 1) TO '{tmp_path}/copy.csv'",
                f"SELECT * FROM read_parquet('{tmp_path}/other.parquet')",
                "LOAD httpfs",
                "SET enable_external_access = true",
            ):
                with pytest.raises(
                    duckdb.Error, match="disabled by configuration|through configuration|locked"
                ):
                    opened.connection.execute(statement)
    assert not (tmp_path / "copy.csv").exists()


def test_a_long_statement_prints_no_progress_on_standard_output(catalog) -> None:
    setting = "SELECT current_setting('enable_progress_bar')"
    assert fetch_rows(connect_scratch(), setting) == [(False,)]
    with Catalog(catalog, read_only=True) as opened:
        assert fetch_rows(opened.connection, setting) == [(False,)]


def test_the_tool_reports_a_hostile_duckdb_file_in_one_sentence(root, old_catalog) -> None:
    with duckdb.connect(str(old_catalog)) as connection:
        connection.execute(HOSTILE["a macro"])
    tool = str(root / "tools" / "register_corpus.py")
    words = [sys.executable, tool, str(old_catalog.with_name("new")), "convert", str(old_catalog)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "got the macro 'lower', expected a catalog of tables only" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_converted_catalog_without_checksums_gets_them_by_verification(old_catalog, caplog) -> None:
    with duckdb.connect(str(old_catalog)) as connection:
        connection.execute("ALTER TABLE files DROP COLUMN sha256")
    new = old_catalog.with_name("new")
    with Catalog(new) as opened:
        convert_catalog(opened, old_catalog)
        old = Query().run(opened)
    assert [file.sha256 for file in old.files] == [None, None]
    old.warn_missing_checksums(new)
    assert "2 of 2 files were registered without checksums" in caplog.text
    with pytest.raises(ValueError, match="registered without a checksum"):
        old.files[0].verify()
    folder = Path(old.files[0].path).parent
    with Catalog(new) as opened:
        properties = opened.get_corpus("code").properties
        opened.register("code", [str(folder / "*.jsonl")], properties, quiet=True)
        # an older run can be resumed
        assert Query().run(opened).compute_identity() == old.compute_identity()
        done = opened.register("code", [str(folder / "*.jsonl")], properties, quiet=True, verify=True)
        assert (done.n_known, done.n_files, done.n_edited) == (0, 2, 0)
        now = Query().run(opened)
    assert now.compute_identity() != old.compute_identity()
    for file in now.files:
        file.verify()


@pytest.mark.parametrize("key", ["version", "corpus", "files", "part", "replaces", "drops", "after"])
def test_a_forged_commit_is_refused_in_one_sentence(catalog, key) -> None:
    (path,) = (catalog / "commits").iterdir()
    record = json.loads(path.read_bytes())
    hostile = (
        None, 7, "x", [7], ["../x"], {"a": 1}, [["x", 5]], ["corpus=code/part-../../x.parquet", 5],
        ["corpus=other/part-" + "0" * 32 + ".parquet", 5], [{**record["files"][0], "key": -1}],
        [{**record["files"][0], "n_documents": 2**63}], {**record["corpus"], "properties": [{"name": "x"}]},
        {**record["corpus"], "name": None}, float("nan"),
    )  # fmt: skip
    for value in hostile:
        content = json.dumps(record | {key: value}).encode()
        try:
            merge_commits([Commit.from_json(hash_content_name(content), content)])
        except ValueError as error:
            assert str(error).startswith("commit ")
            assert "\n" not in str(error)
        else:
            # numbers of unknown keys to replace are valid
            assert (key, value) in [("replaces", [7]), ("part", None)]


def test_a_commit_with_another_content_than_its_name_is_refused(catalog) -> None:
    (path,) = (catalog / "commits").iterdir()
    path.write_bytes(path.read_bytes().replace(b"one.jsonl", b"two.jsonl"))
    with pytest.raises(ValueError, match=r"catalog: commit \w+: got content with another hash"):
        Catalog(catalog, read_only=True)


def test_a_part_outside_the_catalog_or_of_another_size_is_refused(catalog, tmp_path) -> None:
    (part,) = catalog.glob("corpus=code/part-*.parquet")
    (tmp_path / "elsewhere.parquet").write_bytes(part.read_bytes())
    part.unlink()
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match=r"parquet: is missing"):
        opened.describe_corpus("code")
    os.symlink(tmp_path / "elsewhere.parquet", part)
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match=r"parquet: is missing"):
        opened.describe_corpus("code")
    part.unlink()
    part.write_bytes((tmp_path / "elsewhere.parquet").read_bytes()[:-1])
    with (
        Catalog(catalog, read_only=True) as opened,
        pytest.raises(ValueError, match=r"got [\d,]+ bytes, exp"),
    ):
        opened.describe_corpus("code")


def test_a_damaged_part_is_refused_in_one_sentence(catalog) -> None:
    (part,) = catalog.glob("corpus=code/part-*.parquet")
    part.write_bytes(bytes(part.stat().st_size))
    with Catalog(catalog, read_only=True) as opened:
        ids = [file.entry.key for file in opened.files]
        for read in (opened.summarize_corpora, lambda: Query().run(opened), lambda: opened.locate_texts(ids)):
            with pytest.raises(ValueError, match="parquet"):
                read()


def test_a_folder_of_something_else_is_refused_and_unchanged(tmp_path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"got a folder without catalog\.json"):
        Catalog(tmp_path / "notes")
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]
    (tmp_path / "notes" / "catalog.json").write_text('{"format": "mixture catalog", "version": 2}')
    with pytest.raises(ValueError, match="expected .*version.: 1"):
        Catalog(tmp_path / "notes")
