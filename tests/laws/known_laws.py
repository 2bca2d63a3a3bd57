"""Runs of laws whose constants are known."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from megatron.laws.forms import FORM
from megatron.laws.law import Law

TRUTH = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}
# from Besiroglu et al., rounded
BESIROGLU = {"E": 1.82, "A": 482.0, "B": 2085.0, "alpha": 0.348, "beta": 0.366}
Runs = tuple[np.ndarray, np.ndarray, np.ndarray]


def count_trials(fast: int, slow: int) -> pytest.MarkDecorator:
    """Return the parameter `n`: the number of simulations of a fast test, and of a slow one."""
    return pytest.mark.parametrize("n", [fast, pytest.param(slow, marks=pytest.mark.slow)])


def least_hits(n: int, share: float = 0.95) -> int:
    """Return the number of hits of `n` trials below which are 0.3 % of all simulations."""
    return int(binom.ppf(0.003, n, share))


def make_law(form: str = "chinchilla", params: Mapping[str, float] = TRUTH, **more: Any) -> Law:
    """Return a law of these constants, which no runs were fitted for."""
    return Law(form=form, params=dict(params), objective=0.0, huber_delta=1e-3, n_runs=10, **more)


def simulate_losses(
    N: np.ndarray,
    D: np.ndarray,
    sigma: np.ndarray | float,
    seed: int = 0,
    params: Mapping[str, float] = TRUTH,
) -> np.ndarray:
    """Return losses of form chinchilla with noise of the standard deviation `sigma` in log L."""
    noise = np.random.default_rng(seed).standard_normal(len(N))
    return FORM["chinchilla"].loss(dict(params), N, D) * np.exp(sigma * noise)


def simulate_grid(n_sizes: int, n_lengths: int, sigma: float = 0.0, seed: int = 0) -> Runs:
    """Return N, D, L of all pairs of sizes from 1e7 to 1e9 and of lengths from 1e9 to 1e11."""
    axes = np.geomspace(1e7, 1e9, n_sizes), np.geomspace(1e9, 1e11, n_lengths)
    N, D = (grid.ravel() for grid in np.meshgrid(*axes))
    return N, D, simulate_losses(N, D, sigma, seed)


def make_ratios(n_sizes: int, n_ratios: int) -> tuple[np.ndarray, np.ndarray]:
    """Return N and D of sizes from 1e7 to 1e9, each with D/N from 4 to 100."""
    N = np.repeat(np.geomspace(1e7, 1e9, n_sizes), n_ratios)
    return N, N * np.tile(np.geomspace(4, 100, n_ratios), n_sizes)


def make_isoflop(n_budgets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return N and D of budgets from 1e18 to 1e20, each with five D/N from 4 to 100."""
    compute = np.repeat(np.geomspace(1e18, 1e20, n_budgets), 5)
    ratio = np.tile(np.geomspace(4, 100, 5), n_budgets)
    N = np.sqrt(compute / 6 / ratio)
    return N, N * ratio


def make_repeats(
    n_sizes: int = 5, epochs: Sequence[int] = (1, 3, 10, 40)
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return N, D, U of sizes from 1e7 to 1e9, three amounts of unique text and these epochs of it."""
    n, u, e = np.meshgrid(np.geomspace(1e7, 1e9, n_sizes), np.geomspace(1e8, 1e10, 3), epochs)
    return n.ravel(), (u * e).ravel(), u.ravel()


def check_derivatives(
    evaluate: Callable[[np.ndarray], tuple[float, np.ndarray]],
    gradient: np.ndarray,
    hessian: np.ndarray,
    step: float = 1e-6,
) -> None:
    """Compare derivatives with central differences.

    evaluate  a step from the point -> (objective, gradient [n])
    """
    for i, moved in enumerate(step * np.eye(len(gradient))):
        (up, slope_up), (down, slope_down) = evaluate(moved), evaluate(-moved)
        assert gradient[i] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-8)
        scale = max(1.0, np.abs(hessian).max())
        np.testing.assert_allclose(
            hessian[i], (slope_up - slope_down) / (2 * step), rtol=1e-4, atol=1e-6 * scale
        )
