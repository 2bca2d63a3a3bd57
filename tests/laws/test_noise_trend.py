"""Noise that changes with compute: detected where it does, and not where it does not."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import t

from megatron.laws.fit import fit_law
from megatron.laws.fitting.noise import Trend, fit_trend, orthonormal_basis
from megatron.laws.law import Law
from tests.laws.known_laws import BESIROGLU, Runs, make_isoflop, simulate_losses

RANGE = np.log(100)  # of compute
FALLING = -np.log(5) / RANGE  # sigma falls to a fifth over the range


def make_design(n_runs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (x = log(N D) [n], a basis of five constants [n, 5], off = x minus its mean)."""
    x = np.repeat(np.linspace(40, 40 + RANGE, n_runs // 5), 5)
    y = np.tile(np.linspace(-1, 1, 5), n_runs // 5)
    off = x - x.mean()
    return x, orthonormal_basis(np.column_stack([np.ones(n_runs), off, y, off**2, y**2])), off


def simulate_trends(slope: float, n_trials: int, n_runs: int = 40) -> list[Trend | None]:
    """Return the trends of least-squares residuals with sigma = exp(slope off)."""
    x, basis, off = make_design(n_runs)
    rng = np.random.default_rng(0)
    trends = []
    for _ in range(n_trials):
        noise = np.exp(slope * off) * rng.standard_normal(n_runs)
        trends.append(fit_trend(noise - basis @ (basis.T @ noise), basis, x))
    return trends


def test_a_constant_sigma_is_rejected_as_often_as_the_level() -> None:
    trends = simulate_trends(0.0, 1500)
    # 1 % of 1,500 is 15, with a standard deviation of 3.9
    assert 4 <= sum(trend is not None for trend in trends) <= 32


def test_the_error_of_sigma_at_either_end_agrees_with_its_degrees_of_freedom() -> None:
    trends = [trend for trend in simulate_trends(FALLING, 600, 80) if trend is not None]
    assert len(trends) > 580
    for side in (-0.5, 0.5):
        x = 40 + RANGE * (0.5 + side)
        sigma, dof = (
            np.array(v) for v in zip(*(trend.evaluate(np.array(x)) for trend in trends), strict=True)
        )
        off = np.log(sigma / np.exp(FALLING * RANGE * side))
        # the projection mixes noise of both ends, so sigma has an error of up to a tenth
        assert abs(off.mean()) < 0.12
        assert off.std() == pytest.approx(np.sqrt(1 / (2 * dof)).mean(), rel=0.15)
        new = np.random.default_rng(1).standard_normal(len(trends)) * np.exp(FALLING * RANGE * side)
        assert 0.92 < np.mean(np.abs(new) < t.ppf(0.975, dof) * sigma) < 0.985


def test_the_slope_is_that_of_maximum_likelihood() -> None:
    x, basis, off = make_design(80)
    noise = np.exp(FALLING * off) * np.random.default_rng(3).uniform(-1, 1, 80)  # nothing beyond 3 sigma
    residual = noise - basis @ (basis.T @ noise)
    squares = residual**2 / (1 - (basis**2).sum(axis=1))

    def twice_negative_likelihood(at: np.ndarray) -> float:
        log_variance = at[0] + 2 * at[1] * off
        return float((log_variance + squares * np.exp(-log_variance)).sum())

    best = minimize(twice_negative_likelihood, [0.0, 0.0], method="Nelder-Mead", tol=1e-10)
    assert fit_trend(residual, basis, x).slope == pytest.approx(best.x[1], abs=1e-4)


def test_one_failed_run_is_no_trend() -> None:
    x, basis, _ = make_design(40)
    rng = np.random.default_rng(4)
    n_found = 0
    for _ in range(100):
        noise = rng.standard_normal(40)
        noise[2] += 30
        n_found += fit_trend(noise, basis, x) is not None
    assert n_found <= 5


def test_too_few_runs_equal_computes_and_no_noise_have_no_trend() -> None:
    x, basis, _ = make_design(10)
    assert fit_trend(np.ones(10), basis, x) is None
    x, basis, _ = make_design(40)
    assert fit_trend(np.zeros(40), basis, x) is None
    assert fit_trend(np.arange(40.0) % 3, basis, np.full(40, 41.0)) is None


def falling_runs() -> Runs:
    """Return N, D and L of 80 runs whose noise falls from 1 % to 0.2 %."""
    n, d = make_isoflop(16)
    sigma = 0.01 * (6 * n * d / 1e18) ** FALLING
    return n, d, simulate_losses(n, d, sigma, 5, BESIROGLU)


def test_predictive_intervals_have_the_noise_of_their_compute_and_law_json_stores_it(tmp_path: Path) -> None:
    law = fit_law(*falling_runs(), n_bootstrap=50)
    law.save(tmp_path / "law.json")
    law = Law.load(tmp_path / "law.json")
    n = np.sqrt(np.array([1e18, 1e20]) / 6 / 20)
    sigma, dof = law.noise_at(n, 20 * n)
    assert 0.006 < sigma[0] < 0.016 and 0.0013 < sigma[1] < 0.003
    beyond, _ = law.noise_at(100 * n[1], 2000 * n[1])
    assert beyond == sigma[1]  # not extrapolated
    value, low, high = law.predict(n, 20 * n)
    _, inner_low, inner_high = law.predict(n, 20 * n, kind="confidence")
    half = t.ppf(0.975, dof) * sigma
    assert np.log(high / value) == pytest.approx(np.hypot(np.log(inner_high / value), half))
    assert np.log(value / low) == pytest.approx(np.hypot(np.log(value / inner_low), half))
