"""Designs against simulated fits, and against what people often choose."""

import numpy as np
import pytest

from megatron.scaling.design import Designer, Limits, Runs, candidates, simple_designs
from megatron.scaling.fit import fit_law
from megatron.scaling.frontier import optimal
from megatron.scaling.law import Law

PRIOR = {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}
LAW = Law(form="chinchilla", params=PRIOR, objective=0.0, huber_delta=1e-3, n_runs=240)
BUDGET, TARGET = 1e20, 1e22


def designer(noise: float = 0.005, done: Runs | None = None) -> Designer:
    return Designer(LAW, TARGET, noise, done)


def test_expected_errors_are_the_scatter_of_simulated_fits() -> None:
    runs = simple_designs(BUDGET, 24)["D/N 5, 20, 80"]
    noise = 0.001
    expected = designer(noise).expect(runs)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(150):
        loss = LAW.loss(runs.N, runs.D) * np.exp(noise * rng.standard_normal(len(runs.N)))
        law = fit_law(runs.N, runs.D, loss, n_bootstrap=0, huber_delta=1e3)
        best = optimal(law, TARGET)
        found.append([np.log(best.N[0]), np.log(best.L[0]), law.derived["a_exponent"]])
    scatter = np.std(found, axis=0)
    for said, seen in zip((expected.log_size, expected.log_loss, expected.a_exponent), scatter, strict=True):
        assert said == pytest.approx(seen, rel=0.2)


def test_the_chosen_runs_keep_to_the_budget_and_beat_simple_designs_of_the_same() -> None:
    one = designer()
    every = candidates(0.25 * BUDGET)
    chosen = one.choose(every, BUDGET, 15)
    assert len(chosen.N) == 15
    assert chosen.flops.sum() <= BUDGET and chosen.flops.max() <= 0.25 * BUDGET * (1 + 1e-9)
    assert len({*zip(chosen.N, chosen.D, strict=True)}) == 15
    told = one.expect(chosen)
    for runs in simple_designs(BUDGET, 15).values():
        assert runs.flops.sum() == pytest.approx(BUDGET)
        other = one.expect(runs)
        assert told.log_size < 0.5 * other.log_size
        assert told.log_loss < 0.6 * other.log_loss


def test_a_ladder_at_one_ratio_says_nothing_of_the_best_size() -> None:
    # NOTES of the data: a single ray D/N = 20 leaves N* unidentifiable
    told = designer().expect(simple_designs(BUDGET, 15)["ladder, D/N 20"])
    assert told.log_size == np.inf or told.log_size > 5


def test_no_exchange_of_one_run_is_better() -> None:
    one = designer()
    every = candidates(0.25 * BUDGET, span=30.0)
    chosen = one.choose(every, BUDGET, 8)
    ridge = 1e-9 * np.einsum("nii->i", one.information(every)) * np.eye(5)
    value = one.criterion(ridge + one.information(chosen).sum(axis=0), "c")
    each = one.information(every)
    mine = {*zip(chosen.N, chosen.D, strict=True)}
    for place in range(8):
        others = chosen.take([i for i in range(8) if i != place])
        left = BUDGET - others.flops.sum()
        free = [
            i
            for i, pair in enumerate(zip(every.N, every.D, strict=True))
            if pair not in mine and every.flops[i] <= left
        ]
        found = one.criterion(ridge + one.information(others).sum(axis=0) + each[free], "c")
        assert found.min() > value - 1e-6


def test_for_d_the_determinant_is_the_larger_for_c_the_errors_are_the_smaller() -> None:
    one = designer()
    every = candidates(0.25 * BUDGET)
    by_c, by_d = (one.choose(every, BUDGET, 12, kind) for kind in ("c", "D"))
    det = [np.linalg.slogdet(one.information(runs).sum(axis=0))[1] for runs in (by_c, by_d)]
    assert det[1] > det[0]
    assert one.expect(by_c).log_size * one.expect(by_c).log_loss < (
        one.expect(by_d).log_size * one.expect(by_d).log_loss
    )


def test_runs_that_are_done_count_and_the_next_ones_go_where_they_left_a_gap() -> None:
    ray = simple_designs(BUDGET, 10)["ladder, D/N 20"]
    after = designer(done=ray)
    nothing = ray.take([])
    assert after.expect(nothing).log_size == np.inf or after.expect(nothing).log_size > 5
    chosen = after.choose(candidates(0.5 * BUDGET), BUDGET, 3)
    assert after.expect(chosen).log_size < 0.5
    assert (np.abs(np.log(chosen.D / chosen.N / 20)) > np.log(2)).all()


def test_repeated_text_is_told_apart_only_by_runs_that_repeat() -> None:
    law = Law(form="repeated_data", params=PRIOR | {"R_D": 15.0}, objective=0.0, huber_delta=1e-3, n_runs=100)
    one = Designer(law, TARGET, 0.005)
    every = candidates(0.25 * BUDGET, unique=1e9)
    chosen = one.choose(every, BUDGET, 14, "D")
    assert (chosen.D / chosen.U).max() > 4
    assert (chosen.D == chosen.U).sum() >= 4


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: designer(noise=0.0), "noise: found 0.0"),
        (lambda: designer().choose(candidates(1e19), 1e6, 3), "buys none of the"),
        (lambda: designer().choose(candidates(1e19), 1e19, 3, "A"), "'A' is not one of c, D"),
        (lambda: candidates(1e10, sizes=[1e9]), "raise the budget"),
    ],
)
def test_what_cannot_be_planned_is_refused(make, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("sizes", [None, [2e7, 5e7], [1e7, 3e7, 1e8, 4e8]])
@pytest.mark.parametrize("n_runs", [6, 12])
def test_a_proposal_is_never_worse_than_the_simple_designs_within_the_same_limits(
    sizes: list[float] | None, n_runs: int
) -> None:
    one = designer()
    limits = Limits(0.25 * BUDGET, (4.0, 400.0), sizes)
    simple = [limits.keep(runs) for runs in simple_designs(BUDGET, n_runs).values()]
    for runs in simple:
        assert (runs.flops <= limits.largest_flops * (1 + 1e-6)).all()
        assert ((runs.D / runs.N >= 4 * (1 - 1e-6)) & (runs.D / runs.N <= 400 * (1 + 1e-6))).all()
        assert sizes is None or set(runs.N) <= set(sizes)
    chosen = one.propose(candidates(limits.largest_flops, sizes=sizes), simple, BUDGET, n_runs)
    assert chosen.flops.sum() <= BUDGET * (1 + 1e-9) and len(chosen.N) <= n_runs
    for runs in simple:
        if len(runs.N):
            assert one.value_of(chosen) <= one.value_of(runs) + 1e-9
