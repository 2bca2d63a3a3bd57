"""Parabolas of isoFLOP runs, and power laws, against surfaces whose optimum is known in closed form."""

from pathlib import Path

import numpy as np
import pytest

from megatron.laws import isoflop
from megatron.laws.forms import chinchilla
from megatron.laws.isoflop import fit_isoflop, split_budgets
from megatron.laws.power_law import fit_power
from tests.laws.published import read_columns

# alpha = beta: in log N the surface is symmetric about its minimum at every C, so a parabola is unbiased
SYMMETRIC = {"E": 1.7, "A": 400.0, "B": 400.0, "alpha": 0.3, "beta": 0.3}
ASYMMETRIC = SYMMETRIC | {"B": 900.0, "beta": 0.36}


def best_size(params: dict[str, float], C: np.ndarray | float) -> np.ndarray | float:
    alpha, beta = params["alpha"], params["beta"]
    G = (alpha * params["A"] / (beta * params["B"])) ** (1 / (alpha + beta))
    return G * (C / 6) ** (beta / (alpha + beta))


def isoflop_runs(params: dict[str, float], reach: float = 3.0) -> tuple[np.ndarray, ...]:
    """N, D, L, C: 7 sizes around the optimum at each of 4 budgets."""
    C = np.geomspace(1e18, 1e21, 4).repeat(7)
    N = best_size(params, C) * np.tile(np.geomspace(1 / reach, reach, 7), 4)
    D = C / (6 * N)
    return N, D, chinchilla(params, N, D), C


def test_parabolas_find_the_optimum_of_a_symmetric_surface() -> None:
    result = fit_isoflop(*isoflop_runs(SYMMETRIC))
    assert result.warnings == []
    for parabola in result.parabolas:
        assert pytest.approx(best_size(SYMMETRIC, parabola.C), rel=1e-6) == parabola.N_best
        assert parabola.N_best * parabola.D_best * 6 == pytest.approx(parabola.C)
        assert not parabola.at_edge
    assert result.size.exponent == pytest.approx(0.5, abs=1e-6)
    assert result.tokens.exponent == pytest.approx(0.5, abs=1e-6)


def test_weights_follow_the_errors_of_the_losses() -> None:
    N, D, L, C = isoflop_runs(SYMMETRIC)
    spoilt = L.copy()
    spoilt[0] += 0.5
    se = np.full_like(L, 0.01)
    se[0] = 100.0
    weighted, plain = (fit_isoflop(N, D, spoilt, C, errors).parabolas[0].N_best for errors in (se, None))
    assert weighted == pytest.approx(best_size(SYMMETRIC, 1e18), rel=1e-3)
    assert plain != pytest.approx(best_size(SYMMETRIC, 1e18), rel=0.1)


def test_the_error_of_a_minimum_is_its_scatter_over_noise() -> None:
    N, D, L, C = isoflop_runs(SYMMETRIC)
    rng = np.random.default_rng(0)
    result = [fit_isoflop(N, D, L + rng.normal(0, 0.003, len(L)), C).parabolas[0] for _ in range(300)]
    scatter = np.std([np.log(parabola.N_best) for parabola in result])
    assert np.sqrt(np.mean([parabola.log_se**2 for parabola in result])) == pytest.approx(scatter, rel=0.15)


def test_a_minimum_at_the_edge_of_the_sizes_is_warned_about_and_excluded_from_the_power_law() -> None:
    N, D, L, C = isoflop_runs(SYMMETRIC)
    selected = (C > 1e18) | (1.02 * best_size(SYMMETRIC, 1e18) < N)
    selected[np.flatnonzero(C == 1e18)[-1]] = True
    extra = best_size(SYMMETRIC, 1e18) * np.array([1.1, 1.6])
    N, D, C = (np.append(v[selected], w) for v, w in ((N, extra), (D, 1e18 / 6 / extra), (C, [1e18] * 2)))
    result = fit_isoflop(N, D, chinchilla(SYMMETRIC, N, D), C)
    assert [parabola.at_edge for parabola in result.parabolas] == [True, False, False, False]
    assert any("at the edge of the sizes" in warning for warning in result.warnings)
    assert result.size.exponent == pytest.approx(0.5, abs=1e-3)


def test_budgets_are_separated_by_gaps_and_too_few_sizes_are_refused() -> None:
    assert [len(rows) for rows in split_budgets(np.array([1e18, 3e18, 1.05e18, 2.9e18, 9e18]))] == [2, 2, 1]
    with pytest.raises(ValueError, match="got no budget of 5 with 4 sizes"):
        fit_isoflop([1e6, 2e6, 3e6, 4e6, 5e6], [1e8] * 5, [3, 3, 3, 3, 3], np.geomspace(1e15, 1e19, 5))


def test_published_isoflop_slices_grow_as_the_parametric_frontier_roughly(laws: Path) -> None:
    path = laws / "chinchilla_epoch" / "svg_extracted_data.csv"
    N, C, L = read_columns(path, "Model Size", "Training FLOP", "loss")
    result = fit_isoflop(N, C / (6 * N), L, C)
    # Hoffmann et al., table 2: a = 0.49 (0.462, 0.534) by isoFLOP profiles of the runs of the paper
    assert len([parabola for parabola in result.parabolas if not parabola.at_edge]) >= 6
    assert result.size.exponent == pytest.approx(0.49, abs=0.06)


def test_runs_far_from_the_minimum_are_not_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    N, D, L, C = isoflop_runs(ASYMMETRIC, 60.0)
    result = fit_isoflop(N, D, L, C)
    monkeypatch.setattr(isoflop, "WINDOW", 100.0)
    wide = fit_isoflop(N, D, L, C)
    for parabola, other in zip(result.parabolas, wide.parabolas, strict=True):
        truth = np.log(best_size(ASYMMETRIC, parabola.C))
        assert other.used.all() and not parabola.used.all() and parabola.used.sum() >= 4
        assert np.abs(np.log(parabola.N[parabola.used] / parabola.N_best)).max() <= 2.8
        assert abs(np.log(parabola.N_best) - truth) < 0.5 * abs(np.log(other.N_best) - truth)
        # by hand: numpy's parabola through the runs of the window
        x = np.log(parabola.N[parabola.used])
        bend, slope, _ = np.polyfit(x, parabola.L[parabola.used], 2)
        assert parabola.N_best == pytest.approx(np.exp(-slope / (2 * bend)), rel=1e-6)


def test_at_least_four_sizes_are_fitted_where_the_window_has_fewer() -> None:
    N = np.array([1e6, 1e8, 1e10, 1e12, 1e14])
    L = 2 + 0.01 * (np.log(N) - np.log(1.3e10)) ** 2
    parabola = fit_isoflop(N, 1e18 / 6 / N, L, np.full(5, 1e18)).parabolas[0]
    assert parabola.used.sum() == 4 and parabola.N_best == pytest.approx(1.3e10, rel=1e-6)


@pytest.mark.parametrize("has_errors", [True, False])
def test_intervals_of_a_power_law_cover(has_errors: bool) -> None:
    """500 sets of six points: 475 +- 4.9 are expected inside each 95 % interval."""
    x = np.geomspace(1e18, 1e21, 6)
    sigma = np.array([0.02, 0.1, 0.05, 0.03, 0.08, 0.04]) if has_errors else np.full(6, 0.05)
    inside = np.zeros(3)
    for seed in range(500):
        rng = np.random.default_rng(seed)
        y = 0.1 * x**0.5 * np.exp(sigma * rng.standard_normal(6))
        law = fit_power(x, y, sigma if has_errors else None)
        true, new = 0.1 * 1e22**0.5, 0.1 * 1e22**0.5 * np.exp(0.05 * rng.standard_normal())
        _, low, high = law.predict(1e22, kind="confidence")
        _, under, over = law.predict(1e22, log_se=0.05 if has_errors else None)
        inside += [law.interval[0] <= 0.5 <= law.interval[1], low <= true <= high, under <= new <= over]
    # with given errors the intervals are conservative: errors are scaled up by chance, never down, and use t
    assert (inside >= 460).all() and (inside <= (500 if has_errors else 490)).all()


def test_a_power_law_is_numpys_weighted_line() -> None:
    rng = np.random.default_rng(0)
    x, se = np.geomspace(1, 1e3, 7), rng.uniform(0.01, 0.2, 7)
    y = 2 * x**0.7 * np.exp(3 * se * rng.standard_normal(7))
    law = fit_power(x, y, se)
    (slope, level), covariance = np.polyfit(np.log(x), np.log(y), 1, w=1 / se, cov=True)
    assert (law.exponent, np.log(law.coefficient)) == pytest.approx((slope, level))
    assert law.covariance[1, 1] == pytest.approx(covariance[0, 0])  # the scatter is above the errors here
    assert law.dof == 5 and float(law.evaluate(50.0)) == pytest.approx(law.coefficient * 50**law.exponent)
    assert law.predict(10.0)[1] < law.predict(10.0, kind="confidence")[1] < law.evaluate(10.0)
    tight = fit_power(x, 2 * x**0.7, se)  # no scatter: the given errors apply
    _, unscaled = np.polyfit(np.log(x), np.log(y), 1, w=1 / se, cov="unscaled")
    assert tight.covariance[1, 1] == pytest.approx(unscaled[0, 0])


def test_two_points_have_an_interval_by_their_errors_only() -> None:
    law = fit_power([1.0, np.e], [1.0, np.e], [0.1, 0.1])
    assert law.interval == pytest.approx((1 - 1.96 * 0.1 * 2**0.5, 1 + 1.96 * 0.1 * 2**0.5), rel=1e-3)
    assert np.isnan(fit_power([1.0, np.e], [1.0, np.e]).interval).all()
    with pytest.raises(ValueError, match="got 1 different x"):
        fit_power([2.0, 2.0], [1.0, 1.0])
    for wrong in ([0.1], [0.1, np.nan], [0.1, -1]):
        with pytest.raises(ValueError, match="log_se: got"):
            fit_power([1.0, 2.0], [1.0, 2.0], wrong)
