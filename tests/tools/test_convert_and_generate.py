"""Tests of converting checkpoints and generating text from the command line."""

import shutil
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_converted_model_writes_the_same_text(cli, stories_folder: Path, tmp_path: Path) -> None:
    words = ("--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 40, "--threads", 1)
    direct = cli("generate_text.py", stories_folder, *words).output
    assert direct.startswith("Once upon a time, there was a little girl named Lily.")
    native = tmp_path / "native"
    converted = cli("convert_checkpoint.py", stories_folder, native, "--to", "native").output
    assert converted == f"{native}: autoregressive, 260,032 parameters\n"
    assert cli("generate_text.py", native, *words, "--stream").output == direct


def test_bad_input_is_reported_in_one_line(
    cli, stories_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = tmp_path_factory.mktemp("bare") / "hf"
    shutil.copytree(stories_folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    for words, sentence in (
        (("generate_text.py", bare), "give it with --tokenizer"),
        (("generate_text.py", tmp_path / "none", "--prompt", "a"), "no such checkpoint"),
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
        error = cli(*words, status=1).error
        assert error.count("\n") == 1 and error.startswith("error: ") and sentence in error
    cli("convert_checkpoint.py", "a", "b", status=2)
    cli("convert_checkpoint.py", "a", "b", "--to", "llama2c", status=2)
    cli("generate_text.py", stories_folder, "--device", "moon", status=2)
    assert not list(tmp_path.iterdir())
