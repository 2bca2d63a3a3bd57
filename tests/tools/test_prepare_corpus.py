"""Tests of tools/prepare_corpus.py from the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run_tool(root: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "prepare_corpus.py"), *map(str, words)]
    env = os.environ | {"HF_HUB_OFFLINE": "0"} | environ  # other tests disable the hub for the whole process
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def test_without_a_sample_and_a_network_local_text_is_used_and_reported(root: Path, tmp_path: Path) -> None:
    silent = {"SCALING_DATA": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run_tool(root, "--max-mb", 1, "--out", tmp_path / "text", **silent)
    assert done.returncode == 0, done.stderr
    assert re.search(r"standard library of .* and the sources of .*, because no C4 sample is in", done.stdout)
    assert "\n  torch 2." in done.stdout
    content = json.loads((tmp_path / "text" / "corpus.json").read_text())
    for side in ("train", "held_out"):
        lines = (tmp_path / "text" / f"{side}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert len(texts) == content[f"{side}_documents"] > 0
        assert sum(len(text.encode()) for text in texts) == content[f"{side}_bytes"]
    assert "Traceback" not in done.stderr


def test_the_c4_sample_is_split_once(root: Path, tmp_path: Path, scaling_data: Path) -> None:
    words = ("--out", tmp_path / "text")
    first = run_tool(root, *words, SCALING_DATA=str(scaling_data))
    assert first.returncode == 0, first.stderr
    assert "C4 (c4_en_shard00000_first1000.jsonl, redpajama_c4_sample2_1000.jsonl)" in first.stdout
    content = json.loads((tmp_path / "text" / "corpus.json").read_text())
    assert content["train_documents"] + content["held_out_documents"] == content["documents"] == 2000
    assert 61 <= content["held_out_documents"] <= 139  # 5 % of 2000, +- 4 standard deviations
    again = run_tool(root, *words, SCALING_DATA=str(scaling_data))
    assert again.returncode == 0
    assert "(already there)" in again.stdout


@pytest.mark.parametrize(
    ("corpus", "sentence"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("c4", "not available from the Hugging Face hub (http://127.0.0.1:9: Connection refused)"),
        (__file__, "test_prepare_corpus.py: expected one of .jsonl"),
    ],
)
def test_unavailable_text_is_reported_in_one_line_and_writes_nothing(
    root: Path, tmp_path: Path, corpus: str, sentence: str
) -> None:
    out = tmp_path / "text"
    done = run_tool(root, "--corpus", corpus, "--out", out, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
