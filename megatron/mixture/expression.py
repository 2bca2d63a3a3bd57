"""Conditions over properties as Python expressions, beside SQL's words.

    (field("source") == "Github") & field("language").isin(["Python", "JavaScript"])

Values go to DuckDB as parameters, never as text. What has no value satisfies no comparison and no `~` of one,
as in SQL; ask for it with `is_null()`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from megatron.mixture.properties import quoted

TAKES: dict[str, tuple[type, ...]] = {  # values that a property of each type is compared with
    "string": (str,), "category": (str,), "integer": (int, float), "float": (int, float),
    "boolean": (bool,), "date": (date,), "list": (str,),
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    """A comparison of one property with values, or other conditions joined by AND, OR or NOT."""

    word: str
    name: str = ""
    values: tuple[Any, ...] = ()
    parts: tuple["Condition", ...] = ()

    def __and__(self, other: "Condition") -> "Condition":
        return Condition("AND", parts=(self, _condition(other)))

    def __or__(self, other: "Condition") -> "Condition":
        return Condition("OR", parts=(self, _condition(other)))

    def __invert__(self) -> "Condition":
        return Condition("NOT", parts=(self,))

    def __bool__(self) -> bool:
        raise ValueError(f"{self}: neither true nor false by itself; join conditions with &, | and ~")

    def __str__(self) -> str:
        return self._write(lambda name, value: repr(value), lambda name: name)

    def sql(self, kinds: Mapping[str, str], given: dict[str, Any]) -> str:
        """In SQL; values are added to `given`, under the names that stand for them.

        kinds: type of each property, all of `names` among them. ValueError for a value of another type.
        """

        def take(name: str, value: Any) -> str:
            parameter = f"p{len(given)}"
            given[parameter] = _fitting(name, kinds[name], value)
            return f"${parameter}"

        return self._write(take, quoted)

    def names(self) -> list[str]:
        """Of the properties in it."""
        return [name for part in self.parts for name in part.names()] + ([self.name] if self.name else [])

    def _write(self, value: Callable[[str, Any], str], name: Callable[[str], str]) -> str:
        if self.parts:
            inner = [part._write(value, name) for part in self.parts]
            return f"(NOT {inner[0]})" if self.word == "NOT" else f"({f' {self.word} '.join(inner)})"
        values, own = [value(self.name, one) for one in self.values], name(self.name)
        if self.word == "IN":
            return f"({own} IN ({', '.join(values)}))"
        if self.word == "contains":
            return f"contains({own}, {values[0]})"
        return f"({' '.join([own, self.word, ' AND '.join(values)]).strip()})"


class Field:
    """A property, to be compared."""

    __hash__ = None  # type: ignore[assignment]  # == makes a condition

    def __init__(self, name: str) -> None:
        self.name = name.lower()  # as DuckDB has it

    def __eq__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("=", value)

    def __ne__(self, value: object) -> Condition:  # type: ignore[override]
        return self._compared("<>", value)

    def __lt__(self, value: Any) -> Condition:
        return self._compared("<", value)

    def __le__(self, value: Any) -> Condition:
        return self._compared("<=", value)

    def __gt__(self, value: Any) -> Condition:
        return self._compared(">", value)

    def __ge__(self, value: Any) -> Condition:
        return self._compared(">=", value)

    def isin(self, values: Iterable[Any]) -> Condition:
        """It has one of the values. ValueError for none."""
        given = tuple(values)
        if not given or isinstance(values, str):
            raise ValueError(f"field '{self.name}': isin wants a list of values, found {values!r}")
        return self._compared("IN", *given)

    def between(self, low: Any, high: Any) -> Condition:
        """It is neither below `low` nor above `high`."""
        return self._compared("BETWEEN", low, high)

    def contains(self, value: str) -> Condition:
        """A list has the element, a string the part."""
        return self._compared("contains", value)

    def is_null(self) -> Condition:
        """The document has no value of it."""
        return Condition("IS NULL", self.name)

    def _compared(self, word: str, *values: Any) -> Condition:
        if any(value is None for value in values):
            raise ValueError(f"field '{self.name}': nothing is equal to None; use is_null()")
        return Condition(word, self.name, values)


def field(name: str) -> Field:
    """The property of a name, or `corpus`, `tokens`, `size`."""
    return Field(name)


def _condition(other: Any) -> Condition:
    if not isinstance(other, Condition):
        raise ValueError(f"{other!r}: wanted a condition; put each comparison in parentheses")
    return other


def _fitting(name: str, kind: str, value: Any) -> Any:
    """A value as DuckDB is given it. ValueError for one of another type."""
    if kind == "date" and isinstance(value, str):
        try:
            return date.fromisoformat(value)
        except ValueError:
            raise ValueError(f"field '{name}': found {value!r}, wanted a date such as 2024-02-29") from None
    wanted: Sequence[type] = TAKES[kind]
    odd = isinstance(value, bool) != (kind == "boolean") or isinstance(value, datetime)
    if odd or not isinstance(value, tuple(wanted)):
        raise ValueError(f"field '{name}': is {kind}, found {value!r}")
    return value
