"""Tests of tools/subset_corpus.py from the command line."""

import signal
import subprocess
import sys
from pathlib import Path

from megatron.data.indexed import IndexedTokens
from tests.conftest import wait_until


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


def test_stopped_half_way_leaves_nothing(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(root / "tools" / "subset_corpus.py"), "--input", "-", "--sample", "0.5"]
    with subprocess.Popen(
        [*command, "--output", str(tmp_path / "out.jsonl")], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(b'{"text": "x"}\n' * 20)
        process.stdin.flush()
        wait_until(lambda: list(tmp_path.iterdir()))
        assert not (tmp_path / "out.jsonl").exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 75
        assert process.stderr.read() == b"stopped; run the same command again\n"
    assert list(tmp_path.iterdir()) == []
