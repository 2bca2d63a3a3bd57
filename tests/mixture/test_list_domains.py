"""Domains of properties with several values, compared with an enumeration of all documents."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.list_domains import find_weighted_values
from megatron.mixture.catalog.properties import read_properties
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.serve.client import MixtureDataset

VALUES = [["Go"], ["C", "Go"], ["C", "Go", "Python"], [], None, ["C", "C", None], ["Python", "C"]]
PROPERTIES = ("languages AS languages list", "licence AS licence category")


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Return a catalog of 1,400 documents in two files; document i has the languages VALUES[i % 7]."""
    for part in range(2):
        with (tmp_path / f"{part}.jsonl").open("w") as file:
            for i in range(700 * part, 700 * part + 700):
                record = {"text": f"document {i}", "languages": VALUES[i % 7], "licence": "AB"[i % 2]}
                file.write(json.dumps(record) + "\n")
    path = tmp_path / "c"
    with Catalog(path, n_threads=1) as opened:
        opened.register("code", [str(tmp_path)], read_properties(PROPERTIES), quiet=True)
    return path


def list_members(result) -> dict[str, list[tuple[int, int]]]:
    """Return (file, row) of each document of each domain."""
    members: dict[str, list[tuple[int, int]]] = {name: [] for name in result.names}
    for domain, file, begin, end in (row.values() for row in result.intervals.to_pylist()):
        members[result.names[domain]] += [(file, row) for row in range(begin, end)]
    return members


def values_of(file: int, row: int) -> set[str | None]:
    return set(VALUES[(700 * file + row) % 7] or [None]) - {None} or {None}


def test_each_document_is_in_the_domain_of_one_of_its_values(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query().run(opened, ["languages"])
        again = Query().run(opened, ["languages"])
    members = list_members(result)
    assert Counter(place for places in members.values() for place in places) == Counter(
        {(file, row): 1 for file in range(2) for row in range(700)}
    )
    for name, places in members.items():
        assert all((None if name == "None" else name) in values_of(*place) for place in places)
    # Go: 200 alone, a half of 200 and a third of 200; binomial standard deviations of about 10
    counts = dict(zip(result.names, result.n_documents.tolist(), strict=True))
    assert counts["None"] == 400
    assert abs(counts["Go"] - (200 + 100 + 200 / 3)) < 50
    assert abs(counts["Python"] - (200 / 3 + 100)) < 50
    assert result.compute_identity() == again.compute_identity()


def test_each_value_is_a_domain_of_the_document(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened:
        result = Query(list_domains="each").run(opened, ["languages", "licence"])
    expected = Counter(
        (value, "AB"[(700 * file + row) % 2])
        for file in range(2) for row in range(700) for value in values_of(file, row)
    )  # fmt: skip
    assert dict(zip(result.domains, result.n_documents.tolist(), strict=True)) == expected
    for (language, licence), places in zip(result.domains, list_members(result).values(), strict=True):
        assert len(set(places)) == len(places)
        assert all(language in values_of(*place) for place in places)
        assert all("AB"[(700 * file + row) % 2] == licence for file, row in places)


def test_the_choice_does_not_depend_on_the_other_files_and_their_folder(catalog, tmp_path) -> None:
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "other_name.jsonl").write_bytes((tmp_path / "1.jsonl").read_bytes())
    with Catalog(tmp_path / "d", n_threads=1) as other:
        other.register("code", [str(tmp_path / "moved")], read_properties(PROPERTIES), quiet=True)
        alone = list_members(Query().run(other, ["languages"]))
    with Catalog(catalog, read_only=True) as opened:
        together = list_members(Query().run(opened, ["languages"]))
    for name, places in alone.items():
        assert [row for _, row in places] == [row for file, row in together[name] if file == 1]


def test_a_mixture_uses_documents_for_values_with_a_weight(catalog, tmp_path) -> None:
    (tmp_path / "m.yaml").write_text(
        "catalog: c\nby: languages\nweights: {Go: 1, Python: 1}\ncount: documents\n"
        "dry: redistribute\nwhere: len(languages) > 0\n"
    )
    with DocumentChunks(tmp_path / "m.yaml", chunk_size=64) as source:
        read = [
            (int(text.removeprefix("document ")), source.names[domain])
            for chunk in MixtureDataset(lambda: source)
            for text, domain in zip(chunk.documents, chunk.domains, strict=True)
        ]
    # every document with Go or Python, once: none of them is lost to C, which has no weight
    with_weight = {i for i in range(1400) if {"Go", "Python"} & values_of(*divmod(i, 700))}
    assert sorted(number for number, _ in read) == sorted(with_weight)
    assert all(name in values_of(*divmod(number, 700)) for number, name in read)


def test_each_delivers_a_document_once_per_value_in_an_epoch(catalog, tmp_path) -> None:
    (tmp_path / "m.yaml").write_text(
        "catalog: c\nby: languages\nlist_domains: each\nweights: {Go: 3, C: 1}\ncount: documents\n"
    )
    with DocumentChunks(tmp_path / "m.yaml", chunk_size=80) as source:
        chunks = list(islice(MixtureDataset(lambda: source), 10))
    # 800 documents: 600 of Go, one epoch, and 200 of C
    of_go = [
        text
        for chunk in chunks
        for text, k in zip(chunk.documents, chunk.domains, strict=True)
        if source.names[k] == "Go"
    ]
    assert len(of_go) == len(set(of_go)) == 600


def test_values_with_a_weight_are_found_in_every_form_of_weights() -> None:
    by = ["languages", "licence"]
    assert find_weighted_values("inferred", by) == {}
    assert find_weighted_values({"Go": 1, "C": 0}, by) == {"languages": {"Go"}}
    nested = {"Go": {"weight": 1, "weights": {"A": 1}}, "C": {"weight": 0}}
    assert find_weighted_values(nested, by) == {"languages": {"Go"}, "licence": {"A"}}
    entries = [{"where": {"languages": ["Go", "C"], "licence": "B"}, "weight": 2}, "wrong", {"weight": 1}]
    assert find_weighted_values(entries, by) == {"languages": {"Go", "C"}, "licence": {"B"}}


def test_another_choice_is_refused(catalog) -> None:
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match="expected one of once"):
        Query(list_domains="all").run(opened, ["languages"])
