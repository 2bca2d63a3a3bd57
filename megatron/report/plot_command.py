"""Figures that commands write with --plot: a dry run, a prediction, a frontier, a comparison."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import write_atomic
from megatron.laws.compute_law import ComputeLaw
from megatron.laws.equivalent_gain import EquivalentGain
from megatron.laws.law import Law
from megatron.laws.prediction import OptimumPrediction, Prediction
from megatron.laws.recipe_law import RecipeLaw
from megatron.report import plot
from megatron.report.plot import ACCENT, INK, Chart
from megatron.study.differences import Difference
from megatron.study.format import format_duration
from megatron.study.frontier import list_unseen
from megatron.study.gain import UNITS
from megatron.study.ladder import PlannedRun
from megatron.study.price import Speed
from megatron.study.selection import Selection


def add_plot_option(parser: Any) -> None:
    """Add --plot to a parser, or to a group of its arguments."""
    page = "write a figure as a page for a browser"
    parser.add_argument("--plot", type=_html_path, metavar="FIGURE.html", help=page)


def _html_path(word: str) -> Path:
    if not word.endswith(".html"):
        raise argparse.ArgumentTypeError(f"got '{word}', expected a name that ends in .html")
    return Path(word)


def write_figure(path: Path, chart: Chart) -> None:
    """Write a chart as a page that needs no network, and print its name."""
    write_atomic(path, chart.to_html(include_plotlyjs=True, default_height="95vh"))
    # stdout may be the JSON of --json
    print(f"{path}: figure", file=sys.stderr)


def plot_price(runs: Sequence[PlannedRun], speed: Speed) -> Chart:
    """Return the size of each run over its training FLOPs; the area of a point is the run's time."""
    seconds = np.array([speed.seconds(run) for run in runs])
    C, N = [run.plan.train_flops for run in runs], [run.plan.n_params for run in runs]
    texts = [f"{run.config.name}<br>{format_duration(s)}" for run, s in zip(runs, seconds, strict=True)]
    # short runs keep a visible point; unknown times are NaN
    widths = np.nan_to_num(6 + 30 * np.sqrt(seconds / seconds.max()), nan=8)
    chart = plot.make_chart()
    plot.add_points(chart, C, N, "runs", ACCENT, texts, size=widths.tolist(), opacity=0.6, showlegend=False)
    chart.update_layout(xaxis=plot.flops_axis(C), yaxis=plot.log_axis("parameters", N))
    return describe_chart(chart, "Runs of the study", "The larger a point, the longer its run takes.")


def plot_prediction(law: Law, answers: Sequence[Prediction | OptimumPrediction]) -> Chart:
    """Return the law's loss over compute for several sizes, and predictions with the predictive interval."""
    chart = law.plot()
    for i, at in enumerate(answers):
        if isinstance(at, Prediction):
            kind, loss, interval = "run", at.loss, at.predictive
        else:
            kind, loss, interval = "optimum", at.L, at.L_predictive
        low, high = interval or (loss, loss)
        name = f"{kind}: N {at.N:.3g}, D {at.D:.3g}"
        style = {"size": 10, "error_y": plot.make_bars([high - loss], [loss - low])}
        colour = plot.ramp_colour(i, len(answers))
        plot.add_points(chart, [6 * at.N * at.D], [loss], name, colour, f"{loss:.4g}", **style)
    caption = "Lines: the law. Points: predictions, with the 95 % interval of one new run where it is known."
    return describe_chart(chart, law.formula(), caption)


def plot_frontier(law: ComputeLaw, runs: Selection, C: Sequence[float] | None) -> Chart:
    """Return best sizes and losses at C FLOPs [n], default: up to the furthest forecast, and the runs."""
    chart = law.plot(C)
    for row, y in enumerate((runs.N, runs.L), 1):
        chart.add_scatter(x=runs.C, y=y, mode="markers", marker={"color": INK, "size": 4}, row=row, col=1)
    caption = "Lines: the best size and its loss, with 95 % intervals (loss: of one new run). Points: runs."
    return describe_chart(chart, "Compute-optimal frontier", caption)


def plot_recipe(law: RecipeLaw, points: Selection, C: Sequence[float] | None) -> Chart:
    """Return the recipe's loss at C FLOPs [n], default: up to the furthest forecast, and its points."""
    fitted, unseen = points.subset(~points.held_out()), list_unseen(points)
    furthest = max([law.furthest_forecast(), *(at for at, _ in unseen)])
    chart = law.plot(np.geomspace(law.C[0], furthest, 24) if C is None else C)
    chart.add_scatter(x=fitted.C, y=fitted.L, mode="markers", marker={"color": INK, "size": 4})
    caption = "Band: 95 % interval of one new run. Points: runs."
    if unseen:
        x, y = map(list, zip(*unseen, strict=True))
        marker = {"color": ACCENT, "size": 9, "symbol": "diamond"}
        chart.add_scatter(x=x, y=y, mode="markers", marker=marker)
        caption += " Diamonds: runs that are not fitted."
    return describe_chart(chart, "Loss of one recipe", caption)


def plot_differences(differences: Sequence[Difference]) -> Chart:
    """Return each difference in nats per token, with its interval where that is known."""
    x = np.array([at.difference for at in differences])
    low, high = np.array([at.interval or (at.difference, at.difference) for at in differences]).T
    names = [f"{at.a} − {at.b}" for at in differences]
    chart = plot.make_chart()
    style = {"mode": "markers", "marker": {"color": ACCENT, "size": 9}, "showlegend": False}
    chart.add_scatter(x=x.tolist(), y=names, error_x=plot.make_bars(high - x, x - low), **style)
    chart.add_vline(x=0, line={"color": INK, "width": 1})
    chart.update_layout(xaxis={"title": {"text": "nats per token"}})
    caption = "Left of 0: the first one is better. Bars: 95 % intervals; none: not known."
    return describe_chart(chart, "Differences of the held-out loss", caption)


def plot_gain(gain: EquivalentGain, by: str) -> Chart:
    """Return the share of A's compute that B needs over compute, with its 95 % interval."""
    C = np.geomspace(*gain.C, 40)
    gains = [gain.at(c) for c in C]
    chart = plot.make_chart()
    low, high = np.array([at.interval for at in gains]).T
    plot.add_band(chart, C, low, high, "95 % confidence")
    plot.add_line(chart, C, [at.ratio for at in gains], "B needs", ACCENT, "B needs")
    chart.add_hline(y=1, line={"color": INK, "width": 1})
    axis = {"title": {"text": f"share of A's {UNITS[by]}"}}
    chart.update_layout(xaxis=plot.log_axis(f"{UNITS[by]} of A", C), yaxis=axis, showlegend=False)
    return describe_chart(
        chart,
        f"{UNITS[by]} that B needs for the loss of A".capitalize(),
        "Below 1: B is better. Band: 95 % interval.",
    )


def describe_chart(chart: Chart, title: str, caption: str) -> Chart:
    # above the plot and its legend; a chart without a fixed height fills the window
    texts = {"text": title, "subtitle": {"text": caption}, "y": 0.98, "yanchor": "top"}
    return chart.update_layout(
        title=texts, height=None, margin={"t": 120}, paper_bgcolor="#fff", template="plotly_white"
    )
