"""The tree in CONTRIBUTING.md and the environment files agree with the checkout."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from megatron.cli import SUBCOMMANDS
from tests.conftest import run_process


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[Path]:
    """All tracked files of the checkout."""
    listed = run_process(["git", "ls-files"], root)
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


def test_make_help_lists_every_target_but_clean(root: Path) -> None:
    listed = re.findall(r"^make ([\w-]+) ", run_process(["make", "help"], root).stdout, re.MULTILINE)
    targets = re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(targets) - {"clean"}) and len(listed) > 5


def test_relative_links_between_guides_exist(root: Path, tracked: list[Path]) -> None:
    guides = [path for path in tracked if path.suffix == ".md"]
    links = [
        (g, link) for g in guides for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", (root / g).read_text())
    ]
    assert len(links) > 50
    assert [(str(g), link) for g, link in links if not (root / g.parent / link).exists()] == []


def test_a_wheel_has_the_tools_in_its_own_package_and_runs_them(root: Path, tmp_path: Path) -> None:
    run_process([sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path], root)
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    assert {path.stem for path in tmp_path.glob("megatron/commands/*.py")} == set(SUBCOMMANDS.values())
    for helper in (root / "megatron").glob("_csrc*.so"):  # built by another command
        shutil.copy(helper, tmp_path / "megatron")

    code = "from megatron.study.launchers import local; print(local.PRETRAIN.is_file())"
    for words, start in (
        (("-m", "megatron.cli", "merge", "--help"), "usage: scaling merge"),
        (("-c", code), "True"),
    ):
        done = run_process([sys.executable, *words], tmp_path, PYTHONPATH=str(tmp_path))
        assert done.stdout.startswith(start)
