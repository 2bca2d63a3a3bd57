"""Stacks of forms: weights, quantiles of mixtures, widening with distance, and stacked_law.json."""

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm, t

from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.laws.prediction import predict_optimum, predict_run
from megatron.laws.stack import (
    Component,
    Cut,
    StackedLaw,
    _estimate_growth,
    is_stack,
    mixture_quantiles,
    stack_laws,
)

TRUTH = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}


def simulate_runs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 24 runs of a known law with 0.3 % of noise."""
    rng = np.random.default_rng(5)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 3e10, 4)))
    return n, d, FORM["chinchilla"].loss(TRUTH, n, d) * np.exp(0.003 * rng.standard_normal(24))


@pytest.fixture(scope="module")
def stack() -> StackedLaw:
    return stack_laws(*simulate_runs(), n_bootstrap=60)


def make_component(mean: float, scale: float, weight: float = 1.0) -> Component:
    """Return a component that is nearly a normal distribution at one point."""
    return Component(weight, np.array([[mean]]), np.array([scale]), np.array([1e6]))


def test_weights_are_the_inverse_mean_squares_of_the_errors_on_the_largest_runs(stack: StackedLaw) -> None:
    assert [cut["n_left_out"] for cut in stack.cuts] == [2, 5, 7, 10]
    square = {form: np.mean([cut["rms"][form] ** 2 for cut in stack.cuts]) + 1e-8 for form in stack.laws}
    inverse = {form: 1 / value for form, value in square.items()}
    assert stack.weights == pytest.approx({f: v / sum(inverse.values()) for f, v in inverse.items()})
    assert set(stack.weights) == {"chinchilla", "over_training", "kaplan"}
    # the runs have a floor and kaplan has none
    assert list(stack.weights)[-1] == "kaplan" and stack.weights["kaplan"] < 0.2


def test_the_quantile_of_one_component_is_exact_and_of_two_distant_ones_that_of_the_nearer() -> None:
    low, high = mixture_quantiles([make_component(2.0, 0.5)], [0.025, 0.975])
    assert (low[0], high[0]) == pytest.approx(tuple(norm.ppf([0.025, 0.975], 2.0, 0.5)), abs=1e-4)
    apart = [make_component(0.0, 1.0, 0.5), make_component(100.0, 2.0, 0.5)]
    lower, upper = mixture_quantiles(apart, [0.25, 0.75])  # the medians of the two
    assert (lower[0], upper[0]) == pytest.approx((0.0, 100.0), abs=1e-4)


def test_independent_errors_add_in_quadrature_with_degrees_of_freedom_between_both() -> None:
    wide = Component(1.0, np.zeros((1, 1)), np.array([3.0]), np.array([10.0])).widen(np.array([4.0]), 4.0)
    assert wide.scale[0] == pytest.approx(5.0)
    assert wide.dof[0] == pytest.approx(25**2 / (81 / 10 + 256 / 4))  # Satterthwaite
    same = make_component(0.0, 0.0).widen(np.array([0.0]), 4.0)
    assert (same.scale[0], same.dof[0]) == (0.0, 1e6)


def test_the_interval_contains_the_disagreement_of_the_forms(stack: StackedLaw) -> None:
    far = (1e11, 1e13)
    mixed = replace(stack, weights={"chinchilla": 0.6, "over_training": 0.2, "kaplan": 0.2}, growth=0.0)
    _, low, high = mixed.predict(*far, kind="confidence")
    values = {form: float(law.loss(*far)) for form, law in stack.laws.items()}
    assert max(values.values()) / min(values.values()) > 1.1
    assert all(low <= value <= high for value in values.values())
    alone = replace(stack, weights={"chinchilla": 1.0}, growth=0.0).predict(*far, kind="confidence")
    assert low < alone[1] < alone[2] < high


def test_the_interval_widens_with_distance_by_the_measured_growth(stack: StackedLaw) -> None:
    inside, ahead = (1e8, 5e9), (1e10, 3e12)
    still, grows = replace(stack, growth=0.0), replace(stack, growth=0.2)
    assert still.predict(*inside) == grows.predict(*inside)
    distance = np.log(6 * 1e10 * 3e12 / stack.largest_compute)
    assert stack.distance(*ahead) == pytest.approx(distance) and stack.distance(*inside) == 0
    _, low, high = grows.predict(*ahead, kind="confidence")
    half = t.ppf(0.975, stack.growth_dof) * 0.2 * distance  # the other variances are small in comparison
    assert 0.5 * np.log(high / low) == pytest.approx(half, rel=0.05)
    _, outer_low, outer_high = still.predict(*ahead)
    _, low, high = still.predict(*ahead, kind="confidence")
    assert outer_low < low < high < outer_high


def test_growth_is_the_slope_of_the_errors_that_the_spread_does_not_explain() -> None:
    x = np.array([1.0, 2.0, 3.0])
    error = {"chinchilla": 0.3 * x, "kaplan": 0.3 * x}
    variance = {form: np.full(3, 0.01) for form in error}
    weights = {"chinchilla": 0.4, "kaplan": 0.6}
    cut = Cut(0.1, 3, x, error, variance)
    expected = np.sqrt((0.09 * (14 / 3) - 0.01) / (14 / 3))
    assert _estimate_growth([cut], weights) == pytest.approx(expected)
    near = Cut(0.1, 3, 0.01 * x, error, variance)  # not an extrapolation, so it has no information on growth
    assert _estimate_growth([near, cut], weights) == pytest.approx(expected)
    assert _estimate_growth([near], weights) == 0.0


def test_a_form_that_cannot_be_fitted_is_named_and_not_in_the_stack() -> None:
    n, d, loss = simulate_runs()
    stacked = stack_laws(n, d, loss, forms=("chinchilla", "repeated_data"), n_bootstrap=10)
    assert (
        list(stacked.weights) == ["chinchilla"]
        and "expected the unique tokens" in stacked.refused["repeated_data"]
    )
    assert stacked.predict(1e9, 1e10)[0] == pytest.approx(stacked.laws["chinchilla"].loss(1e9, 1e10))
    with pytest.raises(ValueError, match="form: got 'moon', expected one of chinchilla"):
        stack_laws(n, d, loss, forms=("moon",))
    with pytest.raises(ValueError, match="stack: got no form that fits without the largest runs"):
        stack_laws(n, d, loss, forms=("repeated_data",), n_bootstrap=10)


def test_runs_that_repeat_give_weight_to_the_forms_of_repetition() -> None:
    n, d, _ = simulate_runs()
    unique = d / np.tile([1.0, 4.0], 12)
    params = TRUTH | {"R_D": 8.0}
    loss = FORM["repeated_data"].loss(params, n, d, unique)
    loss *= np.exp(0.002 * np.random.default_rng(0).standard_normal(24))
    stacked = stack_laws(n, d, loss, U=unique, forms=("chinchilla", "repeated_data"), n_bootstrap=10)
    assert stacked.weights["repeated_data"] > 0.9
    once, again = stacked.predict(1e9, 1e11)[0], stacked.predict(1e9, 1e11, 1e9)[0]
    assert again > once


def test_predictions_of_a_stack_have_both_intervals_and_an_optimum(stack: StackedLaw) -> None:
    stacked = predict_run(stack, 1e10, 2e11)
    assert (
        stacked.predictive[0]
        < stacked.confidence[0]
        < stacked.loss
        < stacked.confidence[1]
        < stacked.predictive[1]
    )
    assert stacked.outside == {"N": "above", "D": "above"}
    best = predict_optimum(stack, 1e21)
    grid = np.geomspace(1e8, 1e11, 2001)
    assert pytest.approx(stack.loss(grid, 1e21 / 6 / grid).min(), rel=1e-6) == best.L
    assert best.N_confidence[0] < best.N < best.N_confidence[1]
    assert best.N_confidence[0] * best.D_confidence[1] == pytest.approx(1e21 / 6)


def test_a_saved_stack_predicts_the_same_and_is_refused_as_a_law(stack: StackedLaw, tmp_path: Path) -> None:
    path = tmp_path / "stacked_law.json"
    stack.save(path)
    again = StackedLaw.load(path)
    assert again.predict(1e10, 2e11) == stack.predict(1e10, 2e11)
    assert again.weights == stack.weights and is_stack(path)
    with pytest.raises(ValueError, match="got a stack of laws"):
        Law.load(path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"weights": {"chinchilla": 1.0}}, "expected one weight for each of the laws"),
        ({"weights": {"chinchilla": 0.5, "over_training": 0.2, "kaplan": 0.1}}, "expected numbers above 0"),
        ({"weights": [1.0]}, "weights: got"),
        ({"growth": -1}, "growth: got another value, expected a number of 0 or more"),
        ({"growth_dof": 0}, "growth_dof: got another value, expected a number above 0"),
        ({"largest_compute": "1e20"}, "largest_compute: got '1e20', expected float"),
        ({"cuts": [1]}, "cuts: got"),
        ({"laws": {}}, "laws: got"),
        ({"laws": {"chinchilla": {}, "over_training": {}, "kaplan": {}}}, "not a stack of laws"),
        ({"warnings": "few"}, "warnings: got"),
    ],
)
def test_a_wrong_field_of_a_stack_is_named(
    stack: StackedLaw, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "stacked_law.json"
    stack.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="stacked_law.json: not a stack of laws") as error:
        StackedLaw.load(path)
    assert sentence in str(error.value)


def test_the_error_for_a_missing_file_names_the_tool_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tools/fit_law\.py --stack writes one"):
        StackedLaw.load(tmp_path / "stacked_law.json")


@pytest.mark.slow
def test_nine_tenths_of_the_largest_published_runs_are_inside_their_interval(root: Path, laws: Path) -> None:
    bench = runpy.run_path(str(root / "tools" / "bench" / "extrapolate.py"))
    inside = []
    for runs_of_form in bench["read_gadre"](laws):
        scores, _ = bench["extrapolate_runs"](runs_of_form, 0.1, 100)
        scored = scores["stacked"]
        inside.append(np.mean((scored.low <= scored.measured) & (scored.measured <= scored.high)))
    assert len(inside) == 12 and np.mean(inside) >= 0.9


def test_an_integer_constant_beyond_64_bits_is_read_as_a_number(tmp_path: Path) -> None:
    N, D = np.repeat(np.geomspace(1e5, 1e7, 5), 5), np.tile(np.geomspace(1e6, 1e8, 5), 5)
    law = stack_laws(N, D, 1.9 + 120 / N**0.33 + 900 / D**0.42, forms=["kaplan"], n_bootstrap=0)
    law.save(tmp_path / "stacked_law.json")
    stored = json.loads((tmp_path / "stacked_law.json").read_text())
    stored["laws"]["kaplan"]["params"]["Dc"] = 10**30
    (tmp_path / "stacked_law.json").write_text(json.dumps(stored))
    assert np.isfinite(StackedLaw.load(tmp_path / "stacked_law.json").loss(1e7, 1e9))
