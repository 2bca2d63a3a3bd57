"""Figures of the runs: loss during training, over compute, over epochs.

Weights of mixtures; residuals.
"""

import math

import numpy as np
import pandas as pd

from megatron.report.answer import answering_law
from megatron.report.plot import (
    DASH,
    LOSS,
    MUTED,
    RAMP,
    SYMBOL,
    Figure,
    add_line,
    add_objectives,
    add_points,
    add_runs,
    colour_sizes,
    describe_runs,
    flops_axis,
    linear_axis,
    list_legend,
    log_axis,
    make_chart,
    name_sizes,
    ramp_colour,
)
from megatron.report.study_data import Study, read_curve, read_weights, select_fitted_runs
from megatron.study.format import format_count

SMOOTHED_SHARE = 0.02  # share of a curve's points, on either side
MAX_POINTS = 150  # per curve; more are not visible and increase the page's size
MAX_DOMAINS = 8
DASHES = ("solid", "dash", "dot", "dashdot")


def context_figure(study: Study) -> Figure | None:
    """Return the loss of the largest scored run over the tokens that it read before.

    None without such a score.
    """
    if not study.reading.get("loss_by_context"):
        return None
    least, most, loss = map(np.array, zip(*study.reading["loss_by_context"][0], strict=True))
    # 4 to 7 tokens are drawn at their geometric mean, 5.3
    x, run = np.sqrt(np.maximum(least, 1) * np.maximum(most, 1)), study.reading["run"]
    texts = [f"{a} to {b} tokens before: {y:.3f}" for a, b, y in zip(least, most, loss, strict=True)]
    chart = make_chart()
    add_line(chart, x, loss, run, RAMP[0], texts, mode="lines+markers")
    chart.update_layout(xaxis=log_axis("tokens read before, in the window", x), yaxis=linear_axis(LOSS, loss))
    caption = f"Held-out loss of {run} by the number of tokens that it had read."
    return Figure("context", "Loss by position in the window", caption, chart)


def smooth_loss(loss: np.ndarray) -> np.ndarray:
    """Return the running mean over 2 % of the points on either side. float64 [n].

    At the start, where the loss falls fast, the window shrinks
    on both sides, so that the mean does not lag. At the end,
    where the loss is flat, only the side without points is cut.
    """
    # 1,000 points, half = 20. Point 5 is the mean of points 0..10, point 500 of
    # 480..520, point 999 of 979..999.
    n, half = len(loss), math.ceil(SMOOTHED_SHARE * len(loss))
    # running mean by cumulative sums:
    # total[high + 1] - total[low] is the sum over low..high
    total = np.concatenate([[0.0], np.cumsum(loss)])
    at = np.arange(n)
    low = at - np.minimum(half, at)
    high = np.minimum(at + np.minimum(half, at), n - 1)
    return (total[high + 1] - total[low]) / (high + 1 - low)


def thin_points(n: int, most: int) -> np.ndarray:
    """Return the indices of at most `most` of n points to draw, log-spaced, always with the last."""
    if n <= most:
        return np.arange(n)
    return np.unique(np.geomspace(1, n, most).round().astype(int) - 1)


def curves_figure(study: Study) -> Figure | None:
    """Return loss over tokens of every run: smoothed training loss, and the held-out loss at its end."""
    runs = study.runs.dropna(subset=["path", "n_params"])
    curves = {run.Index: read_curve(study, run.path) for run in runs.itertuples()}
    runs = runs[[len(curves[i]["train"]) > 0 for i in runs.index]]
    if not len(runs):
        return None
    chart, colours = make_chart(520), colour_sizes(runs)
    unlisted = list_legend(list(colours))
    for run, size in zip(runs.itertuples(), name_sizes(runs), strict=True):
        train, ends = curves[run.Index]["train"], curves[run.Index]["validation"][-1:]
        keep = thin_points(len(train), MAX_POINTS)
        loss = smooth_loss(train[:, 1])[keep].round(4)
        entry = {"showlegend": size in unlisted, "legendrank": 1000 + list(colours).index(size)}
        style = {"dash": DASH.get(run.objective, "dot"), "width": 1.6}
        add_line(chart, train[keep, 0], loss, size, colours[size], run.run, **style, **entry)
        mark = {"symbol": SYMBOL.get(run.objective, "square"), "showlegend": False}
        text = f"{run.run}, held out"
        add_points(chart, ends[:, 0], ends[:, 1], size, colours[size], text, **mark)
        unlisted -= {size}
    traces = [trace for trace in chart.data if len(trace.x)]
    last = [trace.y[-1] for trace in traces]
    # the first steps are near the loss of a uniform
    # guess and would compress the rest
    top = max(last) + 0.5 * (max(last) - min(last) or max(last))
    losses = [y for trace in traces for y in trace.y if y <= top]
    tokens = [x for trace in traces for x in trace.x]
    add_objectives(chart, runs)
    chart.update_layout(xaxis=log_axis("training tokens", tokens), yaxis=linear_axis(LOSS, losses))
    caption = "Lines: training loss, averaged over 4 % of a run. Points: the last held-out loss of a run."
    return Figure("curves", "Loss during training", caption, chart)


def compute_figure(study: Study) -> Figure | None:
    """Return the held-out loss over compute of all finished runs, with the lowest so far.

    None without runs, and where the figure of the frontier shows them.
    """
    runs = study.finished.dropna(subset=["train_flops"])
    if not len(runs) or answering_law(study) is not None:
        return None
    chart = make_chart()
    for objective, group in runs.groupby("objective", sort=False):
        # a step for each budget: the lowest loss
        # that was measured with at most this compute
        best = group.groupby("train_flops")["loss"].min().sort_index().cummin()
        style = {"shape": "hv", "dash": DASH.get(objective, "dot")}
        add_line(chart, best.index, best, "lowest", MUTED, width=1.5, **style)
    add_runs(chart, runs, "train_flops")
    add_objectives(chart, runs)
    x, y = flops_axis(runs["train_flops"]), linear_axis(LOSS, runs["loss"])
    chart.update_layout(xaxis=x, yaxis=y)
    caption = "Points: finished runs. Steps: the lowest loss with at most this compute."
    return Figure("compute", "Held-out loss over training compute", caption, chart)


def epochs_figure(study: Study) -> Figure | None:
    """Return loss over epochs at fixed size and unique text.

    None if no text is repeated.
    """
    line = ["objective", "n_params", "unique_tokens"]
    runs = study.finished.dropna(subset=["epochs", "unique_tokens"])
    # a line of one number of epochs is a point
    runs = runs[runs.groupby(line)["epochs"].transform("nunique") > 1]
    if not len(runs) or runs["epochs"].max() <= 1:
        return None
    chart, colours = make_chart(), colour_sizes(runs)
    for (objective, _, unique), group in runs.groupby(line):
        # the mean of the seeds of each setting, and of these the lowest
        settings = group["cell"].fillna(group["run"])
        means = group.groupby([group["epochs"], settings])["loss"].mean()
        best, size = means.groupby("epochs").min(), name_sizes(group).iloc[0]
        text, dash = f"{format_count(unique)} unique tokens", DASH.get(objective, "dot")
        add_line(chart, best.index, best, size, colours[size], text, dash=dash)
    add_runs(chart, runs, "epochs")
    add_objectives(chart, runs)
    x = log_axis("epochs over the same unique tokens", runs["epochs"])
    chart.update_layout(xaxis=x, yaxis=linear_axis(LOSS, runs["loss"]))
    caption = "Lines: one size on the same unique text, by its best setting. Points: the runs."
    return Figure("epochs", "Held-out loss over epochs", caption, chart)


def mixture_figure(study: Study) -> Figure | None:
    """Return the weights of the mixtures over tokens, one colour per domain, one dash per run."""
    paths = study.runs.dropna(subset=["path"])
    tables = {run.run: read_weights(study, run.path) for run in paths.itertuples()}
    tables = {name: table for name, table in tables.items() if len(table)}
    if not tables:
        return None
    # the domains with the largest change in any run, then the largest weight
    every = pd.concat([table.agg([np.ptp, "max"]).T for table in tables.values()])
    largest = every.groupby(level=0).max().sort_values(list(every.columns), ascending=False)
    domains = sorted(largest[largest["max"] > 0].index[:MAX_DOMAINS])
    chart = make_chart()
    for number, (run, table) in enumerate(tables.items()):
        keep = np.unique(np.linspace(0, len(table) - 1, MAX_POINTS).round().astype(int))
        # "hv": weights are constant between two records
        style = {"dash": DASHES[number % len(DASHES)], "shape": "hv", "showlegend": number == 0}
        for i, domain in enumerate(domains):
            share = table[domain].iloc[keep] if domain in table else pd.Series(dtype=float)
            colour, text = ramp_colour(i, len(domains)), f"{domain}, {run}"
            add_line(chart, share.index, share.round(5), domain, colour, text, **style)
    x = linear_axis("training tokens", [0, *(table.index[-1] for table in tables.values())])
    y = linear_axis("share of the tokens", [0, largest["max"].max()]) | {"tickformat": ".0%"}
    chart.update_layout(xaxis=x, yaxis=y)
    caption = "Weights of the batches: one colour per domain, one dash per run."
    if len(largest) > len(domains):
        caption += f" Shown: the {len(domains)} domains that change most."
    return Figure("mixture", "Weights of the mixture", caption, chart)


def size_figure(study: Study) -> Figure | None:
    """Return loss over size at each number of tokens with the lines of the parametric law.

    None without.
    """
    law, runs = study.law, select_fitted_runs(study, study.law)
    if law is None or not len(runs):
        return None
    chart, budgets = make_chart(), sorted(set(runs["D"]))
    unlisted = list_legend([f"{format_count(D)} tokens" for D in budgets])
    N = np.geomspace(runs["N"].min() / 1.15, runs["N"].max() * 1.15, 60)
    for i, D in enumerate(budgets):
        name, colour = f"{format_count(D)} tokens", ramp_colour(i, len(budgets))
        add_line(chart, N, np.asarray(law.loss(N, D)).round(5), name, colour)
        group, listed = runs[runs["D"] == D], name in unlisted
        texts = describe_runs(group)
        add_points(chart, group["N"], group["loss"], name, colour, texts, showlegend=listed)
        unlisted -= {name}
    losses = [y for trace in chart.data for y in trace.y]
    chart.update_layout(xaxis=log_axis("parameters, N", N), yaxis=linear_axis(LOSS, losses))
    caption = "Points: the runs of the fit. Lines: the parametric law at each number of tokens, read once."
    return Figure("size", "Parametric law: loss over size", caption, chart, is_diagnostic=True)


def residual_figure(study: Study) -> Figure | None:
    """Return the residuals of the parametric law over compute.

    None with fewer than 4 runs.
    """
    law, runs = study.law, select_fitted_runs(study, study.law)
    if law is None or len(runs) < 4:
        return None
    # the forms with a term for repetition use
    # the unique tokens, the others ignore them
    unique = runs["unique_tokens"].fillna(np.inf)
    predicted = law.loss(runs["N"].to_numpy(), runs["D"].to_numpy(), unique.to_numpy())
    runs = runs.assign(off=100 * (runs["loss"] / predicted - 1))
    chart = make_chart(320)
    add_runs(chart, runs, "C", "off")
    chart.add_hline(y=0, line={"color": MUTED, "width": 1, "dash": "dot"})
    x, y = (flops_axis(runs["C"], "6 N D, FLOPs"), linear_axis("loss above the law, %", [0, *runs["off"]]))
    chart.update_layout(xaxis=x, yaxis=y)
    caption = "Points: the runs of the fit. A pattern in size or compute is a misfit of the form."
    return Figure("residuals", "Parametric law: residuals", caption, chart, is_diagnostic=True)
