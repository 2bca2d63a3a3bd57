"""Untrusted datasets, catalogs, configurations, tokenizers, laws and tables are data, never code.

The limits of each format (tars, catalogs, references in YAML) are covered by its own tests.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from megatron.io import read_json
from megatron.laws.law import Law
from megatron.mixture.catalog import Catalog
from megatron.mixture.properties import read_properties
from megatron.mixture.spec import read_spec
from megatron.plan.resolve import load_config
from megatron.study.ladder import read_study_plan
from megatron.study.table import read_runs, read_table
from megatron.tokenizer.kinds import load_tokenizer_by_name
from tests.trust.hostile_pickles import RunsWhenRead

DEEP = "[" * 100_000


@pytest.mark.parametrize("read", [load_config, read_spec, read_study_plan])
@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.system ['touch {target}']", "${{python:open('{target}', 'w')}}"]
)
def test_yaml_tags_are_refused(tmp_path: Path, target: Path, read: Callable[[Path], Any], value: str) -> None:
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
