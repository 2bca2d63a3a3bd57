"""The command tools/preprocess_data_many_cores.py: exit status, output, and a full disk."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.tokenizer.train_bpe import train_bpe
from tests.tool_modules import load_tool


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """A command line of 40 pieces."""
    train_bpe(["one fish two fish"], 260, tmp_path / "tokenizer")
    text = json.dumps({"text": "one fish, two fish. " * 500}) + "\n"
    (tmp_path / "in.jsonl").write_text(text * 32_000)
    names = {"--input": "in.jsonl", "--output-prefix": "x", "--tokenizer-model": "tokenizer", "--root": ""}
    return [word for option, name in names.items() for word in (option, str(tmp_path / name))]


def test_a_signal_ends_with_status_75_and_the_same_command_resumes(
    root: Path, tmp_path: Path, words: list[str]
) -> None:
    command = [sys.executable, str(root / "tools/preprocess_data_many_cores.py"), *words, "--workers", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob(".x.shards/*.unit")) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=240)[1]
    assert process.returncode == 75 and "Traceback" not in errors
    assert not list(tmp_path.glob("x*"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "resuming: " in done.stderr
    assert "tokens per epoch, 32,000 documents (0 empty)" in done.stdout


def test_a_full_disk_is_one_sentence_with_the_folder_of_the_output(
    root: Path, tmp_path: Path, words: list[str]
) -> None:
    program = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, str(root / "tools/preprocess_data_many_cores.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root)
    assert done.returncode == 1
    assert f"error: {tmp_path}: " in done.stderr and "make room" in done.stderr, done.stderr
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_the_output_equals_the_files_that_megatron_wrote_of_the_same_text(
    root: Path, tmp_path: Path, scaling_data: Path, n_workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = scaling_data / "megatron_openwebtext"
    (tmp_path / "tiny").mkdir()
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(folder / f"gpt2-tiny-{name}", tmp_path / "tiny" / name)
    tool = root / "tools/preprocess_data_many_cores.py"
    words = ["--input", str(folder / "openwebtext-1000.decoded.jsonl.gz"), "--output-prefix", "x"]
    words += ["--tokenizer-model", str(tmp_path / "tiny"), "--append-eod", "--workers", str(n_workers)]
    assert load_tool(tool).main([*words, "--root", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "1,361,845 tokens per epoch, 1,000 documents (0 empty)" in output
    for suffix in (".bin", ".idx"):
        theirs = folder / f"meg-gpt2-openwebtext_text_document{suffix}"
        assert (tmp_path / f"x_text_document{suffix}").read_bytes() == theirs.read_bytes()
