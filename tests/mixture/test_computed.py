"""Properties computed by a Python function: values, types, processes, interruptions, invalid functions."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedWriter
from megatron.mixture import compute_property as computation
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.computed import list_computed
from megatron.mixture.catalog.expression import field
from megatron.mixture.catalog.query import Query
from megatron.mixture.compute_property import compute_property, describe_corpus, remove_computed
from megatron.mixture.document_chunks import DocumentChunks
from megatron.mixture.property_worker import check_value
from tests.mixture.conftest import write_lines

FUNCTIONS = """
import os, pathlib, time

class Bucket:
    def __init__(self):
        self.limit = 11

    def __call__(self, documents):
        return ["short" if len(text) <= self.limit else "long" for text in documents]

def words(documents):
    return [text.split() for text in documents]

def number(documents):
    return [int(text.split()[1]) for text in documents]

def slow(documents):
    with open(os.environ["CALLS"], "a") as file:
        file.write(f"{len(documents)}\\n")
    time.sleep(0.05)
    return number(documents)

def wrong(documents):
    return [None if text.endswith(" 7") else 1.0 for text in documents]

def too_few(documents):
    return [1] * (len(documents) - 1)

def raises(documents):
    raise RuntimeError("no model")

def dies(documents):
    os._exit(3)

def length(documents):
    return [len(ids) for ids in documents]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a module of functions that processes can import."""
    (tmp_path / "modules").mkdir()
    path = tmp_path / "modules" / "my_properties.py"
    path.write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setenv("PYTHONPATH", f"{path.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return path


def test_a_computed_property_is_queried_like_a_registered_one(catalog, functions, tmp_path) -> None:
    done = compute_property(catalog, "code", "bucket", "my_properties:Bucket", "category", 2, quiet=True)
    assert (done.n_files, done.n_documents, done.n_known) == (2, 50, 0)
    compute_property(catalog, "code", "words", "my_properties:words", "list", quiet=True)
    again = compute_property(catalog, "code", "bucket", "my_properties:Bucket", "category", quiet=True)
    assert again.n_known == 50
    with Catalog(catalog, read_only=True) as opened:
        result = Query().where("stars > 4").run(opened, ["language", "bucket"])
        # the text of document i is "document i": 10 characters below 10, then 11
        expected = Counter((("C", "Go", "Python")[i % 3], "short") for i in range(5, 50))
        assert dict(zip(result.domains, result.n_documents.tolist(), strict=True)) == expected
        assert Query().where(field("words").contains("17")).run(opened).n_documents.tolist() == [1]
        assert Query().where("words[2] IN ('3', '4')").run(opened).n_documents.tolist() == [2]
        assert describe_corpus(opened, "code")["bucket"] == [("short", 50, None)]
    (tmp_path / "m.yaml").write_text(
        f"catalog: {catalog.name}\nby: bucket\nwhere: list_contains(words, '7')\ncount: documents\n"
    )
    with DocumentChunks(tmp_path / "m.yaml") as source:
        assert source.read(0, 1).column("text").to_pylist() == ["document 7"] * 512


def test_files_registered_later_are_computed_by_a_second_call(catalog, functions, tmp_path) -> None:
    compute_property(catalog, "code", "number", "my_properties:number", "integer", quiet=True)
    write_lines(tmp_path / "three.jsonl", 10, first=50)
    with Catalog(catalog, n_threads=1) as opened:
        properties = opened.get_corpus("code").properties
        opened.register("code", [str(tmp_path / "three.jsonl")], properties, quiet=True)
        with pytest.raises(ValueError, match=r"no values for 1 of 3 files.*add-property again"):
            Query().where("number < 5").run(opened)
        assert Query().where("stars < 5").run(opened).n_documents.tolist() == [5]
    done = compute_property(catalog, "code", "number", "my_properties:number", "integer", quiet=True)
    assert (done.n_documents, done.n_known) == (60, 50)
    with Catalog(catalog, read_only=True) as opened:
        assert Query().where("number = stars").run(opened).n_documents.tolist() == [60]
        with pytest.raises(ValueError, match="did you mean 'number'"):
            Query().where("numbr = 1").run(opened)


def test_parts_and_batches_keep_the_order_of_the_documents(catalog, functions, monkeypatch) -> None:
    monkeypatch.setattr(computation, "PART_DOCUMENTS", 7)
    compute_property(catalog, "code", "number", "my_properties:number", "integer", 2, batch=3, quiet=True)
    with Catalog(catalog, read_only=True) as opened:
        assert Query().where("number = stars").run(opened).n_documents.tolist() == [50]
    folder = list_computed(catalog, "code")["number"].folder
    assert sorted(path.suffix for path in folder.iterdir()) == ["", ".arrow", ".arrow", ".json"]


@pytest.mark.parametrize(
    ("function", "kind", "n", "why"),
    [
        (
            "wrong",
            "float",
            2,
            r"one.jsonl, document 8: my_properties:wrong: got None, expected .* float",
        ),
        ("number", "string", 1, r"document 1: .* got 0, expected a value of type string"),
        ("too_few", "integer", 1, r"returned 49|returned 29, expected a list of 30 values"),
        ("raises", "integer", 1, r"documents 1 to 30: my_properties:raises raised RuntimeError \(no model\)"),
        ("dies", "integer", 2, "a process ended without an answer"),
        ("missing", "integer", 1, "defines no function or class missing"),
    ],
)
def test_a_wrong_function_is_one_sentence(catalog, functions, function, kind, n, why) -> None:
    with pytest.raises(ValueError, match=why):
        compute_property(catalog, "code", "p", f"my_properties:{function}", kind, n, quiet=True)
    with Catalog(catalog, read_only=True) as opened, pytest.raises(ValueError, match=r"p\b"):
        Query().where("p IS NOT NULL").run(opened)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "string"), (math.nan, "float"), (math.inf, "float"), ("1", "integer"), (True, "integer"),
        (1, "boolean"), (1 << 63, "integer"), ("2024-13-01", "date"), (["a", None], "list"),
        ("\ud800", "string"), ("a", "list"), (np.float64("nan"), "float"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused(value, kind) -> None:
    with pytest.raises(ValueError, match="^place: got"):
        check_value(value, kind, "place")


def test_values_of_numpy_and_dates_are_accepted() -> None:
    assert check_value(np.int32(3), "integer", "") == 3
    assert check_value(3, "float", "") == 3.0
    assert str(check_value("2024-02-29", "date", "")) == "2024-02-29"


def test_names_and_functions_that_exist_are_refused(catalog, functions, tmp_path) -> None:
    for name, function, why in (
        ("stars", "my_properties:number", "was registered with it"),
        ("corpus", "my_properties:number", "reserved"),
        ("../x", "my_properties:number", "without a name"),
        ("x", "no_module_here:f", "Add its folder to PYTHONPATH"),
        ("x", "os.system", "expected module:name"),
    ):
        with pytest.raises(ValueError, match=why):
            compute_property(catalog, "code", name, function, "integer", quiet=True)
    compute_property(catalog, "code", "x", "my_properties:number", "integer", quiet=True)
    with pytest.raises(ValueError, match=r"got values of my_properties:number .*--replace"):
        compute_property(catalog, "code", "x", "my_properties:words", "list", quiet=True)
    functions.write_text(FUNCTIONS.replace("[1]) for", "[1]) + 1 for"))
    with pytest.raises(ValueError, match="another version of its source"):
        compute_property(catalog, "code", "x", "my_properties:number", "integer", quiet=True)
    compute_property(catalog, "code", "x", "my_properties:number", "integer", replace=True, quiet=True)
    with Catalog(catalog, read_only=True) as opened:
        assert Query().where("x = stars + 1").run(opened).n_documents.tolist() == [50]
    remove_computed(catalog, "code", "x")
    assert list_computed(catalog, "code") == {}
    with pytest.raises(ValueError, match="expected one of none"):
        remove_computed(catalog, "code", "x")


def test_ids_of_a_dataset_are_passed_to_the_function(functions, tmp_path) -> None:
    with IndexedWriter(tmp_path / "data", np.dtype(np.uint16), {}) as writer:
        for n in (3, 1, 4, 1, 5):
            writer.add_document(np.arange(n))
    with Catalog(tmp_path / "c", n_threads=1) as opened:
        opened.register("ids", [str(tmp_path / "data")], (), quiet=True)
    compute_property(tmp_path / "c", "ids", "n", "my_properties:length", "integer", quiet=True)
    with Catalog(tmp_path / "c", read_only=True) as opened:
        assert Query().where("n = tokens AND n > 2").run(opened).n_documents.tolist() == [3]


def test_a_killed_computation_resumes_with_the_missing_parts(functions, tmp_path, root) -> None:
    n, part = 40_000, computation.PART_DOCUMENTS
    write_lines(tmp_path / "many.jsonl", n)
    path, calls = tmp_path / "c", tmp_path / "calls"
    with Catalog(path, n_threads=1) as opened:
        opened.register("code", [str(tmp_path / "many.jsonl")], (), quiet=True)
    command = [sys.executable, str(root / "tools" / "register_corpus.py"), str(path), "add-property", "code"]
    command += ["--name", "number", "--function", "my_properties:slow", "--type", "integer"]
    command += ["--processes", "2", "--batch", "1024"]
    environment = os.environ | {"CALLS": str(calls)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    folder = Path(f"{path}.properties") / "corpus=code" / "number"
    end = time.monotonic() + 120
    while not list(folder.glob("*.parts/*.arrow")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {file: file.stat().st_mtime_ns for file in folder.glob("*.parts/*.arrow")}
    assert finished
    assert json.loads((folder / "property.json").read_text())["function"] == "my_properties:slow"
    time.sleep(1)  # its processes end with it, and write no more
    before = calls.read_text()
    time.sleep(0.5)
    assert calls.read_text() == before
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=True)
    n_kept = sum(min(part, n - int(file.stem)) for file in finished)
    assert int(done.stdout.split()[-3].replace(",", "")) >= n_kept > 0, done.stdout
    assert sum(map(int, calls.read_text()[len(before) :].split())) <= n - n_kept
    with Catalog(path, read_only=True) as opened:
        result = Query().where("number >= 0").run(opened, ["number"])
    assert result.get_column("begin").tolist() == list(range(n))
    assert [value for (value,) in result.domains] == list(range(n))
