"""The guides to scoring name every option of their commands, and no other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = {"validate.py": "evaluation/EVAL.md", "evaluate_downstream.py": "downstream/DOWNSTREAM.md"}
PLAIN = {"--help", "--device", "--threads"}  # say all in --help


@pytest.mark.parametrize("tool", GUIDES)
def test_a_guide_names_every_option_of_its_command_and_no_other(root: Path, tool: str) -> None:
    text = (root / "examples_scaling" / GUIDES[tool]).read_text()
    asked = [sys.executable, str(root / "tools" / tool), "--help"]
    told = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=True).stdout
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", told)) - PLAIN
    assert options - set(re.findall(r"--[a-z][a-z-]+", text)) == set()
    lines = [line for line in text.splitlines() if "torchrun" not in line and "preprocess" not in line]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)))
    others = {"--output-prefix", "--dataset-impl", "--tokenizer-type", "--tokenizer-model", "--append-eod"}
    assert named - options - PLAIN - others == set()


@pytest.mark.parametrize("script", ["evaluation/validate.sh", "downstream/downstream.sh"])
def test_a_script_without_its_words_says_how_it_is_used(root: Path, script: str) -> None:
    path = root / "examples_scaling" / script
    failed = subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=240)
    assert failed.returncode == 2 and "usage: " in failed.stderr
