"""Predictions of runs and optima: kinds of intervals, ranges, and laws without replicates."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm, t

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM
from megatron.laws.frontier import optimal_frontier
from megatron.laws.law import Law
from megatron.laws.prediction import predict_optimum, predict_run
from tests.laws.known_laws import TRUTH, make_law, make_ratios, make_repeats, simulate_grid

# expanded percentiles for 95 % with 20 runs: sqrt(20/19) t(0.975, 19) standard normal deviations
TAILS = norm.cdf([-np.sqrt(20 / 19) * t.ppf(0.975, 19), np.sqrt(20 / 19) * t.ppf(0.975, 19)])


def check_order(*values: float) -> None:
    assert all(low < high for low, high in itertools.pairwise(values)), values


def fit_test_law(n_bootstrap: int = 200) -> Law:
    return fit_law(*simulate_grid(5, 4, 0.004, 3), n_bootstrap=n_bootstrap)


def test_a_run_has_a_confidence_and_a_wider_predictive_interval() -> None:
    law = fit_test_law()
    prediction = predict_run(law, 3e9, 2e10)
    assert prediction.loss == float(law.loss(3e9, 2e10)) and prediction.outside == {"N": "above"}
    low, high = np.quantile(law.losses(3e9, 2e10), TAILS)
    assert prediction.confidence == pytest.approx((low, high))
    half = t.ppf(0.975, law.noise["dof"]) * law.spread
    expected = prediction.loss * np.exp(np.hypot(np.log(high / prediction.loss), half))
    assert prediction.predictive[1] == pytest.approx(expected)
    check_order(prediction.predictive[0], *prediction.confidence, prediction.predictive[1])
    assert predict_run(law, 1e8, 1e10).outside == {}
    narrow = predict_run(law, 3e9, 2e10, level=0.5)
    assert narrow.predictive[1] < prediction.predictive[1] and narrow.level == 0.5


def test_the_optimum_is_the_laws_with_intervals_of_its_replicates() -> None:
    law = fit_test_law()
    optimum = predict_optimum(law, 1e21)
    at = optimal_frontier(law, 1e21)
    assert (at.N[0], at.D[0], at.L[0]) == (optimum.N, optimum.D, optimum.L)
    sizes = [optimal_frontier(law.replicate(i), 1e21).N[0] for i in range(law.n_replicates())]
    assert optimum.N_confidence == pytest.approx(tuple(np.quantile(sizes, TAILS)))
    low, high = optimum.L_confidence
    check_order(optimum.L_predictive[0], low, optimum.L, high, optimum.L_predictive[1])
    assert pytest.approx(1e21 / 6) == optimum.N * optimum.D


def test_groups_widen_the_optimum_as_they_widen_a_prediction() -> None:
    rng = np.random.default_rng(0)
    n, d = make_ratios(8, 4)
    groups = np.repeat(np.arange(8), 4)
    noise = 0.003 * rng.standard_normal(8)[groups] + 0.001 * rng.standard_normal(32)
    law = fit_law(n, d, FORM["chinchilla"].loss(TRUTH, n, d) * np.exp(noise), groups=groups, n_bootstrap=400)
    optimum = predict_optimum(law, 1e20)
    losses = np.array([optimal_frontier(law.replicate(i), 1e20).L[0] for i in range(law.n_replicates())])
    plain = np.quantile(losses, [0.025, 0.975])
    assert optimum.L_confidence[0] < plain[0] and plain[1] < optimum.L_confidence[1]


def test_without_replicates_there_is_no_interval_of_either_kind() -> None:
    law = fit_test_law(0)
    assert law.spread > 0
    for kind in ("predictive", "confidence"):
        _, low, high = law.predict(1e8, 1e10, kind=kind)
        assert np.isnan(low) and np.isnan(high)
    assert predict_run(law, 1e8, 1e10).predictive is None
    optimum = predict_optimum(law, 1e20)
    assert optimum.N > 0 and optimum.N_confidence is None and optimum.L_predictive is None


def test_unique_text_changes_the_run_and_the_optimum() -> None:
    rng = np.random.default_rng(1)
    n, d, u = make_repeats(4, (1, 4, 15, 60))
    loss = FORM["repeated_data"].loss(TRUTH | {"R_D": 6.0}, n, d, u)
    loss = loss * np.exp(0.002 * rng.standard_normal(len(n)))
    law = fit_law(n, d, loss, U=u, form="repeated_data", n_bootstrap=30)
    repeated, fresh = predict_run(law, 1e8, 1e11, 1e9), predict_run(law, 1e8, 1e11)
    assert repeated.loss > fresh.loss and repeated.U == 1e9 and fresh.U is None
    few, many = predict_optimum(law, 1e20, 1e8), predict_optimum(law, 1e20)
    assert few.N > many.N and few.L > many.L
    assert few.N_confidence[0] <= few.N <= few.N_confidence[1] * 1.001
    assert predict_run(law, 1e8, 1e11, 1e5).outside == {"U": "below"}


def test_invalid_sizes_and_levels_are_refused() -> None:
    wrong = {"N": (-1.0, math.nan), "D": (0.0, math.inf), "U": (0.0,), "level": (1.0,)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(ValueError, match=f"^{name}: got"):
            predict_run(make_law(), **({"N": 1e8, "D": 1e10} | {name: value}))
    with pytest.raises(ValueError, match="got 'credible', expected predictive or confidence"):
        make_law().predict(1e9, 1e11, kind="credible")
    with pytest.raises(ValueError, match="expected one number. Use law.predict"):
        predict_run(make_law(), np.ones(2), 1e10)
