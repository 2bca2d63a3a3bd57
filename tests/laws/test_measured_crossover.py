"""Measured crossings against curves whose crossing is known."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megatron.laws.measured_crossover import Setting, find_crossings, fit_crossover_law, measure_crossover

GRID = np.geomspace(1e10, 1e14, 17)
SEED_SD = 0.004


def first_loss(C: np.ndarray | float) -> np.ndarray | float:
    """Return a loss that falls, and rises again after 1e12 FLOPs."""
    return 4.4 + 0.02 * np.log(np.asarray(C) / 1e12) ** 2


def second_loss(C: np.ndarray | float, at: float) -> np.ndarray | float:
    """Return a loss that falls through 4.4, the least of the first, at `at` FLOPs."""
    return 4.4 - 0.1 * np.log(np.asarray(C) / at)


def make_settings(
    losses, n_seeds: int, rng: np.random.Generator, name: str, n_fresh: int = 3, sd: float = SEED_SD
) -> list[Setting]:
    """Draw runs whose losses on both texts correlate at 0.85, and lengths of a fresh seed at 0.5."""
    shared = rng.standard_normal(n_fresh)
    settings = []
    for i, (C, loss) in enumerate(zip(GRID, losses, strict=True)):
        of_run, of_text = rng.standard_normal((2, n_seeds))
        fresh = math.sqrt(0.5) * (shared + rng.standard_normal(n_fresh))
        test = 0.85 * of_run + math.sqrt(1 - 0.85**2) * of_text
        losses_of_texts = (loss + sd * noise for noise in (of_run, test, fresh))
        settings.append(Setting(f"{name}{i}", float(C), *losses_of_texts))
    return settings


def find_crossing(first: np.ndarray, second: np.ndarray) -> tuple[float | None, np.ndarray]:
    """Return C_crit and the settings around it for (validation, test) losses [n, 2] on GRID."""
    validation, test = zip(first.T, second.T, strict=True)
    (point,), (around,) = find_crossings((GRID, GRID), validation, [losses[None] for losses in test])
    return (float(point) if math.isfinite(point) else None), around


def pairs(losses: np.ndarray) -> np.ndarray:
    return np.stack([losses, losses], axis=1)


def test_the_crossing_is_with_the_best_earlier_setting_and_not_with_the_overfitted_one() -> None:
    """The first loss rises after its least. Stopped early it stays at 4.4, which the second passes."""
    point, between = find_crossing(pairs(first_loss(GRID)), pairs(second_loss(GRID, 3e13)))
    assert point == pytest.approx(3e13, rel=1e-6)  # the second is linear in log C: interpolation is exact
    low, high = between
    assert GRID[low] < 3e13 < GRID[high]


def test_no_crossing_is_reported_where_there_is_none() -> None:
    above = pairs(second_loss(GRID, 1e16))
    assert find_crossing(pairs(first_loss(GRID)), above)[0] is None
    below = pairs(np.full(len(GRID), 3.0))  # better from the first measurement: it may have crossed before
    assert find_crossing(pairs(first_loss(GRID)), below)[0] is None
    dip = second_loss(GRID, 1e16)
    dip[5] = 3.0  # a dip of the test loss alone: the runs after it are worse
    dipped = np.stack([second_loss(GRID, 1e16), dip], axis=1)
    assert find_crossing(pairs(first_loss(GRID)), dipped)[0] is None


def test_a_setting_is_selected_by_one_text_and_reported_by_the_other() -> None:
    lucky = Setting("lucky", 1e12, np.array([4.5]), np.array([4.0]))
    good = Setting("good", 1e12, np.array([4.4]), np.array([4.41]))
    other = Setting("other", 1e12, np.array([5.0]), np.array([5.1]))
    result = measure_crossover(1e5, [lucky, good], [other])
    assert (result.first.name, result.first.loss, result.first.seed_se) == ("good", 4.41, None)
    assert (result.C, result.interval, result.gap_se, result.first.is_fresh) == (None, None, None, False)
    assert result.gap == pytest.approx(4.41 - 5.1)


def test_the_best_setting_is_reported_by_its_fresh_seeds_only() -> None:
    best = Setting("best", 1e12, np.array([4.4]), np.array([4.0]), np.array([4.5, 4.6, 4.7]))
    stale = Setting("stale", 1e12, np.array([4.5]), np.array([3.0]))
    other = Setting("other", 2e12, np.array([5.0]), np.array([5.1]), np.array([5.2, 5.2, 5.3]))
    result = measure_crossover(1e5, [best, stale], [other])
    assert (result.first.name, result.first.n_seeds, result.first.is_fresh) == ("best", 3, True)
    assert (result.first.loss, result.first.seed_se) == pytest.approx((4.6, 0.1 / math.sqrt(3)))
    # a better setting without fresh seeds: nothing is known of its own fresh losses
    better = replace(stale, validation=np.array([4.3]))
    result = measure_crossover(1e5, [best, better], [other])
    assert (result.first.name, result.first.is_fresh, result.gap_se) == ("stale", False, None)


def selected_truth(first: list[Setting], second: list[Setting], at: float) -> tuple[float | None, float]:
    """Return the crossing, and the difference of the best losses, of the selected settings' true losses."""
    curves = (first_loss, lambda C: second_loss(C, at))
    sides = [
        np.array([(s.validation.mean(), curve(s.C)) for s in side])
        for side, curve in zip((first, second), curves, strict=True)
    ]
    best = [side[side[:, 0].argmin(), 1] for side in sides]
    return find_crossing(*sides)[0], best[0] - best[1]


def test_intervals_of_fresh_seeds_cover_the_crossing_and_their_difference_is_unbiased() -> None:
    """The seeds that select are biased although the reported text is another one."""
    rng = np.random.default_rng(1)
    at, n, sd, inside = 3e13, 100, 0.05, 0
    errors: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(n):
        first = make_settings(first_loss(GRID), 1, rng, "a", sd=sd)
        second = make_settings(second_loss(GRID, at), 1, rng, "b", sd=sd)
        crossing, gap = selected_truth(first, second, at)
        result = measure_crossover(1e5, first, second)
        low, high = (math.inf if end is None else end for end in result.interval)
        inside += low <= (crossing or math.inf) <= high
        errors[True].append(result.gap - gap)
        sides = ([replace(s, fresh=np.empty(0)) for s in side] for side in (first, second))
        reused = measure_crossover(1e5, *sides)
        errors[False].append(reused.gap - gap)
    assert inside / n > 0.95 - 3 * math.sqrt(0.95 * 0.05 / n)
    t = {fresh: np.mean(e) / np.std(e) * math.sqrt(n) for fresh, e in errors.items()}
    assert abs(t[True]) < 3 and abs(t[False]) > 4


def test_the_standard_error_of_the_best_setting_is_not_that_of_a_steep_part() -> None:
    """Seeds differ by 0.2 nats on the way down and by 0.004 at the least, which has a single fresh seed."""
    rng = np.random.default_rng(4)

    def draw(name: str, C: float, loss: float, sd: float, n: int) -> Setting:
        once = loss + sd * rng.standard_normal((2, 1))
        return Setting(name, C, *once, loss + sd * rng.standard_normal(n))

    at_least = [draw(f"b{i}", 1e12, 4.4, 0.004, 3) for i in range(6)]
    steep = [draw(f"c{i}", 5e11, 5.0, 0.2, 3) for i in range(20)]
    single = draw("d", 2e12, 4.38, 0.004, 1)
    other = make_settings(second_loss(GRID, 1e16), 3, rng, "a")
    best = measure_crossover(1e5, [*steep, *at_least, single], other).first
    assert (best.name, best.n_seeds) == ("d", 1)
    assert 0.001 < best.seed_se < 0.012


def test_a_power_law_through_crossings_has_their_exponent() -> None:
    rng = np.random.default_rng(3)
    crossovers = []
    for U in (16e3, 33e3, 65e3):
        first = make_settings(first_loss(GRID), 3, rng, "a")
        second = make_settings(second_loss(GRID, 2e12 * (U / 16e3) ** 2), 3, rng, "b")
        crossovers.append(measure_crossover(U, first, second))
    law = fit_crossover_law(crossovers)
    assert law is not None and law.dof == 3 - 2
    assert law.interval[0] < 2 < law.interval[1]
    assert law.exponent == pytest.approx(2, abs=0.1)
    assert fit_crossover_law(crossovers[:1]) is None
    is_open = np.arange(len(crossovers[0].draws)) % 50 == 0
    with_open = fit_crossover_law(
        [replace(at, draws=np.where(is_open, np.inf, at.draws)) for at in crossovers]
    )
    assert with_open.interval == pytest.approx(law.interval, rel=0.2)
    none_crosses = [replace(at, draws=np.full_like(at.draws, np.inf)) for at in crossovers[:2]]
    assert np.isnan(fit_crossover_law(none_crosses).interval).all()
