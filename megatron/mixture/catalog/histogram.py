"""Histograms of properties: the documents and tokens of a corpus over the values of a property."""

from datetime import date, timedelta
from typing import Any

from megatron.mixture.catalog.properties import Property, quote_identifier
from megatron.mixture.lazy_imports import fetch_rows

MAX_VALUES = 20  # listed separately
N_BINS = 10  # for numbers and dates with more values
BINNED_KINDS = ("integer", "float", "date")
COUNTS = "count(*), CAST(sum(tokens) AS BIGINT)"

HistogramRow = tuple[Any, int, int | None]  # value, documents, tokens if they are counted


def count_values(connection: Any, table: str, prop: Property) -> list[HistogramRow]:
    """Return the values of a property with documents and tokens, the most frequent first.

    The last row sums up the values beyond MAX_VALUES. Numbers and dates with more values than that are
    counted in bins of equal width, the lowest first. A document counts once for each element of a list. The
    value None means a missing value or an empty list.
    """
    name = quote_identifier(prop.name)
    if prop.kind == "list":
        # unnest of an empty or missing list has no row; of [NULL] it has one, which counts the document
        name = f"unnest(CASE WHEN len({name}) > 0 THEN {name} ELSE [NULL] END)"
    values = f"(SELECT {name} AS value, tokens FROM {table})"
    ((n_values,),) = fetch_rows(connection, f"SELECT count(DISTINCT value) FROM {values}")
    if n_values > MAX_VALUES and prop.kind in BINNED_KINDS:
        return _count_bins(connection, values, prop.kind)
    result = fetch_rows(
        connection,
        f"SELECT value, {COUNTS} FROM {values} GROUP BY 1 ORDER BY 2 DESC, 1 NULLS LAST LIMIT {MAX_VALUES}",
    )
    # rows after unnest: a document with two elements counts twice in the total as well
    ((n_all, tokens_all),) = fetch_rows(connection, f"SELECT {COUNTS} FROM {values}")
    n_left = n_all - sum(n for _, n, _ in result)
    if n_left:
        n_others = n_values - sum(value is not None for value, _, _ in result)
        tokens = None if tokens_all is None else tokens_all - sum(tokens or 0 for *_, tokens in result)
        result.append((f"({n_others:,} other values)", n_left, tokens))
    return result


def _count_bins(connection: Any, values: str, kind: str) -> list[HistogramRow]:
    is_valid = "isfinite(value)" if kind == "float" else "value IS NOT NULL"
    ((low, high),) = fetch_rows(connection, f"SELECT min(value), max(value) FROM {values} WHERE {is_valid}")
    if kind == "float":
        # above 0: of more than 20 distinct values, only NaN, Inf and -Inf are not finite
        width = (high - low) / N_BINS
        # the maximum would fall into bin N_BINS; it belongs to the last one
        bin_index = f"least({N_BINS - 1}, CAST(floor((value - $low) / $width) AS INTEGER))"
    else:
        span = (high - low).days if kind == "date" else high - low
        # Ceil, so that N_BINS bins of integer width cover all span + 1 values.
        # 0 to 100: span 100, width 11, last bin 99 to 109.
        width = -(-(span + 1) // N_BINS)
        bin_index = "(value - $low) // $width"
    parameters = {"low": low, "width": width}
    counts = fetch_rows(
        connection,
        f"SELECT {bin_index}, {COUNTS} FROM {values} WHERE {is_valid} GROUP BY 1 ORDER BY 1",
        parameters,
    )
    result: list[HistogramRow] = [(_format_bin(low, width, index), n, tokens) for index, n, tokens in counts]
    for condition, label in (
        ("value IS NULL", None),
        (f"value IS NOT NULL AND NOT ({is_valid})", "not finite"),
    ):
        ((n, tokens),) = fetch_rows(connection, f"SELECT {COUNTS} FROM {values} WHERE {condition}")
        result += [(label, n, tokens)] if n else []
    return result


def _format_bin(low: Any, width: Any, index: int) -> str:
    """Return the label of a bin."""
    if isinstance(low, date):
        begin = low + timedelta(days=index * width)
        return f"{begin} to {begin + timedelta(days=width - 1)}"
    if isinstance(low, float):
        return f"{low + index * width:.4g} to {low + (index + 1) * width:.4g}"
    return f"{low + index * width:,} to {low + (index + 1) * width - 1:,}"
