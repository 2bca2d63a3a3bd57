"""Figures that compare: objectives on the same unique text, and downstream scores with published models."""

from typing import Any

import numpy as np
import pandas as pd

from megatron.laws.crossover import crossover
from megatron.laws.downstream_curve import ANSWER_KINDS, chance_of_task, fit_downstream
from megatron.laws.forms import FORM
from megatron.laws.measured_crossover import list_selected
from megatron.report.plot import (
    ACCENT,
    DASH,
    LOSS,
    MUTED,
    RAMP,
    SYMBOL,
    Figure,
    add_band,
    add_line,
    add_objectives,
    add_points,
    describe_runs,
    flops_axis,
    linear_axis,
    log_axis,
    make_bars,
    make_chart,
    ramp_colour,
)
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.study.format import format_count, format_exponent
from megatron.study.measured import collect_settings

N_UNIQUE, N_REPLICATES = 5, 20  # points of the laws' crossing, and refits of its band
SYMBOLS = ("circle", "square", "triangle-up", "cross", "x", "star")  # for tasks, which have no order


def objectives_figure(study: Study) -> Figure | None:
    """Return the least test loss of both objectives over compute, for each amount of unique text."""
    crossings = study.crossings
    if not crossings:
        return None
    settings = collect_settings(study.runs)
    chart = make_chart()
    points: list[tuple[float, float]] = []
    for i, at in enumerate(crossings):
        name, colour = f"{format_count(at.U, 3)} unique tokens", ramp_colour(i, len(crossings))
        for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION):
            chosen = list_selected(settings[at.U][objective])
            C = [setting.C for setting in chosen]
            losses = [float(setting.reported.mean()) for setting in chosen]
            texts = [f"{setting.name}<br>{len(setting.reported)} seeds" for setting in chosen]
            style: dict[str, Any] = {"dash": DASH[objective], "shape": "hv", "mode": "lines+markers"}
            style |= {"marker": {"symbol": SYMBOL[objective], "size": 8}}
            add_line(chart, C, losses, name, colour, texts, showlegend=objective == AUTOREGRESSIVE, **style)
            points += zip(C, losses, strict=True)
        if at.C is not None:
            text = f"crossing at {format_exponent(at.C)} FLOPs"
            style = {"symbol": "x", "size": 12, "showlegend": False}
            add_points(chart, [at.C], [at.first.loss], name, colour, text, **style)
    add_objectives(chart, study.finished)
    C, losses = map(list, zip(*points, strict=True))
    chart.update_layout(xaxis=flops_axis(C), yaxis=linear_axis("test loss, nats per token", losses))
    caption = "At each compute the setting of the least validation loss so far, by its mean test loss."
    if any(at.C is not None for at in crossings):
        caption += " Crosses: where masked diffusion comes down to the best autoregressive loss."
    return Figure("objectives", "Least loss of both objectives on the same text", caption, chart)


def crossover_figure(study: Study) -> Figure | None:
    """Return the compute of the crossing over unique tokens: measured, and by the laws of both objectives."""
    measured = [at for at in study.crossings if at.C is not None]
    chart, caption = make_chart(), []
    if measured:
        U, C = (np.array([getattr(at, name) for at in measured]) for name in "UC")
        # an end that is not known has no bar
        ends = np.array([at.interval or (None, None) for at in measured], dtype=float)
        bars = make_bars(ends[:, 1] - C, C - ends[:, 0])
        texts = [
            f"{format_count(u, 3)} unique tokens: {format_exponent(c)} FLOPs"
            for u, c in zip(U, C, strict=True)
        ]
        add_points(chart, U, C, "measured", RAMP[3], texts, size=10, error_y=bars)
        caption.append("Points: measured crossings, 95 % confidence by the noise of fresh seeds.")
    by_law = _cross_laws(study)
    if by_law is not None:
        if np.isfinite(by_law).all(axis=None):
            add_band(chart, by_law["U"], by_law["low"], by_law["high"], "by the laws")
        style = {"mode": "lines+markers", "showlegend": True}
        add_line(chart, by_law["U"], by_law["C"], "by the laws", ACCENT, "by the laws", **style)
        caption.append("Line: where the laws of both objectives meet at their best sizes.")
    x, y = ([value for trace in chart.data for value in trace[axis]] for axis in "xy")
    if len(set(x)) < 2:
        return None
    axis = flops_axis(y, "compute of the crossing, FLOPs")
    chart.update_layout(xaxis=log_axis("unique tokens, U", x), yaxis=axis)
    title = "Compute at which masked diffusion passes autoregression"
    return Figure("crossover", title, " ".join(caption), chart)


def _cross_laws(study: Study) -> pd.DataFrame | None:
    """Return U, C, low and high of the crossing of two laws of repeated text.

    None without such laws.
    """
    first, second = (study.laws.get(objective) for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION))
    if first is None or second is None or not all(FORM[law.form].needs_unique for law in (first, second)):
        return None
    unique = study.finished["unique_tokens"].dropna()
    if not len(unique):
        return None
    U = np.geomspace(unique.min() / 2, unique.max() * 10, N_UNIQUE)
    crossing = crossover(first, second, U.tolist(), n_replicates=N_REPLICATES)
    low, high = crossing.ends or (np.full(N_UNIQUE, np.nan),) * 2
    table = pd.DataFrame({"U": U, "C": crossing.C, "low": low, "high": high})
    table = table[np.isfinite(table["C"])]
    return table if len(table) else None


def scores_figure(study: Study) -> Figure | None:
    """Return downstream accuracies over 6 N D of runs and of published models.

    None without scores.
    """
    scores = study.run_scores
    scores = scores[scores["kind"] == "accuracy"]
    if not len(scores):
        return None
    chart, tasks = make_chart(430), sorted(set(scores["task"]))
    models = study.references.dropna(subset=["C"])
    models = models[models["task"].isin(tasks)]
    for i, task in enumerate(tasks):
        symbol = SYMBOLS[i % len(SYMBOLS)]
        for table, colour, shape in ((scores, ACCENT, symbol), (models, RAMP[3], f"{symbol}-open")):
            at = table[table["task"] == task]
            style = {"symbol": shape, "size": 9, "showlegend": colour == ACCENT}
            names = describe_runs(at) if table is scores else at["model"]
            texts = [f"{name}<br>{y:.3f}" for name, y in zip(names, at["score"], strict=True)]
            bars = make_bars(2 * at["se"])
            add_points(chart, at["C"], at["score"], task, colour, texts, error_y=bars, **style)
        if (chance := chance_of_task(task)) is not None:
            chart.add_hline(y=chance, line={"color": MUTED, "width": 1, "dash": "dot"})
    both = pd.concat([table for table in (scores, models) if len(table)])
    bars = 2 * both["se"].astype(float).fillna(0)
    ends = [*(both["score"] + bars), *(both["score"] - bars)]
    chart.update_layout(xaxis=flops_axis(both["C"], "6 N D, FLOPs"), yaxis=linear_axis("accuracy", ends))
    caption = "Filled: finished runs, with two standard errors over the questions."
    caption += " Open: published models." if len(models) else ""
    if any(chance_of_task(task) is not None for task in tasks):
        caption += " Dotted: chance."
    return Figure("scores", "Downstream scores over compute", caption, chart)


def downstream_figure(study: Study) -> Figure | None:
    """Return each task's accuracy or error over the run's loss, with the fitted curve.

    None without two scored runs.
    """
    scores = study.run_scores
    lines = "error = ε − k exp(−γ L), or for accuracies a sigmoid in L"
    names = ("downstream", "Downstream scores over the held-out loss", "score", lines)
    return _plot_over_loss(scores[~scores["kind"].isin(ANSWER_KINDS)], *names)


def answer_figure(study: Study) -> Figure | None:
    """Return the bits per byte of each task's right answers over the run's loss, with fitted lines.

    None without two scored runs.
    """
    scores = study.run_scores
    scores = scores[scores["kind"] == "bits_per_byte"]
    scores = scores.assign(task=scores["task"].str.removesuffix("-bits_per_byte"))
    names = ("answers", "Right answers over the held-out loss", "bits per byte of the right answer")
    return _plot_over_loss(scores, *names, "least squares")


def _plot_over_loss(scores: pd.DataFrame, key: str, title: str, axis: str, lines: str) -> Figure | None:
    """Return scores over the loss with a curve per task where one can be fitted; None without two runs."""
    tasks = {name: group for name, group in scores.groupby(["task", "kind"]) if len(group) > 1}
    if not tasks:
        return None
    chart, has_curve = make_chart(), False
    for i, ((task, kind), group) in enumerate(tasks.items()):
        colour, symbol = ramp_colour(i, len(tasks)), SYMBOLS[i % len(SYMBOLS)]
        loss, values = group["loss"].to_numpy(), group["score"].to_numpy()
        texts = [f"{x}<br>{y:.3f}" for x, y in zip(describe_runs(group), values, strict=True)]
        add_points(chart, loss, values, task, colour, texts, symbol=symbol)
        try:
            curve = fit_downstream(loss, values, kind, n_bootstrap=0, chance=chance_of_task(task, kind))
        except ValueError:  # too few runs, or scores outside 0 to 1
            continue
        x, has_curve = np.linspace(loss.min(), loss.max(), 60), True
        add_line(chart, x, curve.score(x), task, colour)
    values = [y for trace in chart.data for y in trace.y]
    chart.update_layout(xaxis=linear_axis(LOSS, scores["loss"]), yaxis=linear_axis(axis, values))
    caption = "Points: finished runs." + (f" Lines: {lines}." if has_curve else "")
    return Figure(key, title, caption, chart)
