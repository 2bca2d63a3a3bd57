"""Open the DuckDB file of a catalog that may come from an untrusted source.

Protected: statements over a catalog read no other file and load no extension. Opening refuses views, macros,
types and generated columns, which would run in place of tables and functions. Not protected: bytes that
exploit DuckDB's reader of its own format, and the content of the catalog. The catalog names the files to
read (`roots` of a server limits where they may be) and what they contain (`SourceFile.verify`).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.mixture.lazy_imports import connect_database, fetch_rows, import_duckdb

MAGIC = b"DUCK"  # of every DuckDB file, after 8 bytes of a checksum
LOCKED_CONFIG = {
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "python_enable_replacements": "false",
}
REQUIRED_COLUMNS = {  # required columns; a table may have more
    "corpora": {"id", "name", "text_key", "properties"},
    "files": {"id", "corpus", "path", "bytes", "mtime_ns", "n_documents", "n_broken"},
    "broken": {"file", "line", "reason"},
}
GENERATED_COLUMN = re.compile(r"GENERATED\s+ALWAYS\s+AS\s*\(", re.IGNORECASE)
# qualified by schema: otherwise a macro of the same name in the catalog would be called instead
FORBIDDEN_OBJECTS = (
    ("view", "SELECT view_name FROM system.main.duckdb_views() WHERE NOT internal"),
    ("macro", "SELECT function_name FROM system.main.duckdb_functions() WHERE NOT internal"),
    ("type", "SELECT type_name FROM system.main.duckdb_types() WHERE NOT internal"),
)


_shared: dict[Path, Any] = {}  # writing connections of `share_catalog`, by resolved path


@contextmanager
def share_catalog(path: Path) -> Iterator[None]:
    """Keep a catalog open for writing, so that all threads of this process can read and write it at once.

    DuckDB opens a file only once in a process. Within the `with` block `connect_catalog` returns cursors:
    each reads the state at the begin of its statement, also while another one writes.
    """
    connection = connect_catalog(path, read_only=False, n_threads=None)
    _shared[path.resolve()] = connection
    try:
        yield
    finally:
        del _shared[path.resolve()]
        connection.close()


def connect_catalog(path: Path, read_only: bool, n_threads: int | None) -> Any:
    """Return a connection to a catalog. A missing catalog is created unless `read_only`.

    Raises FileNotFoundError, or ValueError for a file that is not a catalog, that holds more than tables, or
    to which another process is writing.
    """
    if path.resolve() in _shared:
        return _shared[path.resolve()].cursor()
    if read_only and not path.is_file():
        raise FileNotFoundError(f"{path}: no such catalog. Create it with tools/register_corpus.py.")
    if path.is_file() and path.stat().st_size and not _is_duckdb(path):
        raise ValueError(
            f"{path}: got a file of another format, expected a DuckDB catalog. Use it, or a path of no file."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # the restrictions apply before the file is read, and lock_configuration prevents later statements from
    # lifting them
    config = LOCKED_CONFIG if n_threads is None else {**LOCKED_CONFIG, "threads": n_threads}
    try:
        connection = connect_database(str(path), read_only=read_only, config=config)
        connection.execute("SET lock_configuration = true")
    except import_duckdb().Error as error:
        raise _make_open_error(path, error) from error
    try:
        _check_objects(path, connection, read_only)
    except import_duckdb().Error as error:
        connection.close()
        raise _make_open_error(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _check_objects(path: Path, connection: Any, read_only: bool) -> None:
    for kind, statement in FORBIDDEN_OBJECTS:
        objects = fetch_rows(connection, statement)
        if objects:
            raise ValueError(
                f"{path}: got the {kind} {objects[0][0]!r}, expected a catalog of tables only. "
                "Create the catalog again with tools/register_corpus.py."
            )
    statement = "SELECT schema_name, table_name, sql FROM system.main.duckdb_tables() WHERE NOT internal"
    tables = fetch_rows(connection, statement)
    for schema, name, sql in tables:
        if schema != "main" or GENERATED_COLUMN.search(sql):
            raise ValueError(
                f"{path}: got the table {schema}.{name} in another schema, or with generated columns, "
                "expected plain tables in main. Create the catalog again with tools/register_corpus.py."
            )
    names = {name for _, name, _ in tables}
    for name, columns in REQUIRED_COLUMNS.items():
        if name not in names:
            if read_only or names:
                raise ValueError(
                    f"{path}: no table '{name}', expected a catalog made by tools/register_corpus.py."
                )
            continue
        missing = columns - list_columns(connection, name)
        # columns beyond the required ones are accepted: later versions add some
        if missing:
            raise ValueError(
                f"{path}: no column '{sorted(missing)[0]}' in '{name}', "
                "expected a catalog made by tools/register_corpus.py."
            )


def list_columns(connection: Any, table: str) -> set[str]:
    """Return the names of a table's columns."""
    statement = "SELECT table_name, column_name FROM system.main.duckdb_columns() WHERE NOT internal"
    return {column for name, column in fetch_rows(connection, statement) if name == table}


def _make_open_error(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: cannot be opened as a catalog ({str(error).splitlines()[0]})")


def _is_duckdb(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == MAGIC
