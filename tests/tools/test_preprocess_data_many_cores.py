"""The command tools/preprocess_data_many_cores.py: exit status and output."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from megatron.tokenizer.train_bpe import train_bpe
from tests.conftest import wait_until


def test_a_signal_ends_with_status_75_and_the_same_command_resumes(root: Path, tmp_path: Path) -> None:
    train_bpe(["one fish two fish"], 260, tmp_path / "tokenizer")
    text = json.dumps({"text": "one fish, two fish. " * 500}) + "\n"
    (tmp_path / "in.jsonl").write_text(text * 8_000)  # ten pieces
    command = [sys.executable, str(root / "tools/preprocess_data_many_cores.py"), "--workers", "2"]
    for option, name in {"input": "in.jsonl", "output-prefix": "x", "tokenizer-model": "tokenizer"}.items():
        command += [f"--{option}", str(tmp_path / name)]
    command += ["--root", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: list(tmp_path.glob(".x.shards/*.unit")))
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=240)[1]
    assert process.returncode == 75 and "Traceback" not in errors
    assert not list(tmp_path.glob("x*"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "resuming: " in done.stderr
    assert "tokens per epoch, 8,000 documents (0 empty)" in done.stdout


def test_the_output_equals_the_files_of_megatron(cli, tmp_path: Path, scaling_data: Path) -> None:
    folder = scaling_data / "megatron_openwebtext"
    (tmp_path / "tiny").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / f"gpt2-tiny-{name}", tmp_path / "tiny" / name)
    words = ["--input", folder / "openwebtext-1000.decoded.jsonl.gz", "--output-prefix", "x", "--append-eod"]
    words += ["--tokenizer-model", tmp_path / "tiny", "--workers", 2, "--root", tmp_path]
    output = cli("prepare", *words).output
    assert "1,361,845 tokens per epoch, 1,000 documents (0 empty)" in output
    for suffix in (".bin", ".idx"):
        theirs = folder / f"meg-gpt2-openwebtext_text_document{suffix}"
        assert (tmp_path / f"x_text_document{suffix}").read_bytes() == theirs.read_bytes()
