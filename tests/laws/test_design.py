"""Designs against simulated fits and common designs."""

import numpy as np
import pytest

from megatron.laws.design import Designer, RunSet, build_simple_designs, generate_candidates
from megatron.laws.fit import fit_law
from megatron.laws.frontier import optimal_frontier
from tests.laws.known_laws import count_trials, make_law

PRIOR = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
LAW = make_law(params=PRIOR)
BUDGET, TARGET = 1e20, 1e22


def make_designer(noise: float = 0.005, done: RunSet | None = None) -> Designer:
    return Designer(LAW, TARGET, noise, done)


@count_trials(40, 150)
def test_expected_errors_are_the_scatter_of_simulated_fits(n: int) -> None:
    runs = build_simple_designs(BUDGET, 24)["D/N 5, 20, 80"]
    noise = 0.001
    expected = make_designer(noise).expect(runs)
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(n):
        loss = LAW.loss(runs.N, runs.D) * np.exp(noise * rng.standard_normal(len(runs.N)))
        law = fit_law(runs.N, runs.D, loss, n_bootstrap=0, huber_delta=1e3)
        best = optimal_frontier(law, TARGET)
        errors.append([np.log(best.N[0]), np.log(best.L[0]), law.derived["a_exponent"]])
    scatter = np.std(errors, axis=0)
    predicted = (expected.log_size, expected.log_loss, expected.a_exponent)
    assert predicted == pytest.approx(tuple(scatter), rel=2.4 / np.sqrt(n))


def test_chosen_runs_keep_to_the_budget_and_beat_simple_designs() -> None:
    designer = make_designer()
    pool = generate_candidates(0.25 * BUDGET)
    chosen = designer.choose(pool, BUDGET, 15)
    assert len(chosen.N) == 15
    assert chosen.flops.sum() <= BUDGET and chosen.flops.max() <= 0.25 * BUDGET * (1 + 1e-9)
    assert len({*zip(chosen.N, chosen.D, strict=True)}) == 15
    errors = designer.expect(chosen)
    for runs in build_simple_designs(BUDGET, 15).values():
        assert runs.flops.sum() == pytest.approx(BUDGET)
        other = designer.expect(runs)
        assert errors.log_size < 0.5 * other.log_size
        assert errors.log_loss < 0.6 * other.log_loss


def test_no_exchange_of_one_run_is_better() -> None:
    designer = make_designer()
    pool = generate_candidates(0.25 * BUDGET)
    pool = pool.select(np.flatnonzero(pool.N.max() < 30 * pool.N))
    chosen = designer.choose(pool, BUDGET, 8)
    ridge = 1e-9 * np.einsum("nii->i", designer.information(pool)) * np.eye(5)
    value = designer.criterion(ridge + designer.information(chosen).sum(axis=0), "c")
    information = designer.information(pool)
    chosen_cells = {*zip(chosen.N, chosen.D, strict=True)}
    for place in range(8):
        others = chosen.select([i for i in range(8) if i != place])
        cheap = pool.flops <= BUDGET - others.flops.sum()
        free = [i for i in np.flatnonzero(cheap) if (pool.N[i], pool.D[i]) not in chosen_cells]
        values = designer.criterion(ridge + designer.information(others).sum(axis=0) + information[free], "c")
        assert values.min() > value - 1e-6


def test_for_d_the_determinant_is_larger_for_c_the_errors_are_smaller() -> None:
    designer = make_designer()
    pool = generate_candidates(0.25 * BUDGET)
    by_c, by_d = (designer.choose(pool, BUDGET, 12, kind) for kind in ("c", "D"))
    det = [np.linalg.slogdet(designer.information(runs).sum(axis=0))[1] for runs in (by_c, by_d)]
    assert det[1] > det[0]
    assert designer.expect(by_c).log_size * designer.expect(by_c).log_loss < (
        designer.expect(by_d).log_size * designer.expect(by_d).log_loss
    )


def test_the_next_runs_fill_the_gap_that_finished_ones_leave() -> None:
    ray = build_simple_designs(BUDGET, 10)["ladder, D/N 20"]
    after = make_designer(done=ray)
    nothing = ray.select([])
    assert after.expect(nothing).log_size == np.inf or after.expect(nothing).log_size > 5
    chosen = after.choose(generate_candidates(0.5 * BUDGET), BUDGET, 3)
    assert after.expect(chosen).log_size < 0.5
    assert (np.abs(np.log(chosen.D / chosen.N / 20)) > np.log(2)).all()


def test_a_design_for_repetition_has_runs_that_repeat_and_runs_that_do_not() -> None:
    law = make_law("repeated_data", PRIOR | {"R_D": 15.0})
    designer = Designer(law, TARGET, 0.005)
    pool = generate_candidates(0.25 * BUDGET, unique=1e9)
    chosen = designer.choose(pool, BUDGET, 14, "D")
    assert (chosen.D / chosen.U).max() > 4
    assert (chosen.D == chosen.U).sum() >= 4


def test_impossible_designs_are_refused() -> None:
    with pytest.raises(ValueError, match="noise: got 0.0"):
        make_designer(noise=0.0)
    designer, pool = make_designer(), generate_candidates(1e19)
    with pytest.raises(ValueError, match="for the cheapest of"):
        designer.choose(pool, 1e6, 3)
    with pytest.raises(ValueError, match="got 'A', expected one of c, D"):
        designer.choose(pool, 1e19, 3, "A")


def test_runs_of_one_price_keep_to_the_budget() -> None:
    # candidates of one price: without the limit, ten runs were chosen for the price of two
    pool = RunSet(np.full(6, 1e7), np.full(6, 2e8), np.full(6, np.inf))
    for budget in (1.0, 3.2):
        flops = budget * pool.flops[0]
        assert 0 < make_designer().choose(pool, flops, 10).flops.sum() <= flops
