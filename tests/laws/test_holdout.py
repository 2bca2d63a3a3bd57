"""Predictions of held-out runs, the choice between forms by them, and the error of a law beyond its runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from megatron.laws.fit import fit_law
from megatron.laws.fitting.extrapolation import HeldOutPart, estimate_growth
from megatron.laws.forms import FORM
from megatron.laws.holdout import compare_forms, extrapolate_law, score_holdout, select_largest
from megatron.laws.law import Law
from megatron.laws.prediction import predict_optimum, predict_run
from tests.laws.known_laws import TRUTH, Runs, count_trials, make_repeats, simulate_losses
from tests.tool_modules import load_tool

COMPUTE = 6 * 1e9 * 3e10  # the largest run's
AHEAD = (1e10, 3e12)


def simulate_runs(bend: float = 0.0) -> Runs:
    """Return 24 runs with 0.3 % of noise; `bend` adds to log L its product with log(C)^2."""
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 3e10, 4)))
    return n, d, simulate_losses(n, d, 0.003, 5) * np.exp(bend * np.log(n * d / 1e16) ** 2)


@pytest.fixture(scope="module")
def law() -> Law:
    return extrapolate_law(*simulate_runs(), n_bootstrap=60)


def test_the_fit_is_that_of_fit_law_and_its_largest_compute_is_stored(law: Law, tmp_path: Path) -> None:
    assert replace(law, extrapolation={}) == fit_law(*simulate_runs(), n_bootstrap=60)
    assert law.extrapolation["dof"] == 4
    assert law.extrapolation["compute"] == pytest.approx(COMPUTE)
    law.save(tmp_path / "law.json")
    assert Law.load(tmp_path / "law.json") == law


def test_a_surface_that_bends_has_more_growth_than_one_of_the_form(law: Law) -> None:
    bent = extrapolate_law(*simulate_runs(0.004), n_bootstrap=10)
    assert bent.extrapolation["growth"] > 0.01 > law.extrapolation["growth"]


def test_growth_is_the_slope_of_the_errors_that_the_variance_does_not_explain() -> None:
    x = np.array([1.0, 2.0, 3.0])
    part = HeldOutPart(x, 0.3 * x, np.full(3, 0.01))
    # mean of x^2 is 14 / 3
    expected = np.sqrt((0.09 * (14 / 3) - 0.01) / (14 / 3))
    assert estimate_growth([part]) == pytest.approx(expected)
    near = replace(part, distance=0.01 * x)  # not an extrapolation
    assert estimate_growth([near, part]) == pytest.approx(expected)
    assert estimate_growth([near]) == 0.0
    assert estimate_growth([replace(part, error=0.01 * x)]) == 0.0


def test_intervals_widen_with_distance_by_the_growth_and_not_inside_the_runs(law: Law) -> None:
    still = replace(law, extrapolation={})
    grown = replace(law, extrapolation=law.extrapolation | {"growth": 0.2})
    for kind in ("predictive", "confidence"):
        assert still.predict(1e8, 5e9, kind=kind) == grown.predict(1e8, 5e9, kind=kind)
        _, low, high = grown.predict(*AHEAD, kind=kind)
        # the other variances are small in comparison
        half = t.ppf(0.975, 4) * 0.2 * np.log(6 * AHEAD[0] * AHEAD[1] / COMPUTE)
        assert 0.5 * np.log(high / low) == pytest.approx(half, rel=0.05)
    outer, inner = (grown.predict(*AHEAD, kind=kind)[1:] for kind in ("predictive", "confidence"))
    assert outer[0] < inner[0] < inner[1] < outer[1]


def test_an_optimum_has_the_intervals_of_a_run_there(law: Law) -> None:
    grown = replace(law, extrapolation=law.extrapolation | {"growth": 0.2})
    best, plain = (predict_optimum(at, 1e23) for at in (grown, replace(law, extrapolation={})))
    run = predict_run(grown, best.N, best.D)
    assert best.L_predictive == pytest.approx(run.predictive, rel=0.02)
    assert best.L_confidence == pytest.approx(run.confidence, rel=0.02)
    assert (best.N_confidence, best.D_confidence) == (plain.N_confidence, plain.D_confidence)


def test_without_a_bootstrap_or_enough_runs_nothing_is_added() -> None:
    n, d, loss = simulate_runs()
    assert extrapolate_law(n, d, loss, n_bootstrap=0).extrapolation == {}
    few = slice(0, 24, 4)
    assert extrapolate_law(n[few], d[::4] * np.arange(1, 7), loss[few], n_bootstrap=5).extrapolation == {}


@pytest.mark.slow
def test_nine_tenths_of_the_largest_published_runs_are_inside_their_interval(root: Path, laws: Path) -> None:
    bench = load_tool(root / "tools" / "bench" / "extrapolate.py")
    table = bench.measure_surfaces(laws, 0.1, 100)
    scored = table[table["set"].str.startswith("gadre") & (table["method"] == "extrapolated")]
    assert len(scored) == 12 and scored["inside"].mean() >= 0.9


TRUE = TRUTH | {"K": 0.03, "g": 0.5, "h": 0.8}


def simulate_repeats(noise: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return N, D, L, U of 5 sizes, 3 amounts of text and 1 to 40 epochs of an over_repetition law."""
    n, d, u = make_repeats()
    loss = FORM["over_repetition"].loss(TRUE, n, d, u)
    return n, d, loss * np.exp(noise * np.random.default_rng(seed).standard_normal(len(n))), u


def test_the_largest_runs_are_those_of_most_compute() -> None:
    selected = select_largest(np.array([1.0, 2.0, 3.0, 4.0]), np.array([9.0, 1.0, 2.0, 2.0]), 2)
    assert selected.tolist() == [True, False, False, True]
    with pytest.raises(ValueError, match="got 4 of 4"):
        select_largest(np.ones(4), np.ones(4), 4)


@count_trials(10, 25)
def test_intervals_cover_new_runs_about_as_often_as_their_level(n: int) -> None:
    inside = n_runs = 0
    for seed in range(n):
        N, D, L, U = simulate_repeats(0.004, seed)
        ones = U == D
        N, D, L = (np.concatenate([v[ones]] * 2) for v in (N, D, L))
        L = L * np.exp(0.004 * np.random.default_rng(100 + seed).standard_normal(len(L)))
        is_held_out = select_largest(N, D, 4)
        law = fit_law(N[~is_held_out], D[~is_held_out], L[~is_held_out], n_bootstrap=100, seed=seed)
        score = score_holdout(law, N[is_held_out], D[is_held_out], L[is_held_out]).as_dict()
        inside, n_runs = inside + score["n_inside"], n_runs + score["n_runs"]
    errors = 100 * np.abs(np.log(np.divide(score["predicted"], score["measured"])))
    assert score["rms_percent"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert score["worst_percent"] == pytest.approx(errors.max())
    # all runs of a simulation may be inside, or none
    assert n_runs == 4 * n and inside >= 0.8 * n_runs


def test_the_true_form_is_chosen_by_the_held_out_runs() -> None:
    N, D, L, U = simulate_repeats(0.002)
    forms = ["chinchilla", "repeated_data", "over_repetition"]
    comparisons = compare_forms(N, D, L, U, forms, select_largest(N, D, 8))
    assert comparisons[0].form == "over_repetition"
    assert comparisons[0].rms < 0.01 < comparisons[-1].rms


def test_a_form_that_cannot_be_fitted_comes_last_with_its_reason() -> None:
    N, D, L, _ = simulate_repeats(0.002)
    comparisons = compare_forms(N, D, L, None, ["repeated_data", "chinchilla"], select_largest(N, D, 8))
    assert [comparison.form for comparison in comparisons] == ["chinchilla", "repeated_data"]
    assert "expected the unique tokens" in comparisons[1].refused
