"""The reader of sections: types, bounds, choices and nested sections, with the key in each message."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.config.option import REQUIRED, option
from megatron.config.section import read_section


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Nested section."""

    at: int = option(REQUIRED, "", at_least=0, unit="-")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Section with a field of each form."""

    rate: float = option(0.5, "", above=0, at_most=1, unit="-")
    folder: Path = option(Path("here"), "")
    flag: bool = option(False, "")
    kind: str = option("a", "", "a", "b")
    counts: list[int] = option([], "", above=0, unit="-")
    shares: list[float] = option([], "", above=0, unit="-")
    inner: Inner | None = option(None, "")
    points: list[Inner] = option([], "")
    run: dict[str, Any] = option({}, "")
    word: str = option("", "", read=lambda value, name: f"{name}={value}")


def test_values_are_converted_to_the_declared_types_and_null_is_not_set() -> None:
    raw = {
        "rate": 1, "folder": "there", "counts": [1e3], "shares": [2], "inner": {"at": 4.0},
        "points": [{"at": 0}, {"at": 1}], "run": {"x": [1]}, "word": 5, "kind": None,
    }  # fmt: skip
    section = read_section(Outer, raw, "f.yaml", separator=": ")
    assert section == Outer(
        rate=1.0, folder=Path("there"), counts=[1000], shares=[2.0], inner=Inner(at=4),
        points=[Inner(at=0), Inner(at=1)], run={"x": [1]}, word="f.yaml: word=5",
    )  # fmt: skip
    assert [type(n) for n in (section.rate, section.counts[0], section.shares[0])] == [float, int, float]


REFUSED: list[tuple[Any, str]] = [
    ({"rte": 1}, "s: unknown key 'rte'; did you mean 'rate'?"),
    ([1], "s: got [1], expected keys such as rate, folder"),
    ({"rate": 0}, "s.rate: got 0, expected more than 0"),
    ({"rate": 2}, "s.rate: got 2, expected more than 0 and 1 or less"),
    ({"rate": float("nan")}, "s.rate: got nan, expected a finite number. Remove the key for"),
    ({"flag": 1}, "s.flag: got 1, expected true or false"),
    ({"kind": "c"}, "s.kind: got 'c', expected one of a, b"),
    ({"folder": "a\nb"}, r"s.folder: got 'a\nb', expected one line"),
    ({"folder": ""}, "s.folder: got '', expected one line of text"),
    ({"counts": 3}, "s.counts: got 3, expected a list of int"),
    ({"counts": [1.5]}, "s.counts: got 1.5, expected integers"),
    ({"counts": [True]}, "s.counts: got True, expected integers"),
    ({"shares": [1, -1]}, "s.shares: got -1, expected numbers above 0"),
    ({"inner": {}}, "s.inner.at: got None, expected int"),
    ({"inner": {"to": 1}}, "s.inner: unknown key 'to'; did you mean 'at'?"),
    ({"points": [{"at": 0}, {"at": -1}]}, "s.points[1].at: got -1, expected 0 or more"),
    ({"run": [1]}, "s.run: got [1], expected keys"),
]


def test_a_wrong_value_is_refused_with_its_key() -> None:
    for raw, message in REFUSED:
        with pytest.raises(ValueError) as caught:
            read_section(Outer, raw, "s")
        assert str(caught.value).startswith(message)
