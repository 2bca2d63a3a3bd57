"""Registration of every format, changes, several writers, kills, object stores, and errors in a sentence."""

import gzip
import json
import shutil
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron.mixture import files, registration
from megatron.mixture.catalog import Catalog
from megatron.mixture.files import iter_sample_lines
from megatron.mixture.query import Query
from megatron.mixture.registration import find_input_files
from tests.datasets import write_dataset
from tests.mixture.conftest import PROPERTIES, register, write_files, write_lines, write_tar
from tests.remote_servers import serve_bucket
from tests.tool_modules import Cli


def count(
    catalog: Path | str, where: tuple[str, ...] = (), by: tuple[str, ...] = ("language",)
) -> dict[str, int]:
    with Catalog(catalog, read_only=True) as opened:
        result = Query(conditions=where).run(opened, by)
    return dict(zip(result.names, result.n_documents.tolist(), strict=True))


def test_formats_of_the_same_documents_give_the_same_properties(tmp_path) -> None:
    write_lines(tmp_path / "plain.jsonl", 30)
    content = (tmp_path / "plain.jsonl").read_bytes()
    records = [json.loads(line) for line in content.splitlines()]
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(content))
    with pa.CompressedOutputStream(str(tmp_path / "packed.jsonl.zst"), "zstd") as stream:
        stream.write(content)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet", row_group_size=7)
    samples = [(f"{i:03}", {"json": json.dumps(record).encode()}) for i, record in enumerate(records)]
    write_tar(tmp_path / "samples.tar", samples)
    names = ["plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "rows.parquet", "samples.tar"]
    for name in names:
        result = register(tmp_path / name.replace(".", "-"), [tmp_path / name])
        assert (result.n_documents, result.n_broken, result.absent) == (30, 0, ())
        assert count(tmp_path / name.replace(".", "-"), ("stars >= 15",)) == {"C": 5, "Go": 5, "Python": 5}


def test_a_dataset_and_lines_take_the_properties_of_the_parquet_beside_them(tmp_path) -> None:
    write_dataset(tmp_path / "ids", map(np.arange, (3, 4, 5)))
    write_lines(tmp_path / "text.jsonl", 3)
    for name in ("ids", "text"):
        pq.write_table(pa.table({"quality": [0.1, 0.5, 0.9]}), tmp_path / f"{name}.parquet")
    assert register(tmp_path / "c-ids", [tmp_path / "ids"], ["quality AS quality float"]).n_documents == 3
    assert count(tmp_path / "c-ids", ("quality > 0.3", "tokens < 5"), ()) == {"all": 1}
    properties = ["quality AS quality float", "meta.language AS language"]
    write_lines(
        tmp_path / "more.jsonl", 2
    )  # small files are read together only without properties beside them
    files = [tmp_path / "text.jsonl", tmp_path / "more.jsonl"]
    assert register(tmp_path / "c-text", files, properties).n_documents == 5
    assert count(tmp_path / "c-text", ("quality > 0.3",)) == {"Go": 1, "Python": 1}
    pq.write_table(pa.table({"quality": [0.1]}), tmp_path / "text.parquet")
    sentence = r"text.parquet: got 1 rows, expected one per document of text.jsonl"
    with pytest.raises(ValueError, match=sentence):
        register(tmp_path / "other", [tmp_path / "text.jsonl"], properties)


def test_a_function_computes_properties_of_records_and_its_error_names_the_record(tmp_path) -> None:
    write_lines(tmp_path / "a.jsonl", 10)
    properties = ["bucket AS bucket integer", *PROPERTIES]
    function = {"function": lambda record: {"bucket": record["meta"]["stars"] // 4}}
    result = register(tmp_path / "c", [tmp_path / "a.jsonl"], properties, **function)
    assert result.n_documents == 10
    assert count(tmp_path / "c", by=("bucket",)) == {"0": 4, "1": 4, "2": 2}
    with pytest.raises(ValueError, match=r"a.jsonl, record 1: the function raised KeyError\('x'\)"):
        register(tmp_path / "d", [tmp_path / "a.jsonl"], properties, function=lambda r: {"bucket": r["x"]})


def test_only_new_and_changed_files_are_registered_and_versions_stay_until_pruned(tmp_path: Path) -> None:
    first, second, catalog = tmp_path / "one.jsonl", tmp_path / "two.jsonl", tmp_path / "catalog"
    write_lines(first, 30)
    write_lines(second, 20, first=30)
    assert register(catalog, [first, second]).n_documents == 50
    assert register(catalog, [first, second]).n_known == 2
    write_lines(second, 25, first=30)
    result = register(catalog, [first, second])
    assert (result.n_files, result.n_known, result.n_documents) == (1, 1, 25)
    with Catalog(catalog) as opened:
        version = opened.versions["code"]
        assert sum(file.n_documents for file in opened.files) == 55
        assert opened.prune({"code": 1}) == 0  # both versions need all files
    for snapshot, n in ({"code": 1}, 50), ({"code": version}, 55):
        with Catalog(catalog, snapshot=snapshot) as opened:
            assert len(Query().run(opened).documents) == n
    with Catalog(catalog) as opened:
        assert opened.prune({}) >= 1
    sentence = "code version 1 cannot be read: .* Use a version that was not pruned, or"
    with pytest.raises(ValueError, match=sentence):
        Catalog(catalog, snapshot={"code": 1})


def test_broken_records_are_counted_and_located(cli: Cli, tmp_path) -> None:
    lines = ['{"text": "a", "n": 1}', "not json", '{"n": 2}', "", '{"text": "b", "n": "x"}']
    lines.append('{"text": "\\ud800", "n": 3}')
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result = register(tmp_path / "c", [tmp_path / "a.jsonl"], ["n AS n integer"])
    assert (result.n_documents, result.n_broken) == (2, 3)
    path = tmp_path / "a.jsonl"
    assert cli("register", tmp_path / "c", "broken", "code").output.splitlines() == [
        f"{path}:2: not JSON", f"{path}:3: no text under 'text'", f"{path}:5: 'n' is no integer",
    ]  # fmt: skip


def test_describe_lists_the_most_frequent_values(tmp_path) -> None:
    with (tmp_path / "a.jsonl").open("w") as file:
        for i in range(100):
            file.write(json.dumps({"text": "t", "n": i % 30, "tags": ["a", "b"][: i % 3]}) + "\n")
    register(tmp_path / "c", [tmp_path / "a.jsonl"], ["n AS n integer", "tags AS tags list"])
    with Catalog(tmp_path / "c") as catalog:
        described = catalog.describe_corpus("code")
    assert described["n"] == [(i, 4, None) for i in range(10)] + [(i, 3, None) for i in range(10, 20)]
    assert described["tags"] == [("a", 66, None), (None, 34, None), ("b", 33, None)]


def test_add_property_takes_values_by_path_and_row_and_replaces_them(cli: Cli, tmp_path, catalog) -> None:
    with Catalog(catalog) as opened:
        rows = [(file.path, row) for file in opened.files for row in range(file.n_documents)]
    for modulus in (2, 5):
        table = {"path": [path for path, _ in rows], "row": [row for _, row in rows],
                 "bucket": [row % modulus for _, row in rows]}  # fmt: skip
        pq.write_table(pa.table(table), tmp_path / "values.parquet")
        words = ["code", tmp_path / "values.parquet", "--property", "bucket integer"]
        assert "bucket of 50 documents" in cli("register", catalog, "add-property", *words).output
        assert len(count(catalog, by=("bucket",))) == modulus
    write_lines(tmp_path / "three.jsonl", 5)
    assert register(catalog, [tmp_path / "three.jsonl"]).n_documents == 5  # without a value
    assert count(catalog, ("bucket IS NULL",), ()) == {"all": 5}
    pq.write_table(pa.table({"path": ["elsewhere"], "row": [0], "bucket": [1]}), tmp_path / "values.parquet")
    with Catalog(catalog) as opened, pytest.raises(ValueError, match="of which 0 are of documents of 'code'"):
        opened.add_property("code", "bucket integer", tmp_path / "values.parquet")


REFUSALS = [  # words, status, sentence
    (["add", "code", "missing.jsonl"], 1, "missing.jsonl: no such file"),
    (["add", "code", "one.jsonl"], 1, "corpus 'code' has the properties meta.language"),
    (["add", "code", "one.jsonl", "--function", "no_module:f"], 1, "--function: got 'no_module:f'"),
    (["describe", "cod"], 1, "no corpus 'cod'; did you mean 'code'"),
    (["convert", "old.duckdb"], 2, "convert: removed. Catalogs of earlier versions cannot be read"),
    (["remove-property", "code"], 2, "remove-property: removed. Replace the values"),
    (["add-property", "code", "--processes", "2"], 2, "removed. Compute values with any program"),
]


def test_the_tool_refuses_in_one_sentence(cli: Cli, catalog: Path) -> None:
    for words, status, reason in REFUSALS:
        errors = cli("register", catalog, *words, cwd=catalog.parent, status=status).error
        assert reason in errors.strip().splitlines()[-1]


def test_other_folders_and_catalogs_of_earlier_versions_are_refused(tmp_path, catalog) -> None:
    (tmp_path / "old" / "commits").mkdir(parents=True)
    (tmp_path / "file.duckdb").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    for name in ("old", "file.duckdb", "full"):
        with pytest.raises(ValueError, match=f"{name}: got other files or a catalog of an earlier version"):
            Catalog(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no such catalog. Create it"):
        Catalog(tmp_path / "new", read_only=True)
    with pytest.raises(ValueError, match="code version 99 cannot be opened"):
        Catalog(catalog, snapshot={"code": 99})


def test_a_corpus_whose_folder_was_deleted_can_be_registered_with_other_properties(catalog, tmp_path) -> None:
    shutil.rmtree(catalog / "code")
    assert register(catalog, [tmp_path / "one.jsonl"], ["meta.stars AS stars integer"]).n_documents == 30
    assert count(catalog, by=()) == {"all": 30}


def test_inputs_skip_sidecars_and_properties_beside_other_inputs(tmp_path) -> None:
    for name in ("a.jsonl", "a.parquet", "b.parquet", ".hidden.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    write_dataset(tmp_path / "d", [[0, 1, 2]])
    (tmp_path / "d.parquet").write_text("")
    assert [path.name for path in find_input_files([str(tmp_path)])] == ["a.jsonl", "b.parquet", "d.bin"]
    assert [path.name for path in find_input_files([str(tmp_path / "d")])] == ["d.bin"]


def test_several_writers_register_every_file_once(tmp_path) -> None:
    files = write_files(tmp_path, 12, 30)
    with ThreadPoolExecutor(4) as writers:  # every file by two of them
        list(writers.map(lambda k: register(tmp_path / "c", files[k % 2 :: 2]), range(4)))
    assert sum(count(tmp_path / "c").values()) == 360
    with Catalog(tmp_path / "c") as opened:
        assert len(opened.files) == 12
    assert register(tmp_path / "c", files).n_known == 12


@pytest.mark.parametrize("n_before", [10, 65, 139])
def test_a_registration_that_stops_resumes(tmp_path, monkeypatch: pytest.MonkeyPatch, n_before: int) -> None:
    monkeypatch.setattr(registration, "BATCH_BYTES", 1)  # a commit for each file
    files = write_files(tmp_path, 6, 25)

    def stop(record: Any) -> dict[str, int]:
        if record["meta"]["stars"] == n_before:
            raise KeyboardInterrupt
        return {"bucket": 0}

    properties = ["bucket AS bucket integer", *PROPERTIES]
    with pytest.raises(KeyboardInterrupt):
        register(tmp_path / "c", files, properties, function=stop)
    if n_before >= 25:
        assert sum(count(tmp_path / "c").values()) == n_before // 25 * 25
    done = register(tmp_path / "c", files, properties, function=lambda record: {"bucket": 0})
    assert (done.n_known, sum(count(tmp_path / "c").values())) == (n_before // 25, 150)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with serve_bucket(monkeypatch):
        yield


@pytest.mark.usefixtures("bucket")
def test_a_catalog_in_s3_gives_the_documents_of_a_folder(tmp_path: Path) -> None:
    s3, files = "s3://bucket/shared/catalog", write_files(tmp_path, 6, 60)
    with ThreadPoolExecutor(3) as writers:  # at the same time
        done = list(writers.map(lambda k: register(s3, files[k::3]), range(3)))
    assert [result.n_documents for result in done] == [120] * 3
    register(tmp_path / "catalog", files)
    query = Query(conditions=("language <> 'Go' AND stars > 100",))
    with Catalog(s3) as remote, Catalog(tmp_path / "catalog") as local:
        identities = [query.run(opened, ["language"]).compute_identity() for opened in (remote, local)]
        assert identities[0] == identities[1]
        assert remote.describe_corpus("code") == local.describe_corpus("code")
        assert remote.prune({}) == 0


def read_all(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in iter_sample_lines(path, "text")]


def test_a_sample_is_a_record_with_the_text_of_its_members(tmp_path) -> None:
    samples = [
        ("a/1", {"txt": b"a cat", "jpg": b"\xff\xd8" * 400}),
        ("a/" + "long" * 40, {"json": b'{"text": "a dog", "__key__": "x", "n": 3}'}),
        ("a/2", {"json": b'{"n": 4}', "txt": b"a bird", "seg.png": b""}),
    ]
    write_tar(tmp_path / "x.tar", samples)
    assert read_all(tmp_path / "x.tar") == [
        {"__key__": "a/1", "text": "a cat"},
        {"__key__": samples[1][0], "text": "a dog", "n": 3},
        {"__key__": "a/2", "text": "a bird", "n": 4},
    ]


def test_samples_without_text_have_records_without_text(tmp_path) -> None:
    broken = [{"jpg": b"x"}, {"txt": b"\xff"}, {"json": b"{"}, {"json": b"[1]", "txt": b"a"}]
    write_tar(tmp_path / "x.tar", [(str(i), members) for i, members in enumerate(broken)])
    assert read_all(tmp_path / "x.tar") == [{"__key__": str(i)} for i in range(4)]


def test_damage_links_out_of_the_archive_and_large_texts_are_refused(tmp_path, monkeypatch) -> None:
    write_tar(tmp_path / "x.tar", [(str(i), {"txt": b"x" * 600}) for i in range(4)])
    content = bytearray((tmp_path / "x.tar").read_bytes())
    content[1536 + 100] ^= 255  # in the header of the second member
    (tmp_path / "damaged.tar").write_bytes(content)
    (tmp_path / "cut.tar").write_bytes(bytes(content[:1000]))
    for name in ("damaged.tar", "cut.tar"):
        with pytest.raises(ValueError, match=f"{name}: cannot be read to its end .* Pack it again"):
            read_all(tmp_path / name)
    for kind, target in ((tarfile.SYMTYPE, "../../etc/passwd"), (tarfile.CHRTYPE, "")):
        with tarfile.open(tmp_path / "link.tar", "w") as archive:
            info = tarfile.TarInfo("1.txt")
            info.type, info.linkname = kind, target
            archive.addfile(info)
        with pytest.raises(ValueError, match="link.tar: cannot be read"):
            read_all(tmp_path / "link.tar")
    monkeypatch.setattr(files, "MAX_MEMBER_BYTES", 500)
    with pytest.raises(ValueError, match="0.txt: got a text of over 500 bytes"):
        read_all(tmp_path / "x.tar")
