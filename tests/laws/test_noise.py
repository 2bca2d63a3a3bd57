"""Scatter of runs around a law: of groups, changing with compute, and the intervals derived from it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import chi2, t

from megatron.laws.fit import fit_law
from megatron.laws.fitting import huber
from megatron.laws.fitting.noise import GROUPED, Trend, estimate_noise, fit_trend, orthonormal_basis
from megatron.laws.fitting.varpro import bootstrap_chinchilla, fit_chinchilla
from megatron.laws.forms import chinchilla
from megatron.laws.law import Law, expanded_level
from tests.laws.known_laws import (
    BESIROGLU,
    count_trials,
    least_hits,
    make_isoflop,
    make_ratios,
    simulate_losses,
)

SIGMA = 0.003


def fit_noisy(
    design: tuple[np.ndarray, np.ndarray], noise: np.ndarray, n_bootstrap: int = 0, **options: Any
) -> Law:
    """Fit runs whose log losses differ from BESIROGLU's by `noise`."""
    n, d = design
    return fit_law(n, d, chinchilla(BESIROGLU, n, d) * np.exp(noise), n_bootstrap=n_bootstrap, **options)


def draw_shared(rng: np.random.Generator, sizes: int, rows: int, between: float, within: float) -> np.ndarray:
    """Return noise of `sizes` models of `rows` runs: of the model, and of the run."""
    return between * rng.standard_normal(sizes).repeat(rows) + within * rng.standard_normal(sizes * rows)


@count_trials(25, 120)
@pytest.mark.parametrize("n_runs", [15, 40])
def test_the_noise_of_a_robust_fit_is_unbiased(n_runs: int, n: int) -> None:
    rng = np.random.default_rng(n_runs)
    squares = []
    for _ in range(n):
        law = fit_noisy(make_isoflop(n_runs // 5), SIGMA * rng.standard_normal(n_runs))
        assert law.noise["dof"] == n_runs - 5
        squares.append((law.spread / SIGMA) ** 2)
    # the sum of n chi-squared variables; 1 % at either end
    low, high = chi2.ppf([0.01, 0.99], n * (n_runs - 5)) / (n * (n_runs - 5))
    assert 0.97 * low < np.mean(squares) < 1.03 * high


def test_a_failed_run_does_not_determine_the_noise() -> None:
    noise = SIGMA * np.random.default_rng(1).standard_normal(40)
    noise[7] += np.log(1.5)
    law = fit_noisy(make_isoflop(8), noise)
    assert law.spread < 2 * SIGMA
    assert law.noise["n_cut"] >= 1


def test_variance_components_are_unbiased() -> None:
    rng = np.random.default_rng(2)
    n_groups, size, between, within = 15, 6, 0.8, 0.3
    groups = np.repeat(np.arange(n_groups), size)
    slopes = np.column_stack([np.ones(90), rng.standard_normal(90), np.repeat(rng.standard_normal(15), 6)])
    estimates = []
    for _ in range(400):
        noise = between * rng.standard_normal(n_groups)[groups] + within * rng.standard_normal(90)
        # residuals of least squares, by projection
        basis = np.linalg.qr(slopes)[0]
        estimate = estimate_noise(noise - basis @ (basis.T @ noise), slopes, groups)
        estimates.append((estimate.between**2, estimate.within**2, estimate.dof))
    mean, error = np.mean(estimates, axis=0), np.std(estimates, axis=0) / 20
    assert (np.abs(mean[:2] - [between**2, within**2]) < 4 * error[:2] + 0.01).all()
    # sigma^2 is nearly dof^-1 chi-squared, of variance 2 sigma^4 / dof; 400 estimates of it are within 20 %
    squares = np.sum(np.array(estimates)[:, :2], axis=1)
    assert mean[2] == pytest.approx(2 * squares.mean() ** 2 / squares.var(), rel=0.2)


@count_trials(12, 60)
def test_rows_that_share_n_are_grouped_if_and_only_if_their_residuals_correlate(n: int) -> None:
    n_grouped = {0.0: 0, 0.003: 0}
    for between in n_grouped:
        for seed in range(n):
            noise = draw_shared(np.random.default_rng(seed), 22, 9, between, 0.002)
            law = fit_noisy(make_ratios(22, 9), noise)
            n_grouped[between] += law.noise["n_groups"] == 22 and law.warnings == [GROUPED]
    # the test of independent rows has the size 1 %
    assert n - n_grouped[0.0] >= least_hits(n, 0.99) and n_grouped[0.003] == n


@count_trials(10, 30)
def test_intervals_of_rows_that_share_the_noise_of_a_model_contain_the_truth(n: int) -> None:
    inside = np.zeros(2)
    for seed in range(n):
        noise = draw_shared(np.random.default_rng(seed), 22, 9, 0.003, 0.001)
        for i, groups in enumerate((None, range(198))):
            law = fit_noisy(make_ratios(22, 9), noise, 100, groups=groups)
            low, high = law.interval["params"]["alpha"]
            inside[i] += low <= BESIROGLU["alpha"] <= high
    # as independent rows about half are inside
    assert inside[0] >= least_hits(n) > 1.1 * inside[1]


def test_a_law_of_too_few_sizes_to_group_is_not_identified_unless_its_rows_are_independent() -> None:
    design, noise = make_ratios(5, 20), draw_shared(np.random.default_rng(0), 5, 20, 0.01, 0.001)
    law = fit_noisy(design, noise, 50)
    assert law.identified is False and set(law.not_identified) == set(BESIROGLU)
    assert "5 N are too few to group them for 5 constants" in law.not_identified["E"]
    alone = fit_noisy(design, noise, 50, groups=range(100))
    assert not any("too few to group" in warning for warning in alone.warnings)


def test_groups_are_resampled_as_units_and_widen_the_intervals() -> None:
    design, noise = make_ratios(12, 8), draw_shared(np.random.default_rng(3), 12, 8, 0.004, 0.0005)
    groups = np.repeat([f"model {i}" for i in range(12)], 8)
    alone, grouped = (fit_noisy(design, noise, 200, groups=labels) for labels in (range(96), groups))
    widths = [np.ptp(law.interval["params"]["alpha"]) for law in (alone, grouped)]
    assert widths[1] > 1.5 * widths[0]
    # 12 groups less about three constants of N: Satterthwaite's degrees of freedom of nearly equal rows
    assert grouped.noise["n_groups"] == 12 and 8 < grouped.noise["dof"] < 12
    assert grouped.noise["between"] > 3 * grouped.noise["within"]
    assert "12 groups" in grouped.interval["method"]
    with pytest.raises(ValueError, match="got 95 labels"):
        fit_noisy(design, noise, groups=groups[1:])
    with pytest.raises(ValueError, match="got 4 groups, expected more than the 5 constants"):
        fit_noisy(design, noise, groups=np.arange(96) // 24)


def test_expanded_percentiles_are_those_of_students_t() -> None:
    # 95 % with 20 groups: sqrt(20/19) t(0.975, 19) = 2.1475 standard normal deviations
    assert expanded_level(0.95, 20) == pytest.approx(0.96825, abs=2e-5)
    # with four constants and 15 groups: sqrt(15/11) t(0.975, 11) = 2.5702 standard normal deviations
    assert expanded_level(0.95, 15, 4) == pytest.approx(0.98984, abs=2e-5)
    assert expanded_level(0.95, 5, 4) == 0.95
    assert expanded_level(0.95, None) == 0.95
    assert expanded_level(0.95, 10**6) == pytest.approx(0.95, abs=1e-5)


@pytest.mark.parametrize("seed", [2, 8])  # seeds at which some of 1000 replicates once ended above
def test_no_replicate_at_the_boundary_ends_above_the_whole_fits_objective(seed: int) -> None:
    # sixteen runs of a law without a floor, whose fit is at E = 0
    n, d = np.repeat(np.geomspace(2e7, 1.5e9, 4), 4), np.tile(np.geomspace(4e8, 3e10, 4), 4)
    noise = 0.01 * np.random.default_rng(seed).standard_normal(16)
    runs = huber.CentredRuns.from_columns(n, d, (0.3 + 9.0 / n**0.12 + 30 / d**0.2) * np.exp(noise))
    weights = np.random.default_rng(0).multinomial(16, np.full(16, 1 / 16), 1000).astype(float)
    best = fit_chinchilla(runs, np.ones((1, 16)), 1e-3)
    fitted = bootstrap_chinchilla(runs, best.phi[0], weights, 1e-3)
    ceiling = huber.huber_objective(np.tile(best.phi[0], (1000, 1)), runs, weights, 1e-3)
    assert (fitted.objective <= ceiling).all()
    assert fitted.converged.all()


RANGE = np.log(100)  # compute, largest over smallest
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


def test_predictive_intervals_have_the_noise_of_their_compute_and_law_json_stores_it(tmp_path: Path) -> None:
    n, d = make_isoflop(16)
    sigma = 0.01 * (6 * n * d / 1e18) ** FALLING  # from 1 % to 0.2 %
    law = fit_law(n, d, simulate_losses(n, d, sigma, 5, BESIROGLU), n_bootstrap=50)
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
