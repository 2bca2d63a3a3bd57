"""Conditions of a query as filters of DuckDB: SQL that is parsed and checked, or Python expressions."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.config.presets import suggest_nearest
from megatron.mixture.catalog.expression import Condition
from megatron.mixture.lazy_imports import fetch_rows

ALLOWED_FUNCTIONS = frozenset(
    ["+", "-", "*", "/", "%", "||", "~~", "!~~", "~~*", "!~~*", "lower", "upper", "trim", "length", "len"]
    + ["contains", "starts_with", "ends_with", "prefix", "suffix", "substr", "substring", "regexp_matches"]
    + ["list_contains", "list_value", "abs", "round", "coalesce", "year", "month", "day", "hash"]
)
LOGIC_CLASSES = frozenset(["COMPARISON", "CONJUNCTION", "BETWEEN", "OPERATOR", "CASE"])
ALLOWED_CLASSES = LOGIC_CLASSES | {"COLUMN_REF", "CONSTANT", "FUNCTION", "CAST"}
MAX_DEPTH = 200  # of nested expressions


def build_filters(
    connection: Any, conditions: Sequence[str | Condition], kinds: Mapping[str, str]
) -> list[Any]:
    """Return each condition as a filter of a relation: checked SQL, or an expression of DuckDB."""
    filters = []
    for condition in conditions:
        try:
            filters.append(_build_filter(connection, condition, kinds))
        except RecursionError:
            raise _make_depth_error(condition) from None
    return filters


def _build_filter(connection: Any, condition: Any, kinds: Mapping[str, str]) -> Any:
    if isinstance(condition, str):
        try:
            condition.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"where {condition!r}: got characters that are not UTF-8. Correct them."
            ) from None
        _check_sql_condition(connection, condition, sorted(kinds))
        # the newline ends a comment, which would otherwise hide the closing parenthesis
        return f"({condition}\n)"
    if not isinstance(condition, Condition):
        raise ValueError(f"where {condition!r}: expected SQL, or a condition on a field.")
    for name in condition.property_names():
        if name not in kinds:
            raise _make_unknown_error(str(condition), name, sorted(kinds))
    return condition.to_expression(kinds)


def _make_depth_error(condition: Any) -> ValueError:
    shown = f"{condition[:60]}..." if isinstance(condition, str) else "a Condition"
    return ValueError(f"where {shown!r}: got more than {MAX_DEPTH} nested levels. Simplify it.")


def _make_unknown_error(condition: str, name: str, columns: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.0)[0]
    return ValueError(
        f"where {condition!r}: no property '{name}'; did you mean '{near}'? "
        f"known: {', '.join(columns)} (write text in single quotes)"
    )


def _check_sql_condition(connection: Any, condition: str, columns: Sequence[str]) -> None:
    """Raise ValueError unless the text is one plain condition over known columns."""
    # DuckDB parses the condition and returns the syntax tree as JSON; only allowed nodes may remain. It
    # binds and executes nothing, so that no table t needs to exist.
    ((serialized,),) = fetch_rows(
        connection, "SELECT json_serialize_sql(?)", [f"SELECT 1 FROM t WHERE {condition}"]
    )
    parsed = json.loads(serialized)
    if parsed["error"]:
        raise ValueError(f"where {condition!r}: {parsed['error_message']}")
    nodes = [statement["node"] for statement in parsed["statements"]]
    # `true; SELECT 1` has two nodes, `true UNION SELECT 1` one of another type
    if len(nodes) != 1 or nodes[0].get("type") != "SELECT_NODE" or nodes[0]["where_clause"] is None:
        raise ValueError(f"where {condition!r}: expected one condition.")
    rest = ("modifiers", "group_expressions", "having", "qualify", "sample")
    # `true ORDER BY 1`, `true LIMIT 1`, `true GROUP BY a`
    if any(nodes[0].get(name) for name in rest):
        raise ValueError(f"where {condition!r}: expected a condition and nothing after it.")
    for node in _iter_expressions(nodes[0]["where_clause"], condition):
        kind = node["class"]
        if kind not in ALLOWED_CLASSES:
            raise ValueError(
                f"where {condition!r}: {kind.lower().replace('_', ' ')} is not allowed in a condition."
            )
        if kind == "FUNCTION" and node["function_name"] not in ALLOWED_FUNCTIONS:
            near = suggest_nearest(node["function_name"], sorted(ALLOWED_FUNCTIONS))
            raise ValueError(
                f"where {condition!r}: function '{node['function_name']}' is not allowed; {near}"
            )
        if kind == "COLUMN_REF":
            name = node["column_names"][0].lower()
            # a qualified name (t.x, or a field of a struct) could be another column than the checked one
            if name not in columns or len(node["column_names"]) > 1:
                raise _make_unknown_error(condition, ".".join(node["column_names"]), columns)


def _iter_expressions(tree: Any, condition: str) -> Iterator[dict[str, Any]]:
    """Yield every expression of a parsed condition. Raises ValueError if they are nested too deeply."""
    # a stack instead of recursion, because the depth is chosen by the author of the condition
    rest = [(tree, 0)]
    while rest:
        part, depth = rest.pop()
        # an expression is a node with "class"; the depth counts these, not the levels of JSON
        if isinstance(part, dict):
            if "class" in part:
                depth += 1
                yield part
            rest += [(child, depth) for child in part.values()]
        elif isinstance(part, list):
            rest += [(child, depth) for child in part]
        if depth > MAX_DEPTH:
            raise _make_depth_error(condition)
