"""Imports on first use of the libraries that only mixtures need, and connections to DuckDB."""

import os
from types import ModuleType
from typing import Any


def import_duckdb() -> ModuleType:
    """Return the module `duckdb`. Raises ValueError if it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise ValueError(
            f"mixtures require duckdb ({error}). Run pip install -r requirements.txt."
        ) from error
    return duckdb


def connect_database(path: str = ":memory:", **options: Any) -> Any:
    """Return a connection that prints nothing.

    DuckDB's progress bar of statements of over 2 s goes to standard output by default.
    """
    connection = import_duckdb().connect(path, **options)
    connection.execute("SET enable_progress_bar = false")
    return connection


def connect_scratch(n_threads: int | None = None, **config: str) -> Any:
    """Return an in-memory database that evaluates expressions over Arrow tables of any size."""
    threads = {} if n_threads is None else {"threads": n_threads}
    connection = connect_database(config={**threads, **config})
    # 64-bit offsets: with 32 bits a batch is limited to 2 GiB of text
    connection.execute("SET arrow_large_buffer_size = true")
    return connection


def import_pyarrow() -> ModuleType:
    """Return the module `pyarrow`, the format of all columns."""
    import pyarrow

    return pyarrow


def import_parquet() -> ModuleType:
    """Return the module `pyarrow.parquet`."""
    import pyarrow.parquet

    return pyarrow.parquet


def import_dataset() -> ModuleType:
    """Return the module `pyarrow.dataset`."""
    import pyarrow.dataset

    return pyarrow.dataset


def import_filesystem() -> ModuleType:
    """Return the module `pyarrow.fs`."""
    import pyarrow.fs

    return pyarrow.fs


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
