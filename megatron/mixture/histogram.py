"""How the documents of a corpus, and their tokens, are spread over the values of a property."""

from datetime import date, timedelta
from typing import Any

from megatron.mixture.libraries import rows
from megatron.mixture.properties import Property, quoted

MOST_VALUES = 20  # that are told one by one
N_BINS = 10  # that numbers and dates fall into where there are more
SCALES = ("integer", "float", "date")
COUNTS = "count(*), CAST(sum(tokens) AS BIGINT)"

Row = tuple[Any, int, int | None]  # value, documents, tokens where they are counted


def histogram(connection: Any, table: str, one: Property) -> list[Row]:
    """Values of a property with documents and tokens, the most frequent first; what is left is one row more.

    Numbers and dates of more than MOST_VALUES values come in bins of one width, the lowest first. A document
    counts once for each element of a list. None: no value, or an empty list.
    """
    name = quoted(one.name)
    if one.kind == "list":
        name = f"unnest(CASE WHEN len({name}) > 0 THEN {name} ELSE [NULL] END)"
    values = f"(SELECT {name} AS value, tokens FROM {table})"
    ((n_values,),) = rows(connection, f"SELECT count(DISTINCT value) FROM {values}")
    if n_values > MOST_VALUES and one.kind in SCALES:
        return _bins(connection, values, one.kind)
    found = rows(
        connection,
        f"SELECT value, {COUNTS} FROM {values} GROUP BY 1 ORDER BY 2 DESC, 1 NULLS LAST LIMIT {MOST_VALUES}",
    )
    ((n_all, tokens_all),) = rows(connection, f"SELECT {COUNTS} FROM {values}")
    n_left = n_all - sum(n for _, n, _ in found)
    if n_left:
        n_others = n_values - sum(value is not None for value, _, _ in found)
        tokens = None if tokens_all is None else tokens_all - sum(tokens or 0 for *_, tokens in found)
        found.append((f"({n_others:,} other values)", n_left, tokens))
    return found


def _bins(connection: Any, values: str, kind: str) -> list[Row]:
    ok = "isfinite(value)" if kind == "float" else "value IS NOT NULL"
    ((low, high),) = rows(connection, f"SELECT min(value), max(value) FROM {values} WHERE {ok}")
    if kind == "float":
        width = (high - low) / N_BINS
        place = f"least({N_BINS - 1}, CAST(floor((value - $low) / $width) AS INTEGER))"
    else:
        span = (high - low).days if kind == "date" else high - low
        width = -(-(span + 1) // N_BINS)
        place = "(value - $low) // $width"
    given = {"low": low, "width": width}
    found = rows(
        connection, f"SELECT {place}, {COUNTS} FROM {values} WHERE {ok} GROUP BY 1 ORDER BY 1", given
    )
    told: list[Row] = [(_bin(low, width, at), n, tokens) for at, n, tokens in found]
    for condition, label in (("value IS NULL", None), (f"value IS NOT NULL AND NOT ({ok})", "not finite")):
        ((n, tokens),) = rows(connection, f"SELECT {COUNTS} FROM {values} WHERE {condition}")
        told += [(label, n, tokens)] if n else []
    return told


def _bin(low: Any, width: Any, at: int) -> str:
    """What the at-th bin is called."""
    if isinstance(low, date):
        begin = low + timedelta(days=at * width)
        return f"{begin} to {begin + timedelta(days=width - 1)}"
    if isinstance(low, float):
        return f"{low + at * width:.4g} to {low + (at + 1) * width:.4g}"
    return f"{low + at * width:,} to {low + (at + 1) * width - 1:,}"
