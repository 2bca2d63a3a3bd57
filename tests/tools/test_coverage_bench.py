"""Tests of tools/bench/coverage.py: scores of intervals, and a reduced version of its table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tool_modules import load_tool


@pytest.fixture(scope="module")
def bench(root: Path) -> dict[str, Any]:
    return vars(load_tool(root / "tools" / "bench" / "coverage.py"))


def test_coverage_width_and_score_are_those_of_the_intervals(bench: dict[str, Any]) -> None:
    # width 2 with x inside; width 1 with x outside by 0.1: a score of 1 + 40 * 0.1
    scores = [bench["score_interval"](0.0, 2.0, 1.0), bench["score_interval"](0.0, 1.0, 1.1)]
    assert [tuple(score) for score in scores] == [(True, 2.0, 2.0), (False, 1.0, pytest.approx(5.0))]
    table = bench["summarise_results"]([[[score, (1.0, 0.5, 0.5)] for _ in range(7)] for score in scores])
    assert table["alpha"] == pytest.approx(
        {"coverage": 0.5, "median_width": 1.5, "width_ratio": 3.0, "score_ratio": 7.0, "oracle_coverage": 1.0}
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("20", 0.92), ("40", 0.92), ("15", 0.88), ("E=0-40", 0.92)])
def test_nominal_95_percent_covers(bench: dict[str, Any], name: str, least: float) -> None:
    n_simulations = 100
    table = bench["summarise_results"](bench["measure_coverage"](name, range(n_simulations), 300, 1))
    error = 2.6 * np.sqrt(0.06 * 0.94 / n_simulations)  # with 7 cells, one test in a hundred fails by chance
    for quantity, cell in table.items():
        assert cell["coverage"] > least - error, quantity
        assert cell["score_ratio"] < 2, quantity
