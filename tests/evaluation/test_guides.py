"""The guides to scoring document all options of their commands."""

import re
from pathlib import Path

import pytest

GUIDES = {"validate": "evaluation/EVAL.md", "evaluate": "downstream/DOWNSTREAM.md"}
PLAIN = {"--help", "--device", "--threads"}  # documented in --help only


@pytest.mark.parametrize("command", GUIDES)
def test_a_guide_documents_all_options_of_its_command(cli, root: Path, command: str) -> None:
    """tests/test_commands.py checks that a guide names no other options."""
    text = (root / "examples_scaling" / GUIDES[command]).read_text().partition("## Convert")[0]
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", cli(command, "--help").output)) - PLAIN
    assert len(options) > 10 and options <= set(re.findall(r"--[a-z][a-z-]+", text))
