"""Open the DuckDB file of a catalog that may come from a stranger.

Defended: statements over a catalog read no other file and load no extension; views, macros, types and
generated columns, which would run in place of tables and functions, are refused when it is opened. Not
defended: bytes that are made to break DuckDB's own reader of its format, and what the catalog says: it names
the files to read (`roots` of a server says where they may be) and what is in them (`SourceFile.verify`).
"""

import re
from pathlib import Path
from typing import Any

from megatron.mixture.libraries import connect, duckdb, rows

MAGIC = b"DUCK"  # of every DuckDB file, behind 8 bytes of a sum
CLOSED = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "python_enable_replacements": "false",
}
TABLES = {  # columns that a table has at least
    "corpora": {"id", "name", "text_key", "properties"},
    "files": {"id", "corpus", "path", "bytes", "mtime_ns", "n_documents", "n_broken"},
    "broken": {"file", "line", "reason"},
}
GENERATED = re.compile(r"GENERATED\s+ALWAYS\s+AS\s*\(", re.IGNORECASE)
# with the names of their schemas: a macro of the same name would be called else
FOREIGN = (
    ("view", "SELECT view_name FROM system.main.duckdb_views() WHERE NOT internal"),
    ("macro", "SELECT function_name FROM system.main.duckdb_functions() WHERE NOT internal"),
    ("type", "SELECT type_name FROM system.main.duckdb_types() WHERE NOT internal"),
)


def connect_catalog(path: Path, read_only: bool, n_threads: int | None) -> Any:
    """A connection to a catalog, which may be new unless `read_only`.

    FileNotFoundError, or ValueError for a file that is no catalog, holds more than tables, or is being
    written to.
    """
    if read_only and not path.is_file():
        raise FileNotFoundError(f"{path}: no such catalog; make it with tools/register_corpus.py")
    if path.is_file() and path.stat().st_size and not _is_duckdb(path):
        raise ValueError(f"{path}: no DuckDB file; wanted a catalog, or a name for a new one")
    path.parent.mkdir(parents=True, exist_ok=True)
    config = CLOSED if n_threads is None else {**CLOSED, "threads": n_threads}
    try:
        connection = connect(str(path), read_only=read_only, config=config)
        connection.execute("SET lock_configuration = true")
    except duckdb().Error as error:
        raise _cannot_be_opened(path, error) from error
    try:
        _check_objects(path, connection, read_only)
    except duckdb().Error as error:
        connection.close()
        raise _cannot_be_opened(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_objects(path: Path, connection: Any, read_only: bool) -> None:
    for kind, statement in FOREIGN:
        names = rows(connection, statement)
        if names:
            raise ValueError(
                f"{path}: got the {kind} {names[0][0]!r}, expected a catalog of tables only. "
                "Make the catalog again with tools/register_corpus.py."
            )
    statement = "SELECT schema_name, table_name, sql FROM system.main.duckdb_tables() WHERE NOT internal"
    tables = rows(connection, statement)
    for schema, name, sql in tables:
        if schema != "main" or GENERATED.search(sql):
            raise ValueError(
                f"{path}: got the table {schema}.{name} in another schema, or with generated columns, "
                "expected plain tables in main. Make the catalog again with tools/register_corpus.py."
            )
    names = {name for _, name, _ in tables}
    for name, columns in TABLES.items():
        if name not in names:
            if read_only or names:
                raise ValueError(f"{path}: no table '{name}', expected a catalog of tools/register_corpus.py")
            continue
        missing = columns - columns_of_table(connection, name)
        if missing:
            raise ValueError(f"{path}: no column '{sorted(missing)[0]}' in '{name}', expected a catalog")


def columns_of_table(connection: Any, table: str) -> set[str]:
    """Names of a table's columns."""
    statement = "SELECT table_name, column_name FROM system.main.duckdb_columns() WHERE NOT internal"
    return {column for name, column in rows(connection, statement) if name == table}


def _cannot_be_opened(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: cannot be opened as a catalog ({str(error).splitlines()[0]})")


def _is_duckdb(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == MAGIC
