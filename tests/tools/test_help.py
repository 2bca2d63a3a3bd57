"""The help of every tool: one shape, true defaults, examples that parse, and there at once."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.command import failed, load_tool
from tests.guide_commands import parse_tool, split_commands

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(ROOT.glob("tools/*.py"))
MANY = 6  # options; more stand in groups
SLOW = ("torch", "scipy.stats", "transformers", "datasets", "lm_eval", "deepspeed", "plotly", "wandb")
BENCHES = sorted(ROOT.glob("tools/bench/*.py"))
named = pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)


explained = pytest.mark.parametrize("tool", [*TOOLS, *BENCHES], ids=lambda path: path.stem)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its actions (`register_corpus.py CATALOG add`)."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


@explained
def test_help_is_a_sentence_options_in_groups_and_examples(tool: Path) -> None:
    parser = load_tool(tool).build_parser()
    sentence = " ".join(parser.description.split())
    assert sentence.endswith(".") and ". " not in sentence
    assert parser.epilog.startswith("examples:\n    ") and "\n\nExit status: 0 " in parser.epilog
    own = [group for group in parser._action_groups[2:] if group._group_actions]
    options = [one for one in parser._actions if one.option_strings and one.dest != "help"]
    assert len(own) >= 2 or len(options) <= MANY


@explained
def test_every_word_is_explained_with_what_it_takes(tool: Path) -> None:
    for parser in parsers(load_tool(tool).build_parser()):
        for action in parser._actions:
            assert action.help, f"{action.dest}: no help"
            if action.option_strings and action.nargs != 0:
                assert action.metavar or action.choices, f"{action.dest}: what does it take?"


@explained
def test_only_what_has_to_be_given_is_asked_for(tool: Path) -> None:
    for parser in parsers(load_tool(tool).build_parser()):
        assert not [one.dest for one in parser._actions if one.nargs == "*" and one.required]


@explained
def test_the_examples_of_the_help_parse(tool: Path) -> None:
    epilog = load_tool(tool).build_parser().epilog
    lines = [line for line in epilog.splitlines() if line.startswith("    ")]
    commands = list(split_commands(lines))
    assert commands
    for command in commands:
        parse_tool(command)
    assert any(str(tool.relative_to(ROOT)) in command.words for command in commands)


@explained
def test_each_action_of_a_command_has_a_sentence_and_an_example_that_parses(tool: Path) -> None:
    for parser in list(parsers(load_tool(tool).build_parser()))[1:]:
        assert parser.description.endswith(".") and parser.description[0].isupper()
        (command,) = split_commands(parser.epilog.removeprefix("example:\n").splitlines())
        parse_tool(command)


@named
def test_help_comes_without_slow_libraries_and_a_wrong_word_is_a_line_and_status_2(
    tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [sys.executable, "-X", "importtime", str(tool), "--help"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=True)
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert not imported & set(SLOW)
    assert "argparse" in imported and "exit status:" in told.stdout.lower()
    with pytest.raises(SystemExit) as ended:
        getattr(load_tool(tool), "parse_args", load_tool(tool).build_parser().parse_args)(["--no-such-word"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--help tells more)" in said


def test_a_misspelt_option_is_offered_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for tool, words, told in (
        ("merge_datasets", ["a", "b", "--outptu", "c"], "--outptu: did you mean --output?"),
        ("validate", ["run", "--data", "x", "--max-smaples=3"], "--max-smaples: did you mean --max-samples?"),
        ("register_corpus", ["c", "add", "n", "p", "--presett", "c4"], "--presett: did you mean --preset?"),
    ):
        with pytest.raises(SystemExit) as ended:
            load_tool(ROOT / "tools" / f"{tool}.py").build_parser().parse_args(words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
    for far in ("--zzz", "--nosuch"):
        with pytest.raises(SystemExit):
            load_tool(ROOT / "tools" / "merge_datasets.py").build_parser().parse_args(
                ["a", "--out", "c", far]
            )
        assert "did you mean" not in capsys.readouterr().err


def test_defaults_are_told_as_they_are_and_absent_ones_are_not() -> None:
    parser = load_tool(ROOT / "tools" / "validate.py").build_parser()
    told = " ".join(parser.format_help().split())
    assert "masks for each window (default 8)" in told
    assert "(default None)" not in told and "(default False)" not in told
    parser = load_tool(ROOT / "tools" / "find_crossover.py").build_parser()
    assert "(default 1e+07 1e+08 1e+09 1e+10)" in " ".join(parser.format_help().split())


def test_what_the_system_refuses_is_told_with_its_place_and_a_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    completion = load_tool(ROOT / "tools" / "completion.py").main
    for out, told in (
        ("file/out", "a file stands where a folder is wanted; choose another place"),
        ("folder", "a folder, where a file is wanted; choose another name"),
        ("absent/out", "no such file or folder"),
    ):
        assert completion(["--out", str(tmp_path / out)]) == 1
        assert capsys.readouterr().err == f"error: {tmp_path / out}: {told}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert failed(ValueError("a sentence of ours")) == 1
    assert capsys.readouterr().err == "error: a sentence of ours\n"
