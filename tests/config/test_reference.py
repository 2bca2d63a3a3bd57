"""The reference page of all keys is generated from the dataclasses."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

from megatron.config.schema import RunConfig
from tests.tool_modules import load_tool


def test_the_files_in_the_tree_are_current(root: Path) -> None:
    for name, text in load_tool(root / "tools" / "make_docs.py").render_files(root).items():
        assert (root / name).read_text() == text, f"{name}: run make docs"


def test_every_key_has_a_row_with_its_default_and_numbers_have_a_unit(root: Path) -> None:
    page = load_tool(root / "tools" / "make_docs.py").render_reference()
    cells = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.*?) \| (.*?) \| (.+) \|$", page, re.M)
    rows = {row[0]: row for row in cells}
    keys = {f"{s.name}.{k.name}" for s in fields(RunConfig) if is_dataclass(s.type) for k in fields(s.type)}
    assert rows.keys() == keys | {"name"}
    assert rows["optim.lr"][1:4] == ("number", "`0.0003`", "-")
    assert rows["checkpoint.keep_last"][1:] == (
        "whole number", "`2`", "checkpoints",
        "number of newest checkpoints to keep; older ones are deleted; null: keep all; more than 0",
    )  # fmt: skip
    assert rows["dist.timeout_s"][3] == "seconds" and rows["dataset.unique_tokens"][2] == "`null`"
    assert rows["dataset.order"][1] == "`epoch` or `megatron`"
    assert not [key for key, row in rows.items() if "number" in row[1] and not row[3]]
