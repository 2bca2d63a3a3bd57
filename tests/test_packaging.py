"""The map in the README, and the files that say what an environment is made of, against the tree."""

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest
import yaml


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[Path]:
    """Every file of the checkout."""
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout, so there is no list of files")
    return [Path(line) for line in listed.stdout.splitlines()]


def test_the_tree_in_the_readme_is_the_tree(root: Path, tracked: list[Path]) -> None:
    text = (root / "README.md").read_text().partition("## The tree\n")[2].partition("```text\n")[2]
    shown: list[str] = []
    top = ""
    for indent, name in re.findall(r"^( {0,2})([\w.]+)/ ", text.partition("```")[0], re.MULTILINE):
        top = top if indent else name
        shown.append(f"{top}/{name}" if indent else name)
    folders = {path.parent for path in tracked if path.parts[0][0] != "."}
    present = {"/".join(folder.parts[:2]) for folder in folders if folder.parts}
    hidden_parts = ("tests/",)  # "mirrors megatron/"
    tops = {folder.split("/")[0] for folder in present}
    wanted = tops | {folder for folder in present if "/" in folder and not folder.startswith(hidden_parts)}
    assert sorted(shown) == sorted(wanted)


def test_every_link_of_the_readme_leads_somewhere(root: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", (root / "README.md").read_text())
    assert len(targets) > 10
    assert [one for one in targets if "://" not in one and not (root / one).exists()] == []


def test_conda_takes_the_pins_of_pip_and_pins_nothing_of_its_own_but_python(root: Path) -> None:
    listed = yaml.safe_load((root / "environment.yml").read_text())["dependencies"]
    (by_pip,) = [one["pip"] for one in listed if isinstance(one, dict)]
    assert by_pip == ["-r requirements.txt"]
    pinned = [one for one in listed if isinstance(one, str) and re.search("[=<>]", one)]
    assert [re.split("[=<>]", one)[0] for one in pinned] == ["python"]
    pins = {line.split("==")[0] for line in (root / "requirements.txt").read_text().splitlines()}
    assert not pins & {one for one in listed if isinstance(one, str)}


def test_the_image_copies_what_there_is_and_runs_as_nobody_special(root: Path) -> None:
    text = (root / "Dockerfile").read_text().replace("\\\n", " ")
    copied = [line.split()[1:-1] for line in text.splitlines() if line.startswith("COPY ")]
    sources = [word for words in copied for word in words if not word.startswith("--")]
    assert sources and all((root / source).exists() for source in sources)
    users = [line.split()[1] for line in text.splitlines() if line.startswith("USER ")]
    assert users and users[-1] not in ("0", "root")


def test_what_git_leaves_out_stays_out_of_the_image_and_nothing_else(root: Path, tracked: list[Path]) -> None:
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
