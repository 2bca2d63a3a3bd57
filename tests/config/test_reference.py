"""The reference page of all keys is generated from the dataclasses."""

from pathlib import Path

from tests.tool_modules import load_tool


def test_the_files_in_the_tree_are_current(root: Path) -> None:
    for name, text in load_tool(root / "tools" / "make_docs.py").render_files(root).items():
        assert (root / name).read_text() == text, f"{name}: run make docs"
