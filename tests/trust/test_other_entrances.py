"""Untrusted datasets, catalogs, configurations, tokenizers, laws and tables are data, never code.

The limits of each format (tars, catalogs, references in YAML) are covered by its own tests.
"""

import io
import json
import pickle
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from megatron.data.indexed import IndexedTokens
from megatron.data.indexed_writer import IndexedWriter
from megatron.io import read_json
from megatron.laws.law import Law
from megatron.mixture.catalog import Catalog
from megatron.mixture.files import iter_sample_lines
from megatron.mixture.properties import read_properties
from megatron.mixture.spec import read_spec
from megatron.plan.datapaths import read_corpora
from megatron.plan.resolve import load_config
from megatron.study.ladder import read_study_plan
from megatron.study.table import read_runs, read_table
from megatron.tokenizer.kinds import load_tokenizer_by_name
from tests.trust.hostile_pickles import RunsWhenRead

DEEP = "[" * 100_000


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the path that hostile files try to create."""
    return tmp_path / "it_ran"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Write a dataset of 10 documents of 7 tokens; return its prefix."""
    with IndexedWriter(tmp_path / "train", np.dtype(np.uint16), {"tokenizer": {"n_tokens": 50}}) as writer:
        for _ in range(10):
            writer.add_document(np.arange(7))
    return tmp_path / "train"


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (17, "B", 99),  # invalid dtype code
        (18, "<Q", 1 << 60),  # sequences
        (26, "<Q", 1 << 60),  # documents
        (26, "<Q", 0),
        (34, "<i", -1),  # a length
        (34, "<i", 1 << 30),
        (34 + 40 + 8, "<q", 1 << 40),  # a position far past the data
        (34 + 40 + 8, "<q", -8),
        (34 + 120 + 8, "<q", 1 << 40),  # a document that begins past the last
    ],
)
def test_an_index_of_tokens_with_wrong_values_is_refused(
    dataset: Path, at: int, form: str, value: int
) -> None:
    index = dataset.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    struct.pack_into(form, content, at, value)
    index.write_bytes(content)
    with pytest.raises(ValueError, match="train"):
        IndexedTokens(dataset)


def test_an_index_that_is_a_pickle_or_truncated_is_refused(dataset: Path, target: Path) -> None:
    index = dataset.with_suffix(".idx")
    whole = index.read_bytes()
    for content in (pickle.dumps(RunsWhenRead(target)), whole[:-1], whole[:20], b""):
        index.write_bytes(content)
        with pytest.raises(ValueError, match="train.idx"):
            IndexedTokens(dataset)
    index.write_bytes(whole)
    dataset.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(ValueError, match="train.bin"):
        IndexedTokens(dataset)
    assert not target.exists()


def test_a_sidecar_is_parsed_as_json_only(dataset: Path, target: Path) -> None:
    for content in (pickle.dumps(RunsWhenRead(target)), b"!!python/object/apply:os.system [id]", b"[1]"):
        dataset.with_suffix(".json").write_bytes(content)
        with pytest.raises(ValueError, match="train.json"):
            IndexedTokens(dataset)
    assert not target.exists()


def test_a_data_path_file_names_files_and_runs_nothing(tmp_path: Path, target: Path) -> None:
    listed = tmp_path / "paths.txt"
    listed.write_text(f"1.0 $(touch {target})\n1.0 `touch {target}`; touch {target}\n")
    with pytest.raises((ValueError, FileNotFoundError)):
        IndexedTokens(read_corpora(str(listed))[0].prefix)
    assert not target.exists()


@pytest.mark.parametrize("read", [load_config, read_spec, read_study_plan])
@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch {target}']",
        "!!python/object/new:os.system ['touch {target}']",
        "!!python/name:os.system",
        "!!python/object/apply:subprocess.Popen [['touch', '{target}']]",
        "!<tag:yaml.org,2002:python/module:antigravity> ''",
        "${{oc.create:os.system}}",
        "${{python:open('{target}', 'w')}}",
    ],
)
def test_yaml_tags_create_no_objects(
    tmp_path: Path, target: Path, read: Callable[[Path], Any], value: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"name: {value.format(target=target)}\ncatalog: {value.format(target=target)}\n")
    with pytest.raises(ValueError, match="config.yaml"):
        read(path)
    assert not target.exists()


def test_a_tokenizer_is_data(tmp_path: Path, target: Path) -> None:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]))
    inner.save(str(tmp_path / "tokenizer.json"))
    # the code that transformers would import with trust_remote_code
    settings = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(target)!r}, 'w')")
    assert load_tokenizer_by_name(str(tmp_path)).encode_batch(["aa"]) == [[0, 0]]
    for name, content in (
        ("tokenizer.json", pickle.dumps(RunsWhenRead(target))),
        ("tokenizer.json", DEEP.encode()),
        ("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 18446744073709551616}}}'),
        ("tokenizer.model", pickle.dumps(RunsWhenRead(target))),
        ("tokenizer.bin", bytes(64)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load_tokenizer_by_name(str(tmp_path / name))
    (tmp_path / "tokenizer_config.json").write_text(DEEP)
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer_config.json: got invalid JSON"):
        load_tokenizer_by_name(str(tmp_path))
    assert not target.exists()


def test_a_law_a_table_and_a_result_are_data(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "law.json"
    for content in (
        pickle.dumps(RunsWhenRead(target)),
        DEEP.encode(),
        b"[]",
        b'{"form": "__import__(\'os\').system", "params": {}}',
        b'{"form": "chinchilla", "params": 7}',
        b"\xff\xfe",
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="law.json"):
            Law.load(path)
    with pytest.raises(ValueError, match="got invalid JSON"):
        path.write_text(DEEP)
        read_json(path)
    table = tmp_path / "table.csv"
    cell = f"=cmd|'/c touch {target}'!A1"
    table.write_text(f"run,kind\n{cell},@SUM(1)\n")
    # cells are strings; how a spreadsheet reads them is out of scope
    assert read_table(table).to_numpy().tolist() == [[cell, "@SUM(1)"]]
    run = tmp_path / "study" / "runs" / "run"
    run.mkdir(parents=True)
    for name in ("plan.json", "result.json"):
        (run / name).write_text(DEEP)
    assert list(read_runs(tmp_path / "study")["status"]) == ["failed"]
    assert not target.exists()


def test_a_catalog_that_is_another_file_is_neither_opened_nor_converted(tmp_path: Path, target: Path) -> None:
    path = tmp_path / "catalog.duckdb"
    for content in (pickle.dumps(RunsWhenRead(target)), bytes(8) + b"DUCK" + b"\xff" * 4096):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"catalog\.duckdb"):
            Catalog(path, read_only=True)
    assert not target.exists()


def test_a_pickle_in_the_place_of_any_file_of_a_catalog_is_not_read(tmp_path: Path, target: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "n": 1}\n')
    with Catalog(tmp_path / "c", n_threads=1) as catalog:
        catalog.register("c", [str(tmp_path / "a.jsonl")], read_properties(["n AS n integer"]), quiet=True)
    hostile = pickle.dumps(RunsWhenRead(target))
    # a checksum file (.crc) is not read
    for path in [path for path in (tmp_path / "c").rglob("*") if path.suffix in (".json", ".parquet")]:
        before = path.read_bytes()
        path.write_bytes(hostile + bytes(max(0, len(before) - len(hostile))))
        with pytest.raises(ValueError, match="/c: "), Catalog(tmp_path / "c") as catalog:
            catalog.describe_corpus("c")
        path.write_bytes(before)
    assert not target.exists()


def test_names_in_an_archive_create_no_files(tmp_path: Path) -> None:
    archive, elsewhere = tmp_path / "x.tar", tmp_path / "elsewhere"
    for name, kind, target in (
        ("../elsewhere.txt", tarfile.REGTYPE, ""),
        ("link.txt", tarfile.SYMTYPE, "/etc/passwd"),
    ):
        with tarfile.open(archive, "w") as written:
            member = tarfile.TarInfo(name)
            member.size, member.type, member.linkname = 2 if kind == tarfile.REGTYPE else 0, kind, target
            written.addfile(member, io.BytesIO(b"hi"))
        with pytest.raises(ValueError, match=r"x\.tar: cannot be read to its end"):
            list(iter_sample_lines(archive, "text"))
    with tarfile.open(archive, "w") as written:  # an absolute name is a key, and creates no file
        member = tarfile.TarInfo(f"{elsewhere}.txt")
        member.size = 2
        written.addfile(member, io.BytesIO(b"hi"))
    with Catalog(tmp_path / "catalog", n_threads=1) as catalog:
        catalog.register("c", [str(archive)], read_properties(["__key__ AS key"]), quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog", "x.tar"]
