"""Conditions and domains against a slow evaluation in Python, and sorted, repeatable selections."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.mixture.catalog import Catalog
from megatron.mixture.query import Query, Selection
from tests.mixture.conftest import register

PROPERTIES = ["lang AS lang category", "stars AS stars integer", "day AS day date", "tags AS tags list"]
PROPERTIES.append("ok AS ok boolean")


def make_record(i: int) -> dict[str, Any]:
    day, is_even = f"2024-01-{1 + i % 28:02}", i % 2 == 0
    record: dict[str, Any] = {"text": f"t{i}", "stars": i % 17, "day": day, "ok": is_even}
    record["tags"] = ["x", "y", "y", None, "it's"][: i % 6] if i % 5 else None
    return record | ({"lang": ("C", "Go", "it's")[i % 3]} if i % 4 else {})


@pytest.fixture(scope="module")
def catalog(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("query")
    for k in range(3):
        with (folder / f"{k}.jsonl").open("w") as file:
            file.writelines(json.dumps(make_record(i)) + "\n" for i in range(100 * k, 100 * k + 100))
    register(folder / "c", [folder], PROPERTIES)
    return folder / "c"


CASES = [
    ("lang = 'C' AND stars > 10", lambda r: r.get("lang") == "C" and r["stars"] > 10),
    ("lang <> 'it''s'", lambda r: r.get("lang", "it's") != "it's"),
    ("stars BETWEEN 3 AND 5 OR ok", lambda r: 3 <= r["stars"] <= 5 or r["ok"]),
    ("lang IS NULL", lambda r: "lang" not in r),
    ("NOT lang IN ('C', 'Go')", lambda r: r.get("lang") == "it's"),
    ("day < DATE '2024-01-05'", lambda r: r["day"] < "2024-01-05"),
    ("list_contains(tags, 'it''s')", lambda r: "it's" in (r["tags"] or [])),
]


def test_conditions_select_the_records_of_a_loop(catalog: Path) -> None:
    for condition, accepts in CASES:
        with Catalog(catalog, read_only=True) as opened:
            result = Query().where(condition).run(opened)
        # the files are sorted by their names here
        stems = [int(Path(file.path).stem) for file in result.files]
        places = zip(result.column("file").tolist(), result.column("row").tolist(), strict=True)
        rows = [stems[file] * 100 + row for file, row in places]
        assert rows == [i for i in range(300) if accepts(make_record(i))], condition


REFUSED = [
    ("langs = 'C'", "Referenced column .langs. not found .*lang"),
    ("true) OR (true", "syntax error"),
    ("true; SELECT 1", "expected one condition"),
    ("true ORDER BY 1", "syntax error"),
    ("lang = (SELECT content FROM read_text('/etc/passwd'))", "Permission Error"),
    ("stars > 'x'", "Could not convert string 'x'"),
    ("lang = 'none'", "no document satisfies"),
]


def test_a_condition_that_cannot_be_evaluated_is_refused(catalog: Path) -> None:
    with Catalog(catalog, read_only=True) as opened:
        for condition, reason in REFUSED:
            with pytest.raises(ValueError, match=reason):
                Query().where(condition).run(opened)
        with pytest.raises(ValueError, match="by: got 'tags', a list"):
            Query().run(opened, ["tags"])


def test_documents_are_sorted_by_domain_file_and_row_and_saved_as_they_are(catalog, tmp_path) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query(conditions=("stars > 2",)).run(opened, ["lang", "ok"])
    names = ("C/False", "C/True", "Go/False", "Go/True", "it's/False", "it's/True", "None/True")
    assert result.names == names
    domain = np.repeat(np.arange(7), result.n_documents).tolist()
    keys = [*zip(domain, result.column("file").tolist(), result.column("row").tolist(), strict=True)]
    assert keys == sorted(keys)
    result.save(tmp_path / "x.arrow")
    loaded = Selection.load(tmp_path / "x.arrow")
    assert loaded.compute_identity() == result.compute_identity()
    assert loaded.documents.equals(result.documents) and loaded.domains == result.domains
    (tmp_path / "x.arrow").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="got a damaged file, or one of an earlier version. Run"):
        Selection.load(tmp_path / "x.arrow")
