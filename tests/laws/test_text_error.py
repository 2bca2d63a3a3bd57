"""The error that runs scored on one text share: it is part of E and of losses on new text only."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from megatron.laws.fit import fit_law
from megatron.laws.fitting.mixed_interval import build_component
from megatron.laws.forms import FORM
from megatron.laws.law import Law
from megatron.laws.prediction import predict_optimum, predict_run

TRUTH = {"E": 1.7, "A": 400.0, "B": 900.0, "alpha": 0.34, "beta": 0.31}
SHARED, OWN = 0.02, 0.002  # of log L
AT = (3e8, 1e10)


def fit_world(rng: np.random.Generator, n_bootstrap: int = 60) -> tuple[Law, float]:
    """Return (a law of 24 runs on one text, factor of losses on that text relative to all text)."""
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 3e10, 4)))
    factor = float(np.exp(SHARED * rng.standard_normal()))
    loss = FORM["chinchilla"].loss(TRUTH, n, d) * factor * np.exp(OWN * rng.standard_normal(24))
    return fit_law(n, d, loss, n_bootstrap=n_bootstrap, loss_se=SHARED * loss), factor


def test_intervals_for_a_new_text_cover_it_and_those_for_the_same_text_cover_only_that() -> None:
    rng = np.random.default_rng(0)
    n_worlds, mean = 120, float(FORM["chinchilla"].loss(TRUTH, *AT))
    inside = {name: 0 for name in ("same", "new", "mean of all text", "new by the interval of the same")}
    for _ in range(n_worlds):
        law, factor = fit_world(rng)
        run_noise, new_run_noise = np.exp(OWN * rng.standard_normal(2))
        elsewhere = mean * np.exp(SHARED * rng.standard_normal()) * new_run_noise
        for name, measured, kind, text in (
            ("same", mean * factor * run_noise, "predictive", "same"),
            ("new", elsewhere, "predictive", "new"),
            ("mean of all text", mean, "confidence", "new"),
            ("new by the interval of the same", elsewhere, "predictive", "same"),
        ):
            _, low, high = law.predict(*AT, kind=kind, text=text)
            inside[name] += bool(low <= measured <= high)
    error = 3 * np.sqrt(0.05 * 0.95 / n_worlds)
    for name in ("same", "new", "mean of all text"):
        assert inside[name] / n_worlds > 0.95 - error, inside
    assert inside["new by the interval of the same"] / n_worlds < 0.5, inside


def test_the_variance_of_the_text_is_added_once_to_the_mean_and_twice_to_a_measured_loss() -> None:
    law, _ = fit_world(np.random.default_rng(1))
    assert law.text_error == pytest.approx(
        {"loss_se": law.text_error["loss_se"], "relative": SHARED, "n_runs": 24}
    )
    for kind, times in (("confidence", 1), ("predictive", 2)):
        value, low, high = law.predict(*AT, kind=kind)
        same, new_low, new_high = law.predict(*AT, kind=kind, text="new")
        half = norm.ppf(0.975) * np.sqrt(times) * SHARED
        assert same == value
        assert np.log(new_high / value) == pytest.approx(np.hypot(np.log(high / value), half))
        assert np.log(value / new_low) == pytest.approx(np.hypot(np.log(value / low), half))
        at = [np.array([v]) for v in (*AT, np.inf)]
        plain, wide = (build_component(law, 1.0, *at, kind, text).scale[0] for text in ("same", "new"))
        assert wide == pytest.approx(np.hypot(plain, np.sqrt(times) * SHARED))


def test_the_floor_on_a_new_text_has_the_shared_error_in_nats_and_stays_above_zero() -> None:
    law, _ = fit_world(np.random.default_rng(2))
    low, high = law.floor_interval()
    assert [low, high] == pytest.approx(law.interval["params"]["E"])
    half = norm.ppf(0.975) * law.text_error["loss_se"]
    floor = law.params["E"]
    expected = (floor - np.hypot(floor - low, half), floor + np.hypot(high - floor, half))
    assert law.floor_interval(text="new") == pytest.approx(expected)
    huge = fit_law(*simulate_runs(), n_bootstrap=20, loss_se=np.full(24, 5.0))
    assert huge.floor_interval(text="new")[0] == 0.0


def simulate_runs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(1e7, 1e9, 6), np.geomspace(1e9, 3e10, 4)))
    noise = np.exp(OWN * np.random.default_rng(0).standard_normal(24))
    return n, d, FORM["chinchilla"].loss(TRUTH, n, d) * noise


def test_predictions_of_runs_and_optima_take_the_text() -> None:
    law, _ = fit_world(np.random.default_rng(3))
    same, new = (predict_run(law, *AT, text=text) for text in ("same", "new"))
    assert new.predictive[1] > same.predictive[1] and (same.text, new.text) == ("same", "new")
    same, new = (predict_optimum(law, 1e20, text=text) for text in ("same", "new"))
    assert new.L_predictive[1] > same.L_predictive[1] and new.L_confidence[0] < same.L_confidence[0]
    assert new.N_confidence == same.N_confidence  # a common factor does not move the optimum


def test_a_new_text_without_a_known_error_is_refused() -> None:
    law = fit_law(*simulate_runs(), n_bootstrap=20)
    assert law.text_error == {}
    with pytest.raises(ValueError, match="text: got new for a law without text_error"):
        law.predict(*AT, text="new")
    with pytest.raises(ValueError, match="text: got new"):
        predict_optimum(law, 1e20, text="new")
    with pytest.raises(ValueError, match="text: got 'other', expected same or new"):
        law.predict(*AT, text="other")
    with pytest.raises(ValueError, match="loss_se: got 3 values, expected one for each of 24 runs"):
        fit_law(*simulate_runs(), n_bootstrap=0, loss_se=[0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="loss_se: got a negative or infinite value"):
        fit_law(*simulate_runs(), n_bootstrap=0, loss_se=np.full(24, -0.1))


def test_unknown_errors_are_skipped_and_the_field_survives_saving(tmp_path: Path) -> None:
    n, d, loss = simulate_runs()
    errors = np.where(np.arange(24) < 20, np.nan, 0.03)
    law = fit_law(n, d, loss, n_bootstrap=20, loss_se=errors)
    assert law.text_error["n_runs"] == 4 and law.text_error["loss_se"] == 0.03
    law.save(tmp_path / "law.json")
    assert Law.load(tmp_path / "law.json").predict(*AT, text="new") == law.predict(*AT, text="new")
    assert fit_law(n, d, loss, n_bootstrap=0, loss_se=np.full(24, np.nan)).text_error == {}
