"""Forecasts of ladders by distance: trends, baselines, and their scores."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from megatron.laws.distance import (
    BASELINES,
    Ladder,
    cluster_interval,
    forecast_by_trend,
    lower_envelope,
    score_ladders,
    summarise_scores,
)
from megatron.laws.fitting.compute_trend import PRIOR, fit_trend
from megatron.laws.recipe_law import fit_recipe_law
from tests.laws.known_laws import count_trials, least_hits

C = np.geomspace(1e17, 1e19, 8)


def true_loss(C: np.ndarray | float, floor: float = 1.8, slope: float = 0.16) -> np.ndarray:
    """Return E + K C^-g, 3.6 at 1e17 FLOPs."""
    return floor + (3.6 - floor) * (np.asarray(C) / 1e17) ** -slope


@count_trials(20, 100)
@pytest.mark.parametrize("times", [3.0, 30.0, 300.0])
def test_intervals_at_any_distance_cover_a_power_law_with_a_floor(n: int, times: float) -> None:
    inside, errors = 0, []
    for seed in range(n):
        rng = np.random.default_rng([seed, 3])
        floor, slope = rng.uniform(1.2, 2.2), rng.uniform(0.1, 0.2)
        noise = 0.004 * rng.standard_normal(9)
        law = fit_recipe_law(C, true_loss(C, floor, slope) * np.exp(noise[:8]))
        at = law.predict(times * C[-1])
        measured = float(true_loss(times * C[-1], floor, slope)) * math.exp(noise[8])
        inside += at.predictive[0] <= measured <= at.predictive[1]
        errors.append(math.log(at.loss / measured))
    assert inside >= least_hits(n)
    assert abs(np.mean(errors)) < 0.02


def test_a_trend_is_its_mixture_by_simulation() -> None:
    """Quantiles are those of draws of floor, line, walk and noise."""
    trend = fit_trend(np.log(C), np.log(true_loss(C)) + 0.003 * np.sin(np.arange(8)))
    rng, ahead = np.random.default_rng(0), math.log(20.0)
    k = rng.choice(len(trend.weight), 200_000, p=trend.weight)
    column = {
        name: np.array(getattr(trend, name))[k] for name in ("floor", "level", "slope", "drift", "noise")
    }
    of_level, between, of_slope = np.array(trend.covariance)[k].T
    variance = of_level - 2 * ahead * between + ahead**2 * of_slope + column["drift"] ** 2 * ahead**3 / 3
    reducible = column["level"] - column["slope"] * ahead + np.sqrt(variance) * rng.standard_normal(len(k))
    draws = np.log(column["floor"] + np.exp(reducible))
    for share in (0.025, 0.5, 0.975):
        quantile = trend.quantile(trend.edge + ahead, share, noisy=False)
        assert quantile == pytest.approx(np.quantile(draws, share), abs=3e-3)
    low, high = trend.floor_interval(0.95)
    assert low < 1.8 < high < true_loss(C).min()


def test_known_noise_and_rows_that_share_it_are_used() -> None:
    x, y = np.log(C), np.log(true_loss(C))
    half = {}
    for name, covariance in (("alone", np.eye(8)), ("shared", np.eye(8) + 4 * np.ones((8, 8)))):
        low, high = fit_trend(x, y, covariance, (0.01, 30.0)).interval(x[-1], 0.95, noisy=False)
        half[name] = high - low
    assert half["shared"] > 2 * half["alone"]
    narrow, wide = (fit_trend(x, y, None, (sd, 100.0)).interval(x[-1], 0.95) for sd in (0.001, 0.02))
    assert wide[1] - wide[0] > 5 * (narrow[1] - narrow[0])


def test_a_recipe_law_is_saved_and_refuses_what_it_cannot_fit(tmp_path: Path) -> None:
    law = fit_recipe_law(C, true_loss(C), [f"run{i}" for i in range(8)])
    law.save(tmp_path / "recipe_law.json")
    assert (tmp_path / "recipe_law.json").read_text() == json.dumps(asdict(law), indent=1) + "\n"
    furthest = law.furthest_forecast(0.05)
    assert law.predict(furthest).half_width == pytest.approx(0.05, rel=0.02)
    frame = law.to_frame()
    assert (frame["predictive_low"] < frame["loss"]).all() and frame["C"].iloc[0] == pytest.approx(C[0])
    with pytest.raises(ValueError, match="got 3 different C, expected 4 or more"):
        fit_recipe_law(C[:3], true_loss(C[:3]))
    with pytest.raises(ValueError, match=r"expected 1e\+17 FLOPs or more|expected 1e\+17 or more"):
        law.predict(1e16)


def test_losses_that_do_not_fall_have_no_law() -> None:
    for losses in ([3.0, 3.0, 3.0, 3.0], [3.0, 3.1, 3.2, 3.3]):
        with pytest.raises(ValueError, match="do not fall with compute"):
            fit_recipe_law([1e15, 2e15, 4e15, 8e15], losses)


def test_the_envelope_falls_and_has_the_lowest_point_of_each_bin() -> None:
    compute = np.array([1.0, 1.2, 3.0, 9.0, 9.5, 40.0])
    losses = np.array([5.0, 4.8, 4.9, 4.0, 3.9, 3.0])
    C_of, L_of = lower_envelope(compute[::-1], losses[::-1])
    assert (C_of.tolist(), L_of.tolist()) == ([1.2, 9.5, 40.0], [4.8, 3.9, 3.0])


def test_held_out_points_are_scored_at_their_distance_beside_both_baselines() -> None:
    wide = np.geomspace(1e15, 1e19, 17)
    exact = Ladder("a", "exact", wide, true_loss(wide / 0.01))
    line = Ladder("b", "line", wide, 5 * (wide / 1e15) ** -0.05)
    scores = score_ladders([exact, line], {"trend": forecast_by_trend(PRIOR), **BASELINES}, (10.0, 100.0))
    assert set(scores["factor"]) == {10.0, 100.0}
    # of the factor 100, points further than 33 times: 10^1.75 and 10^2
    far = scores[(scores["factor"] == 100) & (scores["method"] == "trend")]
    assert np.unique(far["C"]).tolist() == pytest.approx([10**18.75, 1e19])
    of = {(m, s): part["error"].abs().max() for (m, s), part in scores.groupby(["method", "source"])}
    assert of["E + K C^-g", "a"] < 1e-4 and of["power law", "b"] < 1e-9
    assert of["power law", "a"] > 0.02
    table = summarise_scores(scores)
    assert len(table) == 6 and (table["n"] == [4, 4, 4, 4, 4, 4]).all() and (table["sources"] == 2).all()
    with pytest.raises(ValueError, match="got none with 4 points"):
        score_ladders([Ladder("a", "short", wide[:4], wide[:4])], BASELINES)
    outside = scores[~scores["inside"]]
    assert (outside["score"] > 2 * outside["half_width"]).all()


def test_clusters_widen_the_interval_of_a_share() -> None:
    inside = np.repeat([1.0, 1.0, 1.0, 0.0], 10)
    apart, together = (cluster_interval(inside, groups) for groups in (np.arange(40), np.arange(40) // 10))
    assert apart == pytest.approx((0.598, 0.858), abs=2e-3)  # Wilson's interval of 30 of 40
    assert together[0] < apart[0] - 0.2 and together[1] > apart[1]
    assert cluster_interval(np.ones(40), np.arange(40) // 10)[0] == pytest.approx(0.51, abs=0.01)  # of 4 of 4
