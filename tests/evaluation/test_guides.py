"""The guides to scoring document all options of their commands, and no others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = {"validate.py": "evaluation/EVAL.md", "evaluate_downstream.py": "downstream/DOWNSTREAM.md"}
COMMANDS = {"validate.py": "scaling validate", "evaluate_downstream.py": "scaling evaluate"}
PLAIN = {"--help", "--device", "--threads"}  # documented in --help only


@pytest.mark.parametrize("tool", GUIDES)
def test_a_guide_documents_all_options_of_its_command_and_no_others(root: Path, tool: str) -> None:
    text = (root / "examples_scaling" / GUIDES[tool]).read_text().partition("## Convert")[0]
    command = [sys.executable, str(root / "tools" / tool), "--help"]
    help_text = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text)) - PLAIN
    assert options - set(re.findall(r"--[a-z][a-z-]+", text)) == set()
    # other commands have options of their own, and `--references` is explained below its command
    foreign = (
        "torchrun",
        "lm_eval --model",
        "scaling prepare",
        "scaling collect",
        "`--references`",
        *(command for name, command in COMMANDS.items() if name != tool),
    )
    lines = [line for line in text.splitlines() if not any(word in line for word in foreign)]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)))
    others = {"--output-prefix", "--dataset-impl", "--tokenizer-type", "--tokenizer-model", "--append-eod"}
    assert named - options - PLAIN - others == set()


@pytest.mark.parametrize("script", ["evaluation/validate.sh", "downstream/downstream.sh"])
def test_a_script_without_arguments_prints_its_usage(root: Path, script: str) -> None:
    path = root / "examples_scaling" / script
    failed = subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=240)
    assert failed.returncode == 2 and "usage: " in failed.stderr
