"""Tests of tools/check_environment.py on complete, incomplete and broken installations."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tool_modules import load_tool

REQUIREMENTS = ("requirements-quickstart.txt", "requirements.txt")

TWO_GPUS = "NVIDIA H100 80GB HBM3, 81559 MiB, 570.86.15\n" * 2


@pytest.fixture
def check(root: Path):
    """A function that runs the tool and returns (status, {item: (mark, rest)}, stderr)."""

    def run_check(
        python: tuple[str, ...] = (), path: str = "", packages: str = ""
    ) -> tuple[int, dict[str, tuple[str, str]], str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (packages, str(root))))}
        environment["PATH"] = os.pathsep.join(filter(None, (path, os.environ["PATH"])))
        done = subprocess.run(
            [sys.executable, *python, str(root / "tools" / "check_environment.py")],
            env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        lines = re.findall(r"^(ok|missing|-) +(.{20}\S*) +(.*)$", done.stdout, re.MULTILINE)
        return done.returncode, {what.strip(): (mark, rest) for mark, what, rest in lines}, done.stderr

    return run_check


def test_where_nothing_is_installed_it_names_the_one_command_that_installs_all_and_fails(check) -> None:
    status, rows, error = check(python=("-I", "-S"))  # no site-packages, no PYTHONPATH
    assert status == 1
    assert rows["packages"][0] == "missing" and "to install: make quickstart" in rows["packages"][1]
    assert not any("pip install" in rest for _, rest in rows.values())
    assert error == "error: training cannot run here without packages\n"


def test_where_single_packages_are_missing_it_lists_each_with_its_command(check, tmp_path: Path) -> None:
    hide = """
import importlib.metadata as metadata, sys
def find_version(name, version=metadata.version):
    if name in ("torch", "numpy", "deepspeed"):
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = find_version
sys.modules["megatron._csrc"] = None
"""
    (tmp_path / "sitecustomize.py").write_text(hide)
    status, rows, error = check(packages=str(tmp_path))
    assert status == 1
    lacking = {what for what, (mark, _) in rows.items() if mark == "missing"}
    assert lacking == {"torch", "megatron._csrc", "numpy"}
    assert "make test" in rows["torch"][1] and "pip install numpy==" in rows["numpy"][1]
    assert "not compiled" in rows["megatron._csrc"][1]
    assert rows["deepspeed"][0] == "-"  # optional for training
    assert error.startswith("error: training cannot run here without torch, megatron._csrc")


def test_it_lists_every_pinned_library_and_passes_where_training_runs(check, root: Path) -> None:
    status, rows, _ = check()
    assert status == 0
    pinned = re.findall(r"^([\w.-]+)==", (root / "requirements.txt").read_text(), re.MULTILINE)
    assert set(pinned) <= rows.keys()
    assert {rows[what][0] for what in ("torch", "numpy", "megatron._csrc")} == {"ok"}


def test_gpus_are_listed_and_a_torch_that_does_not_see_them_is_reported(check, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text(f"#!/bin/sh\nprintf '{TWO_GPUS}'\n")
    driver.chmod(0o755)
    blind = tmp_path / "sitecustomize.py"  # hide GPUs from torch, as in a CPU build
    blind.write_text("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\n")
    status, rows, _ = check(path=str(tmp_path), packages=str(tmp_path))
    assert status == 0
    assert rows["GPU 0"] == rows["GPU 1"] == ("ok", TWO_GPUS.splitlines()[0])
    assert rows["GPUs of torch"][0] == "-"
    assert "download.pytorch.org" in rows["GPUs of torch"][1]


def test_a_torch_that_cannot_be_imported_is_fatal_and_its_last_error_line_is_shown(
    check, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: not found')\n")
    status, rows, error = check(packages=str(tmp_path))
    assert status == 1 and "without torch" in error
    assert rows["torch"][0] == "missing" and "libcudart.so.13: not found" in rows["torch"][1]


def test_apex_is_listed_only_with_its_compiled_kernels(check, tmp_path: Path) -> None:
    mark, rest = check(packages=str(tmp_path))[1]["apex"]
    assert mark == "-" and "amp_C" in rest
    (tmp_path / "amp_C.py").touch()
    assert check(packages=str(tmp_path))[1]["apex"] == ("ok", str(tmp_path / "amp_C.py"))


IMPORTED = """
import sys
import megatron.checkpoint.preempt, megatron.mixture.spec, megatron.train.build, megatron.train.loop
print(*{name.split(".")[0] for name in sys.modules})
"""


def test_what_it_requires_is_what_training_imports(root: Path) -> None:
    command = [sys.executable, "-c", IMPORTED]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=True)
    text = "".join((root / name).read_text() for name in REQUIREMENTS)
    pinned = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    required = load_tool(root / "tools" / "check_environment.py").TRAINING
    assert pinned & set(done.stdout.split()) == set(required)
