"""Tests of the help of every tool: layout, defaults, examples that parse, and no slow imports."""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.cli import ACTIONS, SUBCOMMANDS
from tests.guide_commands import parse_tool, split_commands
from tests.tool_modules import load_tool

ROOT = Path(__file__).resolve().parents[2]
TOOLS = sorted(ROOT.glob("tools/*.py"))
SLOW = ("torch", "scipy.stats", "transformers", "datasets", "lm_eval", "deepspeed", "plotly", "wandb")
BENCHES = sorted(path for path in ROOT.glob("tools/bench/*.py") if path.stem != "harness")
all_tools = pytest.mark.parametrize("tool", [*TOOLS, *BENCHES], ids=lambda path: path.stem)


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and its actions' parsers (`scaling register CATALOG add`)."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from list_parsers(inner)


@all_tools
def test_every_option_and_action_is_described_and_the_examples_parse(tool: Path) -> None:
    first, *actions = list_parsers(load_tool(tool).build_parser())
    assert first.description.endswith(".") and "\n\nExit status: 0 " in first.epilog
    for parser in (first, *actions):
        assert all(action.help for action in parser._actions)
    for parser in actions:
        assert parser.description.endswith(".")
        if parser.epilog.startswith("example:\n"):
            (command,) = split_commands(parser.epilog.removeprefix("example:\n").splitlines())
            parse_tool(command)
    lines = [line for line in first.epilog.splitlines() if line.startswith("    ")]
    commands = list(split_commands(lines))
    assert commands
    for command in commands:
        parse_tool(command)
    names = [name for name, file in SUBCOMMANDS.items() if file == tool.stem and file in ACTIONS]
    for shown in names or [str(tool.relative_to(ROOT))]:
        assert any(shown in command.words for command in commands), shown


@pytest.mark.parametrize("tool", TOOLS, ids=lambda path: path.stem)
def test_help_loads_no_slow_libraries_and_a_wrong_option_is_one_line_and_status_2(
    tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-X", "importtime", str(tool), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & set(SLOW)
    assert "argparse" in imported and "exit status:" in done.stdout.lower()
    with pytest.raises(SystemExit) as ended:
        getattr(load_tool(tool), "parse_args", load_tool(tool).build_parser().parse_args)(["--no-such-word"])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and "--help)" in errors
