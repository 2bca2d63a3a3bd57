"""Profile likelihood intervals against fits with the constant fixed at their ends."""

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.forms import FORM
from megatron.laws.profile import profile_constant

TRUTH = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}
LEAST_SQUARES = 1e3


def simulate_runs(seed: int = 0, sigma: float = 0.005) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e9, 1e11, 4)))
    return n, d, FORM["chinchilla"].loss(TRUTH, n, d) * np.exp(sigma * rng.standard_normal(20))


@pytest.mark.parametrize("name", ["alpha", "beta", "E"])
def test_a_profile_is_the_t_interval_of_the_linearised_fit(name: str) -> None:
    n, d, loss = simulate_runs(5, 0.001)
    result = profile_constant(n, d, loss, form="chinchilla", name=name, huber_delta=LEAST_SQUARES)
    law = fit_law(n, d, loss, huber_delta=LEAST_SQUARES, n_bootstrap=0)
    assert result.best == pytest.approx(law.params[name], rel=1e-4) and result.identified
    # -2 log likelihood is n log(sum of squares), with the constant fixed at either end of the interval
    for end in (result.low, result.high):
        fixed_fit = fit_law(n, d, loss, fixed={name: end}, huber_delta=LEAST_SQUARES, n_bootstrap=0)
        assert 20 * np.log(fixed_fit.objective / law.objective) == pytest.approx(3.841, abs=0.12)
    assert name in result.words and "*" not in result.words and "confidence" in result.words


def test_a_profile_of_an_exponent_on_one_ray_is_not_identified() -> None:
    n = np.geomspace(1e7, 1e9, 14)
    loss = FORM["chinchilla"].loss(TRUTH, n, 20 * n) * np.exp(
        0.003 * np.random.default_rng(0).standard_normal(14)
    )
    result = profile_constant(n, 20 * n, loss, form="chinchilla", name="alpha")
    assert not result.identified and "not identified" in result.words


@pytest.mark.parametrize(
    ("form", "name"), [("over_training", "eta"), ("kaplan", "alpha_N"), ("repeated_data", "R_D")]
)
def test_other_constants_have_profiles(form: str, name: str) -> None:
    rng = np.random.default_rng(0)
    n, u, e = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 4), [1e8, 1e9, 1e10], [1, 4, 15]))
    truth = {
        "over_training": {"E": 1.7, "a": 120.0, "b": 200.0, "eta": 0.25},
        "kaplan": {"Nc": 6.4e13, "Dc": 1.8e13, "alpha_N": 0.076, "alpha_D": 0.103},
        "repeated_data": TRUTH | {"R_D": 8.0},
    }[form]
    loss = FORM[form].loss(truth, n, u * e, u) * np.exp(0.002 * rng.standard_normal(len(n)))
    result = profile_constant(n, u * e, loss, U=u, form=form, name=name)
    assert result.identified and result.low < truth[name] < result.high
