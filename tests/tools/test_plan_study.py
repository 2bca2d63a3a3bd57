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


def test_runs_of_a_pool_are_chosen_for_targets(cli, tmp_path: Path) -> None:
    pool = simulate_runs(5, 5, noise=0.001)
    pool["cost"] = 6 * pool["n_params"] * pool["train_tokens"]
    pool.to_csv(tmp_path / "pool.csv", index=False)
    pd.DataFrame({"n_params": [1e10], "train_tokens": [1e12]}).to_csv(tmp_path / "targets.csv", index=False)
    words = ("choose", tmp_path / "pool.csv", tmp_path / "targets.csv", "--axes", "n_params", "train_tokens")
    words += ("--cost", "cost", "--budget", 3e20, "--out", tmp_path / "runs.csv")
    output = cli(*words, "--score").output
    unknown = ("choose", tmp_path / "targets.csv", *words[2:], "--score")
    assert "no column 'loss'" in cli(*unknown, status=1).error
    chosen = pd.read_csv(tmp_path / "runs.csv")
    assert chosen["cost"].sum() <= 3e20 and f"{len(chosen)} runs, cost " in output
    assert "target 1: loss " in output
    # every run of the pool is finished: there is none to choose
    assert "0 runs, cost 0" in (output := cli(*words).output) and "target 1: loss " in output
