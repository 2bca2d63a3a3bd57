"""Tests of tools/subset_corpus.py from the command line."""

import os
import signal
from pathlib import Path

import pytest

from megatron.data.indexed import IndexedTokens
from tests.datasets import write_texts


def test_a_command_writes_a_part_of_a_text_or_of_a_pipe(cli, tmp_path: Path, scaling_data: Path) -> None:
    gpt2, c4 = scaling_data / "gpt2_tokenizer", scaling_data / "c4" / "c4_en_shard00000_first1000.jsonl"
    words = ["--tokens", "10K", "--tokenizer-model", gpt2, "--append-eod", "--output", tmp_path / "a.jsonl"]
    done = cli("subset", "--input", c4, *words)
    n = len((tmp_path / "a.jsonl").read_bytes().splitlines())
    assert done.output.startswith(f"{tmp_path / 'a.jsonl'}: {n} documents, 10,")
    cli("subset", "--input", "-", *words[:-1], tmp_path / "b.jsonl", stdin=c4.read_bytes())
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()


def test_a_dataset_gives_a_dataset(cli, tmp_path: Path, scaling_data: Path) -> None:
    prefix = scaling_data / "megatron_openwebtext" / "meg-gpt2-openwebtext_text_document"
    whole = IndexedTokens(prefix)
    for word in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        cli("subset", "--input", word, "--documents", 3, "--output", tmp_path / "first", "--overwrite")
        part = IndexedTokens(tmp_path / "first")
        assert all((part.get_document(i) == whole.get_document(i)).all() for i in range(3))
        assert part.n_documents == 3
    words = ("--input", prefix, "--documents", 3, "--append-eod", "--output", tmp_path / "x")
    assert "Omit the tokenizer's options" in cli("subset", *words, status=1).error


def test_stopped_before_the_end_it_leaves_nothing(
    cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal arrives when the file is synced, before it has its name."""
    source = write_texts(tmp_path / "in.jsonl", "words")

    def stop(file: int) -> None:
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "the signal would end the tests"
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(os, "fsync", stop)
    words = ("--input", source, "--documents", 3, "--output", tmp_path / "out.jsonl")
    assert cli("subset", *words, status=75).error == "stopped; run the same command again\n"
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
