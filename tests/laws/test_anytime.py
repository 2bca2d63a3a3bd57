"""Intervals that hold at every look: simulated studies, and the Bayes factor by integration."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from megatron.laws.anytime import SCALE, anytime_half_width

N_MAX = 40


def decide_at_each_look(effect: float, n_max: int, n_studies: int, seed: int) -> np.ndarray:
    """Return the decision (-1, 0, 1) of studies that look after every pair of runs, noise 1 in each arm."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(effect, 1, (n_studies, n_max)), rng.normal(0, 1, (n_studies, n_max))
    decision = np.zeros(n_studies)
    for n in range(2, n_max + 1):
        difference = a[:, :n].mean(1) - b[:, :n].mean(1)
        sigma = np.sqrt((a[:, :n].var(1) + b[:, :n].var(1)) * n / (2 * n - 2))
        half = anytime_half_width(1.0, 2 * n - 2, n / 2) * sigma
        crossed = (np.abs(difference) > half) & (decision == 0)
        decision[crossed] = np.sign(difference[crossed])
    return decision


def test_equal_recipes_are_called_different_in_at_most_5_percent_of_studies_under_peeking() -> None:
    decision = decide_at_each_look(0.0, N_MAX, 1000, seed=0)
    # Student's t at every look errs in about a quarter of such studies
    assert (decision != 0).mean() <= 0.05


def test_power_beside_a_fixed_number_of_13_runs() -> None:
    fixed = stats.ttest_ind(*np.random.default_rng(1).normal([[[1.5]], [[0.0]]], 1, (2, 13, 2000))).pvalue
    decision = decide_at_each_look(1.5, 13, 1000, seed=2)
    # a fixed test at 13 runs has more power there, which is the price of looking at each
    assert 0.92 < (fixed < 0.05).mean() < 0.98
    assert 0.68 < (decision > 0).mean() < 0.84 and not (decision < 0).any()
    assert (decide_at_each_look(3.0, 13, 500, seed=3) > 0).mean() > 0.99


def test_the_interval_ends_where_the_bayes_factor_is_20() -> None:
    n, dof = 6, 5
    half = anytime_half_width(1.0, dof, n)
    t = half * math.sqrt(n)

    # the density of t under a mean of variance SCALE sigma^2: noncentral t, integrated over the mean
    def weighted(effect: float) -> float:
        density = stats.nct.pdf(t, dof, effect * math.sqrt(n))
        return float(density * stats.norm.pdf(effect, scale=math.sqrt(SCALE)))

    under_alternative = integrate.quad(weighted, -12, 12, limit=200)[0]
    assert under_alternative / stats.t.pdf(t, dof) == pytest.approx(20, rel=1e-4)


def test_too_few_runs_have_no_bounded_interval() -> None:
    assert anytime_half_width(1.0, 0, 1) == math.inf
    assert anytime_half_width(1.0, 2, 3) == math.inf
    assert anytime_half_width(1.0, 30, 3) < math.inf
