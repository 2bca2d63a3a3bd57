"""Figures that compare: objectives on the same unique text, and downstream scores with published models."""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from megatron.laws.crossover import crossover
from megatron.laws.downstream_curve import chance_of_task, fit_downstream
from megatron.laws.forms import FORM
from megatron.laws.measured_crossover import list_selected
from megatron.report._old_tables import collect_settings
from megatron.report.plot import (
    ACCENT,
    DASH,
    LOSS,
    MUTED,
    RAMP,
    SYMBOL,
    Figure,
    add_band,
    add_objectives,
    describe_runs,
    flops_axis,
    linear_axis,
    log_axis,
    make_chart,
    ramp_colour,
)
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.study.format import format_count

if TYPE_CHECKING:
    import plotly.graph_objects as go

N_UNIQUE, N_REPLICATES = 5, 20  # points of the laws' crossing, and refits of its band
SYMBOLS = ("circle", "square", "triangle-up", "cross", "x", "star")  # of tasks, which have no order


def objectives_figure(study: Study) -> Figure | None:
    """Return the least test loss of both objectives over compute, for each amount of unique text."""
    crossings = study.crossings
    if not crossings:
        return None
    settings = collect_settings(study.runs)
    chart, drawn = make_chart(), []
    for i, at in enumerate(crossings):
        name, colour = f"{format_count(at.U, 3)} unique tokens", ramp_colour(i, len(crossings))
        for objective in (AUTOREGRESSIVE, MASKED_DIFFUSION):
            chosen = list_selected(settings[at.U][objective])
            drawn += [(setting.C, float(setting.reported.mean())) for setting in chosen]
            x, y = zip(*drawn[-len(chosen) :], strict=True)
            texts = [f"{setting.name}<br>{len(setting.reported)} seeds" for setting in chosen]
            chart.add_scatter(
                x=x, y=y, mode="lines+markers", name=name, legendgroup=name, customdata=texts,
                showlegend=objective == AUTOREGRESSIVE,
                line={"color": colour, "width": 2, "dash": DASH[objective], "shape": "hv"},
                marker={"color": colour, "size": 8, "symbol": SYMBOL[objective]},
                hovertemplate="%{customdata}<br>test %{y:.4f}<extra></extra>",
            )  # fmt: skip
        if at.C is not None:
            chart.add_scatter(
                x=[at.C], y=[at.first.loss], mode="markers", legendgroup=name, showlegend=False,
                marker={"color": colour, "size": 12, "symbol": "x"},
                hovertemplate="%{x:.2s} FLOPs<extra>crossing</extra>",
            )  # fmt: skip
    add_objectives(chart, study.finished)
    C, losses = zip(*drawn, strict=True)
    chart.update_layout(xaxis=flops_axis(C), yaxis=linear_axis("test loss, nats per token", losses))
    caption = (
        "At each compute the setting of the least validation loss so far; its mean test loss over the seeds "
        "that report it."
    )
    if any(at.C is not None for at in crossings):
        caption += " Crosses: where the line of masked diffusion comes down to the best of the other."
    return Figure("objectives", "Least loss of both objectives on the same text", caption, chart)


def crossover_figure(study: Study) -> Figure | None:
    """Return the compute of the crossing over unique tokens: measured, and by the laws of both objectives."""
    measured = [at for at in study.crossings if at.C is not None]
    chart, caption = make_chart(), []
    U, C = [at.U for at in measured], [float(at.C or 0.0) for at in measured]
    if measured:
        ends = [
            [C[i] if end is None else end for end in at.interval or (None, None)]
            for i, at in enumerate(measured)
        ]
        error = {"type": "data", "symmetric": False, "thickness": 1.5,
                 "array": [high - c for c, (_, high) in zip(C, ends, strict=True)],
                 "arrayminus": [c - low for c, (low, _) in zip(C, ends, strict=True)]}  # fmt: skip
        chart.add_scatter(
            x=U, y=C, mode="markers", name="measured", error_y=error, marker={"color": RAMP[3], "size": 10},
            hovertemplate="%{x:.3s} unique tokens: %{y:.2s} FLOPs<extra>measured</extra>",
        )  # fmt: skip
        caption.append("Points: measured crossings, 95 % confidence by the noise of fresh seeds.")
    by_law = _cross_laws(study)
    if by_law is not None:
        if np.isfinite(by_law[["low", "high"]]).all(axis=None):
            add_band(chart, by_law["U"].tolist(), by_law["low"].tolist(), by_law["high"].tolist())
            C += by_law[["low", "high"]].stack().tolist()
        chart.add_scatter(
            x=by_law["U"].tolist(), y=by_law["C"].tolist(), mode="lines+markers", name="by the laws",
            line={"color": ACCENT, "width": 2.2},
            hovertemplate="%{x:.3s} unique tokens: %{y:.2s} FLOPs<extra>laws</extra>",
        )  # fmt: skip
        U, C = U + by_law["U"].tolist(), C + by_law["C"].tolist()
        caption.append("Line: where the laws of both objectives meet at their best sizes.")
    if len(set(U)) < 2:
        return None
    chart.update_layout(
        xaxis=log_axis("unique tokens, U", U), yaxis=flops_axis(C, "compute of the crossing, FLOPs")
    )
    title = "Compute at which masked diffusion passes autoregression"
    return Figure("crossover", title, " ".join(caption), chart)


def _cross_laws(study: Study) -> pd.DataFrame | None:
    """Return U, C, low and high of the crossing of two laws of repeated text; None without such laws."""
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
    """Return downstream accuracies over 6 N D of runs and of published models; None without scores."""
    scores = _join_scores(study)
    scores = scores[scores["kind"] == "accuracy"]
    if not len(scores):
        return None
    references = pd.DataFrame(
        [(r.task, r.score, r.se or np.nan, 6.0 * r.n_params * r.train_tokens, r.model)
         for r in study.references if r.n_params and r.train_tokens],
        columns=["task", "score", "se", "C", "text"],
    )  # fmt: skip
    chart, tasks = make_chart(430), sorted(set(scores["task"]))
    references = references[references["task"].isin(tasks)]
    for i, task in enumerate(tasks):
        symbol = SYMBOLS[i % len(SYMBOLS)]
        for table, colour, form in ((scores, ACCENT, symbol), (references, RAMP[3], f"{symbol}-open")):
            _add_scores(chart, table[table["task"] == task], task, colour, form)
        if (chance := chance_of_task(task)) is not None:
            chart.add_hline(y=chance, line={"color": MUTED, "width": 1, "dash": "dot"})
    both = pd.concat([scores, references])
    ends = pd.concat([both["score"] + 2 * both["se"].fillna(0), both["score"] - 2 * both["se"].fillna(0)])
    chart.update_layout(xaxis=flops_axis(both["C"], "6 N D, FLOPs"), yaxis=linear_axis("accuracy", ends))
    caption = "Filled: finished runs, with two standard errors over the questions."
    if len(references):
        caption += " Open: published models."
    if any(chance_of_task(task) is not None for task in tasks):
        caption += " Dotted: chance."
    return Figure("scores", "Downstream scores over compute", caption, chart)


def _join_scores(study: Study) -> pd.DataFrame:
    """Return the scores of finished runs with loss, C = 6 N D and a hover text."""
    runs = study.finished
    runs = runs.assign(C=6.0 * runs["n_params"] * runs["train_tokens"], text=describe_runs(runs))
    return study.scores.merge(runs[["run", "loss", "C", "text"]], on="run")


def _add_scores(chart: "go.Figure", table: pd.DataFrame, task: str, colour: str, symbol: str) -> None:
    if not len(table):
        return
    bars = {"array": (2 * table["se"].fillna(0)).tolist(), "thickness": 1, "width": 3}
    chart.add_scatter(
        x=table["C"].tolist(), y=table["score"].tolist(), mode="markers", name=task, legendgroup=task,
        showlegend=colour == ACCENT, error_y=bars, customdata=table["text"].tolist(),
        marker={"color": colour, "size": 9, "symbol": symbol, "line": {"width": 1.5}},
        hovertemplate=f"%{{customdata}}<br>{task} %{{y:.3f}}<extra></extra>",
    )  # fmt: skip


def downstream_figure(study: Study) -> Figure | None:
    """Return each task's scores over the run's loss, with the fitted curve; None without two scored runs."""
    scores = _join_scores(study)
    tasks = {key: group for key, group in scores.groupby(["task", "kind"]) if len(group) > 1}
    if not tasks:
        return None
    chart, has_curve = make_chart(), False
    for i, ((task, kind), group) in enumerate(tasks.items()):
        colour = ramp_colour(i, len(tasks))
        chart.add_scatter(
            x=group["loss"].tolist(), y=group["score"].tolist(), mode="markers", name=task, legendgroup=task,
            marker={"color": colour, "size": 8, "symbol": SYMBOLS[i % len(SYMBOLS)]},
            customdata=group["text"].tolist(),
            hovertemplate=f"%{{customdata}}<br>{task} %{{y:.3f}}<extra></extra>",
        )  # fmt: skip
        loss = group["loss"].to_numpy()
        try:
            chance = chance_of_task(task) if kind == "accuracy" else None
            curve = fit_downstream(loss, group["score"].to_numpy(), kind, n_bootstrap=0, chance=chance)
        except ValueError:  # too few runs, or scores outside 0 to 1
            continue
        x, has_curve = np.linspace(loss.min(), loss.max(), 60), True
        chart.add_scatter(
            x=x.tolist(), y=curve.score(x).tolist(), mode="lines", legendgroup=task, showlegend=False,
            hoverinfo="skip", line={"color": colour, "width": 1.8},
        )  # fmt: skip
    values = [y for trace in chart.data for y in trace.y]
    chart.update_layout(xaxis=linear_axis(LOSS, scores["loss"]), yaxis=linear_axis("score", values))
    caption = "Points: finished runs."
    if has_curve:
        caption += " Lines: error = ε − k exp(−γ L), or for accuracies a sigmoid in L."
    return Figure("downstream", "Downstream scores over the held-out loss", caption, chart)
