"""The package `megatron` beside NVIDIA's megatron-core, and beside packages with the same module names."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import megatron
from tests.conftest import run_process

BOTH = "import megatron.core, megatron.laws.law as law; print(megatron.core.NAME, law.Law.__name__)"


def write_package(folder: Path, **sources: str) -> Path:
    """Write `folder/megatron/NAME/__init__.py` for each name; `__init__` is megatron/__init__.py."""
    for name, source in sources.items():
        part = folder / "megatron" / ("" if name == "__init__" else name)
        part.mkdir(parents=True, exist_ok=True)
        (part / "__init__.py").write_text(source)
    return folder


def run_python(code: str, *entries: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that finds these folders first, in this order."""
    variables = {"PYTHONPATH": os.pathsep.join(map(str, entries)), "PYTHONSAFEPATH": "1"}
    return run_process([sys.executable, "-c", code], folder, **variables)


@pytest.mark.parametrize("place", ["before", "after", "same"])
def test_megatron_core_imports_beside_this_package(place: str, root: Path, tmp_path: Path) -> None:
    core = write_package(tmp_path / "site", core="NAME = 'core'\nfrom megatron.core.part import X\n")
    (core / "megatron" / "core" / "part.py").write_text("X = 1\n")
    entries = {"before": (core, root), "after": (root, core), "same": (core,)}[place]
    if place == "same":  # pip installs both wheels into the same folder
        for path in (root / "megatron").iterdir():
            (core / "megatron" / path.name).symlink_to(path)
    assert run_python(BOTH, *entries, folder=tmp_path).stdout == "core Law\n"


@pytest.mark.parametrize(
    "parts", [{"__init__": "", "training": ""}, {"core": "", "data": ""}], ids=["regular", "namespace"]
)
def test_another_package_with_our_names_is_refused(parts: dict[str, str], root: Path, tmp_path: Path) -> None:
    other = write_package(tmp_path / "Megatron-DeepSpeed", **parts)
    done = run_python("import megatron.laws", root, other, folder=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: {other}/megatron: got a second package `megatron`")
    assert f"Remove {other} from the search path (PYTHONPATH)" in last and "virtual environment" in last


def test_copies_of_this_project_and_leftovers_are_ignored(root: Path, tmp_path: Path) -> None:
    package = str(root / "megatron")
    copy = write_package(tmp_path / "copy", __init__="", laws="", data="")
    leftover = tmp_path / "leftover"
    (leftover / "megatron" / "data" / "__pycache__").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(root)
    entries = [str(path) for path in (copy, leftover, link, tmp_path / "absent")]
    assert megatron.find_portions(package, entries) == []
