"""Sidecars with a field of the wrong type are refused in a sentence."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data import open_dataset
from megatron.data.indexed_writer import IndexedWriter
from megatron.data.sidecar import FIELDS, read_sidecar
from megatron.plan.datapaths import read_data_paths
from megatron.text.inspect_dataset import find_faults
from megatron.text.merge import merge_datasets

WRONG_VALUES: dict[type, list[Any]] = {
    int: [True, -1, 1.0, 1 << 63, 10**30, "5", [], {}],
    float: [True, math.nan, math.inf, "0.5", []],
    bool: [0, "yes", {}],
    str: [5, False, [], {}],
    dict: [5, True, "x", [{}]],
    list: [5, "x", {}, [5], [{}, None]],
}
FIELD_TYPES = [
    (section, name, kind)
    for section, kinds in FIELDS.items()
    for kind, names in kinds.items()
    for name in names.split()
]


@pytest.mark.parametrize(("section", "name", "kind"), FIELD_TYPES)
def test_a_field_of_the_wrong_type_is_named(tmp_path: Path, section: str, name: str, kind: type) -> None:
    path = tmp_path / "a.json"
    for value in WRONG_VALUES[kind]:
        fields = {name: value}
        path.write_text(
            json.dumps({section: [fields] if section == "parts" else fields} if section else fields)
        )
        place = {"": "", "parts": r"parts\[0\]\."}.get(section, rf"{section}\.")
        with pytest.raises(ValueError, match=rf"^{path}: {place}{name}: got '.*', expected [^\n]*$"):
            read_sidecar(tmp_path / "a")
        path.write_text(path.read_text().replace(json.dumps(value), "null"))  # a missing value
        read_sidecar(tmp_path / "a")


@pytest.mark.parametrize("text", ['{"tokens": "x"}', '{"tokens": 5', "[]", "[" * 100_000, "9" * 5000, "\0"])
def test_every_reader_refuses_a_damaged_sidecar(tmp_path: Path, text: str) -> None:
    with IndexedWriter(tmp_path / "a", np.dtype(np.uint16)) as writer:
        writer.add_document([1, 2, 3])
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "paths.txt").write_text(f"1 {tmp_path}/a\n")
    for read in (
        lambda: read_data_paths(tmp_path / "paths.txt"),
        lambda: open_dataset(tmp_path / "a"),
        lambda: list(find_faults(tmp_path / "a")),
        lambda: merge_datasets([str(tmp_path / "a")], tmp_path / "merged"),
    ):
        with pytest.raises(ValueError, match=r"^(?s:.*a\.json: .*)$") as error:
            read()
        assert "\n" not in str(error.value)
