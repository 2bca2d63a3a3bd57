"""Conditions over properties as Python expressions, with the operators of SQL.

    (field("source") == "Github") & field("language").isin(["Python", "JavaScript"])

Values are passed to DuckDB as parameters, never as text. As in SQL, a missing value satisfies no comparison
and no `~` of one; select missing values with `is_null()`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from megatron.mixture.catalog.properties import quote_identifier

VALUE_TYPES: dict[str, tuple[type, ...]] = {  # Python types that a property may be compared with
    "string": (str,), "category": (str,), "integer": (int, float), "float": (int, float),
    "boolean": (bool,), "date": (date,), "list": (str,),
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
        return self._format(lambda name, value: repr(value), lambda name: name)

    def to_sql(self, kinds: Mapping[str, str], parameters: dict[str, Any]) -> str:
        """Return the condition in SQL. Its values are added to `parameters` under their placeholders.

        kinds   type of each property, including all of `property_names`

        Raises ValueError for a value of another type.
        """

        def add_parameter(name: str, value: Any) -> str:
            # unique over all conditions of a query, which share the dictionary
            placeholder = f"p{len(parameters)}"
            parameters[placeholder] = _check_value(name, kinds[name], value)
            return f"${placeholder}"

        return self._format(add_parameter, quote_identifier)

    def property_names(self) -> list[str]:
        """Return the names of the properties in the condition."""
        return [name for part in self.parts for name in part.property_names()] + (
            [self.name] if self.name else []
        )

    def _format(self, format_value: Callable[[str, Any], str], format_name: Callable[[str], str]) -> str:
        # one format for SQL (placeholders) and for messages (values)
        if self.parts:
            inner = [part._format(format_value, format_name) for part in self.parts]
            return f"(NOT {inner[0]})" if self.operator == "NOT" else f"({f' {self.operator} '.join(inner)})"
        values, column = [format_value(self.name, value) for value in self.values], format_name(self.name)
        if self.operator == "IN":
            return f"({column} IN ({', '.join(values)}))"
        if self.operator == "contains":
            return f"contains({column}, {values[0]})"
        # x = $p0, x BETWEEN $p0 AND $p1, or x IS NULL, whose values are empty (hence strip)
        return f"({' '.join([column, self.operator, ' AND '.join(values)]).strip()})"


class Field:
    """A property, ready to be compared."""

    __hash__ = None  # type: ignore[assignment]  # == returns a condition

    def __init__(self, name: str) -> None:
        self.name = name.lower()  # names are not case-sensitive in DuckDB

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compare("=", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
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
