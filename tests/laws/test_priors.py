"""Tied constants, priors and profiles, against scipy fits of the same problem."""

import numpy as np
import pytest
from scipy.optimize import least_squares, minimize

from megatron.laws.fit import fit_law
from megatron.laws.fitting.priors import Prior, parse_prior, prior_scale
from megatron.laws.fitting.profile import profile_constant
from megatron.laws.forms import FORM

TRUTH = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}
LEAST_SQUARES = 1e3
OPTIONS = {"maxiter": 20000, "xatol": 1e-12, "fatol": 1e-14}


def simulate_runs(seed: int = 0, sigma: float = 0.005) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 4)))
    return n, d, FORM["chinchilla"].loss(TRUTH, n, d) * np.exp(sigma * rng.standard_normal(20))


def fit_with_scipy(
    n: np.ndarray, d: np.ndarray, loss: np.ndarray, extra=lambda x: [], tie: bool = False, weights=1.0
):
    """Fit log loss by scipy in (log E, log A, alpha, log B, beta), with further residuals `extra`."""

    def residual(x: np.ndarray) -> np.ndarray:
        e, a, alpha, b, beta = (*x[:4], x[2] if tie else x[4])
        fitted = np.exp(e) + np.exp(a) * n**-alpha + np.exp(b) * d**-beta
        return np.concatenate([weights * (np.log(loss) - np.log(fitted)), np.atleast_1d(extra(x))])

    start = [np.log(1.7), np.log(400), 0.33, np.log(700), 0.32][: 4 if tie else 5]
    x = least_squares(residual, start, x_scale="jac", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=5000).x
    return {
        "E": np.exp(x[0]),
        "A": np.exp(x[1]),
        "alpha": x[2],
        "B": np.exp(x[3]),
        "beta": x[2 if tie else 4],
    }


def test_a_tied_fit_is_the_fit_of_the_reduced_form() -> None:
    n, d, loss = simulate_runs()
    law = fit_law(n, d, loss, tied={"alpha": "beta"}, huber_delta=LEAST_SQUARES, n_bootstrap=20)
    assert law.params == pytest.approx(fit_with_scipy(n, d, loss, tie=True), rel=1e-6)
    assert law.params["alpha"] == law.params["beta"] and law.tied == {"alpha": "beta"}
    assert law.replicates["alpha"] == law.replicates["beta"] and np.ptp(law.replicates["alpha"]) > 0
    assert law.derived["a_exponent"] == 0.5
    assert law.noise["dof"] == 20 - 4  # one constant fewer than the free form
    other = fit_law(n, d, loss, tied={"beta": "alpha"}, huber_delta=LEAST_SQUARES, n_bootstrap=0)
    assert other.params == pytest.approx(law.params, rel=1e-8)


def test_a_tied_huber_fit_is_at_least_as_good_as_scipys() -> None:
    n, d, loss = simulate_runs(1)

    def objective(x: np.ndarray) -> float:
        fitted = (
            np.exp(x[0]) + np.exp(x[1] - x[2] * (np.log(n) - 18)) + np.exp(x[3] - x[2] * (np.log(d) - 23))
        )
        r = np.abs(np.log(loss) - np.log(fitted))
        return float((np.minimum(r, 1e-3) * (r - 0.5 * np.minimum(r, 1e-3))).sum()) * 1e3

    starts = [(0.5, -0.5, alpha, -0.5) for alpha in (0.25, 0.3, 0.35, 0.4)]
    best = min(
        minimize(objective, s, method="Nelder-Mead", options=OPTIONS).fun
        for s in starts
    )  # fmt: skip
    law = fit_law(n, d, loss, tied={"alpha": "beta"}, n_bootstrap=0)
    assert law.objective * 1e3 <= best * (1 + 1e-6)


def test_a_tie_to_a_fixed_exponent_fixes_both() -> None:
    n, d, loss = simulate_runs()
    tied_fit = fit_law(n, d, loss, tied={"alpha": "beta"}, fixed={"beta": 0.33}, n_bootstrap=0)
    both = fit_law(n, d, loss, fixed={"alpha": 0.33, "beta": 0.33}, n_bootstrap=0)
    assert tied_fit.params == pytest.approx(both.params, rel=1e-7)


def test_a_tie_with_repetition_is_fitted_too() -> None:
    n, u, e = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 4), [1e8, 1e9, 1e10], [1, 4, 15, 60]))
    truth = TRUTH | {"alpha": 0.33, "beta": 0.33, "R_D": 8.0, "R_N": 3.0}
    loss = FORM["data_constrained"].loss(truth, n, u * e, u)
    law = fit_law(n, u * e, loss, U=u, form="data_constrained", tied={"alpha": "beta"}, n_bootstrap=0)
    np.testing.assert_allclose(law.loss(n, u * e, u), loss, rtol=1e-6)
    assert law.params["alpha"] == law.params["beta"] == pytest.approx(0.33, rel=1e-4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"tied": {"alpha": "E"}}, "expected two exponents"),
        ({"tied": {"alpha": "alpha"}}, "Tie each exponent once"),
        ({"tied": {"alpha": "beta", "beta": "alpha"}}, "Tie each exponent once"),
        ({"tied": {"alpha": "beta"}, "fixed": {"alpha": 0.3}}, "alpha is already tied or fixed"),
        ({"tied": {"alpha": "beta"}, "form": "over_training"}, "none to tie"),
        ({"priors": [Prior("R_D", 5.0, 1.0)]}, "is not a constant of chinchilla"),
        ({"priors": [Prior("E", 2.0, 1.0)] * 2}, "got it twice"),
        ({"priors": [Prior("E", 2.0, 1.0)], "fixed": {"E": 2.0}}, "fixed too"),
    ],
)
def test_ties_and_priors_that_contradict_are_refused(words: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        fit_law(*simulate_runs(), n_bootstrap=0, **words)


@pytest.mark.parametrize(
    "prior",
    [Prior("alpha", 0.40, 0.02), Prior("E", 1.6, 0.05), Prior("A", 900.0, 200.0), Prior("B", 300.0, 60.0)],
)
def test_a_prior_is_one_more_measurement_of_a_least_squares_fit(prior: Prior) -> None:
    n, d, loss = simulate_runs(2)
    sigma = fit_law(n, d, loss, huber_delta=LEAST_SQUARES, n_bootstrap=0).spread
    place = {"E": 0, "A": 1, "alpha": 2, "B": 3}[prior.name]
    sd = prior.spread if prior.name == "alpha" else prior.spread / prior.mean
    mean = prior.mean if prior.name == "alpha" else np.log(prior.mean)
    expected = fit_with_scipy(n, d, loss, lambda x: (x[place] - mean) / sd, weights=1 / sigma)
    law = fit_law(n, d, loss, priors=[prior], huber_delta=LEAST_SQUARES, n_bootstrap=0)
    assert law.params == pytest.approx(expected, rel=1e-5)
    free = fit_law(n, d, loss, huber_delta=LEAST_SQUARES, n_bootstrap=0)
    assert law.objective > free.objective
    assert min(free.params[prior.name], prior.mean) < law.params[prior.name]
    assert law.params[prior.name] < max(free.params[prior.name], prior.mean)


@pytest.mark.parametrize("delta", [1e-3, LEAST_SQUARES])
@pytest.mark.parametrize(("name", "mean"), [("alpha", 0.38), ("E", 1.6)])
def test_a_sharp_prior_fixes_a_constant_and_a_wide_one_has_no_effect(
    delta: float, name: str, mean: float
) -> None:
    n, d, loss = simulate_runs(3)
    sharp = fit_law(n, d, loss, priors=[Prior(name, mean, mean * 1e-7)], huber_delta=delta, n_bootstrap=0)
    fixed_fit = fit_law(n, d, loss, fixed={name: mean}, huber_delta=delta, n_bootstrap=0)
    assert sharp.params == pytest.approx(fixed_fit.params, rel=1e-4)
    wide = fit_law(n, d, loss, priors=[Prior(name, mean, 1e6)], huber_delta=delta, n_bootstrap=0)
    free = fit_law(n, d, loss, huber_delta=delta, n_bootstrap=0)
    assert wide.params == pytest.approx(free.params, rel=1e-4)


@pytest.mark.parametrize("delta", [1e-3, LEAST_SQUARES])
def test_the_spread_of_replicates_is_that_of_runs_and_prior_together(delta: float) -> None:
    """Precisions add: that of alpha from the runs (with the efficiency of the Huber) and of the prior."""
    n, d, loss = simulate_runs(4)
    alone = fit_law(n, d, loss, huber_delta=delta, n_bootstrap=400)
    from_runs = alone.standard_error["alpha"]
    law = fit_law(n, d, loss, priors=[Prior("alpha", 0.34, from_runs)], huber_delta=delta, n_bootstrap=400)
    assert law.standard_error["alpha"] == pytest.approx(from_runs / np.sqrt(2), rel=0.25)
    sharp = fit_law(n, d, loss, priors=[Prior("alpha", 0.34, 0.002)], huber_delta=delta, n_bootstrap=400)
    assert sharp.standard_error["alpha"] == pytest.approx(0.002, rel=0.15)


@pytest.mark.parametrize("ratio", [0.05, 0.5, 2.0, 50.0])
def test_the_scale_of_a_prior_is_the_efficiency_of_the_huber_by_integration(ratio: float) -> None:
    sigma = 0.004
    delta = ratio * sigma
    z = np.linspace(-12, 12, 2_000_001)
    density = np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi)
    pull = np.clip(sigma * z, -delta, delta)
    step = z[1] - z[0]
    expected = (pull**2 * density).sum() * step / (density[np.abs(sigma * z) < delta].sum() * step)
    assert prior_scale(sigma, delta) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("text", ["alpha=0.34+-0.05", " alpha = 0.34 +/- 0.05 ", "alpha=0.34±0.05"])
def test_a_prior_is_read(text: str) -> None:
    assert parse_prior(text) == Prior("alpha", 0.34, 0.05)


def test_a_prior_with_exponents_is_read() -> None:
    assert parse_prior("A=4e+02+-1e+1") == Prior("A", 400.0, 10.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("alpha", "expected NAME=MEAN"), ("alpha=0.3", "expected NAME=MEAN"), ("alpha=x+-1", "expected NAME"),
        ("alpha=0.3+-0", "above 0"), ("alpha=nan+-1", "above 0"), ("A=-3+-1", "mean above 0"),
        ("L0=9+-1", "can have a prior"),
    ],
)  # fmt: skip
def test_an_invalid_prior_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_prior(text)


@pytest.mark.parametrize("name", ["alpha", "beta", "E"])
def test_a_profile_is_the_t_interval_of_the_linearised_fit(name: str) -> None:
    n, d, loss = simulate_runs(5, 0.001)
    result = profile_constant(n, d, loss, form="chinchilla", name=name, huber_delta=LEAST_SQUARES)
    law = fit_law(n, d, loss, huber_delta=LEAST_SQUARES, n_bootstrap=0)
    assert result.best == pytest.approx(law.params[name], rel=1e-4) and result.identified
    # -2 log likelihood is n log(sum of squares), with the constant fixed at either end of the interval
    for end in (result.low, result.high):
        fixed_fit = fit_law(n, d, loss, fixed={name: end}, huber_delta=LEAST_SQUARES, n_bootstrap=0)
        assert 20 * np.log(fixed_fit.objective / law.objective) == pytest.approx(3.841, abs=0.1)
    assert name in result.words and "*" not in result.words and "confidence" in result.words


def test_a_profile_of_an_exponent_on_one_ray_is_not_identified() -> None:
    n = np.geomspace(1e7, 1e9, 14)
    loss = FORM["chinchilla"].loss(TRUTH, n, 20 * n) * np.exp(
        0.003 * np.random.default_rng(0).standard_normal(14)
    )
    result = profile_constant(n, 20 * n, loss, form="chinchilla", name="alpha")
    assert not result.identified and "not identified" in result.words


@pytest.mark.parametrize(
    ("form", "name"), [("over_training", "eta"), ("kaplan", "alpha_N"), ("repeated_data", "R_D")]
)
def test_other_constants_have_profiles(form: str, name: str) -> None:
    rng = np.random.default_rng(0)
    n, u, e = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 4), [1e8, 1e9, 1e10], [1, 4, 15]))
    truth = {
        "over_training": {"E": 1.7, "a": 120.0, "b": 200.0, "eta": 0.25},
        "kaplan": {"Nc": 6.4e13, "Dc": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103},
        "repeated_data": TRUTH | {"R_D": 8.0},
    }[form]
    loss = FORM[form].loss(truth, n, u * e, u) * np.exp(0.002 * rng.standard_normal(len(n)))
    result = profile_constant(n, u * e, loss, u if form == "repeated_data" else None, form=form, name=name)
    assert result.identified and result.low < truth[name] < result.high


def test_a_profile_counts_weights() -> None:
    n, d, loss = simulate_runs(6)
    weights = np.ones(20)
    weights[3] = 0.0
    spoilt = loss.copy()
    spoilt[3] *= 2
    weighted = profile_constant(n, d, spoilt, form="chinchilla", name="alpha", run_weights=weights)
    without = np.arange(20) != 3
    without_row = profile_constant(n[without], d[without], loss[without], form="chinchilla", name="alpha")
    assert (weighted.best, weighted.low, weighted.high) == pytest.approx(
        (without_row.best, without_row.low, without_row.high), rel=1e-3
    )
