"""Scatter of runs around a law, with and without groups, and the intervals derived from it."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import chi2

from megatron.laws.fit import fit_law
from megatron.laws.fitting.huber import (
    CentredRuns,
    from_floor_coordinates,
    huber_derivatives,
    huber_objective,
    to_floor_coordinates,
    transform_to_floor,
)
from megatron.laws.fitting.noise import GROUPED, estimate_noise
from megatron.laws.fitting.varpro import bootstrap_chinchilla, fit_chinchilla
from megatron.laws.forms import chinchilla
from megatron.laws.law import Law, expanded_level
from tests.laws.known_laws import (
    BESIROGLU,
    check_derivatives,
    count_trials,
    least_hits,
    make_isoflop,
    make_ratios,
)

SIGMA = 0.003


def fit_noisy(
    design: tuple[np.ndarray, np.ndarray], noise: np.ndarray, n_bootstrap: int = 0, **options: Any
) -> Law:
    """Fit runs whose log losses differ from those of BESIROGLU by `noise`."""
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


def test_a_predictive_interval_adds_the_noise_to_the_laws_own() -> None:
    law = fit_noisy(make_isoflop(8), SIGMA * np.random.default_rng(4).standard_normal(40), 100)
    value, low, high = law.predict(1e9, 1e11)
    same, inner_low, inner_high = law.predict(1e9, 1e11, kind="confidence")
    assert value == same and low < inner_low < value < inner_high < high
    half = 2.03011 * law.spread  # t(0.975, 35)
    assert np.log(high / value) == pytest.approx(np.hypot(np.log(inner_high / value), half), rel=1e-5)
    with pytest.raises(ValueError, match="got 'credible', expected predictive or confidence"):
        law.predict(1e9, 1e11, kind="credible")


def make_runs_without_floor(seed: int) -> tuple[CentredRuns, np.ndarray]:
    """Return sixteen runs of a law without a floor, whose fit is at E = 0, and resampling weights."""
    n, d = np.repeat(np.geomspace(2e7, 1.5e9, 4), 4), np.tile(np.geomspace(4e8, 3e10, 4), 4)
    noise = 0.01 * np.random.default_rng(seed).standard_normal(16)
    loss = (0.3 + 9.0 / n**0.12 + 30 / d**0.2) * np.exp(noise)
    weights = np.random.default_rng(0).multinomial(16, np.full(16, 1 / 16), 1000).astype(float)
    return CentredRuns.from_columns(n, d, loss), weights


@pytest.mark.parametrize("seed", [2, 8])  # seeds at which some of 1000 replicates once ended above
def test_no_replicate_at_the_boundary_ends_above_the_whole_fits_objective(seed: int) -> None:
    runs, weights = make_runs_without_floor(seed)
    best = fit_chinchilla(runs, np.ones((1, 16)), 1e-3)
    fitted = bootstrap_chinchilla(runs, best.phi[0], weights, 1e-3)
    ceiling = huber_objective(np.tile(best.phi[0], (1000, 1)), runs, weights, 1e-3)
    assert (fitted.objective <= ceiling).all()
    assert fitted.converged.all()


def test_derivatives_above_the_floor_are_those_of_finite_differences() -> None:
    runs, weights = make_runs_without_floor(1)
    floored = np.array([[0.4, 0.3, 0.2, 0.25, 0.3]])
    phi = from_floor_coordinates(floored)
    assert np.allclose(to_floor_coordinates(phi), floored, rtol=1e-12)

    def evaluate(step: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        phi = from_floor_coordinates(floored + step)
        derivatives = transform_to_floor(phi, *huber_derivatives(phi, runs, weights[:1], 10.0))
        return huber_objective(phi, runs, weights[:1], 10.0)[0], *(values[0] for values in derivatives[:2])

    _, gradient, hessian = evaluate(np.zeros(5))
    check_derivatives(lambda step: evaluate(step)[:2], gradient, hessian, 1e-5)
