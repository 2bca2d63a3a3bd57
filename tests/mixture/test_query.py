"""Conditions and domains against a slow evaluation in Python, and sorted, repeatable selections."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.mixture.catalog import Catalog
from megatron.mixture.properties import Condition, field, read_properties
from megatron.mixture.query import Query, Selection

PROPERTIES = [
    "lang AS lang category",
    "stars AS stars integer",
    "day AS day date",
    "tags AS tags list",
    "ok AS ok boolean",
]


def make_record(i: int) -> dict[str, object]:
    record: dict[str, object] = {
        "text": f"t{i}",
        "stars": i % 17,
        "day": f"2024-01-{1 + i % 28:02}",
        "ok": i % 2 == 0,
    }
    record["tags"] = ["x", "y", "y", None, "it's"][: i % 6] if i % 5 else None
    return record | ({"lang": ("C", "Go", "it's")[i % 3]} if i % 4 else {})


@pytest.fixture(scope="module")
def catalog(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("query")
    for k in range(3):
        with (folder / f"{k}.jsonl").open("w") as file:
            file.writelines(json.dumps(make_record(i)) + "\n" for i in range(100 * k, 100 * k + 100))
    with Catalog(folder / "c", n_threads=2) as opened:
        opened.register("a", [str(folder)], read_properties(PROPERTIES), quiet=True)
    return folder / "c"


CASES = [
    ("lang = 'C' AND stars > 10", (field("lang") == "C") & (field("stars") > 10),
     lambda r: r.get("lang") == "C" and r["stars"] > 10),
    ("lang <> 'it''s'", field("lang") != "it's", lambda r: r.get("lang", "it's") != "it's"),
    ("stars BETWEEN 3 AND 5 OR ok", field("stars").between(3, 5) | (field("ok") == True),  # noqa: E712
     lambda r: 3 <= r["stars"] <= 5 or r["ok"]),
    ("lang IS NULL", field("lang").is_null(), lambda r: "lang" not in r),
    ("NOT lang IN ('C', 'Go')", ~field("lang").isin(["C", "Go"]), lambda r: r.get("lang") == "it's"),
    ("day < DATE '2024-01-05'", field("day") < "2024-01-05", lambda r: r["day"] < "2024-01-05"),
    ("list_contains(tags, 'it''s')", field("tags").contains("it's"), lambda r: "it's" in (r["tags"] or [])),
]  # fmt: skip


@pytest.mark.parametrize("sql, expression, accepts", CASES, ids=[case[0] for case in CASES])
def test_sql_and_expressions_select_the_records_of_a_loop(sql, expression, accepts, catalog) -> None:
    expected = [i for i in range(300) if accepts(make_record(i))]
    for condition in (sql, expression):
        with Catalog(catalog, read_only=True) as opened:
            result = Query().where(condition).run(opened)
        # the files are sorted by their names here
        rows = [int(Path(result.files[file].path).stem) * 100 + row for file, row in
                zip(result.column("file").tolist(), result.column("row").tolist(), strict=True)]  # fmt: skip
        assert rows == expected


REFUSED = [
    ("langs = 'C'", "did you mean 'lang'"),
    ("true) OR (true", "syntax error"),
    ("true; SELECT 1", "expected one condition"),
    ("true ORDER BY 1", "syntax error"),
    ("lang = (SELECT content FROM read_text('/etc/passwd'))", "Permission Error"),
    ("stars > 'x'", "Could not convert string 'x'"),
    ("lang = 'none'", "no document satisfies"),
]


@pytest.mark.parametrize("condition, reason", REFUSED)
def test_a_condition_that_cannot_be_evaluated_is_refused(condition, reason, catalog) -> None:
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match=reason):
        Query().where(condition).run(opened)


def test_conditions_without_meaning_are_refused() -> None:
    for make in (lambda: field("x") == None, lambda: field("x").isin("en"), lambda: 1 < field("x") < 2,  # noqa: E711
                 lambda: (field("x") == 1) & True):  # fmt: skip
        with pytest.raises(ValueError, match="expected|no truth value"):
            make()
    assert str(Condition("a") & ~Condition("b")) == "(a AND (NOT b))"


def test_documents_are_sorted_by_domain_file_and_row_and_saved_as_they_are(catalog, tmp_path) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query(conditions=("stars > 2",)).run(opened, ["lang", "ok"])
    assert result.names == (
        "C/False",
        "C/True",
        "Go/False",
        "Go/True",
        "it's/False",
        "it's/True",
        "None/True",
    )
    domain = np.repeat(np.arange(7), result.n_documents)
    keys = list(
        zip(domain.tolist(), result.column("file").tolist(), result.column("row").tolist(), strict=True)
    )
    assert keys == sorted(keys)
    result.save(tmp_path / "x.arrow")
    loaded = Selection.load(tmp_path / "x.arrow")
    assert loaded.compute_identity() == result.compute_identity()
    assert loaded.documents.equals(result.documents) and loaded.domains == result.domains
    (tmp_path / "x.arrow").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="got a damaged file, or one of an earlier version. Run"):
        Selection.load(tmp_path / "x.arrow")


def test_a_list_puts_a_document_into_one_domain_and_weighted_values_take_precedence(catalog) -> None:
    values = [set(make_record(i)["tags"] or []) - {None} for i in range(300)]
    none = sum(not tags for tags in values)
    with Catalog(catalog, read_only=True) as opened:
        once = Query().run(opened, ["tags"])
        weighted = Query(weighted={"tags": {"y"}}).run(opened, ["tags"])
    assert once.n_documents.sum() == weighted.n_documents.sum() == 300
    assert dict(zip(once.names, once.n_documents.tolist(), strict=True))["None"] == none
    expected = sum(1 / len(tags) for tags in values if "y" in tags)
    assert abs(once.n_documents[once.names.index("y")] - expected) < 4 * expected**0.5
    assert weighted.n_documents[weighted.names.index("y")] == sum("y" in tags for tags in values)
