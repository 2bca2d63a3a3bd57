"""Approaches 1 and 2, and power laws, against surfaces whose optimum is known in closed form."""

from pathlib import Path

import numpy as np
import pytest

from megatron.scaling.approaches import Exponent, compare_approaches, estimate_bias, find_disagreements
from megatron.scaling.envelope import Curve, curves_of_runs, fit_envelope
from megatron.scaling.forms import chinchilla
from megatron.scaling.isoflop import budgets, fit_isoflop
from megatron.scaling.law import Law
from megatron.scaling.power_law import fit_power

# alpha = beta: in log N the surface is symmetric about its minimum at every C, so a parabola is unbiased
EVEN = {"E": 1.7, "A": 400.0, "B": 400.0, "alpha": 0.3, "beta": 0.3}
LEANING = EVEN | {"B": 900.0, "beta": 0.36}


def best_size(params: dict[str, float], C: float) -> float:
    alpha, beta = params["alpha"], params["beta"]
    G = (alpha * params["A"] / (beta * params["B"])) ** (1 / (alpha + beta))
    return G * (C / 6) ** (beta / (alpha + beta))


def isoflop_runs(params: dict[str, float], reach: float = 3.0) -> tuple[np.ndarray, ...]:
    """N, D, L, C: 7 sizes around the optimum at each of 4 budgets."""
    N, C = [], []
    for compute in (1e18, 1e19, 1e20, 1e21):
        N += list(best_size(params, compute) * np.geomspace(1 / reach, reach, 7))
        C += [compute] * 7
    N, C = np.array(N), np.array(C)
    D = C / (6 * N)
    return N, D, chinchilla(params, N, D), C


def test_parabolas_find_the_optimum_of_a_symmetric_surface() -> None:
    found = fit_isoflop(*isoflop_runs(EVEN))
    assert found.warnings == []
    for one in found.parabolas:
        assert pytest.approx(best_size(EVEN, one.C), rel=1e-6) == one.N_best
        assert one.N_best * one.D_best * 6 == pytest.approx(one.C)
        assert not one.at_edge
    assert found.size.exponent == pytest.approx(0.5, abs=1e-6)
    assert found.tokens.exponent == pytest.approx(0.5, abs=1e-6)


def test_parabolas_are_biased_on_a_surface_that_leans_and_less_so_close_to_its_minimum() -> None:
    off = []
    for reach in (10.0, 1.5):
        one = fit_isoflop(*isoflop_runs(LEANING, reach)).parabolas[0]
        off.append(abs(np.log(one.N_best / best_size(LEANING, one.C))))
    assert off[0] > 10 * off[1]


def test_weights_follow_the_errors_of_the_losses() -> None:
    N, D, L, C = isoflop_runs(EVEN)
    spoilt = L.copy()
    spoilt[0] += 0.5
    se = np.full_like(L, 0.01)
    se[0] = 100.0
    assert fit_isoflop(N, D, spoilt, C, se).parabolas[0].N_best == pytest.approx(
        best_size(EVEN, 1e18), rel=1e-3
    )
    assert fit_isoflop(N, D, spoilt, C).parabolas[0].N_best != pytest.approx(best_size(EVEN, 1e18), rel=0.1)


def test_the_error_of_a_minimum_is_its_scatter_over_noise() -> None:
    N, D, L, C = isoflop_runs(EVEN)
    rng = np.random.default_rng(0)
    found = [fit_isoflop(N, D, L + rng.normal(0, 0.003, len(L)), C).parabolas[0] for _ in range(300)]
    scatter = np.std([np.log(one.N_best) for one in found])
    assert np.sqrt(np.mean([one.log_se**2 for one in found])) == pytest.approx(scatter, rel=0.15)


def test_a_minimum_at_the_edge_of_the_sizes_is_told_and_kept_out_of_the_power_law() -> None:
    N, D, L, C = isoflop_runs(EVEN)
    kept = (C > 1e18) | (1.02 * best_size(EVEN, 1e18) < N)
    kept[np.flatnonzero(C == 1e18)[-1]] = True
    extra = best_size(EVEN, 1e18) * np.array([1.1, 1.6])
    N, D, C = (np.append(v[kept], w) for v, w in ((N, extra), (D, 1e18 / 6 / extra), (C, [1e18] * 2)))
    found = fit_isoflop(N, D, chinchilla(EVEN, N, D), C)
    assert [one.at_edge for one in found.parabolas] == [True, False, False, False]
    assert any("at the edge of the sizes" in one for one in found.warnings)
    assert found.size.exponent == pytest.approx(0.5, abs=1e-3)


def test_budgets_are_told_apart_by_gaps_and_too_few_sizes_are_said() -> None:
    assert [len(rows) for rows in budgets(np.array([1e18, 3e18, 1.05e18, 2.9e18, 9e18]))] == [2, 2, 1]
    with pytest.raises(ValueError, match="no budget of 5 has 4 sizes"):
        fit_isoflop([1e6, 2e6, 3e6, 4e6, 5e6], [1e8] * 5, [3, 3, 3, 3, 3], np.geomspace(1e15, 1e19, 5))


def test_the_envelope_of_a_known_surface_grows_as_its_optimum() -> None:
    sizes = np.geomspace(1e7, 1e10, 25)
    curves = [
        Curve(n, 6 * n * d, chinchilla(EVEN, n, d)) for n in sizes for d in [np.geomspace(1e4, 1e13, 600)]
    ]
    found = fit_envelope(curves)
    inside = (found.C > 1e16) & (found.C < 1e20)
    # the winner is the size next to the optimum: within half a step of the ladder, 1.155 here
    ratio = found.N[inside] / [best_size(EVEN, c) for c in found.C[inside]]
    assert np.abs(np.log(ratio)).max() < 0.6 * np.log(sizes[1] / sizes[0])
    assert found.size.exponent == pytest.approx(0.5, abs=0.02)
    assert found.tokens.exponent == pytest.approx(0.5, abs=0.02)


def test_the_envelope_says_where_it_is_cut_and_what_it_cannot_compare() -> None:
    n, d = (a.ravel() for a in np.meshgrid([1e7, 3e7, 1e8], np.geomspace(1e10, 1e12, 4)))
    curves = curves_of_runs(n, 6 * n * d, chinchilla(EVEN, n, d))
    assert [len(curve.C) for curve in curves] == [4, 4, 4]
    found = fit_envelope([*curves, Curve(3e8, np.array([1e20]), np.array([2.5]))])
    assert any("1 sizes have one budget only" in one for one in found.warnings)
    assert any("The largest size wins at" in one for one in found.warnings)
    loose = [Curve(curve.N, curve.C, curve.L, annealed=False) for curve in curves]
    assert any("not annealed" in one for one in fit_envelope(loose).warnings)
    with pytest.raises(ValueError, match="found 1 sizes"):
        fit_envelope(curves[:1])


def test_seeds_of_one_budget_are_one_point_of_a_curve() -> None:
    [curve] = curves_of_runs(np.full(3, 1e7), np.array([1e18, 1e18, 2e18]), np.array([3.0, 3.2, 2.9]))
    np.testing.assert_allclose(curve.L, [3.1, 2.9])


def test_a_power_law_through_exact_points_is_exact_and_heavy_points_pull() -> None:
    x = np.array([1.0, 10.0, 100.0, 1000.0])
    law = fit_power(x, 3 * x**0.4)
    assert (law.coefficient, law.exponent) == pytest.approx((3.0, 0.4))
    assert float(law.at(50.0)) == pytest.approx(3 * 50**0.4)
    y = 3 * x**0.4 * [1, 1, 1, 2]
    assert fit_power(x, y, [0.01, 0.01, 0.01, 10]).exponent == pytest.approx(0.4, abs=1e-4)
    with pytest.raises(ValueError, match="found 1 different x"):
        fit_power([2.0, 2.0], [1.0, 1.0])


def test_published_isoflop_slices_grow_as_the_parametric_frontier_roughly(laws: Path) -> None:
    import runpy

    columns = runpy.run_path(str(Path(__file__).with_name("published.py")))["columns"]
    N, C, L = columns(
        laws / "chinchilla_epoch" / "svg_extracted_data.csv", "Model Size", "Training FLOP", "loss"
    )
    found = fit_isoflop(N, C / (6 * N), L, C)
    # Hoffmann et al., table 2: a = 0.49 (0.462, 0.534) by isoFLOP profiles of their own runs
    assert len([one for one in found.parabolas if not one.at_edge]) >= 6
    assert found.size.exponent == pytest.approx(0.49, abs=0.06)


def test_runs_far_from_the_minimum_are_not_fitted() -> None:
    N, D, L, C = isoflop_runs(LEANING, 60.0)
    wide = fit_isoflop(N, D, L, C, window=100.0)
    found = fit_isoflop(N, D, L, C)
    for one, other in zip(found.parabolas, wide.parabolas, strict=True):
        truth = np.log(best_size(LEANING, one.C))
        assert other.used.all() and not one.used.all() and one.used.sum() >= 4
        assert np.abs(np.log(one.N[one.used] / one.N_best)).max() <= 2.8
        assert abs(np.log(one.N_best) - truth) < 0.5 * abs(np.log(other.N_best) - truth)
        # by hand: numpy's parabola through the runs of the window
        x = np.log(one.N[one.used])
        bend, slope, _ = np.polyfit(x, one.L[one.used], 2)
        assert one.N_best == pytest.approx(np.exp(-slope / (2 * bend)), rel=1e-6)


def test_four_sizes_stay_where_the_window_has_fewer() -> None:
    N = np.array([1e6, 1e8, 1e10, 1e12, 1e14])
    L = 2 + 0.01 * (np.log(N) - np.log(1.3e10)) ** 2
    one = fit_isoflop(N, 1e18 / 6 / N, L, np.full(5, 1e18)).parabolas[0]
    assert one.used.sum() == 4 and one.N_best == pytest.approx(1.3e10, rel=1e-6)


def test_the_bias_of_parabolas_is_what_they_are_off_by_on_the_law_itself() -> None:
    runs = isoflop_runs(LEANING, 10.0)
    law = Law(form="chinchilla", params=LEANING, objective=0.0, huber_delta=1e-3, n_runs=0)
    found = fit_isoflop(*runs)
    bias = estimate_bias(found, law)
    true = LEANING["beta"] / (LEANING["alpha"] + LEANING["beta"])
    errors = [one.N_best / best_size(LEANING, one.C) for one in found.parabolas]
    assert bias.factor == pytest.approx(errors[-1], rel=1e-6) and abs(bias.factor - 1) > 0.02
    plain = np.polyfit(
        np.log([one.C for one in found.parabolas]), np.log([one.N_best for one in found.parabolas]), 1
    )
    assert bias.exponent == pytest.approx(plain[0] - true, abs=1e-9)
    assert f"{bias.factor:.2f} times" in bias.words
    even = Law(form="chinchilla", params=EVEN, objective=0.0, huber_delta=1e-3, n_runs=0)
    none = estimate_bias(fit_isoflop(*isoflop_runs(EVEN)), even)
    assert none.exponent == pytest.approx(0, abs=1e-6) and none.factor == pytest.approx(1, rel=1e-5)


def test_approaches_are_compared_and_flagged_where_they_disagree() -> None:
    N, D, L, C = isoflop_runs(EVEN)
    noise = np.exp(0.001 * np.random.default_rng(0).standard_normal(len(N)))
    agreed = compare_approaches(N, D, L * noise, C, n_bootstrap=100)
    by = {one.approach: one for one in agreed.exponents}
    assert {2, 3} <= set(by) and by[3].interval[0] < 0.5 < by[3].interval[1]
    assert not [words for words in agreed.disagreements if "approach 2" in words and "approach 3" in words]
    ones = [Exponent(1, 0.62, None), Exponent(2, 0.55, (0.53, 0.57)), Exponent(3, 0.48, (0.45, 0.51))]
    [words] = find_disagreements(ones)
    assert "approach 2 (isoFLOP parabolas) gives N* ~ C^0.550 [0.530, 0.570]" in words and "C^0.480" in words
    assert find_disagreements([ones[1], Exponent(3, 0.54, (0.4, 0.6))]) == []
    assert find_disagreements([ones[1], Exponent(3, 0.51, (0.4, 0.56))]) == []  # one inside the other's


@pytest.mark.parametrize("known", [True, False])
def test_intervals_of_a_power_law_cover(known: bool) -> None:
    """500 sets of six points: 475 +- 4.9 expected inside each 95 % interval."""
    x = np.geomspace(1e18, 1e21, 6)
    sigma = np.array([0.02, 0.1, 0.05, 0.03, 0.08, 0.04]) if known else np.full(6, 0.05)
    inside = np.zeros(3)
    for seed in range(500):
        rng = np.random.default_rng(seed)
        y = 0.1 * x**0.5 * np.exp(sigma * rng.standard_normal(6))
        law = fit_power(x, y, sigma if known else None)
        true, new = 0.1 * 1e22**0.5, 0.1 * 1e22**0.5 * np.exp(0.05 * rng.standard_normal())
        _, low, high = law.predict(1e22, kind="confidence")
        _, under, over = law.predict(1e22, log_se=0.05 if known else None)
        inside += [law.interval[0] <= 0.5 <= law.interval[1], low <= true <= high, under <= new <= over]
    # errors that are scaled up by chance and t make known errors conservative
    assert (inside >= 460).all() and (inside <= (500 if known else 490)).all()


def test_a_power_law_is_numpys_weighted_line() -> None:
    rng = np.random.default_rng(0)
    x, se = np.geomspace(1, 1e3, 7), rng.uniform(0.01, 0.2, 7)
    y = 2 * x**0.7 * np.exp(3 * se * rng.standard_normal(7))
    law = fit_power(x, y, se)
    (slope, level), covariance = np.polyfit(np.log(x), np.log(y), 1, w=1 / se, cov=True)
    assert (law.exponent, np.log(law.coefficient)) == pytest.approx((slope, level))
    assert law.covariance[1, 1] == pytest.approx(covariance[0, 0])  # the scatter is above the errors here
    assert law.dof == 5 and law.predict(10.0)[1] < law.predict(10.0, kind="confidence")[1] < law.at(10.0)
    tight = fit_power(x, 2 * x**0.7, se)  # no scatter: the errors themselves
    assert tight.covariance[1, 1] == pytest.approx(
        np.polyfit(np.log(x), np.log(y), 1, w=1 / se, cov="unscaled")[1][0, 0]
    )


def test_two_points_have_an_interval_by_their_errors_only() -> None:
    law = fit_power([1.0, np.e], [1.0, np.e], [0.1, 0.1])
    assert law.interval == pytest.approx((1 - 1.96 * 0.1 * 2**0.5, 1 + 1.96 * 0.1 * 2**0.5), rel=1e-3)
    assert np.isnan(fit_power([1.0, np.e], [1.0, np.e]).interval).all()
    for wrong in ([0.1], [0.1, np.nan], [0.1, -1]):
        with pytest.raises(ValueError, match="log_se: got"):
            fit_power([1.0, 2.0], [1.0, 2.0], wrong)


def test_what_is_missing_is_said() -> None:
    n = np.geomspace(1e7, 1e9, 12)
    loss = chinchilla(EVEN, n, 20 * n)
    found = compare_approaches(n, 20 * n, loss, 120 * n * n, n_bootstrap=10)
    assert 2 in found.missing and found.bias is None
