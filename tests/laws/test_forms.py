"""Forms in their constants, their surfaces in the coordinates of a fit, and fits of known laws."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.fit import fit_law
from megatron.laws.fitting.fit_form import find_starts
from megatron.laws.fitting.fit_problem import Problem
from megatron.laws.fitting.surface import THETA, RunPoints, Surface
from megatron.laws.forms import FITTED_FORMS, FORM, chinchilla
from megatron.laws.law import Law
from tests.laws.known_laws import TRUTH, make_repeats

TRUE = {
    "chinchilla": TRUTH,
    "data_constrained": TRUTH | {"R_D": 12.0, "R_N": 6.0},
    "repeated_data": TRUTH | {"R_D": 12.0},
    "over_repetition": TRUTH | {"K": 0.02, "g": 0.5, "h": 0.8},
    "kaplan": {"Nc": 8.8e13, "Dc": 5.4e13, "alpha_N": 0.076, "alpha_D": 0.095},
    "over_training": {"E": 1.6, "a": 140.0, "b": 280.0, "eta": 0.25},
}


def test_every_form_has_a_surface_and_a_truth_here() -> None:
    assert set(FITTED_FORMS) == set(THETA) and set(FORM) == set(TRUE)


@pytest.mark.parametrize("form", FITTED_FORMS)
def test_the_surface_of_a_fit_is_the_form_and_its_slopes_are_finite_differences(form: str) -> None:
    n, d, u = make_repeats()
    at = RunPoints.from_columns(n, d, np.ones_like(n), u)
    surface = Surface(form)
    theta = surface.from_constants(TRUE[form], at)[None]
    assert {k: float(v[0]) for k, v in surface.to_constants(theta, at).items()} == pytest.approx(TRUE[form])
    fitted, slopes = surface.evaluate(theta, at)
    np.testing.assert_allclose(np.exp(fitted[0]), FORM[form].loss(TRUE[form], n, d, u), rtol=1e-12)
    for i, step in enumerate(1e-6 * np.eye(theta.shape[1])):
        up, down = (surface.evaluate(theta + sign * step, at)[0] for sign in (1, -1))
        np.testing.assert_allclose(slopes[:, :, i], (up - down) / 2e-6, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("form", FITTED_FORMS)
def test_second_derivatives_are_those_of_the_gradient(form: str, residual: bool) -> None:
    n, d, u = make_repeats()
    loss = FORM[form].loss(TRUE[form], n, d, u) * np.exp(0.02 * np.random.default_rng(0).normal(size=len(n)))
    problem = Problem(Surface(form), RunPoints.from_columns(n, d, loss, u), 0.5, residual)
    weights, theta = np.ones((1, len(n))), find_starts(problem, np.ones(len(n)), {})[-1:]
    free = np.ones(theta.shape[1], dtype=bool)
    _, hessian, majorant = problem.derivatives(theta, weights, free)
    for i, step in enumerate(1e-6 * np.eye(theta.shape[1])):
        up, down = (problem.derivatives(theta + sign * step, weights, free)[0] for sign in (1, -1))
        scale = np.abs(hessian[0]).max()
        np.testing.assert_allclose(hessian[0, i], (up - down)[0] / 2e-6, atol=2e-6 * scale)
    assert np.linalg.eigvalsh(majorant[0]).min() > -1e-9 * scale


@pytest.mark.parametrize("form", FITTED_FORMS)
def test_a_noise_free_law_of_any_form_is_recovered(form: str) -> None:
    n, d, u = make_repeats()
    law = fit_law(n, d, FORM[form].loss(TRUE[form], n, d, u), U=u, form=form, n_bootstrap=0)
    assert law.params == pytest.approx(TRUE[form], rel=1e-6)
    assert law.loss(3e8, 2e10, 5e9) == pytest.approx(float(FORM[form].loss(TRUE[form], 3e8, 2e10, 5e9)))


def test_what_cannot_be_fitted_is_refused_in_a_sentence() -> None:
    n, d, u = make_repeats()
    columns = {"N": n, "D": d, "L": chinchilla(TRUTH, n, d), "U": u, "n_bootstrap": 0}
    two = {"N": [1e6, 2e6], "D": [1e6, 2e6], "L": [3.0, 2.9], "U": None}
    for change, sentence in (
        (two | {"L": [1.0, np.nan]}, "L, run 2: got nan, expected a positive number"),
        (two | {"N": [-1.0, 1e6]}, "N, run 1: got -1.0"),
        (two | {"D": [1e6]}, "N, D, L: got 2, 1, 2 values"),
        (two, r"got 2 distinct \(N, D\) for 5 constants, expected 6 or more"),
        ({"form": "repeated_data", "U": None}, "expected the unique tokens"),
        ({"form": "chinchila"}, "got 'chinchila', expected one of chinchilla"),
        ({"residual": "bits"}, "got 'bits', expected one of log, nats"),
        ({"fixed": {"A": 3.0}}, "got A without alpha, expected both"),
        ({"form": "bounded"}, "got 'bounded', expected one of chinchilla.* Pass its formula as a function"),
        ({"form": chinchilla}, "start: got none, expected"),
        ({"form": "kaplan"}, "'kaplan' is of published laws only"),
        ({"fixed": {"R_D": 3.0}}, "got 'R_D', expected constants of the form"),
        ({"loss_se": [0.1, 0.1, 0.1]}, "loss_se: got 3 values, expected one for each of 60 runs"),
        ({"loss_se": np.full(60, -0.1)}, "loss_se: got a negative or infinite value"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit_law(**(columns | change))


def test_a_law_of_any_form_survives_saving_and_loading(tmp_path: Path) -> None:
    n, d, u = make_repeats()
    loss = FORM["over_repetition"].loss(TRUE["over_repetition"], n, d, u)
    law = fit_law(n, d, loss, U=u, form="over_repetition", n_bootstrap=3)
    law.save(tmp_path / "law.json")
    again = Law.load(tmp_path / "law.json")
    assert again == law
    assert json.loads((tmp_path / "law.json").read_text())["formula"] == law.formula()
    assert again.formula() == "L = 1.7 + 400/N^0.34 + 900/D^0.31 + 0.02 (N/U)^0.5 (D/U - 1)^0.8"
    value, low, high = again.predict(1e8, 1e10, 1e9)
    assert low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9)
    assert value > again.loss(1e8, 1e10)  # the same number of tokens, all unique


def test_runs_without_repetition_do_not_identify_its_cost() -> None:
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 5), np.geomspace(1e8, 1e10, 4)))
    law = fit_law(n, d, chinchilla(TRUE["chinchilla"], n, d), U=d, form="repeated_data", n_bootstrap=0)
    assert any("what repetition costs is not identified" in warning for warning in law.warnings)


def test_the_form_of_kaplan_is_their_equation() -> None:
    # equation 1.5 of Kaplan et al., without the log-sum-exp
    c, n, d, u = TRUE["kaplan"], *make_repeats()
    plain = ((c["Nc"] / n) ** (c["alpha_N"] / c["alpha_D"]) + c["Dc"] / d) ** c["alpha_D"]
    np.testing.assert_allclose(FORM["kaplan"].loss(c, n, d, u), plain, rtol=1e-12)
