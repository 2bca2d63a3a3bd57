"""Tests of scaling frontier on a table of runs."""

import json
from pathlib import Path

import pandas as pd
import pytest

from megatron.study.format import format_count
from tests.report.frontier_study import LAW, RUNS
from tests.tools.conftest import read_traces


def test_the_optimum_of_a_table_is_that_of_its_law(cli, tmp_path: Path) -> None:
    """The table also has rows of another corpus."""
    other = RUNS.assign(corpus="code", loss=1.5 * RUNS["loss"] / RUNS["n_params"] ** 0.1)
    pd.concat([RUNS.assign(corpus="c4"), other]).to_csv(tmp_path / "table.csv", index=False)
    words = ("--flops-by", "train_flops", "--where", "corpus == 'c4'", "--budgets", 1e12, 2e13)
    words += ("--out", tmp_path / "law.json", "--plot", tmp_path / "frontier.html")
    output = cli("frontier", tmp_path / "table.csv", *words).output
    assert json.loads((tmp_path / "law.json").read_text())["params"] == pytest.approx(LAW.params, rel=1e-3)
    for flops, start in ((1e12, "1.00e+12"), (2e13, "2.00e+13")):
        (line,) = (line for line in output.splitlines() if line.strip().startswith(start))
        at = LAW.optimum(flops)
        assert {format_count(at.N, 3), f"{at.loss:.3f}"} <= set(line.split())
    best = read_traces(tmp_path / "frontier.html")[1]
    assert best["y"] == pytest.approx([LAW.optimum(flops).N for flops in (1e12, 2e13)], rel=1e-3)
