"""The examples of examples_scaling/mixture, and the Python of MIXTURE.md."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guide_commands import commands_of


@pytest.fixture
def folder(tmp_path: Path, scaling_data: Path) -> Path:
    """What the guide begins with."""
    name = "derived_slimpajama_schema.jsonl.gz"
    (tmp_path / "slimpajama").mkdir()
    (tmp_path / "slimpajama" / name).symlink_to(scaling_data / "redpajama_sample" / name)
    (tmp_path / "gpt2").symlink_to(scaling_data / "gpt2_tokenizer")
    return tmp_path


def run(words: list[str], folder: Path, root: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(root / words[0]), *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_python_of_the_guide_prints_what_the_guide_shows(root: Path, folder: Path) -> None:
    guide = (root / "examples_scaling" / "training" / "MIXTURE.md").read_text()
    register = commands_of(root / "examples_scaling" / "training" / "MIXTURE.md")[0]
    run(register.words[1:], folder, root)
    ((script, output),) = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", guide, re.DOTALL)
    (folder / "ask.py").write_text(script)
    assert run([str(folder / "ask.py")], folder, root) == output


def test_the_examples_read_a_mixture_here_and_from_a_server(root: Path, folder: Path) -> None:
    text = next((folder / "slimpajama").iterdir())
    (folder / "work").mkdir()
    told = run(["examples_scaling/mixture/local.py", str(text), "work"], folder, root)
    assert told.startswith("registered 4,262 documents, 0 broken lines\n")
    assert told.endswith("one group goes on with chunk 6\n")
    shares = re.findall(r"C4': '([\d.]+)', 'RedPajamaGithub': '([\d.]+)'", told)
    assert len(shares) == 6
    assert all(abs(float(c4) - 0.5) < 0.01 and abs(float(code) - 0.3) < 0.01 for c4, code in shares)
    told = run(["examples_scaling/mixture/server.py", "work/mixture.yaml"], folder, root)
    assert "8 chunks of 512 documents, the same" in told
    assert "the second server gave 4 chunks, 2048 documents" in told
    for name in ("local", "server"):
        assert len((root / "examples_scaling" / "mixture" / f"{name}.py").read_text().splitlines()) < 60
