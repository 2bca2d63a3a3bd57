"""Tests of converting checkpoints and generating text from the command line."""

from pathlib import Path


def test_a_converted_model_writes_the_same_text(cli, stories_folder: Path, tmp_path: Path) -> None:
    words = ("--prompt", "Once upon a time", "--temperature", 0, "--max-new-tokens", 20, "--threads", 1)
    direct = cli("generate_text.py", stories_folder, *words).output
    assert direct.startswith("Once upon a time, there was a little girl named Lily.")
    native = tmp_path / "native"
    converted = cli("convert_checkpoint.py", stories_folder, native, "--to", "native").output
    assert converted == f"{native}: autoregressive, 260,032 parameters\n"
    assert cli("generate_text.py", native, *words, "--stream").output == direct


def test_options_that_do_not_apply_to_a_model_are_refused(cli, stories_folder: Path) -> None:
    for words, sentence in (
        ((stories_folder, "--max-new-tokens", -1), "got -1 new tokens, expected 0 or more"),
        ((stories_folder, "--steps", 4), "--steps, --block-tokens: got an autoregressive model. Omit them."),
    ):
        error = cli("generate_text.py", *words, status=1).error
        assert error.count("\n") == 1 and error.startswith("error: ") and sentence in error
