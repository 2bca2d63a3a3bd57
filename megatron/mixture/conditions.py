"""Conditions of a query as Python expressions, with the operators of SQL.

    (field("source") == "Github") & field("language").isin(["Python", "JavaScript"])

An expression becomes SQL with quoted names and values. As in SQL, a missing value satisfies no comparison and
no `~` of one; select missing values with `is_null()`. The database that evaluates conditions reads no file
except the catalog's.
"""

from collections.abc import Iterable
from datetime import date
from typing import Any

from megatron.mixture.properties import quote_identifier


class Condition:
    """SQL of a condition, which &, | and ~ combine."""

    def __init__(self, sql: str) -> None:
        self.sql = sql

    def __and__(self, other: "Condition") -> "Condition":
        return Condition(f"({self.sql} AND {_check_condition(other).sql})")

    def __or__(self, other: "Condition") -> "Condition":
        return Condition(f"({self.sql} OR {_check_condition(other).sql})")

    def __invert__(self) -> "Condition":
        return Condition(f"(NOT {self.sql})")

    def __bool__(self) -> bool:
        # `a and b` and `1 < x < 2` call bool() and would drop the first condition without an error
        raise ValueError(f"{self}: a condition has no truth value. Join conditions with &, | and ~.")

    def __str__(self) -> str:
        return self.sql


class Field:
    """A property, ready to be compared."""

    __hash__ = None  # type: ignore[assignment]  # == returns a condition

    def __init__(self, name: str) -> None:
        self.name = name

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
        given = [] if isinstance(values, str) else list(map(self._quote, values))
        if not given:
            raise ValueError(f"field '{self.name}': got {values!r}, expected a list of values for isin.")
        return Condition(f"({quote_identifier(self.name)} IN ({', '.join(given)}))")

    def between(self, low: Any, high: Any) -> Condition:
        """Return the condition that the property is neither below `low` nor above `high`."""
        return (self >= low) & (self <= high)

    def contains(self, value: str) -> Condition:
        """Return the condition that a list contains the element, or a string the substring."""
        return Condition(f"contains({quote_identifier(self.name)}, {self._quote(value)})")

    def is_null(self) -> Condition:
        """Return the condition that the document has no value of the property."""
        return Condition(f"({quote_identifier(self.name)} IS NULL)")

    def _compare(self, operator: str, value: Any) -> Condition:
        return Condition(f"({quote_identifier(self.name)} {operator} {self._quote(value)})")

    def _quote(self, value: Any) -> str:
        if isinstance(value, bool | int | float):
            return repr(value)
        if isinstance(value, str | date):
            return "'" + str(value).replace("'", "''") + "'"
        raise ValueError(
            f"field '{self.name}': got {value!r}, expected text, a number or a date. Use is_null()."
        )


def field(name: str) -> Field:
    """Return the property of that name, or one of `corpus`, `tokens` and `size`."""
    return Field(name)


def _check_condition(other: Any) -> Condition:
    if not isinstance(other, Condition):
        raise ValueError(f"got {other!r}, expected a condition. Put each comparison in parentheses.")
    return other
