"""Tests of scaling plan from the command line."""

from pathlib import Path

import pandas as pd

from tests.tools.conftest import simulate_runs


def test_a_plan_is_shown_beside_simple_designs_and_written(cli, tmp_path: Path) -> None:
    out = tmp_path / "runs.csv"
    done = cli("plan", "--budget", 1e18, "--runs", 8, "--target", 1e20, "--out", out)
    runs = pd.read_csv(out)
    assert len(runs) == 8 and (6 * runs.n_params * runs.train_tokens).sum() <= 1.001e18
    for name in ("proposed (c)", "ladder, D/N 20", "D/N 5, 20, 80", "isoFLOP slices"):
        assert name in done.output


def test_after_some_runs_the_next_ones_are_proposed(cli, tmp_path: Path) -> None:
    simulate_runs(3, 1).to_csv(tmp_path / "table.csv", index=False)
    words = ("--budget", 1e17, "--runs", 2, "--target", 1e19, "--done", tmp_path / "table.csv")
    assert "done so far" in cli("plan", *words).output
