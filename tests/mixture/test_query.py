"""Queries: exactly the documents that satisfy the conditions, as intervals."""

import numpy as np
import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query, QueryResult
from tests.mixture.conftest import LANGUAGES


def list_documents(result: QueryResult) -> list[list[int]]:
    """Return the numbers of the documents of each domain, as in write_lines."""
    firsts = {"one.jsonl": 0, "two.jsonl": 30}
    numbers: list[list[int]] = [[] for _ in result.domains]
    for domain, file, begin, end in zip(
        *(result.get_column(n).tolist() for n in ("domain", "file", "begin", "end")), strict=True
    ):
        first = firsts[result.files[file].path.rpartition("/")[2]]
        numbers[domain] += range(first + begin, first + end)
    return numbers


def test_conditions_combine_and_domains_are_the_values_of_the_properties(catalog) -> None:
    query = Query().where("stars >= 10").where("stars < 40 AND language IN ('C', 'Go')")
    with Catalog(catalog, read_only=True) as opened:
        result = query.run(opened, by=["language"])
    assert result.names == ("C", "Go")
    assert list_documents(result) == [[i for i in range(10, 40) if i % 3 == k] for k in (0, 1)]
    assert result.n_documents.tolist() == [10, 10]


def test_adjacent_documents_are_one_interval(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query().where("stars BETWEEN 5 AND 44").run(opened)
    assert result.intervals.num_rows == 2  # one in each file
    assert list_documents(result) == [list(range(5, 45))]


def test_an_unknown_property_is_refused_and_the_nearest_offered(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened:
        with pytest.raises(ValueError, match="no property 'langauge'; did you mean 'language'"):
            Query().where("langauge = 'C'").run(opened)
        with pytest.raises(ValueError, match="no property 'star'; did you mean 'stars'"):
            Query().run(opened, by=["star"])
        with pytest.raises(ValueError, match="no document satisfies"):
            Query().where("language = 'Cobol'").run(opened)


@pytest.mark.parametrize(
    "condition",
    ["stars IN (SELECT 1)", "true; DROP TABLE files", "stars = 1 ORDER BY stars",
     "read_text('/etc/passwd') = 'x'",
     "stars = (", "getenv('HOME') = ''", "true) OR (true", "files.path = ''", "true UNION SELECT 2", ""],
)  # fmt: skip
def test_only_a_plain_condition_is_accepted(catalog, condition) -> None:
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match="where"):
        Query().where(condition).run(opened)


def test_a_condition_that_is_not_utf8_is_refused_with_a_message(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match="that are not UTF-8"):
        Query().where("language = '\udcff'").run(opened)


def test_a_comment_does_not_swallow_the_next_condition(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query().where("stars < 20 -- few").where("stars > 17").run(opened)
    assert list_documents(result) == [[18, 19]]


def test_a_saved_result_loads_unchanged(catalog, tmp_path) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query().run(opened, by=["language"])
    result.save(tmp_path / "r.arrow")
    again = QueryResult.load(tmp_path / "r.arrow")
    assert again.compute_identity() == result.compute_identity()
    assert (again.names, again.files) == (LANGUAGES, result.files)
    assert again.intervals.equals(result.intervals)
    (tmp_path / "r.arrow").write_bytes(b"no arrow")
    with pytest.raises(ValueError, match="not a query result"):
        QueryResult.load(tmp_path / "r.arrow")


def test_each_row_of_a_random_table_is_in_its_domain_once(tmp_path) -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 5, size=(3000, 2))
    path = tmp_path / "r.jsonl"
    path.write_text("".join(f'{{"text":"","a":{a},"b":"{b}"}}\n' for a, b in keys.tolist()))
    with Catalog(tmp_path / "c", n_threads=2) as opened:
        opened.register("r", [str(path)], read_properties(["a AS a integer", "b"]), quiet=True)
        result = Query().where("a <> 2").run(opened, by=["a", "b"])
    begin, end, domain = (result.get_column(name) for name in ("begin", "end", "domain"))
    rows = np.concatenate([np.arange(b, e) for b, e in zip(begin, end, strict=True)])
    of = np.repeat(domain, end - begin)
    assert sorted(rows.tolist()) == np.flatnonzero(keys[:, 0] != 2).tolist()
    assert [result.domains[k] for k in of] == [(a, str(b)) for a, b in keys[rows].tolist()]
