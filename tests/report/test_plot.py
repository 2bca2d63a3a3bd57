import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest

from megatron.report.figures.plot import log_axis
from megatron.report.figures.plot_law import find_optimum_path, prediction_figure, select_law_points
from megatron.report.figures.plot_runs import (
    compute_figure,
    lower_envelope,
    objectives_figure,
    smooth_loss,
    thin_points,
)
from megatron.report.palette import RAMPS, make_palette
from megatron.report.study_data import RunPoint, Study, read_study

synthetic = runpy.run_path(str(Path(__file__).with_name("synthetic_study.py")))


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    return read_study(synthetic["write_study"](tmp_path_factory.mktemp("study")))


def luminance(colour: str) -> float:
    """Return the relative luminance of #rrggbb by WCAG 2.2."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(first: str, second: str) -> float:
    bright, dim = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_stand_out_from_the_paper_and_their_order_shows_without_colour_vision(theme):
    colours = make_palette(9, 5)[theme]
    for ramp, n in zip(RAMPS, (9, 5), strict=True):
        along = [colours[f"{ramp}{i}"] for i in range(n)]
        assert (
            min(contrast(colour, colours["paper"]) for colour in along) >= 3
        )  # WCAG 1.4.11, graphical objects
        assert [luminance(colour) for colour in along] == sorted(luminance(colour) for colour in along)
    assert all(contrast(colours[text], colours["paper"]) >= 4.5 for text in ("ink", "muted", "accent"))


def test_one_colour_is_given_when_there_is_one_size():
    assert make_palette(1, 0)["light"]["size0"].startswith("#")


def test_smoothing_keeps_a_straight_line_except_at_its_end():
    line = np.arange(200.0)
    assert np.allclose(smooth_loss(line)[:196], line[:196])  # 2 % of 200 is 4 points, cut only at the end
    assert smooth_loss(np.array([3.0])).tolist() == [3.0]


def test_smoothing_averages_noise_away():
    noise = np.tile([1.0, -1.0], 500)
    assert abs(smooth_loss(noise)[25:-25]).max() <= 1 / 41  # windows of 2 * 20 + 1 points: all but one cancel


def test_thinning_keeps_the_first_and_the_last():
    indices = thin_points(10_000, 250)
    assert len(indices) <= 250 and indices[0] == 0 and indices[-1] == 9_999
    assert thin_points(5, 250).tolist() == [0, 1, 2, 3, 4]


def test_the_envelope_omits_runs_that_a_cheaper_run_beats():
    points = [(1e12, 7.0), (2e12, 7.5), (3e12, 6.0), (3e12, 6.5), (4e12, 6.0), (5e12, 5.0)]
    rows = [
        RunPoint(run="", objective="", n_params=1, train_tokens=1, N=1, D=1, C=flops, loss=loss)
        for flops, loss in points
    ]
    assert [(row.C, row.loss) for row in lower_envelope(rows)] == [
        (1e12, 7.0),
        (3e12, 6.0),
        (5e12, 5.0),
    ]


def test_a_logarithmic_axis_has_round_ticks():
    assert log_axis("tokens", [450_000, 5_200_000])["ticktext"] == ["500k", "1M", "2M", "5M"]
    assert len(log_axis("A", [1, 1e24])["tickvals"]) <= 9  # not every one of 24 decades has a label
    assert log_axis("tokens", [1, 1e6])["ticktext"] == ["1", "10", "100", "1k", "10k", "100k", "1M"]


def test_the_optimum_is_where_loss_at_equal_compute_is_least(study):
    C = np.array([1e13, 1e14])
    best = find_optimum_path(study.law, C)
    for c, N, L in zip(C, best.N, best.L, strict=True):
        others = np.geomspace(N / 100, N * 100, 20_001)
        losses = synthetic["true_loss"](others, c / 6 / others)
        assert pytest.approx(others[losses.argmin()], rel=1e-3) == N
        assert pytest.approx(losses.min(), rel=1e-9) == L
    assert np.allclose(6 * best.N * best.D, C)


def test_the_band_is_the_percentiles_of_the_refits_and_contains_the_line(study):
    best = find_optimum_path(study.law, np.array([1e14]))
    assert best.N_ends[0] < best.N < best.N_ends[1] and best.D_ends[0] < best.D < best.D_ends[1]
    alpha, beta, A, B = (np.array(study.law.replicates[name]) for name in ("alpha", "beta", "A", "B"))
    N = (alpha * A / (beta * B)) ** (1 / (alpha + beta)) * (1e14 / 6) ** (
        beta / (alpha + beta)
    )  # Hoffmann, eq. 4
    assert np.allclose([end[0] for end in best.N_ends], np.percentile(N, [2.5, 97.5]))


def test_the_law_is_compared_with_runs_of_its_objective_only(study):
    assert {row.objective for row in select_law_points(study)} == {"autoregressive"}
    assert len(select_law_points(study)) == 15


def test_predictions_are_the_values_of_the_law(study):
    marks = [trace for trace in prediction_figure(study).data if trace["mode"] == "markers"]
    predicted = {round(trace["x"][0], 9) for trace in marks}
    grid = itertools.product(synthetic["SIZES"].values(), synthetic["BUDGETS"])
    assert predicted == {round(synthetic["true_loss"](N, D), 9) for N, D in grid}


def test_objectives_are_compared_at_equal_size_and_tokens_only(study):
    figure = objectives_figure(study)
    assert "in 6 pairs" in figure.alt
    assert {trace["line"]["dash"] for trace in figure.data} == {"solid", "dash"}
    assert "upper bound" in figure.caption


def test_losses_during_training_are_not_on_the_envelope(study):
    lines = [trace for trace in compute_figure(study).data if "envelope" in trace["meta"]]
    final = {row.loss for row in study.finished_rows()}
    assert lines and all(set(trace["y"]) <= final for trace in lines)
