"""Imports on first use of the libraries that only mixtures need, and connections to DuckDB."""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

INSTALL = "Run pip install -r requirements.txt."


def import_duckdb() -> ModuleType:
    """Return the module `duckdb`. Raises ValueError if it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise ValueError(f"mixtures require duckdb ({error}). {INSTALL}") from error
    return duckdb


def import_deltalake() -> ModuleType:
    """Return the module `deltalake`, the table format of catalogs. Raises ValueError if not installed."""
    try:
        import deltalake
    except ImportError as error:
        raise ValueError(f"mixtures require deltalake ({error}). {INSTALL}") from error
    return deltalake


def connect_database(n_threads: int | None = None, folder: Path | str | None = None) -> Any:
    """Return an in-memory database. With `folder` it reads no file outside of it, whatever the query is."""
    threads = {} if n_threads is None else {"threads": n_threads}
    connection = import_duckdb().connect(":memory:", config=threads)
    # DuckDB's progress bar of statements of over 2 s goes to standard output by default
    connection.execute("SET enable_progress_bar = false")
    # 64-bit offsets: with 32 bits a batch is limited to 2 GiB of text
    connection.execute("SET arrow_large_buffer_size = true")
    if folder is not None:
        connection.execute("SET python_enable_replacements = false")
        connection.execute(f"SET allowed_directories = {[str(folder)]!r}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    return connection


def import_pyarrow() -> ModuleType:
    """Return the module `pyarrow`, the format of all columns, with its submodules in use."""
    import pyarrow
    import pyarrow.fs
    import pyarrow.parquet

    return pyarrow


def import_flight() -> ModuleType:
    """Return the module `pyarrow.flight`. Raises ValueError if this build of pyarrow has none."""
    # Otherwise each failed handshake prints a line on the terminal.
    # gRPC reads it when it is loaded, hence before the import; a value of the user has priority.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        import pyarrow.flight as module
    except ImportError as error:
        raise ValueError(
            f"a mixture server requires pyarrow.flight ({error}). Install a build of pyarrow with it."
        ) from error
    return module


def fetch_rows(connection: Any, statement: str, given: Any = None) -> list[tuple[Any, ...]]:
    """Execute a statement and return all its rows.

    DuckDB requires that a result is read to its end before the next statement.
    """
    return connection.execute(statement, given).fetchall()
