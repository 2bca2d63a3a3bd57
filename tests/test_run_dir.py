"""Metrics of a run directory, and readers of damaged files."""

import json
from pathlib import Path

import pytest

from megatron.plan.run_dir import read_metrics
from megatron.study.launchers.launch import read_last_metrics


@pytest.mark.parametrize("line", [b"{", b"\x80{}", b"[1]", b'{"kind": "train"}', b'{"kind": [], "step": 1}'])
def test_a_damaged_line_of_metrics_is_named_and_the_last_complete_line_precedes_it(
    tmp_path: Path, line: bytes
) -> None:
    good = b'{"kind": "train", "step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + line + b"\n" + b'{"kind"')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: got .* Remove the line\."):
        list(read_metrics(tmp_path))
    last = read_last_metrics(tmp_path)
    assert last == {"kind": "train", "step": 1} or last == json.loads(line)
    (tmp_path / "metrics.jsonl").write_bytes(good + b"\x80\n[1]\n")
    assert read_last_metrics(tmp_path) == {"kind": "train", "step": 1}
