"""Conditions over properties as Python expressions, with the operators of SQL.

    (field("source") == "Github") & field("language").isin(["Python", "JavaScript"])

Names and values become nodes of DuckDB's expression API, never text of a statement. As in SQL, a missing
value satisfies no comparison and no `~` of one; select missing values with `is_null()`.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from megatron.mixture.lazy_imports import import_duckdb

VALUE_TYPES: dict[str, tuple[type, ...]] = {  # Python types that a property may be compared with
    "string": (str,), "category": (str,), "integer": (int, float), "float": (int, float),
    "boolean": (bool,), "date": (date,), "list": (str,),
}  # fmt: skip
LOGIC: dict[str, Callable[..., Any]] = {"AND": operator.and_, "OR": operator.or_}
# of an expression of DuckDB with the expressions of the values
COMPARISONS: dict[str, Callable[..., Any]] = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge,
    "IN": lambda column, *values: column.isin(*values),
    "BETWEEN": lambda column, low, high: column.between(low, high),
    "IS NULL": lambda column: column.isnull(),
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """Comparison of one property with values, or other conditions joined by AND, OR or NOT."""

    operator: str
    name: str = ""
    values: tuple[Any, ...] = ()
    parts: tuple["Condition", ...] = ()

    def __and__(self, other: "Condition") -> "Condition":
        return Condition("AND", parts=(self, _check_condition(other)))

    def __or__(self, other: "Condition") -> "Condition":
        return Condition("OR", parts=(self, _check_condition(other)))

    def __invert__(self) -> "Condition":
        return Condition("NOT", parts=(self,))

    def __bool__(self) -> bool:
        # `a and b` and `1 < x < 2` call bool() and would drop the first condition without an error
        raise ValueError(f"{self}: a condition has no truth value. Join conditions with &, | and ~.")

    def __str__(self) -> str:
        if self.parts:
            inner = f" {self.operator} ".join(map(str, self.parts))
            return f"(NOT {inner})" if self.operator == "NOT" else f"({inner})"
        values = list(map(repr, self.values))
        if self.operator == "IN":
            return f"({self.name} IN ({', '.join(values)}))"
        if self.operator == "contains":
            return f"contains({self.name}, {values[0]})"
        # x = 1, x BETWEEN 1 AND 2, or x IS NULL, whose values are empty (hence strip)
        return f"({' '.join([self.name, self.operator, ' AND '.join(values)]).strip()})"

    def to_expression(self, kinds: Mapping[str, str]) -> Any:
        """Return the condition as an expression of DuckDB, in which names and values are never read as SQL.

        kinds   type of each property, including all of `property_names`

        Raises ValueError for a value of another type.
        """
        duckdb = import_duckdb()
        if self.parts:
            parts = [part.to_expression(kinds) for part in self.parts]
            return ~parts[0] if self.operator == "NOT" else LOGIC[self.operator](*parts)
        column = duckdb.ColumnExpression(self.name)
        values = [
            duckdb.ConstantExpression(_check_value(self.name, kinds[self.name], value))
            for value in self.values
        ]
        if self.operator == "contains":
            return duckdb.FunctionExpression("contains", column, *values)
        return COMPARISONS[self.operator](column, *values)

    def property_names(self) -> list[str]:
        """Return the names of the properties in the condition."""
        return [name for part in self.parts for name in part.property_names()] + (
            [self.name] if self.name else []
        )


class Field:
    """A property, ready to be compared."""

    __hash__ = None  # type: ignore[assignment]  # == returns a condition

    def __init__(self, name: str) -> None:
        self.name = name.lower()  # names are not case-sensitive in DuckDB

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]  # no bool
        return self._compare("=", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]  # no bool
        return self._compare("<>", value)

    def __lt__(self, value: Any) -> Condition:
        return self._compare("<", value)

    def __le__(self, value: Any) -> Condition:
        return self._compare("<=", value)

    def __gt__(self, value: Any) -> Condition:
        return self._compare(">", value)

    def __ge__(self, value: Any) -> Condition:
        return self._compare(">=", value)

    def isin(self, values: Iterable[Any]) -> Condition:
        """Return the condition that the property has one of the values. Raises ValueError if empty."""
        # a string is iterable too: isin("en") would mean "e" or "n"
        given = tuple(values)
        if not given or isinstance(values, str):
            raise ValueError(f"field '{self.name}': got {values!r}, expected a list of values for isin.")
        return self._compare("IN", *given)

    def between(self, low: Any, high: Any) -> Condition:
        """Return the condition that the property is neither below `low` nor above `high`."""
        return self._compare("BETWEEN", low, high)

    def contains(self, value: str) -> Condition:
        """Return the condition that a list contains the element, or a string the substring."""
        return self._compare("contains", value)

    def is_null(self) -> Condition:
        """Return the condition that the document has no value of the property."""
        return Condition("IS NULL", self.name)

    def _compare(self, operator: str, *values: Any) -> Condition:
        if any(value is None for value in values):
            raise ValueError(f"field '{self.name}': got None, which no value is equal to. Use is_null().")
        return Condition(operator, self.name, values)


def field(name: str) -> Field:
    """Return the property of that name, or one of `corpus`, `tokens` and `size`."""
    return Field(name)


def _check_condition(other: Any) -> Condition:
    if not isinstance(other, Condition):
        raise ValueError(f"got {other!r}, expected a condition. Put each comparison in parentheses.")
    return other


def _check_value(name: str, kind: str, value: Any) -> Any:
    """Return a value as DuckDB expects it. Raises ValueError for a value of another type."""
    if kind == "date" and isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"field '{name}': got {value!r}, expected a date such as 2024-02-29.") from None
    expected: Sequence[type] = VALUE_TYPES[kind]
    # bool is a subclass of int, and datetime of date
    is_other_type = isinstance(value, bool) != (kind == "boolean") or isinstance(value, datetime)
    if is_other_type or not isinstance(value, tuple(expected)):
        raise ValueError(f"field '{name}': got {value!r}, expected a value of type {kind}.")
    return value
