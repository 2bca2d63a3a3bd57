"""Compute-equivalent gain: exact ladders, simulated coverage, and refusals."""

import math

import numpy as np
import pytest

from megatron.laws.compute_law import fit_compute_law
from megatron.laws.equivalent_gain import (
    EquivalentGain,
    Ladder,
    fit_gain,
    gain_of_cells,
    ladder_of_frontier,
    ladder_of_runs,
)
from tests.laws.known_laws import count_trials, least_hits

BUDGETS = np.geomspace(1e16, 3e17, 4)
MIDDLE = math.log(np.sqrt(1e16 * 3e17))


def loss_of(C: np.ndarray, ratio: float, stretch: float) -> np.ndarray:
    """Return the loss of a recipe that needs `ratio` (C / middle)^stretch times the compute of E + K C^-g."""
    x = np.log(C) - MIDDLE
    u = (x - math.log(ratio)) / (1 + stretch)
    return np.asarray(2 + 2.2 * np.exp(-0.15 * u))


def true_ratio(C: float, ratio: float, stretch: float) -> float:
    return float(ratio * math.exp(stretch * (math.log(C) - MIDDLE)))


def simulate(
    ratio: float, stretch: float, n_seeds: int, shared: float, rng: np.random.Generator
) -> EquivalentGain:
    """Fit ladders of `n_seeds` a budget, noise 0.3 %, a share of its variance common to both recipes."""
    C = np.repeat(BUDGETS, n_seeds)
    common = math.sqrt(shared) * rng.normal(size=len(C))
    labels = [f"{i}" for i in range(len(C))]
    ladders = []
    for recipe in ((1.0, 0.0), (ratio, stretch)):
        noise = common + math.sqrt(1 - shared) * rng.normal(size=len(C))
        ladders.append(ladder_of_runs(C, loss_of(C, *recipe) * np.exp(0.003 * noise), labels))
    return fit_gain(*ladders)


def grid_ladder(ratio: float, noise: float, rng: np.random.Generator) -> Ladder:
    """Return the frontier of four sizes at each of five budgets; the recipe has the loss of C / ratio."""
    C = np.repeat(np.geomspace(1e16, 3e17, 5), 4)
    offset = np.tile([0.35, 0.7, 1.4, 2.8], 5)
    N = np.sqrt(C / 120) * offset
    # the surface of Chinchilla's form at the compute that the other recipe would need
    size = np.sqrt(C / ratio / 120) * offset
    tokens = C / ratio / 6 / size
    L = 1.7 + 400 / size**0.34 + 1200 / tokens**0.34
    return ladder_of_frontier(N, C / 6 / N, L * np.exp(noise * rng.normal(size=len(C))), C)


def test_a_ladder_shifted_in_compute_has_that_gain_everywhere() -> None:
    C = np.geomspace(1e16, 3e17, 8)
    L = 9 * C**-0.03  # a straight line in logs, which the form contains
    gain = fit_gain(ladder_of_runs(C, L), ladder_of_runs(0.8 * C, L))
    for at in (1.1e16, 1e17, 2e18):
        assert gain.at(at).ratio == pytest.approx(0.8, abs=1e-6)
    assert gain.trend()[0] == pytest.approx(1, abs=1e-6)
    assert list(gain.C) == pytest.approx([1e16, 0.8 * 3e17])


def test_exchanged_recipes_have_the_inverse_gain() -> None:
    rng = np.random.default_rng(1)
    C = np.repeat(BUDGETS, 3)
    a, b = (
        ladder_of_runs(C, loss_of(C, ratio, 0.0) * np.exp(0.003 * rng.normal(size=12)))
        for ratio in (1.0, 0.8)
    )
    forward, back = fit_gain(a, b), fit_gain(b, a)
    # B at r C has the loss of A at C: the inverse is read at r C
    at = forward.at(1e17)
    inverse = back.at(1e17 * at.ratio)
    assert inverse.ratio == pytest.approx(1 / at.ratio, rel=2e-3)
    assert (at.verdict, inverse.verdict) == ("better", "worse")


@count_trials(60, 600)
@pytest.mark.parametrize(
    ("ratio", "stretch", "n_seeds", "shared"),
    [(1.0, 0.0, 1, 0.0), (0.8, 0.05, 3, 0.5), (0.7, 0.0, 3, 0.0), (1.3, -0.03, 2, 0.8)],
)
def test_intervals_cover_the_true_ratio_and_its_trend(
    ratio: float, stretch: float, n_seeds: int, shared: float, n: int
) -> None:
    rng = np.random.default_rng(7)
    fits = [simulate(ratio, stretch, n_seeds, shared, rng) for _ in range(n)]
    for C in (BUDGETS[0], BUDGETS[-1]):
        hits = [
            low <= true_ratio(C, ratio, stretch) <= high for low, high in (g.at(C).interval for g in fits)
        ]
        assert sum(hits) >= least_hits(n, 0.93)
    trends = [g.trend() for g in fits]
    assert sum(low <= 10**stretch <= high for _, low, high in trends) >= least_hits(n, 0.93)


def test_pairs_that_share_noise_narrow_the_interval() -> None:
    rng = np.random.default_rng(3)
    C = np.repeat(BUDGETS, 3)
    common, labels = rng.normal(size=12), [str(i) for i in range(12)]
    L = [loss_of(C, r, 0.0) * np.exp(0.003 * (common + 0.1 * rng.normal(size=12))) for r in (1.0, 0.8)]
    paired = fit_gain(*(ladder_of_runs(C, losses, labels) for losses in L))
    plain = fit_gain(*(ladder_of_runs(C, losses) for losses in L))
    assert paired.correlation > 0.9 and plain.correlation == 0
    (low, high), (wide_low, wide_high) = (g.at(1e17).interval for g in (paired, plain))
    assert (high - low) < 0.4 * (wide_high - wide_low) and low < 0.8 < high


@count_trials(8, 100)
def test_frontiers_of_two_grids_give_the_gain(n: int) -> None:
    rng = np.random.default_rng(5)
    gains = [fit_gain(grid_ladder(1.0, 0.003, rng), grid_ladder(0.7, 0.003, rng)).at(3e17) for _ in range(n)]
    assert sum(low <= 0.7 <= high for low, high in (g.interval for g in gains)) >= least_hits(n, 0.92)
    assert all(g.verdict == "better" for g in gains)


def test_a_gain_that_approaches_one_shrinks() -> None:
    rng = np.random.default_rng(2)
    assert simulate(0.6, 0.1, 3, 0.0, rng).change == "shrinks"
    assert simulate(1.6, -0.1, 3, 0.0, rng).change == "shrinks"
    assert simulate(0.6, -0.1, 3, 0.0, rng).change == "grows"
    assert simulate(1.0, -0.1, 3, 0.5, rng).change == "falls"
    assert simulate(1.0, 0.1, 3, 0.5, rng).change == "rises"


def test_cells_use_the_slope_of_the_frontier() -> None:
    rng = np.random.default_rng(4)
    C = np.repeat(np.geomspace(1e16, 3e17, 5), 4)
    N = np.sqrt(C / 120) * np.tile([0.35, 0.7, 1.4, 2.8], 5)
    L = (1.7 + 400 / N**0.34 + 1200 / (C / 6 / N) ** 0.34) * np.exp(0.001 * rng.normal(size=20))
    law = fit_compute_law(N, C / 6 / N, L, C)
    # the slope of the exact frontier, N* = D* = sqrt(C / 6) up to a constant that cancels
    losses = [1.7 + np.min(400 / n**0.34 + 1200 / (c / 6 / n) ** 0.34) for c in (9.9e16, 1.01e17)
              for n in (np.geomspace(1e6, 1e9, 100_001),)]  # fmt: skip
    slope = math.log(losses[1] / losses[0]) / math.log(1.01 / 0.99)
    got, error = law.slope(1e17)
    assert abs(got - slope) < 3 * error and error < 0.1 * abs(slope)
    gain = gain_of_cells(law, (1e17, 1e17), 0.01, 0.001, 20)
    assert gain.ratio == pytest.approx(math.exp(0.01 / -got))
    # Fieller: the ends are the ratios theta at which difference - theta |slope| is t errors from 0
    for end in gain.interval:
        theta = math.log(end)
        distance = (0.01 + theta * got) / math.hypot(0.001, theta * error)
        assert abs(distance) == pytest.approx(2.0860, abs=1e-3)
    assert gain_of_cells(law, (1e17, 2e17), 0.0, 0.001, 20).ratio == pytest.approx(2)


@pytest.mark.parametrize(
    ("C", "other", "L", "words"),
    [
        ([1e16, 2e16, 4e16], [1e18, 2e18, 4e18], [4.0, 3.9, 3.8], "without common compute"),
        ([1e16], [1e16], [4.0], "one budget"),
        ([1e16, 2e16, 4e16], [1e16, 2e16, 4e16], [4.0, 3.9, 3.8], "without common losses"),
        ([1e16, 2e16, 4e16], [1e16, 2e16, 4e16], [3.0, 3.1, 3.2], "do not fall"),
        ([1e16, 2e16], [1e16, 2e16], [4.0, 3.9], "4 runs for 4 constants"),
    ],
)
def test_ladders_without_an_answer_are_refused(
    C: list[float], other: list[float], L: list[float], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        fit_gain(ladder_of_runs(C, L), ladder_of_runs(other, np.array(L) / (1 + ("losses" in words))))
