"""Runs chosen from a pool: against a dense Gaussian process, on simulated and on published pools."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from megatron.laws import pool_design
from megatron.laws.pool_design import choose_from_pool, predict_targets

# columns of the axes, the loss, the cost, shares of the pool's cost, and R^2 of the published method
POOLS = json.loads(Path(__file__).with_name("scalebench.json").read_text())


def simulate_pool(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return N, D and rate [60, 3] of a law with an optimal rate, and noisy losses."""
    rng = np.random.default_rng(seed)
    axes = np.exp(rng.uniform(np.log([1e6, 1e8, 1e-4]), np.log([1e8, 1e10, 1e-2]), (60, 3)))
    return axes, true_loss(axes) * np.exp(0.003 * rng.standard_normal(60))


def true_loss(axes: np.ndarray) -> np.ndarray:
    N, D, rate = axes.T
    return 1.7 + (30 * N**-0.2 + 60 * D**-0.2) * np.exp(0.02 * np.log(rate / 1e-3) ** 2)


TARGETS = np.array([[1e9, 1e11, 1e-3], [1e9, 3e10, 5e-4]])


def test_each_choice_reduces_the_summed_variance_of_a_dense_process_most_for_its_cost() -> None:
    axes, _ = simulate_pool()
    axes, cost = axes[:12], np.linspace(1.0, 3.0, 12)
    z, z_at = (np.log(v) - np.log(TARGETS).mean(axis=0) for v in (axes, TARGETS))

    def dense_variance(rows: list[int]) -> float:
        among = pool_design._covariance(z[rows], z[rows]) + pool_design.DESIGN_NOISE**2 * np.eye(len(rows))
        between = pool_design._covariance(z_at, z[rows])
        prior = pool_design._covariance(z_at, z_at)
        return float(np.trace(prior - between @ np.linalg.solve(among, between.T)))

    choice = choose_from_pool(axes, cost, TARGETS, budget=8.0, done=np.arange(12) == 3)
    rows = [3]
    for row in choice.rows:
        spent = cost[rows[1:]].sum()
        free = [i for i in range(12) if i not in rows and spent + cost[i] <= 8]
        gain = {i: (dense_variance(rows) - dense_variance([*rows, i])) / cost[i] ** 0.2 for i in free}
        assert max(gain, key=lambda i: gain[i]) == row
        rows.append(int(row))
    assert choice.cost == pytest.approx(cost[choice.rows].sum()) and choice.cost <= 8
    assert choice.error_after < choice.error_before


def test_predictions_cover_targets_100_times_larger() -> None:
    inside = []
    for seed in range(20):
        axes, losses = simulate_pool(seed)
        predicted = predict_targets(axes, losses, TARGETS)
        assert np.abs(predicted.loss / true_loss(TARGETS) - 1).max() < 0.1
        inside += list((predicted.low < true_loss(TARGETS)) & (true_loss(TARGETS) < predicted.high))
    assert np.mean(inside) >= 0.9


def test_values_that_are_not_possible_are_refused() -> None:
    axes, losses = simulate_pool()
    for wrong, sentence in (
        ((axes, np.ones(60), -TARGETS, 5.0), "targets: expected rows of numbers above 0"),
        ((axes, np.zeros(60), TARGETS, 5.0), "cost: expected a number above 0 for each of 60 runs"),
        ((axes, np.full(60, 9.0), TARGETS, 5.0), "budget: got 5, expected 9 or more"),
        ((axes, np.ones(60), TARGETS[:, :2], 5.0), "got 2 axes, expected 3"),
    ):
        with pytest.raises(ValueError, match=sentence):
            choose_from_pool(*wrong)
    with pytest.raises(ValueError, match="got 60 losses of 59 runs"):
        predict_targets(axes[1:], losses, TARGETS)


def score_pool(folder: Path, name: str) -> Iterator[tuple[float, float]]:
    """Yield R^2 of the targets by the runs chosen at each share of the cost, and the published one."""
    pool = POOLS[name]
    tables = [pd.read_parquet(folder / f"{name}_{part}.parquet") for part in ("train", "test")]
    for share, published in zip(pool["shares"], pool["published"], strict=True):
        scores = []
        for group, runs in tables[0].groupby("group"):
            at = tables[1][tables[1]["group"] == group]
            axes, targets = (table[pool["axes"]].to_numpy(float) for table in (runs, at))
            cost, losses = runs.eval(pool["cost"]).to_numpy(float), runs[pool["loss"]].to_numpy(float)
            budget = share * cost.sum()
            chosen = choose_from_pool(axes, cost, targets, budget).rows if cost.min() <= budget else []
            if len(chosen) < 2:
                scores.append(-1.0)
            elif len(at):
                predicted = predict_targets(axes[chosen], losses[chosen], targets).loss
                measured = at[pool["loss"]].to_numpy(float)
                explained = 1 - ((measured - predicted) ** 2).sum() / measured.var() / len(at)
                scores.append(max(explained, -1.0))
        yield float(np.mean(scores)), published


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in POOLS if name != "sparsity"])
def test_runs_chosen_from_published_pools_predict_as_well_as_the_published_method(
    laws: Path, name: str
) -> None:
    for ours, published in score_pool(laws / "scalebench", name):
        assert ours >= published - 0.005  # published with two digits
