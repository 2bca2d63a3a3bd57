"""Predictions of held-out runs, and the choice between forms by them."""

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM
from megatron.laws.holdout import compare_forms, score_holdout, select_largest
from tests.laws.known_laws import TRUTH, count_trials

TRUE = TRUTH | {"K": 0.03, "g": 0.5, "h": 0.8}


def simulate_runs(noise: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return N, D, L, U of 5 sizes, 3 amounts of text and 1 to 40 epochs of an over_repetition law."""
    n, u, e = np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e8, 1e10, 3), [1, 3, 10, 40])
    n, d, u = n.ravel(), (u * e).ravel(), u.ravel()
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
        N, D, L, U = simulate_runs(0.004, seed)
        ones = U == D
        N, D, L = (np.concatenate([v[ones]] * 2) for v in (N, D, L))
        L = L * np.exp(0.004 * np.random.default_rng(100 + seed).standard_normal(len(L)))
        is_held_out = select_largest(N, D, 4)
        law = fit_law(N[~is_held_out], D[~is_held_out], L[~is_held_out], n_bootstrap=100, seed=seed)
        score = score_holdout(law, N[is_held_out], D[is_held_out], L[is_held_out]).as_dict()
        inside, n_runs = inside + score["n_inside"], n_runs + score["n_runs"]
    # of the runs of a simulation, all or none may be inside
    assert n_runs == 4 * n and inside >= 0.8 * n_runs


def test_a_perfect_law_scores_zero_and_its_interval_is_only_the_spread() -> None:
    N, D, L, U = simulate_runs(0.0)
    law = fit_law(N, D, L, U=U, form="over_repetition", n_bootstrap=0)
    score = score_holdout(law, N, D, L, U)
    assert np.abs(score.error).max() < 1e-8
    assert score.as_dict()["rms_percent"] == pytest.approx(0, abs=1e-6)


def test_the_true_form_is_chosen_by_the_held_out_runs() -> None:
    N, D, L, U = simulate_runs(0.002)
    forms = ["chinchilla", "repeated_data", "over_repetition"]
    comparisons = compare_forms(N, D, L, U, forms, select_largest(N, D, 8))
    assert comparisons[0].form == "over_repetition"
    assert comparisons[0].rms < 0.01 < comparisons[-1].rms


def test_a_form_that_cannot_be_fitted_comes_last_with_its_reason() -> None:
    N, D, L, _ = simulate_runs(0.002)
    comparisons = compare_forms(N, D, L, None, ["repeated_data", "chinchilla"], select_largest(N, D, 8))
    assert [comparison.form for comparison in comparisons] == ["chinchilla", "repeated_data"]
    assert "expected the unique tokens" in comparisons[1].refused
