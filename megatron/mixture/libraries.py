"""The libraries that only mixtures want, imported when they are first used."""

import os
from types import ModuleType
from typing import Any


def duckdb() -> ModuleType:
    """DuckDB, which keeps the catalog. ValueError where it is not installed."""
    try:
        import duckdb
    except ImportError as error:
        raise ValueError(f"mixtures want duckdb ({error}); pip install -r requirements.txt") from error
    return duckdb


def connect(path: str = ":memory:", **options: Any) -> Any:
    """A connection that prints nothing: DuckDB's bar of statements of over 2 s goes to standard output."""
    connection = duckdb().connect(path, **options)
    connection.execute("SET enable_progress_bar = false")
    return connection


def connect_scratch(n_threads: int | None = None, **config: str) -> Any:
    """A database in memory, to evaluate expressions over Arrow tables of any size."""
    threads = {} if n_threads is None else {"threads": n_threads}
    connection = connect(config={**threads, **config})
    connection.execute("SET arrow_large_buffer_size = true")  # else no more than 2 GiB of text at a time
    return connection


def pyarrow() -> ModuleType:
    """Arrow, in which columns travel."""
    import pyarrow

    return pyarrow


def parquet() -> ModuleType:
    """Arrow's reader of parquet."""
    import pyarrow.parquet

    return pyarrow.parquet


def flight() -> ModuleType:
    """Arrow Flight, over which a server is asked. ValueError where this pyarrow was built without it."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else each failed handshake is a line on the terminal
    try:
        import pyarrow.flight as found
    except ImportError as error:
        raise ValueError(f"a mixture server wants pyarrow.flight ({error})") from error
    return found


def rows(connection: Any, statement: str, given: Any = None) -> list[tuple[Any, ...]]:
    """What a statement of DuckDB answers, all of it: a statement must be read to its end before the next."""
    return connection.execute(statement, given).fetchall()
