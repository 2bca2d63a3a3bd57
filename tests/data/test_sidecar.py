"""Sidecars with a field of the wrong type are refused in a sentence."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.data import open_dataset
from megatron.data.sidecar import FIELDS, read_sidecar
from megatron.plan.datapaths import read_data_paths
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets
from tests.datasets import write_dataset
from tests.wrong_values import read_refusal

WRONG_VALUES: dict[type, list[Any]] = {
    int: [True, -1, 1.0, 1 << 63, 10**30, "5", [], {}],
    float: [True, math.nan, math.inf, "0.5", []],
    bool: [0, "yes", {}],
    str: [5, False, [], {}],
    dict: [5, True, "x", [{}]],
    list: [5, "x", {}, [5], [{}, None]],
}


def test_a_field_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    fields = [(section, kind, name) for section, kinds in FIELDS.items() for kind, names in kinds.items()
              for name in names.split()]  # fmt: skip
    assert len(fields) > 20
    for section, kind, name in fields:
        place = {"": "", "parts": r"parts\[0\]\."}.get(section, rf"{section}\.")
        for value in (*WRONG_VALUES[kind], None):  # None: a missing value
            entry = {name: value}
            content = {section: [entry] if section == "parts" else entry} if section else entry
            path.write_text(json.dumps(content))
            message = read_refusal(lambda: read_sidecar(tmp_path / "a"))
            expected = rf"{path}: {place}{name}: got '.*', expected [^\n]*"
            assert message is None if value is None else re.fullmatch(expected, str(message)), content


@pytest.mark.parametrize("text", ['{"tokens": "x"}', '{"tokens": 5', "[]", "[" * 100_000, "9" * 5000, "\0"])
def test_every_reader_refuses_a_damaged_sidecar(tmp_path: Path, text: str) -> None:
    prefix = write_dataset(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "paths.txt").write_text(f"1 {prefix}\n")
    for read in (
        lambda: read_data_paths(tmp_path / "paths.txt"),
        lambda: open_dataset(prefix),
        lambda: list(find_faults(prefix)),
        lambda: merge_datasets([prefix], tmp_path / "merged"),
    ):
        assert "a.json: " in str(read_refusal(read))
