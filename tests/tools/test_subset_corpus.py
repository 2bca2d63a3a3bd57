"""Tests of tools/subset_corpus.py from the command line."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedTokens


def test_one_command_takes_a_part_of_c4(cli, tmp_path: Path, scaling_data: Path) -> None:
    gpt2, c4 = scaling_data / "gpt2_tokenizer", scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl"
    words = ["--tokens", "10K", "--tokenizer-model", gpt2, "--append-eod", "--output", tmp_path / "a.jsonl"]
    done = cli("subset", "--input", c4, *words)
    n = len((tmp_path / "a.jsonl").read_bytes().splitlines())
    assert done.output.startswith(f"{tmp_path / 'a.jsonl'}: {n} documents, 10,")
    cli("subset", "--input", "-", *words[:-1], tmp_path / "b.jsonl", stdin=c4.read_bytes())
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_dataset_gives_a_dataset(cli, tmp_path: Path, scaling_data: Path) -> None:
    pair = scaling_data / "megatron_openwebtext" / "meg-gpt2-openwebtext_text_document"
    for word in (pair, f"{pair}.bin", f"{pair}.idx"):
        cli("subset", "--input", word, "--documents", 3, "--output", tmp_path / "first", "--overwrite")
        part, whole = IndexedTokens(tmp_path / "first"), IndexedTokens(pair)
        assert [part.get_document(i).tolist() for i in range(3)] == [
            whole.get_document(i).tolist() for i in range(3)
        ]
    words = ("--input", pair, "--documents", 3, "--append-eod", "--output", tmp_path / "x")
    assert "Omit the tokenizer's options" in cli("subset", *words, status=1).error


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["--documents", "2"], 1, "got 1 documents, expected 2"),
        (["--tokens", "5"], 1, "Give --tokenizer-model"),
        (["--documents", "-1"], 2, "got '-1', expected a whole number of 1 or more"),
        (["--sample", "x"], 2, "got 'x', expected a number"),
        (["--sample", "1", "--documents", "1"], 2, "not allowed with"),
        ([], 2, "one of the arguments"),
    ],
)
def test_invalid_options_are_reported_in_one_line(
    cli, tmp_path: Path, words: list, status: int, sentence: str
) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x"}) + "\n")
    words = ["--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl", *words]
    assert sentence in cli("subset", *words, status=status).error.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_stopped_half_way_leaves_nothing(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "tools" / "subset_corpus.py"), "--input", "-", "--sample", "0.5"]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path / "out.jsonl")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b'{"text": "x"}\n' * 20)
        process.stdin.flush()
        end = time.monotonic() + 240
        while not list(tmp_path.iterdir()):
            assert time.monotonic() < end and process.poll() is None
            time.sleep(0.05)
        assert sorted(path.name for path in tmp_path.iterdir()) != ["out.jsonl"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 75
        assert process.stderr.read() == b"stopped; run the same command again\n"
    assert list(tmp_path.iterdir()) == []


def test_help_shows_a_command_and_units(cli) -> None:
    text = cli("subset", "--help").output
    assert "--tokens 100M --tokenizer-model gpt2" in text
    assert "10^6" in text
