"""The figures: each shows the values of its runs and laws, and its caption describes only what is shown."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from megatron.report import plot, plot_compare, plot_frontier, plot_runs, tables
from megatron.report.report import make_figures
from megatron.report.study_data import Study, make_references, read_study
from megatron.study.downstream_scores import REFERENCE_COLUMNS
from tests.report.frontier_study import BUDGETS, LAW, RUNS, TIMES, make_forecast, make_study
from tests.report.synthetic_study import BUDGETS as TOKENS
from tests.report.synthetic_study import SIZES, true_loss

FRONTIER = make_study(RUNS, frontier=LAW)
BITS = "bits_per_byte"


def list_traces(figure: plot.Figure, mode: str) -> list[Any]:
    return [trace for trace in figure.chart.data if trace.mode == mode]


def list_entries(figure: plot.Figure) -> list[str]:
    return [trace.name for trace in figure.chart.data if trace.showlegend is not False]


def test_every_figure_has_texts_units_and_a_legend_without_repetition(study: Study, crossing: Study) -> None:
    studies = (study, FRONTIER, make_study(RUNS), crossing)
    figures = [figure for of_study in map(make_figures, studies) for figure in of_study]
    expected = {"isoflop", "frontier", "compute", "curves", "epochs", "objectives", "size", "residuals"}
    assert {figure.key for figure in figures} == expected
    for figure in figures:
        axes = [axis for name, axis in figure.content["layout"].items() if name[1:5] == "axis"]
        titles = [axis["title"]["text"] for axis in axes if "title" in axis]
        units = ("tokens", "nats", "FLOPs", "parameters", "%")
        assert len(titles) >= 2 and all(any(unit in title for unit in units) for title in titles)
        entries = list_entries(figure)
        assert len(entries) == len(set(entries)) <= 10 and figure.caption.endswith(".")


def test_isoflop_shows_the_runs_the_slices_of_the_law_and_the_best_sizes() -> None:
    figure = plot_frontier.isoflop_figure(FRONTIER)
    points = list_traces(figure, "markers")
    runs = [trace for trace in points if len(trace.x) == len(TIMES)]
    assert sorted(y for trace in runs for y in trace.y) == sorted(RUNS["loss"])
    lines = list_traces(figure, "lines")
    for line, C in zip(lines, [*BUDGETS, 4 * BUDGETS[-1]], strict=True):
        assert line.y == pytest.approx(LAW.loss(np.array(line.x), C), abs=1e-4)
    best = [trace.x[0] for trace in points if len(trace.x) == 1]
    assert best == pytest.approx([LAW.optimum(C).N for C in [*BUDGETS, 4 * BUDGETS[-1]]])
    assert {"Crosses", "Dashed"} <= {
        sentence.split()[0].strip(":,") for sentence in figure.caption.split(". ")
    }


def test_an_unidentified_frontier_is_dotted_and_has_no_best_size() -> None:
    law = replace(LAW, not_identified={"alpha": "at the edge"})
    study = make_study(RUNS, frontier=law)
    figure = plot_frontier.isoflop_figure(study)
    assert {line.line.dash for line in list_traces(figure, "lines")} == {"dot"}
    assert all(len(trace.x) == len(TIMES) for trace in list_traces(figure, "markers"))
    assert "Crosses" not in figure.caption and "Dashed" not in figure.caption
    assert plot_frontier.frontier_figure(study) is None


def test_without_a_frontier_isoflop_shows_parabolas() -> None:
    figure = plot_frontier.isoflop_figure(make_study(RUNS))
    for line in list_traces(figure, "lines"):
        x = np.log(line.x)
        residual = np.array(line.y) - np.polyval(np.polyfit(x, line.y, 2), x)
        assert abs(residual).max() < 2e-5  # rounded to 5 digits
    assert "parabola" in figure.caption and "Dashed" not in figure.caption


def test_the_frontier_is_that_of_the_law_and_bars_are_the_forecasts() -> None:
    forecasts = make_forecast(LAW)
    caption = plot_frontier.frontier_figure(FRONTIER).caption
    assert "forecast" not in caption
    figure = plot_frontier.frontier_figure(replace(FRONTIER, forecasts=forecasts))
    assert "Bars" in figure.caption and "Diamonds" not in figure.caption
    sizes, losses = (line for line in list_traces(figure, "lines") if line.name == "best" and not line.fill)
    for C, N, L in zip(sizes.x, sizes.y, losses.y, strict=True):
        assert pytest.approx((LAW.optimum(C).N, LAW.optimum(C).loss)) == (N, L)
    assert sizes.x[-1] == pytest.approx(10 * BUDGETS[-1])
    measured = replace(FRONTIER, forecasts=forecasts.assign(observed=3.0))
    figure = plot_frontier.frontier_figure(measured)
    diamond = next(trace for trace in figure.chart.data if trace.name == "measured")
    assert (diamond.x[0], diamond.y[0]) == (pytest.approx(4 * BUDGETS[-1]), 3.0)


def test_the_envelope_is_steps_of_the_lowest_loss_so_far_and_never_rises() -> None:
    flops, losses = [1e12, 2e12, 3e12, 3e12, 4e12], [7.0, 7.5, 6.5, 6.0, 6.2]
    runs = RUNS.iloc[:5].assign(train_flops=flops, loss=losses)
    (line,) = list_traces(plot_runs.compute_figure(make_study(runs)), "lines")
    # between two budgets the loss of the cheaper one holds, so no point is below a measured loss
    assert line.line.shape == "hv"
    assert list(zip(line.x, line.y, strict=True)) == [(1e12, 7.0), (2e12, 7.0), (3e12, 6.0), (4e12, 6.0)]


def test_curves_end_at_the_last_held_out_loss(study: Study, folder: Path) -> None:
    figure = plot_runs.curves_figure(study)
    ends = [trace for trace in list_traces(figure, "markers") if len(trace.x)]
    assert len(list_traces(figure, "lines")) == len(ends) == 21
    with (folder / "runs" / "ar-1M-0.5MT" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 999, "tokens": 9e6, "loss": NaN}\n')
    again = plot_runs.curves_figure(read_study(folder))
    assert repr(again.chart.data) == repr(figure.chart.data)


def test_smoothing_keeps_a_straight_line_except_at_its_end_and_averages_noise() -> None:
    line = np.arange(200.0)
    assert np.allclose(plot_runs.smooth_loss(line)[:196], line[:196])  # 2 % of 200 is 4 points
    assert plot_runs.smooth_loss(np.array([3.0])).tolist() == [3.0]
    noise = np.tile([1.0, -1.0], 500)  # windows of 2 * 20 + 1 points: all but one cancel
    assert abs(plot_runs.smooth_loss(noise)[25:-25]).max() <= 1 / 41


def test_lines_over_epochs_are_the_best_mean_of_seeds() -> None:
    runs = RUNS.iloc[:5].assign(
        n_params=1e6, unique_tokens=1e5, epochs=[1.0, 2.0, 2.0, 2.0, 4.0], loss=[5.0, 4.0, 4.4, 4.3, 4.5],
        cell=["a", "b", "b", "c", "d"],
    )  # fmt: skip
    (line,) = list_traces(plot_runs.epochs_figure(make_study(runs)), "lines")
    assert (list(line.x), list(line.y)) == ([1, 2, 4], pytest.approx([5.0, 4.2, 4.5]))
    assert plot_runs.epochs_figure(make_study(runs.assign(epochs=1.0))) is None


def test_residuals_are_of_the_runs_of_the_law_and_lines_are_its_values(study: Study) -> None:
    figure = plot_runs.residual_figure(study)
    runs = study.main_runs
    expected = 100 * (runs["loss"] / true_loss(runs["n_params"], runs["train_tokens"]) - 1)
    values = [y for trace in list_traces(figure, "markers") for y in trace.y]
    assert sorted(values) == pytest.approx(sorted(expected))
    lines = list_traces(plot_runs.size_figure(study), "lines")
    for line, D in zip(lines, TOKENS, strict=True):
        assert line.y == pytest.approx(true_loss(np.array(line.x), D), abs=1e-4)
    points = list_traces(plot_runs.size_figure(study), "markers")
    points_of_runs = {(x, y) for trace in points for x, y in zip(trace.x, trace.y, strict=True)}
    assert {x for x, _ in points_of_runs} == set(SIZES.values()) and len(points_of_runs) == 15


def append_weights(folder: Path, run: str, weights: list[dict[str, float]]) -> None:
    with (folder / "runs" / run / "metrics.jsonl").open("a") as file:
        for step, shares in enumerate(weights, 1):
            line = {"kind": "train", "step": step, "tokens": 10 * step, "loss": 3.0, "weights": shares}
            file.write(json.dumps(line) + "\n")


def test_the_mixture_shows_the_weights_as_they_were_logged(folder: Path, study: Study) -> None:
    first, second = sorted(path.name for path in (folder / "runs").iterdir())[:2]
    append_weights(folder, first, [{"C": 0.5, "Go": 0.5, "none": 0.0}] * 3)
    append_weights(folder, second, [{"C": 1 - x, "Go": x, "none": 0.0} for x in (0.5, 0.7, 0.8)])
    figure = plot_runs.mixture_figure(read_study(folder))
    shares = {trace.hovertext: (list(trace.x), list(trace.y)) for trace in figure.chart.data}
    assert set(shares) == {f"{name}, {run}" for name, run in itertools.product(("C", "Go"), (first, second))}
    assert shares[f"Go, {second}"] == ([10, 20, 30], pytest.approx([0.5, 0.7, 0.8]))
    assert list_entries(figure) == ["C", "Go"] and "domains that change most" in figure.caption
    assert plot_runs.mixture_figure(study) is None


def test_objectives_and_crossings_are_the_measured_ones(crossing: Study) -> None:
    figure = plot_compare.objectives_figure(crossing)
    assert "Crosses" not in figure.caption and plot_compare.crossover_figure(crossing) is None
    lowest = {trace.name: min(trace.y) for trace in figure.chart.data if trace.line.dash == "solid"}
    for at in crossing.crossings:
        name = f"{at.U / 1e3:.3g}k unique tokens"
        assert lowest[name] <= at.first.loss + 1e-12
    crossed = [
        replace(at, C=1e12 * i, interval=(0.9e12 * i, None)) for i, at in enumerate(crossing.crossings, 1)
    ]
    other = replace(crossing)
    vars(other)["crossings"] = crossed
    assert "Crosses" in plot_compare.objectives_figure(other).caption
    (points,) = plot_compare.crossover_figure(other).chart.data
    assert list(points.y) == [at.C for at in crossed]
    assert list(points.error_y.array) == [0.0] * 4  # an end that is not known has no bar
    assert points.error_y.arrayminus == pytest.approx([0.1 * at.C for at in crossed])


@pytest.fixture
def scored(study: Study) -> Study:
    runs = study.main_runs
    rising = 0.9 - 0.1 * runs["loss"]
    more = {"run": runs["run"], "se": 0.02}
    tables = [
        pd.DataFrame({"task": "sciq", "score": rising, "kind": "accuracy"} | more),
        pd.DataFrame({"task": "few", "score": 1 - rising, "kind": "error"} | more)[:2],
        pd.DataFrame({"task": f"sciq-{BITS}", "score": 0.1 + 0.3 * runs["loss"], "kind": BITS} | more),
    ]
    references = [
        ["acme/b", "sciq", 0.9, "accuracy", None, "acc", 10**9, 10**11, ""],
        ["acme/b", f"sciq-{BITS}", 1.1, BITS, None, BITS, 10**9, 10**11, ""],
        ["acme/unplaced", "sciq", 0.8, "accuracy", 0.02, "acc", None, None, ""],
    ]
    references = make_references(pd.DataFrame(references, columns=REFERENCE_COLUMNS))
    return replace(study, scores=pd.concat(tables), references=references)


def test_scores_are_over_6nd_beside_published_models_of_known_size(scored: Study) -> None:
    ours, theirs = plot_compare.scores_figure(scored).chart.data
    runs = scored.main_runs
    assert sorted(ours.x) == pytest.approx(sorted(6 * runs["n_params"] * runs["train_tokens"]))
    assert list(ours.error_y.array) == pytest.approx([0.04] * 15)
    assert (list(theirs.x), list(theirs.y)) == ([6e20], [0.9])
    alone = plot_compare.scores_figure(replace(scored, references=make_references(None)))
    assert "Open" not in alone.caption and "Dotted: chance" in alone.caption


def test_published_models_are_listed_by_compute_below_the_largest_scored_run(scored: Study) -> None:
    table = tables.tabulate_models(scored)
    best = scored.main_runs.iloc[-1]
    assert [row[0] for row in table.rows] == [f"this study: {best['run']}", "acme/b", "acme/unplaced"]
    assert table.rows[0][4] == f"{0.9 - 0.1 * best['loss']:.3f} ± 0.020"
    assert table.rows[1][1:] == ["1.00B", "100B", "6.0e20", "0.900"] and table.rows[2][1:4] == ["–"] * 3


def test_scores_over_loss_have_a_curve_where_one_can_be_fitted(scored: Study) -> None:
    figure = plot_compare.downstream_figure(scored)
    assert {trace.name for trace in list_traces(figure, "markers")} == {"sciq", "few"}
    assert [trace.name for trace in list_traces(figure, "lines")] == ["sciq"]  # two runs are too few
    few = replace(scored, scores=scored.scores[:1])
    assert plot_compare.downstream_figure(few) is None and plot_compare.answer_figure(few) is None


def test_bits_per_byte_of_right_answers_have_a_figure_of_their_own(scored: Study) -> None:
    figure = plot_compare.answer_figure(scored)
    (points,), (line,) = list_traces(figure, "markers"), list_traces(figure, "lines")
    assert points.name == line.name == "sciq" and len(points.x) == len(scored.main_runs)
    assert list(line.y) == pytest.approx([0.1 + 0.3 * x for x in line.x])
