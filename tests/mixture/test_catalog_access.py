"""Catalogs from untrusted sources: no other file is read."""

import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from megatron.mixture.catalog.catalog import Catalog
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


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("read_only", [True, False])
def test_a_catalog_with_more_or_less_than_its_tables_is_refused(catalog, tmp_path, kind, read_only) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    with duckdb.connect(str(catalog)) as connection:
        connection.execute(HOSTILE[kind].format(secret=secret))
    with pytest.raises(ValueError, match=r"catalog\.duckdb: (got the|no table|no column)") as error:
        Catalog(catalog, read_only=read_only)
    assert SECRET not in str(error.value)


def test_statements_over_a_catalog_read_no_file_and_change_no_setting(catalog, tmp_path) -> None:
    (tmp_path / "secret.txt").write_text(SECRET)
    for read_only in (True, False):
        with Catalog(catalog, read_only=read_only) as opened:
            for statement in (
                f"SELECT * FROM read_text('{tmp_path}/secret.txt')",
                f"SELECT * FROM '{tmp_path}/one.jsonl'",
                f"ATTACH '{tmp_path}/other.duckdb'",
                f"COPY files TO '{tmp_path}/copy.csv'",
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


def test_the_tool_reports_a_hostile_catalog_in_one_sentence(root, catalog) -> None:
    with duckdb.connect(str(catalog)) as connection:
        connection.execute(HOSTILE["a macro"])
    words = [sys.executable, str(root / "tools" / "register_corpus.py"), str(catalog), "list"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "got the macro 'lower', expected a catalog of tables only" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_catalog_without_checksums_is_read_and_keeps_the_identity_of_its_documents(catalog, caplog) -> None:
    with duckdb.connect(str(catalog)) as connection:
        connection.execute("ALTER TABLE files DROP COLUMN sha256")
    with Catalog(catalog, read_only=True) as opened:
        old = Query().run(opened)
    assert [file.sha256 for file in old.files] == [None, None]
    old.warn_missing_checksums(catalog)
    assert "2 of 2 files were registered without checksums" in caplog.text
    with pytest.raises(ValueError, match="registered without a checksum"):
        old.files[0].verify()
    folder = Path(old.files[0].path).parent
    with Catalog(catalog) as opened:
        properties = opened.get_corpus("code").properties
        opened.register("code", [str(folder / "*.jsonl")], properties, quiet=True)
        # an older run can be resumed
        assert Query().run(opened).compute_identity() == old.compute_identity()
        done = opened.register("code", [str(folder / "*.jsonl")], properties, quiet=True, verify=True)
        assert (done.n_known, done.n_files, done.n_edited) == (2, 0, 0)
        new = Query().run(opened)
    assert new.compute_identity() != old.compute_identity()
    for file in new.files:
        file.verify()
