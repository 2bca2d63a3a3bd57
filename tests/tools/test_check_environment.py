"""Tests of tools/check_environment.py on complete, incomplete and broken installations."""

import importlib.metadata as metadata
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megatron
from tests.conftest import run_process
from tests.tool_modules import Cli, load_tool

TWO_GPUS = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15\n" * 2
# a build for the CPU, which is imported at once
CPU_TORCH = """
class version: cuda = hip = None
class cuda: device_count = staticmethod(lambda: 0)
"""
IMPORTED = """
import sys
import megatron.checkpoint.preempt, megatron.mixture.spec, megatron.train.build, megatron.train.loop
print(*{name.split(".")[0] for name in sys.modules})
"""
Rows = dict[str, tuple[str, str]]
Check = Callable[..., tuple[Rows, str]]


def parse_rows(output: str) -> Rows:
    """Return item -> (mark, rest of the line)."""
    lines = re.findall(r"^(ok|missing|-) +(.{20}\S*) +(.*)$", output, re.MULTILINE)
    return {what.strip(): (mark, rest) for mark, what, rest in lines}


@pytest.fixture
def check(cli: Cli, tmp_path: Path) -> Check:
    """A function that runs the tool beside a torch of this source, and returns (rows, errors)."""

    def run_check(torch: str = CPU_TORCH, status: int = 0) -> tuple[Rows, str]:
        (tmp_path / "torch.py").write_text(torch)
        env = {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = cli("check", env=env, status=status)
        return parse_rows(done.output), done.error

    return run_check


def test_where_nothing_is_installed_it_names_the_one_command_that_installs_all_and_fails(root: Path) -> None:
    command = [sys.executable, "-I", "-S", str(root / "tools" / "check_environment.py")]  # no site-packages
    done = run_process(command)
    rows = parse_rows(done.stdout)
    assert done.returncode == 1
    assert rows["packages"][0] == "missing" and "to install: make quickstart" in rows["packages"][1]
    assert not any("pip install" in rest for _, rest in rows.values())
    assert done.stderr == "error: training cannot run here without packages\n"


def test_each_missing_package_is_listed_with_its_command(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version

    def find_version(name: str) -> str:
        if name in ("torch", "numpy", "deepspeed"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", find_version)
    monkeypatch.delattr(megatron, "_csrc", raising=False)
    monkeypatch.setitem(sys.modules, "megatron._csrc", None)
    rows, error = check(status=1)
    assert {what for what, (mark, _) in rows.items() if mark == "missing"} == {
        "torch", "megatron._csrc", "numpy"
    }  # fmt: skip
    assert "make test" in rows["torch"][1] and "pip install numpy==" in rows["numpy"][1]
    assert "not compiled" in rows["megatron._csrc"][1]
    assert rows["deepspeed"][0] == "-"  # optional for training
    assert error.startswith("error: training cannot run here without torch, megatron._csrc")


def test_without_requirements_as_in_a_wheel_the_libraries_are_those_of_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = load_tool(root / "tools" / "check_environment.py")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    assert tuple(name for name, _, _ in tool.read_requirements()) == tool.TRAINING


def test_it_lists_every_pinned_library_and_passes_where_training_runs(cli: Cli, root: Path) -> None:
    rows = parse_rows(cli("check").output)
    pinned = re.findall(r"^([\w.-]+)==", (root / "requirements.txt").read_text(), re.MULTILINE)
    assert set(pinned) <= rows.keys()
    assert {rows[what][0] for what in ("torch", "numpy", "megatron._csrc")} == {"ok"}


def test_gpus_are_listed_and_a_torch_that_does_not_see_them_is_reported(check: Check, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '{TWO_GPUS}'\n")
    driver.chmod(0o755)
    rows, _ = check()
    assert rows["GPU 0"] == rows["GPU 1"] == ("ok", TWO_GPUS.splitlines()[0])
    assert rows["GPUs of torch"][0] == "-"
    assert "download.pytorch.org" in rows["GPUs of torch"][1]


def test_a_torch_that_cannot_be_imported_is_fatal_and_its_last_error_line_is_shown(check: Check) -> None:
    rows, error = check("raise ImportError('libcudart.so.13: not found')\n", status=1)
    assert "without torch" in error
    assert rows["torch"][0] == "missing" and "libcudart.so.13: not found" in rows["torch"][1]


def test_what_it_requires_is_what_training_imports(root: Path) -> None:
    done = run_process([sys.executable, "-c", IMPORTED], PYTHONPATH=str(root))
    text = (root / "requirements.txt").read_text()
    pinned = set(re.findall(r"^([\w.-]+)[=>]=", text, re.MULTILINE))  # torch has bounds
    required = load_tool(root / "tools" / "check_environment.py").TRAINING
    assert pinned & set(done.stdout.split()) == set(required)
