"""Figures of the runs: loss during training, over compute, over epochs; weights of mixtures; residuals."""

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from megatron.report.plot import (
    DASH,
    LOSS,
    MUTED,
    SYMBOL,
    Figure,
    add_objectives,
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

if TYPE_CHECKING:
    pass

SMOOTHED_SHARE = 0.02  # share of a curve's points, on either side
MAX_POINTS = 150  # of a curve; more are not visible and increase the page's size
MAX_DOMAINS = 8
DASHES = ("solid", "dash", "dot", "dashdot")


def smooth_loss(loss: np.ndarray) -> np.ndarray:
    """Return the running mean over 2 % of the points on either side. float64 [n].

    At the start, where the loss falls fast, the window shrinks on both sides, so that the mean does not lag.
    At the end, where the loss is flat, only the side without points is cut.
    """
    # 1,000 points, half = 20. Point 5 is the mean of points 0..10, point 500 of 480..520, point 999 of
    # 979..999.
    n, half = len(loss), math.ceil(SMOOTHED_SHARE * len(loss))
    # running mean by cumulative sums: total[high + 1] - total[low] is the sum over low..high
    total = np.concatenate([[0.0], np.cumsum(loss)])
    at = np.arange(n)
    low = at - np.minimum(half, at)
    high = np.minimum(at + np.minimum(half, at), n - 1)
    return (total[high + 1] - total[low]) / (high + 1 - low)


def thin_points(n: int, most: int) -> np.ndarray:
    """Return the indices of at most `most` of n points to draw, log-spaced, always with the last."""
    return np.unique(np.geomspace(1, n, most).round().astype(int) - 1) if n > most else np.arange(n)


def curves_figure(study: Study) -> Figure | None:
    """Return loss over tokens of every run: smoothed training loss, and the held-out loss at its end."""
    runs = study.runs.dropna(subset=["path", "n_params"])
    curves = {run.Index: read_curve(study, run.path) for run in runs.itertuples()}
    runs = runs[[len(curves[i]["train"]) > 0 for i in runs.index]]
    if not len(runs):
        return None
    chart, colours = make_chart(400), colour_sizes(runs)
    unlisted = list_legend(list(colours))
    tokens: list[float] = []
    losses: list[float] = []
    ends_at = []
    for run, size in zip(runs.itertuples(), name_sizes(runs), strict=True):
        train, held_out = curves[run.Index]["train"], curves[run.Index]["validation"]
        keep = thin_points(len(train), MAX_POINTS)
        loss = smooth_loss(train[:, 1])[keep]
        chart.add_scatter(
            x=train[keep, 0].tolist(), y=loss.round(4).tolist(), mode="lines", name=size, legendgroup=size,
            showlegend=size in unlisted, legendrank=1000 + list(colours).index(size), opacity=0.85,
            line={"color": colours[size], "width": 1.6, "dash": DASH.get(run.objective, "dot")},
            hovertemplate=f"{size}<br>%{{y:.3f}} at %{{x:.3s}} tokens<extra></extra>",
        )  # fmt: skip
        unlisted -= {size}
        ends = held_out[-1:]
        chart.add_scatter(
            x=ends[:, 0].tolist(), y=ends[:, 1].tolist(), mode="markers", legendgroup=size, showlegend=False,
            marker={"color": colours[size], "size": 7, "symbol": SYMBOL.get(run.objective, "square")},
            hovertemplate=f"{size}, held out<br>%{{y:.3f}} at %{{x:.3s}} tokens<extra></extra>",
        )  # fmt: skip
        ends_at.append(len(losses) + len(loss) - 1)
        tokens += train[keep, 0].tolist()
        losses += [*loss, *ends[:, 1]]
    add_objectives(chart, runs, symbols=False)
    # the first steps are near the loss of a uniform guess and would compress the rest
    last = [losses[i] for i in ends_at]
    top = max(last) + 0.5 * (max(last) - min(last) or max(last))
    shown = [loss for loss in losses if loss <= top]
    chart.update_layout(xaxis=log_axis("training tokens", tokens), yaxis=linear_axis(LOSS, shown))
    caption = "Lines: training loss, averaged over 4 % of a run. Points: the last held-out loss of a run."
    return Figure("curves", "Loss during training", caption, chart)


def compute_figure(study: Study) -> Figure | None:
    """Return the held-out loss over compute of all finished runs, with the lowest so far."""
    runs = study.finished.dropna(subset=["train_flops"])
    if not len(runs):
        return None
    chart = make_chart()
    for objective, group in runs.groupby("objective", sort=False):
        # a step for each budget: the lowest loss that was measured with at most this compute
        best = group.groupby("train_flops")["loss"].min().sort_index().cummin()
        chart.add_scatter(
            x=best.index.tolist(), y=best.tolist(), mode="lines", showlegend=False, hoverinfo="skip",
            line={"color": MUTED, "width": 1.5, "shape": "hv", "dash": DASH.get(objective, "dot")},
        )  # fmt: skip
    add_runs(chart, runs, "train_flops")
    add_objectives(chart, runs)
    axes = {"xaxis": flops_axis(runs["train_flops"]), "yaxis": linear_axis(LOSS, runs["loss"])}
    chart.update_layout(axes)
    caption = "Points: finished runs. Steps: the lowest loss with at most this compute."
    return Figure("compute", "Held-out loss over training compute", caption, chart)


def epochs_figure(study: Study) -> Figure | None:
    """Return loss over epochs at fixed size and unique text; None if no text is repeated."""
    runs = study.finished.dropna(subset=["epochs", "unique_tokens"])
    lines = runs.groupby(["objective", "n_params", "unique_tokens"])
    # a line of one number of epochs is a point
    runs = runs[lines["epochs"].transform("nunique") > 1]
    if not len(runs) or runs["epochs"].max() <= 1:
        return None
    chart, colours = make_chart(), colour_sizes(runs)
    for (objective, _, unique), group in runs.groupby(["objective", "n_params", "unique_tokens"]):
        # the mean of the seeds of each setting, and of these the lowest
        settings = group["cell"].fillna(group["run"])
        means = group.groupby([group["epochs"], settings])["loss"].mean()
        best, size = means.groupby("epochs").min(), name_sizes(group).iloc[0]
        chart.add_scatter(
            x=best.index.tolist(), y=best.tolist(), mode="lines", legendgroup=size, showlegend=False,
            line={"color": colours[size], "width": 1.8, "dash": DASH.get(objective, "dot")},
            hovertemplate=f"{size}, {format_count(unique)} unique tokens<extra></extra>",
        )  # fmt: skip
    add_runs(chart, runs, "epochs")
    add_objectives(chart, runs)
    chart.update_layout(
        xaxis=log_axis("epochs over the same unique tokens", runs["epochs"]),
        yaxis=linear_axis(LOSS, runs["loss"]),
    )
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
        dash = DASHES[number % len(DASHES)]
        keep = np.unique(np.linspace(0, len(table) - 1, MAX_POINTS).round().astype(int))
        for i, domain in enumerate(domains):
            share = table[domain].iloc[keep] if domain in table else pd.Series(dtype=float)
            # "hv": weights are constant between two records
            style = {"color": ramp_colour(i, len(domains)), "width": 2, "dash": dash, "shape": "hv"}
            chart.add_scatter(
                x=share.index.tolist(), y=share.round(5).tolist(), mode="lines", name=domain,
                legendgroup=domain, showlegend=number == 0, line=style,
                hovertemplate=f"<b>{domain}</b>, {run}<br>%{{y:.1%}} at %{{x:.3s}} tokens<extra></extra>",
            )  # fmt: skip
    last = max(table.index[-1] for table in tables.values())
    chart.update_layout(
        xaxis=linear_axis("training tokens", [0, last]),
        yaxis=linear_axis("share of the tokens", [0, max(table.max().max() for table in tables.values())]),
        yaxis_tickformat=".0%",
    )
    caption = "Weights of the batches: one colour per domain, one dash per run."
    if len(largest) > len(domains):
        caption += f" Shown: the {len(domains)} domains that change most."
    return Figure("mixture", "Weights of the mixture", caption, chart)


def size_figure(study: Study) -> Figure | None:
    """Return loss over size at each number of tokens with the lines of the parametric law; None without."""
    law, runs = study.law, select_fitted_runs(study, study.law)
    if law is None or not len(runs):
        return None
    chart, budgets = make_chart(), sorted(set(runs["D"]))
    listed = list_legend([format_count(D) for D in budgets])
    N = np.geomspace(runs["N"].min() / 1.15, runs["N"].max() * 1.15, 60)
    for i, D in enumerate(budgets):
        name, colour, group = format_count(D), ramp_colour(i, len(budgets)), runs[runs["D"] == D]
        chart.add_scatter(
            x=N.tolist(), y=np.asarray(law.loss(N, D)).round(5).tolist(), mode="lines", hoverinfo="skip",
            legendgroup=name, showlegend=False, line={"color": colour, "width": 1.8},
        )  # fmt: skip
        chart.add_scatter(
            x=group["N"].tolist(), y=group["loss"].tolist(), mode="markers", name=f"{name} tokens",
            legendgroup=name, showlegend=name in listed, marker={"color": colour, "size": 8},
            customdata=describe_runs(group), hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip
        listed -= {name}
    losses = np.concatenate([trace.y for trace in chart.data]).astype(float)
    chart.update_layout(xaxis=log_axis("parameters, N", N), yaxis=linear_axis(LOSS, losses))
    caption = "Points: the runs of the fit. Lines: the parametric law at each number of tokens, read once."
    return Figure("size", "Parametric law: loss over size", caption, chart, is_diagnostic=True)


def residual_figure(study: Study) -> Figure | None:
    """Return the residuals of the parametric law over compute; None with fewer than 4 runs."""
    law, runs = study.law, select_fitted_runs(study, study.law)
    if law is None or len(runs) < 4:
        return None
    # the forms with a term for repetition use the unique tokens, the others ignore them
    unique = runs["unique_tokens"].fillna(np.inf)
    predicted = law.loss(runs["N"].to_numpy(), runs["D"].to_numpy(), unique.to_numpy())
    runs = runs.assign(off=100 * (runs["loss"] / predicted - 1))
    chart = make_chart(320)
    add_runs(chart, runs, "C", "off", error=False)
    chart.add_hline(y=0, line={"color": MUTED, "width": 1, "dash": "dot"})
    chart.update_layout(
        xaxis=flops_axis(runs["C"], "6 N D, FLOPs"),
        yaxis=linear_axis("measured above the law, % of the loss", [0, *runs["off"]]),
    )
    caption = "Points: the runs of the fit. A pattern in size or compute is a misfit of the form."
    return Figure("residuals", "Parametric law: residuals", caption, chart, is_diagnostic=True)
