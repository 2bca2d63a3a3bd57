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


def pyarrow() -> ModuleType:
    """Arrow, in which columns travel."""
    import pyarrow

    return pyarrow


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
