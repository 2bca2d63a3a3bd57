"""Fits against known laws and slow reference implementations."""

import math

import numpy as np
import pytest

from megatron.laws.diagnostics import diagnose
from megatron.laws.fit import fit_law
from megatron.laws.fitting import huber
from megatron.laws.fitting.varpro import bootstrap_chinchilla, fit_chinchilla
from tests.laws.known_laws import TRUTH, check_derivatives, count_trials, least_hits, simulate_grid
from tests.laws.published import refit_weighted


@count_trials(15, 60)
def test_intervals_cover_the_truth_about_as_often_as_their_level(n: int) -> None:
    covered = dict.fromkeys(TRUTH, 0)
    for seed in range(n):
        law = fit_law(*simulate_grid(6, 5, 0.003, seed), n_bootstrap=200, seed=seed)
        for name in TRUTH:
            low, high = law.interval["params"][name]
            covered[name] += low <= TRUTH[name] <= high
    # percentile intervals on 30 runs cover slightly less than their level of 95 %
    assert min(covered.values()) >= least_hits(n, 0.91), covered


@pytest.mark.parametrize("delta", [1e-3, 0.05, math.inf])
@pytest.mark.parametrize("floor", ["free", "zero", "positive"])
def test_derivatives_are_those_of_finite_differences(delta: float, floor: str) -> None:
    runs = huber.CentredRuns.from_columns(*simulate_grid(6, 5, 0.05))
    weights = np.random.default_rng(0).integers(0, 4, (1, len(runs.x))).astype(float)
    phi = np.array([[2.4, 0.2, 0.15, 0.4, 0.25]])
    floored = np.array([[0.4, 0.3, 0.2, 0.25, 0.3]])
    assert np.allclose(huber.to_floor_coordinates(huber.from_floor_coordinates(floored)), floored, rtol=1e-12)

    def evaluate(step: np.ndarray) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        if floor == "free":
            moved = phi + step
        elif floor == "positive":  # coordinates above the floor
            moved = huber.from_floor_coordinates(floored + step)
        else:  # four coordinates of the laws without a floor
            moved = huber.project_to_zero_floor(huber.project_to_zero_floor(phi) + np.append(0.0, step))
        derivatives = huber.huber_derivatives(moved, runs, weights, delta)
        if floor == "positive":
            derivatives = huber.transform_to_floor(moved, derivatives)
        elif floor == "zero":
            derivatives = huber.restrict_to_zero_floor(moved, derivatives)
        return huber.huber_objective(moved, runs, weights, delta)[0], *(values[0] for values in derivatives)

    n = 4 if floor == "zero" else 5
    _, gradient, hessian, majorant = evaluate(np.zeros(n))
    check_derivatives(lambda step: evaluate(step)[:2], gradient, hessian)
    assert np.linalg.eigvalsh(majorant).min() > -1e-12


def test_a_floor_below_zero_becomes_zero_and_the_fit_is_the_best_without_a_floor() -> None:
    n, d, loss = simulate_grid(6, 5)
    loss = loss - 1.8  # the floor of TRUTH is 1.7: the best E is negative
    law = fit_law(n, d, loss, n_bootstrap=0)
    assert law.params["E"] == pytest.approx(0.0, abs=1e-12)
    runs = huber.CentredRuns.from_columns(n, d, loss)
    fitted = fit_chinchilla(runs, np.ones((1, len(n))), 1e-3)
    assert huber.compute_floor(fitted.phi)[0] == pytest.approx(0.0, abs=1e-12)
    rng = np.random.default_rng(0)
    near = huber.project_to_zero_floor(np.abs(fitted.phi + rng.normal(0, 1e-3, (500, 5))))
    assert (huber.huber_objective(near, runs, np.ones((500, len(n))), 1e-3) >= fitted.objective[0]).all()


def test_poorly_determined_replicates_still_converge() -> None:
    # the smallest study: 5 x 3 runs over a factor of 8 in N and of 4 in D, with 0.5 % of noise
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1.6e5, 1.3e6, 5), np.geomspace(2.5e5, 1e6, 3)))
    loss = 2.4 + 102 / n**0.4 + 38 / d**0.19
    runs = huber.CentredRuns.from_columns(
        n, d, loss * np.exp(0.005 * np.random.default_rng(0).standard_normal(15))
    )
    best = fit_chinchilla(runs, np.ones((1, 15)), 1e-3)
    weights = np.random.default_rng(0).multinomial(15, np.full(15, 1 / 15), 200).astype(float)
    assert bootstrap_chinchilla(runs, best.phi[0], weights, 1e-3).converged.mean() > 0.9


def test_the_least_number_of_runs_can_be_resampled_down_to_a_single_one() -> None:
    n, d = (a.ravel() for a in np.meshgrid([1e4, 3e4], [2e3, 5e3, 1e4]))
    replicates = refit_weighted(n, d, 3 + 20 / n**0.3 + 20 / d**0.3, weights=6 * np.eye(6))
    assert all(np.isfinite(values).all() for values in replicates.values())


def test_a_single_ray_gives_a_warning() -> None:
    n = np.geomspace(1e7, 1e9, 12)
    loss = 1.7 + 400 / n**0.34 + 900 / (20 * n) ** 0.31
    law = fit_law(n, 20 * n, loss, n_bootstrap=0)
    assert any("single ray" in warning for warning in law.warnings)


def test_a_lower_minimum_in_a_narrow_valley_is_the_fit() -> None:
    n = np.repeat([190_354_176.0, 371_262_464, 758_220_288, 1_279_395_840], 4)
    d = n * np.tile([20.03, 40.03, 100.03, 200.03], 4)
    loss = np.array([
        1.301034, 1.20673, 1.182527, 1.150769, 1.184743, 1.167277, 1.118659, 1.103702,
        1.135848, 1.095465, 1.060287, 1.043125, 1.075187, 1.054871, 1.01351, 0.981395,
    ])  # fmt: skip
    law = fit_law(n, d, loss, n_bootstrap=0)
    # the lowest of 100 random starts of scipy's L-BFGS-B; narrowing Huber widths end at 1.0466e-4, beta 0.18
    assert law.objective == pytest.approx(1.035965e-4, rel=1e-5)
    assert law.params["beta"] == pytest.approx(0.3540, abs=2e-4)


def test_a_coefficient_is_not_identified_if_its_exponent_is_not() -> None:
    n, d = np.geomspace(1e7, 1e9, 20), np.geomspace(1e9, 1e10, 20)[::-1]
    params = {"E": 1.8, "A": 400.0, "B": 1000.0, "alpha": 0.34, "beta": 0.3}
    spread = np.linspace(0.9, 1.1, 100)
    replicates = {name: value * spread for name, value in params.items()} | {
        "beta": 0.3 + 0.3 * (spread - 1) * 8
    }
    columns = {"N": n, "D": d, "L": np.full(20, 2.5)}
    diagnosis = diagnose("chinchilla", columns, params, replicates, {})
    assert set(diagnosis.not_identified) == {"B", "beta"}
    fixed = diagnose("chinchilla", columns, params, replicates, {"B": 1000.0})
    assert set(fixed.not_identified) == {"beta"}
