"""Tests of converting checkpoints and generating text from the command line."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_tool(root: Path, tool: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / tool), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_converted_model_writes_the_same_text(root: Path, stories_folder: Path, tmp_path: Path) -> None:
    words = ("--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 40, "--threads", 1)
    direct = run_tool(root, "generate_text.py", stories_folder, *words)
    assert direct.returncode == 0, direct.stderr
    assert direct.stdout.startswith("Once upon a time, there was a little girl named Lily.")
    done = run_tool(
        root,
        "convert_checkpoint.py",
        stories_folder,
        tmp_path / "native",
        "--to",
        "native",
    )
    assert (done.returncode, done.stdout) == (
        0,
        f"{tmp_path / 'native'}: autoregressive, 260,032 parameters\n",
    )
    again = run_tool(root, "generate_text.py", tmp_path / "native", *words, "--stream")
    assert (again.returncode, again.stdout) == (0, direct.stdout)


def test_bad_input_is_reported_in_one_line(
    root: Path, stories_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = tmp_path_factory.mktemp("bare") / "hf"
    shutil.copytree(stories_folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    for words, sentence in (
        (("generate_text.py", bare), "give it with --tokenizer"),
        (("generate_text.py", tmp_path / "none", "--prompt", "a"), "no such checkpoint"),
        (("generate_text.py", stories_folder, "--device", "moon"), "--device moon: "),
        (
            ("convert_checkpoint.py", bare / "config.json", tmp_path / "out", "--to", "native"),
            "config.json: got a file, expected a checkpoint's folder. Convert other formats",
        ),
        (
            ("convert_checkpoint.py", "run", tmp_path / "out", "--to", "full", "--dtype", "bfloat16"),
            "are for --to huggingface, not full",
        ),
        (
            ("convert_checkpoint.py", "run", tmp_path / "out", "--to", "sharded", "--tokenizer", "gpt2"),
            "--to sharded keeps the run's settings",
        ),
        (
            ("generate_text.py", stories_folder, "--max-new-tokens", -1),
            "got -1 new tokens, expected 0 or more",
        ),
        (
            ("generate_text.py", stories_folder, "--steps", 4),
            "--steps, --block-tokens: got an autoregressive model. Omit them.",
        ),
    ):  # fmt: skip
        failed = run_tool(root, *words)
        assert (failed.returncode, failed.stderr.count("\n")) == (1, 1), failed.stderr
        assert failed.stderr.startswith("error: ") and sentence in failed.stderr
    assert run_tool(root, "convert_checkpoint.py", "a", "b").returncode == 2
    removed = run_tool(root, "convert_checkpoint.py", "a", "b", "--to", "llama2c")
    assert (
        removed.returncode == 2 and "llama2.c's own export.py reads a Hugging Face folder" in removed.stderr
    )
    assert not list(tmp_path.iterdir())
