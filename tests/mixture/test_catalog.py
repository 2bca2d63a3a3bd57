"""Registration: every document once, broken lines located, nothing left half done."""

import gzip
import json
import shutil
import signal
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture.catalog import line_blocks
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.properties import Property, read_properties, read_property
from megatron.mixture.catalog.query import Query
from megatron.mixture.document_chunks import DocumentChunks
from tests.mixture.conftest import PROPERTIES, write_lines

SOURCES = {  # of the sample, as in data/INDEX.md
    "RedPajamaC4": 2000, "RedPajamaStackExchange": 2000, "RedPajamaGithub": 200, "RedPajamaArXiv": 20,
    "RedPajamaWikipedia": 20, "RedPajamaCommonCrawl": 20, "RedPajamaBook": 2,
}  # fmt: skip


def register(path: Path, inputs: list[Path], *properties: str, name: str = "a") -> object:
    with Catalog(path, n_threads=1) as catalog:
        return catalog.register(name, [str(path) for path in inputs], read_properties(properties), quiet=True)


def test_a_property_is_a_path_or_sql_with_a_name_and_a_type() -> None:
    assert read_property("meta.source") == Property("source", "meta.source")
    assert read_property("a[0].b as c DATE") == Property("c", "a[0].b", "date")
    assert read_property("length(record->>'$.x') AS n integer").name == "n"
    for wrong in ("upper(x)", "x AS file", "", "x AS n interger"):
        with pytest.raises(ValueError, match="property"):
            read_property(wrong)
    with pytest.raises(ValueError, match="got the name twice"):
        read_properties(["a.x", "b.x"])


def test_the_slimpajama_preset_counts_the_sources_of_the_sample(scaling_data, tmp_path) -> None:
    sample = scaling_data / "redpajama_sample" / "derived_slimpajama_schema.jsonl.gz"
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        done = catalog.register("slim", [str(sample)], read_properties([], "slimpajama"), quiet=True)
        assert (done.n_documents, done.n_broken) == (4262, 0)
        assert {value: n for value, n, _ in catalog.describe_corpus("slim")["source"]} == SOURCES


def test_broken_lines_are_counted_and_located_and_the_others_keep_their_spans(tmp_path) -> None:
    lines = [b'{"text":"a","n":1}', b"", b'{"text":5}', b'{"text":"b","n":"x"}', b'{"te', b" ",
             b'{"text":"\xff"}', b"5", b'{"text":"d","n":7}']  # fmt: skip
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    done = register(tmp_path / "c", [path], "n AS n integer")
    assert (done.n_documents, done.n_broken) == (2, 5)
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        broken = [(line, reason) for _, line, reason in catalog.list_broken("a")]
        rows = catalog.connection.execute(
            "SELECT row, begin, size, n FROM documents_1 ORDER BY row"
        ).fetchall()
    assert broken == [
        (3, "no text under 'text'"), (4, "'n' is no integer"), (5, "not JSON"), (7, "not JSON"),
        (8, "no text under 'text'"),
    ]  # fmt: skip
    whole = path.read_bytes() + b"\n"
    assert [json.loads(whole[begin : begin + size])["n"] for _, begin, size, _ in rows] == [1, 7]
    assert [row[0] for row in rows] == [0, 1]


def test_a_lone_surrogate_is_the_replacement_character_in_texts_and_properties(tmp_path) -> None:
    lines = [{"text": "a \ud800 b", "of": "x\udfff"}, {"text": "\U0001f41f", "of": "y"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = register(tmp_path / "c", [tmp_path / "a.jsonl"], "of")
    assert (done.n_documents, done.n_broken, done.absent) == (2, 0, ())
    (tmp_path / "m.yaml").write_text("catalog: c\nby: [of]\ncount: documents\nshuffle: false\n")
    source = DocumentChunks(tmp_path / "m.yaml")
    assert source.names == ("x\ufffd", "y")
    assert set(source.read(0, 1).column("text").to_pylist()) == {"a \ufffd b", "\U0001f41f"}


def test_a_property_that_no_document_has_is_reported(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", 4)
    done = register(tmp_path / "c", [tmp_path / "a.jsonl"], "meta.stars AS stars", "meta.strs AS strs")
    assert done.absent == ("strs",)


def test_a_file_that_is_not_a_catalog_is_refused_and_unchanged(tmp_path) -> None:
    path = tmp_path / "text.jsonl"
    write_lines(path, 4)
    before = path.read_bytes()
    for read_only in (True, False):
        with pytest.raises(ValueError, match="expected a catalog"):
            Catalog(path, read_only=read_only)
    assert path.read_bytes() == before


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 20])
def test_block_boundaries_and_compression_do_not_change_the_result(
    tmp_path, monkeypatch, block_bytes
) -> None:
    monkeypatch.setattr(line_blocks, "BLOCK_BYTES", block_bytes)
    write_lines(tmp_path / "a.jsonl", 40)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    register(tmp_path / "c", [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"], *PROPERTIES)
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        columns = "row, begin, size, language, stars"
        rows = catalog.connection.execute(f"SELECT {columns} FROM documents_1 ORDER BY file, row").fetchall()
    text = (tmp_path / "a.jsonl").read_text()
    assert rows[:40] == rows[40:]
    assert [
        json.loads(text[begin : begin + size])["meta"]["stars"] for _, begin, size, *_ in rows[:40]
    ] == list(range(40))
    assert [stars for *_, stars in rows[:40]] == list(range(40))


def test_only_new_and_changed_files_are_registered(tmp_path) -> None:
    path, first, second = tmp_path / "c", tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    write_lines(first, 5)
    write_lines(second, 7)
    assert register(path, [first], *PROPERTIES).n_documents == 5
    again = register(path, [first, second], *PROPERTIES)
    assert (again.n_files, again.n_known, again.n_documents) == (1, 1, 7)
    write_lines(first, 9)
    again = register(path, [first, second], *PROPERTIES)
    assert (again.n_files, again.n_documents) == (1, 9)
    with Catalog(path) as catalog:
        assert catalog.summarize_corpora()[0].n_documents == 16
        with pytest.raises(ValueError, match="has the properties"):
            catalog.register("a", [str(first)], read_properties(["meta.stars"]), quiet=True)
        with pytest.raises(ValueError, match="did you mean 'a'"):
            catalog.describe_corpus("aa")
        catalog.remove("a")
        assert catalog.summarize_corpora() == []


def test_a_file_that_fails_leaves_nothing_and_those_before_it_stay(tmp_path) -> None:
    write_lines(tmp_path / "1.jsonl", 5)
    broken = tmp_path / "2.jsonl.gz"
    broken.write_bytes(gzip.compress((tmp_path / "1.jsonl").read_bytes())[:-9])
    with pytest.raises(ValueError, match=r"2.jsonl.gz: got damaged content .* Write or download it again\.$"):
        register(tmp_path / "c", [tmp_path / "1.jsonl", broken], *PROPERTIES)
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        assert [(summary.n_files, summary.n_documents) for summary in catalog.summarize_corpora()] == [(1, 5)]


def test_a_killed_registration_resumes(root, tmp_path) -> None:
    for i in range(8):
        write_lines(tmp_path / f"{i}.jsonl", 20_000, first=i * 20_000)
    words = [sys.executable, str(root / "tools" / "register_corpus.py"), str(tmp_path / "c"), "add",
             "a", str(tmp_path / "*.jsonl"), "--property", PROPERTIES[1], "--threads", "1"]  # fmt: skip
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(0.7)
    first.kill()
    first.communicate(timeout=240)
    again = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        query = "SELECT count(*), count(DISTINCT stars), max(stars) FROM documents_1"
        assert catalog.connection.execute(query).fetchall() == [(160_000, 160_000, 159_999)]


def test_parquet_and_indexed_datasets_supply_their_columns(tmp_path) -> None:
    columns = {"text": ["a", None, "c"], "lang": ["x", "y", "z"], "tags": [["p"], [], ["q", "r"]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with IndexedWriter(tmp_path / "pair", np.dtype(np.uint16), {}) as writer:
        for length in (3, 1):
            writer.add_document(np.arange(length))
    pyarrow.parquet.write_table(pyarrow.table({"lang": ["x", "y"]}), tmp_path / "pair.parquet")
    done = register(tmp_path / "c", [tmp_path / "t.parquet"], "lang AS lang", "tags AS tags list")
    assert (done.n_documents, done.n_broken) == (2, 1)
    assert register(tmp_path / "c", [tmp_path / "pair"], "lang AS lang", name="b").n_documents == 2
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        assert catalog.list_broken("a") == [(str(tmp_path / "t.parquet"), 2, "no text under 'text'")]
        assert catalog.describe_corpus("b")["lang"] == [("x", 1, 3), ("y", 1, 1)]
        rows = catalog.connection.execute(
            "SELECT row, begin, lang, tags FROM documents_1 ORDER BY row"
        ).fetchall()
    assert rows == [(0, 0, "x", ["p"]), (1, 2, "z", ["q", "r"])]


def test_the_redpajama_preset_detects_each_part_and_the_languages_of_code(scaling_data, tmp_path) -> None:
    names = {"arxiv": 20, "book": 2, "c4": 1000, "cc": 20, "github": 200, "stackexchange": 2000, "wiki": 20}
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        inputs = [str(scaling_data / "redpajama_sample" / f"sample_{name}*.jsonl") for name in names]
        catalog.register("red", inputs, read_properties([], "redpajama"), quiet=True)
        sources = {value: n for value, n, _ in catalog.describe_corpus("red")["source"]}
        assert sources == {"wikipedia" if k == "wiki" else k: n for k, n in names.items()}
        python = Query().where("source = 'github' AND list_contains(languages, 'Python')").run(catalog)
        mostly = Query().where("source = 'github' AND language = 'Python'").run(catalog)
    lines = [json.loads(line) for n in (1, 2) for line in
             (scaling_data / "redpajama_sample" / f"sample_github{n}.jsonl").open()]  # fmt: skip
    languages = [{entry["name"]: int(entry["bytes"]) for entry in line["meta"]["language"]} for line in lines]
    assert python.n_documents.tolist() == [sum("Python" in sizes for sizes in languages)]
    most = [max(sizes, key=lambda name, sizes=sizes: sizes[name]) for sizes in languages if sizes]
    assert mostly.n_documents.tolist() == [most.count("Python")]


@pytest.mark.parametrize("preset", ["c4", "fineweb", "pile"])
def test_a_preset_reads_the_schema_it_is_named_after(tmp_path, preset) -> None:
    url = "https://a.org/"
    if preset == "fineweb":
        record = {"text": "t", "url": url, "dump": "CC-MAIN-2013-20", "language": "en", "language_score": 0.5,
                "token_count": 7}  # fmt: skip
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "t.parquet")
        expected = (url, "CC-MAIN-2013-20", "en", 0.5, 7)
    else:
        record = {"c4": {"text": "t", "url": url, "timestamp": "2019-04-25T12:57:54Z"},
                  "pile": {"text": "t", "meta": {"pile_set_name": "PubMed Central"}}}[preset]  # fmt: skip
        (tmp_path / "t.jsonl").write_text(json.dumps(record))
        expected = (url, date(2019, 4, 25)) if preset == "c4" else ("PubMed Central",)
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        properties = read_properties([], preset)
        catalog.register("a", [str(tmp_path / "t.*")], properties, quiet=True)
        names = ", ".join(prop.name for prop in properties)
        assert catalog.connection.execute(f"SELECT {names} FROM documents_1").fetchall() == [expected]


def test_every_type_keeps_its_values_and_a_name_may_be_an_sql_keyword(tmp_path) -> None:
    values = {"a": "x", "i": 2**40, "f": 0.25, "b": True, "d": "2020-02-29", "l": ["p", "q"]}
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "", **values}) + '\n{"text":""}\n')
    kinds = {"a": "category", "i": "integer", "f": "float", "b": "boolean", "d": "date", "l": "list"}
    register(tmp_path / "c", [tmp_path / "t.jsonl"], *(f"{k} AS {k} {t}" for k, t in kinds.items()),
             "a AS order", "a AS group category")  # fmt: skip
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        rows = catalog.connection.execute("SELECT a, i, f, b, d, l FROM documents_1 ORDER BY row").fetchall()
        assert rows == [tuple((values | {"d": date(2020, 2, 29)}).values()), (None,) * 6]
        assert Query().where("\"order\" = 'x'").run(catalog, by=["group"]).names == ("x",)
        assert catalog.describe_corpus("a")["order"] == [("x", 1, None), (None, 1, None)]


def test_a_description_bins_numbers_and_dates_unnests_lists_and_counts_omitted_values(tmp_path) -> None:
    days = [date(2020, 1, 1) + timedelta(days=i) for i in range(100)]
    lists = [["a", "b"]] * 3 + [[]] * 97
    lines = [{"text": "", "i": i, "f": i / 99, "d": str(days[i]), "l": lists[i], "s": str(i)}
             for i in range(100)]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    properties = ("i AS i integer", "f AS f float", "d AS d date", "l AS l list", "s AS s")
    register(tmp_path / "c", [tmp_path / "t.jsonl"], *properties)
    with Catalog(tmp_path / "c", read_only=True) as catalog:
        histograms = catalog.describe_corpus("a")
    assert histograms["i"] == [(f"{10 * k} to {10 * k + 9}", 10, None) for k in range(10)]
    assert [n for _, n, _ in histograms["f"]] == [10] * 10
    assert histograms["d"][1] == ("2020-01-11 to 2020-01-20", 10, None)
    assert histograms["l"] == [(None, 97, None), ("a", 3, None), ("b", 3, None)]
    assert histograms["s"][-1] == ("(80 other values)", 80, None)
    assert sum(n for _, n, _ in histograms["s"]) == 100


KILLED_AT = """
import os, pathlib, signal, sys
from megatron.mixture.catalog import catalog, line_blocks, part_files, small_files, storage
from megatron.mixture.catalog.properties import read_properties
path, files, moment = sys.argv[1], sys.argv[2:-2], int(sys.argv[-2])
left, line_blocks.BLOCK_BYTES, small_files.BATCH_FILES = [moment], 1000, int(sys.argv[-1])
def count_calls(function):
    def kill_at_moment(*words):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*words)
    return kill_at_moment
storage.fsync_path = count_calls(storage.fsync_path)
pathlib.Path.rename = count_calls(pathlib.Path.rename)
part_files.PartWriter.write = count_calls(part_files.PartWriter.write)
with catalog.Catalog(catalog.Path(path), n_threads=1) as opened:
    opened.register("a", files, read_properties(["meta.stars AS stars integer"]), quiet=True)
"""


@pytest.mark.parametrize(
    ("at_once", "moments"), [(1, (2, 4, 6, 8, 12, 13, 24, 25)), (3, (2, 4, 6, 8, 9, 10))]
)
def test_killed_at_any_write_a_file_is_in_the_catalog_whole_or_not_at_all(tmp_path, at_once, moments) -> None:
    for i in range(3):
        write_lines(tmp_path / f"{i}.jsonl", 50, first=i * 50)
    files, path, seen = [str(tmp_path / f"{i}.jsonl") for i in range(3)], tmp_path / "c", set()
    for moment in moments:  # 3 to create the catalog, and about 9 per batch
        shutil.rmtree(path, ignore_errors=True)
        done = subprocess.run(
            [sys.executable, "-c", KILLED_AT, str(path), *files, str(moment), str(at_once)],
            capture_output=True,
            timeout=240,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        with Catalog(path, n_threads=1) as catalog:
            n_files = sum(summary.n_files for summary in catalog.summarize_corpora())
            assert [file.entry.n_documents for file in catalog.files] == [50] * n_files
            if catalog.list_corpora():
                assert catalog.connection.execute("SELECT count(*) FROM documents_1").fetchall() == [
                    (50 * n_files,)
                ]
            again = catalog.register("a", files, read_properties([PROPERTIES[1]]), quiet=True)
            assert (again.n_known, again.n_files) == (n_files, 3 - n_files)
            query = "SELECT count(*), count(DISTINCT stars), max(stars) FROM documents_1"
            assert catalog.connection.execute(query).fetchall() == [(150, 150, 149)]
        seen.add(n_files)
    assert {0, 1} <= seen if at_once == 1 else seen == {0, 3}
