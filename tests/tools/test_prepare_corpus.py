"""tools/prepare_corpus.py, run as a person runs it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(root: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "prepare_corpus.py"), *map(str, words)]
    env = os.environ | {"HF_HUB_OFFLINE": "0"} | environ  # other tests forbid the hub to all that come after
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def test_with_no_sample_and_no_network_there_is_text_and_it_is_said_which(root: Path, tmp_path: Path) -> None:
    silent = {"SCALING_DATA": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = run(root, "--max-mb", 1, "--out", tmp_path / "text", **silent)
    assert done.returncode == 0, done.stderr
    assert re.search(r"standard library of .* and the sources of .*, because no C4 sample lies", done.stdout)
    assert "\n  torch 2." in done.stdout
    told = json.loads((tmp_path / "text" / "corpus.json").read_text())
    for side in ("train", "held_out"):
        lines = (tmp_path / "text" / f"{side}.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert len(texts) == told[f"{side}_documents"] > 0
        assert sum(len(text.encode()) for text in texts) == told[f"{side}_bytes"]
    assert "Traceback" not in done.stderr


def test_the_c4_sample_is_split_once(root: Path, tmp_path: Path, scaling_data: Path) -> None:
    words = ("--out", tmp_path / "text")
    first = run(root, *words, SCALING_DATA=str(scaling_data))
    assert first.returncode == 0, first.stderr
    assert "C4 (c4_en_shard00000_first1000.jsonl, redpajama_c4_sample2_1000.jsonl)" in first.stdout
    told = json.loads((tmp_path / "text" / "corpus.json").read_text())
    assert told["train_documents"] + told["held_out_documents"] == told["documents"] == 2000
    assert 61 <= told["held_out_documents"] <= 139  # 5 % of 2000, +- 4 standard deviations
    again = run(root, *words, SCALING_DATA=str(scaling_data))
    assert again.returncode == 0
    assert "(already there)" in again.stdout


@pytest.mark.parametrize(
    ("corpus", "sentence"),
    [
        ("nowhere.jsonl", "nowhere.jsonl: no such file"),
        ("c4", "not to be had from the Hugging Face hub (http://127.0.0.1:9: Connection refused)"),
        (__file__, "test_prepare_corpus.py: wanted"),
    ],
)
def test_text_that_is_not_to_be_had_is_one_sentence_and_leaves_nothing(
    root: Path, tmp_path: Path, corpus: str, sentence: str
) -> None:
    out = tmp_path / "text"
    done = run(root, "--corpus", corpus, "--out", out, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
