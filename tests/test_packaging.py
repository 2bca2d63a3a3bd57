"""The tree in CONTRIBUTING.md and the environment files agree with the checkout."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.cli import SUBCOMMANDS


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[Path]:
    """All tracked files of the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout, so no list of files")
    return [Path(line) for line in listed.stdout.splitlines()]


def test_the_tree_in_the_guide_is_the_tree(root: Path, tracked: list[Path]) -> None:
    text = (root / "CONTRIBUTING.md").read_text().partition("## The tree\n")[2].partition("```text\n")[2]
    shown: list[str] = []
    top = ""
    for indent, name in re.findall(r"^( {0,2})([\w.]+)/ ", text.partition("```")[0], re.MULTILINE):
        top = top if indent else name
        shown.append(f"{top}/{name}" if indent else name)
    folders = {path.parent for path in tracked if path.parts[0][0] != "."}
    present = {"/".join(folder.parts[:2]) for folder in folders if folder.parts}
    hidden_parts = ("tests/",)  # the guide describes it as "mirrors megatron/"
    tops = {folder.split("/")[0] for folder in present}
    expected = tops | {folder for folder in present if "/" in folder and not folder.startswith(hidden_parts)}
    assert sorted(shown) == sorted(expected)


def test_every_link_of_the_readme_exists(root: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (root / "README.md").read_text())
    assert len(targets) > 10
    assert [target for target in targets if "://" not in target and not (root / target).exists()] == []


def test_make_help_lists_every_target_but_clean(root: Path) -> None:
    done = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True)
    listed = re.findall(r"^make ([\w-]+) ", done.stdout, re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(targets) - {"clean"}) and len(listed) > 5


def test_conda_uses_the_pins_of_pip_and_pins_only_python(root: Path) -> None:
    listed = yaml.safe_load((root / "environment.yml").read_text())["dependencies"]
    (by_pip,) = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    assert by_pip == ["-r requirements.txt"]
    pinned = [entry for entry in listed if isinstance(entry, str) and re.search("[=<>]", entry)]
    assert [re.split("[=<>]", entry)[0] for entry in pinned] == ["python"]
    files = ("requirements-quickstart.txt", "requirements.txt")
    lines = "".join((root / name).read_text() for name in files).splitlines()
    pins = {re.split("[=<>]", line)[0] for line in lines}
    assert not pins & {entry for entry in listed if isinstance(entry, str)}


def test_the_image_copies_existing_files_and_does_not_run_as_root(root: Path) -> None:
    text = (root / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    sources = [word for words in copied for word in words if not word.startswith("--")]
    assert sources and all((root / source).exists() for source in sources)
    users = [line.split()[1] for line in text.splitlines() if line.startswith("USER ")]
    assert users and users[-1] not in ("0", "root")


def test_the_image_excludes_exactly_what_git_ignores(root: Path, tracked: list[Path]) -> None:
    patterns = [line for line in (root / ".dockerignore").read_text().split("\n") if line and line[0] != "#"]

    def is_ignored(path: Path) -> bool:
        parts = [path, *path.parents[:-1]]
        return any(
            fnmatch.fnmatch(str(part), pattern) or fnmatch.fnmatch(f"/{part}", pattern.replace("**/", "*/"))
            for part in parts
            for pattern in patterns
        )

    assert [path for path in tracked if is_ignored(path)] == []
    outside = (".venv/bin/python", "experiments/run/log.txt", "build/x", ".git/HEAD", "megatron/_csrc.so")
    for name in (*outside, "megatron/data/__pycache__/x.pyc"):
        assert is_ignored(Path(name)), name


def test_relative_links_between_guides_exist(root: Path, tracked: list[Path]) -> None:
    guides = [path for path in tracked if path.suffix == ".md"]
    links = [
        (g, link) for g in guides for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", (root / g).read_text())
    ]
    assert len(links) > 50
    assert [(str(g), link) for g, link in links if not (root / g.parent / link).exists()] == []


def test_a_wheel_has_the_tools_in_its_own_package_and_runs_them(root: Path, tmp_path: Path) -> None:
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(build, cwd=root, check=True, timeout=240, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    assert {path.stem for path in tmp_path.glob("megatron/commands/*.py")} == set(SUBCOMMANDS.values())
    for helper in (root / "megatron").glob("_csrc*.so"):  # built by another command
        shutil.copy(helper, tmp_path / "megatron")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command, environment = [sys.executable, *words], {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    done = run("-m", "megatron.cli", "merge", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: scaling merge")
    # without requirements.txt the libraries are those of training
    done = run("-m", "megatron.cli", "check")
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr and "Python" in done.stdout
    code = "from megatron.study.launchers import local; print(local.PRETRAIN.is_file())"
    assert run("-c", code).stdout == "True\n"
