"""Conditions as Python expressions select the same documents as the same conditions in SQL."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.expression import Condition, field
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query

PROPERTIES = (
    "s AS s category",
    "i AS i integer",
    "f AS f float",
    "b AS b boolean",
    "d AS d date",
    "l AS l list",
)
ODD = "O'Neil \" ; DROP TABLE files --"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Catalog]:
    """Return a catalog of 200 documents with a property of each type; a tenth of the values are missing."""
    rng = np.random.default_rng(3)
    with (tmp_path / "t.jsonl").open("w") as file:
        for _ in range(200):
            properties = {
                "s": ["Github", "C4", ODD][rng.integers(3)], "i": int(rng.integers(-5, 6)),
                "f": float(rng.integers(8)) / 4, "b": bool(rng.integers(2)),
                "d": f"2024-02-{rng.integers(1, 30):02}", "l": ["x", "y", "z"][: rng.integers(4)],
            }  # fmt: skip
            present = {key: value for key, value in properties.items() if rng.random() > 0.1}
            file.write(json.dumps({"text": "", **present}) + "\n")
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("a", [str(tmp_path / "t.jsonl")], read_properties(PROPERTIES), quiet=True)
        yield catalog


SAME = [
    (field("s") == "Github", "s = 'Github'"),
    (field("s") != "Github", "s <> 'Github'"),
    (field("S") == ODD, "s = 'O''Neil \" ; DROP TABLE files --'"),
    (field("i") < 2, "i < 2"),
    (field("i") <= 2, "i <= 2"),
    (field("i") > 1.5, "i > 1.5"),
    (field("i") >= -2, "i >= -2"),
    (field("f") == 0.25, "f = 0.25"),
    (field("b") == True, "b = true"),  # noqa: E712
    (field("d") >= date(2024, 2, 15), "d >= '2024-02-15'"),
    (field("d") == "2024-02-29", "d = '2024-02-29'"),
    (field("s").isin(["C4", ODD]), "s IN ('C4', 'O''Neil \" ; DROP TABLE files --')"),
    (field("i").between(-1, 3), "i BETWEEN -1 AND 3"),
    (field("l").contains("y"), "list_contains(l, 'y')"),
    (field("s").contains("hub"), "contains(s, 'hub')"),
    (field("f").is_null(), "f IS NULL"),
    (~field("f").is_null(), "f IS NOT NULL"),
    (~(field("i") > 0), "NOT i > 0"),
    ((field("s") == "C4") & (field("i") > 0) | field("b").is_null(), "s = 'C4' AND i > 0 OR b IS NULL"),
    ((field("s") == "C4") & ((field("i") > 0) | field("b").is_null()), "s = 'C4' AND (i > 0 OR b IS NULL)"),
    (~((field("s") == "C4") & (field("i") > 0)), "NOT (s = 'C4' AND i > 0)"),
    ((field("corpus") == "a") & (field("size") > 30), "corpus = 'a' AND size > 30"),
]  # fmt: skip


@pytest.mark.parametrize(("condition", "sql"), SAME, ids=[sql for _, sql in SAME])
def test_an_expression_selects_the_documents_of_the_same_sql(
    opened: Catalog, condition: Condition, sql: str
) -> None:
    result = Query().where(condition).run(opened, by=["s"])
    expected = Query().where(sql).run(opened, by=["s"])
    assert 0 < result.n_documents.sum() < 200
    assert result.compute_identity() == expected.compute_identity()


def test_conditions_in_python_and_sql_combine(opened: Catalog) -> None:
    mixed = Query().where(field("s") == "C4").where("i > 0").where(field("i") < 4)
    assert (
        mixed.run(opened).compute_identity()
        == Query().where("s = 'C4' AND i > 0 AND i < 4").run(opened).compute_identity()
    )


def test_a_value_is_never_read_as_sql(opened: Catalog) -> None:
    for word in ("x' OR true --", "'); DROP TABLE files; --", "$p0", "?"):
        with pytest.raises(ValueError, match="no document satisfies"):
            Query().where(field("s") == word).run(opened)
    assert Query().run(opened).n_documents.sum() == 200
    with pytest.raises(ValueError, match="no property"):
        Query().where(field("s) OR (true") == "x").run(opened)


def test_an_unknown_property_is_refused_and_the_nearest_offered(catalog: Path) -> None:
    with Catalog(catalog, read_only=True) as opened:
        for condition in (field("langauge") == "C", ~((field("stars") > 1) & field("langauge").is_null())):
            with pytest.raises(ValueError, match="no property 'langauge'; did you mean 'language'"):
                Query().where(condition).run(opened)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (field("i") == "1", "'i': got '1', expected a value of type integer"),
        (field("s") == 1, "'s': got 1, expected a value of type category"),
        (field("i") == True, "got True, expected a value of type integer"),  # noqa: E712
        (field("d") == "2024-02-30", "expected a date such as"),
        (field("b") == 1, "got 1, expected a value of type boolean"),
        (field("l").contains(3), "got 3, expected a value of type list"),
    ],
)
def test_a_value_of_another_type_is_refused(opened: Catalog, condition: Condition, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Query().where(condition).run(opened)


def test_typical_mistakes_are_errors_when_a_condition_is_built() -> None:
    with pytest.raises(ValueError, match="Use is_null"):
        _ = field("a") == None  # noqa: E711
    with pytest.raises(ValueError, match="Join conditions with &"):
        _ = (field("a") == 1) and (field("b") == 2)
    with pytest.raises(ValueError, match="expected a list of values for isin"):
        field("a").isin("text")
    with pytest.raises(ValueError, match="parentheses"):
        _ = (field("a") == 1) & "b"  # type: ignore[operator]
