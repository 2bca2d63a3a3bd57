import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest

from megatron.scaling.palette import RAMPS, palette
from megatron.scaling.plot import log_axis
from megatron.scaling.plot_law import law_points, optimum, prediction_figure
from megatron.scaling.plot_runs import compute_figure, envelope, objectives_figure, smoothed, thinned
from megatron.scaling.study import Study, read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    return read_study(synthetic["write_study"](tmp_path_factory.mktemp("study")))


def luminance(colour: str) -> float:
    """WCAG 2.2's relative luminance of #rrggbb."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: str, other: str) -> float:
    bright, dim = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_stand_out_from_the_paper_and_their_order_shows_without_colour_vision(theme):
    colours = palette(9, 5)[theme]
    for ramp, n in zip(RAMPS, (9, 5), strict=True):
        along = [colours[f"{ramp}{i}"] for i in range(n)]
        assert (
            min(contrast(colour, colours["paper"]) for colour in along) >= 3
        )  # WCAG 1.4.11, graphical objects
        assert [luminance(colour) for colour in along] == sorted(luminance(colour) for colour in along)
    assert all(contrast(colours[text], colours["paper"]) >= 4.5 for text in ("ink", "muted", "accent"))


def test_one_colour_is_given_when_there_is_one_size():
    assert palette(1, 0)["light"]["size0"].startswith("#")


def test_smoothing_keeps_a_straight_line_but_for_its_end():
    line = np.arange(200.0)
    assert np.allclose(smoothed(line)[:196], line[:196])  # 2 % of 200 is 4 points, cut only at the end
    assert smoothed(np.array([3.0])).tolist() == [3.0]


def test_smoothing_averages_noise_away():
    noise = np.tile([1.0, -1.0], 500)
    assert abs(smoothed(noise)[25:-25]).max() <= 1 / 41  # 2 * 20 + 1 points: one is left over


def test_thinning_keeps_the_first_and_the_last():
    kept = thinned(10_000, 250)
    assert len(kept) <= 250 and kept[0] == 0 and kept[-1] == 9_999
    assert thinned(5, 250).tolist() == [0, 1, 2, 3, 4]


def test_the_envelope_leaves_out_runs_that_a_cheaper_one_beats():
    points = [(1e12, 7.0), (2e12, 7.5), (3e12, 6.0), (3e12, 6.5), (4e12, 6.0), (5e12, 5.0)]
    rows = [{"train_flops": flops, "loss": loss} for flops, loss in points]
    assert [(row["train_flops"], row["loss"]) for row in envelope(rows)] == [
        (1e12, 7.0),
        (3e12, 6.0),
        (5e12, 5.0),
    ]


def test_a_logarithmic_axis_has_ticks_that_people_count_in():
    assert log_axis("tokens", [450_000, 5_200_000])["ticktext"] == ["500k", "1M", "2M", "5M"]
    assert len(log_axis("A", [1, 1e24])["tickvals"]) <= 9  # twenty-four decades are not named each
    assert log_axis("tokens", [1, 1e6])["ticktext"] == ["1", "10", "100", "1k", "10k", "100k", "1M"]


def test_the_optimum_is_where_loss_at_equal_compute_is_least(study):
    C = np.array([1e13, 1e14])
    best = optimum(study.law, C)
    for c, N, L in zip(C, best.N, best.L, strict=True):
        others = np.geomspace(N / 100, N * 100, 20_001)
        losses = synthetic["true_loss"](others, c / 6 / others)
        assert pytest.approx(others[losses.argmin()], rel=1e-3) == N
        assert pytest.approx(losses.min(), rel=1e-9) == L
    assert np.allclose(6 * best.N * best.D, C)


def test_the_band_is_the_percentiles_of_the_refits_and_holds_the_line(study):
    best = optimum(study.law, np.array([1e14]))
    assert best.N_ends[0] < best.N < best.N_ends[1] and best.D_ends[0] < best.D < best.D_ends[1]
    alpha, beta, A, B = (np.array(study.law.replicates[name]) for name in ("alpha", "beta", "A", "B"))
    N = (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (1e14 / 6) ** (
        beta / (alpha + beta)
    )  # Hoffmann, eq. 4
    assert np.allclose([end[0] for end in best.N_ends], np.percentile(N, [2.5, 97.5]))


def test_the_law_is_set_beside_the_runs_of_its_own_objective_only(study):
    assert {row["objective"] for row in law_points(study)} == {"autoregressive"}
    assert len(law_points(study)) == 15


def test_predictions_are_the_laws_own_values(study):
    marks = [trace for trace in prediction_figure(study).data if trace["mode"] == "markers"]
    said = {round(trace["x"][0], 9) for trace in marks}
    grid = itertools.product(synthetic["SIZES"].values(), synthetic["BUDGETS"])
    assert said == {round(synthetic["true_loss"](N, D), 9) for N, D in grid}


def test_objectives_are_compared_at_equal_size_and_tokens_only(study):
    figure = objectives_figure(study)
    assert "in 6 pairs" in figure.alt
    assert {trace["line"]["dash"] for trace in figure.data} == {"solid", "dash"}
    assert "upper bound" in figure.caption


def test_a_run_on_its_way_is_not_on_the_envelope(study):
    lines = [trace for trace in compute_figure(study).data if "envelope" in trace["meta"]]
    final = {row["loss"] for row in study.done()}
    assert lines and all(set(trace["y"]) <= final for trace in lines)
