"""Lack-of-fit test of a form against the scatter of runs that differ only in their seed."""

import numpy as np
import pytest
from scipy.stats import f, f_oneway

from megatron.laws.fit import fit_law
from megatron.laws.fitting.lack_of_fit import check_lack_of_fit
from tests.laws.known_laws import BESIROGLU, count_trials, least_hits, simulate_losses

N = np.repeat(np.geomspace(1e7, 1e9, 6), 12)
D = np.tile(np.geomspace(1e9, 1e11, 6).repeat(2), 6)
SIGMA = 0.003


def simulate_seeds(seed: int, bend: float = 0.0) -> np.ndarray:
    """Return losses of Chinchilla's form with two seeds per cell.

    `bend` adds a wave, which no sum of powers has.
    """
    wave = bend * np.sin(3 * np.log(N / 1e7)) * np.sin(2 * np.log(D / 1e9))
    return simulate_losses(N, D, SIGMA, seed, BESIROGLU) * np.exp(wave)


def test_without_constants_it_is_the_analysis_of_variance() -> None:
    rng = np.random.default_rng(0)
    cells = np.repeat(np.arange(5), 4)
    values = rng.standard_normal(20) + 0.5 * cells
    mean = np.full((20, 1), 20**-0.5)  # the mean is the one constant
    tested = check_lack_of_fit(values, mean, cells[:, None])
    expected = f_oneway(*values.reshape(5, 4))
    assert tested.statistic == pytest.approx(expected.statistic, rel=1e-10)
    assert expected.pvalue <= tested.p_value < expected.pvalue + 0.02  # the bootstrap may only raise it
    assert tested.dof == (4, 15)


@count_trials(30, 150)
def test_a_true_form_is_rejected_about_as_often_as_the_level(n: int) -> None:
    laws = [fit_law(N, D, simulate_seeds(seed), n_bootstrap=0) for seed in range(n)]
    p_values = np.array([law.lack_of_fit["p_value"] for law in laws])
    assert (p_values >= 0.05).sum() >= least_hits(n)
    assert abs(np.median(p_values) - 0.55) < 1.8 / np.sqrt(n)


@pytest.mark.parametrize(("kind", "most", "by_f"), [("heavy tails", 14, 16), ("falling noise", 60, 150)])
def test_uneven_noise_is_rejected_less_often_than_by_the_f_test(kind: str, most: int, by_f: int) -> None:
    cells = np.concatenate([np.arange(20), np.repeat(np.arange(16, 20), 2)])
    x = np.array([cells // 4, cells % 4]).T / 4
    basis = np.linalg.qr(np.column_stack([np.ones(len(x)), x, x**2]))[0]
    rng, tests = np.random.default_rng(0), []
    for _ in range(200):
        noise = rng.standard_t(3, len(x)) if kind == "heavy tails" else rng.standard_normal(len(x))
        noise = noise * (1 if kind == "heavy tails" else np.exp(-1.6 * x[:, 0]))
        tests.append(check_lack_of_fit(noise, basis, cells))
    assert sum(not tested.passes for tested in tests) <= most
    assert sum(f.sf(tested.statistic, *tested.dof) < 0.05 for tested in tests) >= by_f


def test_a_form_that_does_not_hold_is_rejected_and_its_misfit_is_measured() -> None:
    law = fit_law(N, D, simulate_seeds(0, bend=0.01), n_bootstrap=0)
    assert law.lack_of_fit["passes"] is False and law.lack_of_fit["p_value"] == 0.001  # 1 of 1,000
    assert law.lack_of_fit["noise"] == pytest.approx(SIGMA, rel=0.35)
    assert 0.003 < law.lack_of_fit["misfit"] < 0.02


def test_without_repeated_runs_nothing_is_claimed() -> None:
    once = slice(None, None, 2)
    assert fit_law(N[once], D[once], simulate_seeds(0)[once], n_bootstrap=0).lack_of_fit == {}
    twice = np.tile(simulate_seeds(0)[once], 2)  # copied rows are not repeated runs
    assert fit_law(np.tile(N[once], 2), np.tile(D[once], 2), twice, n_bootstrap=0).lack_of_fit == {}
