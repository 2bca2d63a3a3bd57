"""Figures of the answer: loss over size at equal compute, and the best size and its loss over compute."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from megatron.laws.compute_law import LARGEST_STEP, ComputeLaw
from megatron.laws.isoflop import fit_isoflop, split_budgets
from megatron.report.answer import answering_law, find_answers, find_optima
from megatron.report.plot import (
    ACCENT,
    LOSS,
    MUTED,
    RAMP,
    SHADE,
    Figure,
    add_band,
    describe_runs,
    flops_axis,
    linear_axis,
    log_axis,
    make_chart,
    ramp_colour,
)
from megatron.report.study_data import Study, group_trunks, select_fitted_runs
from megatron.study.format import format_count, format_exponent, format_with_interval

if TYPE_CHECKING:
    import plotly.graph_objects as go

STEPS = 48  # points of a line
MARGIN = 1.15  # factor by which a line extends beyond the sizes of its runs
MAX_RATIO = 3.0  # minima further outside the sizes of a budget than this factor are not marked
LOSS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
Z95 = 1.96


@dataclass(frozen=True)
class Slice:
    """Loss over size at C FLOPs: runs, a line through N and loss [n], and the best size where it is known."""

    C: float
    runs: pd.DataFrame
    N: np.ndarray
    loss: np.ndarray
    best: Mapping[str, float] | None  # N, N_low, N_high, loss

    @property
    def name(self) -> str:
        """Compute as text."""
        return f"{format_exponent(self.C)} FLOPs"


def isoflop_figure(study: Study) -> Figure | None:
    """Return loss over size at each compute; None without a budget of several sizes."""
    slices = slice_frontier(study) or slice_parabolas(study)
    if not slices:
        return None
    law, chart = study.frontier, make_chart(430)
    is_dotted = law is not None and not law.identified
    for i, at in enumerate(slices):
        _add_slice(chart, at, ramp_colour(i, len(slices)), "dot" if is_dotted else "solid")
    _add_next(chart, study)
    shown = pd.concat([at.runs for at in slices])
    sizes = [N for trace in chart.data for N in trace.x]
    # the ends of a line can rise far above the runs
    top = shown["loss"].max() + 0.25 * np.ptp(shown["loss"])
    losses = [y for trace in chart.data for y in trace.y if y <= top]
    chart.update_layout(xaxis=log_axis("parameters, N", sizes), yaxis=linear_axis(LOSS, losses))
    caption = ["Points: runs of about equal compute."]
    if law is None:
        caption.append("Lines: a parabola in log N for each budget.")
    elif is_dotted:
        caption.append("Dotted: the fitted frontier, whose best sizes are unknown.")
    else:
        caption.append("Lines: one law for all budgets.")
    if any(at.best is not None for at in slices):
        caption.append("Crosses: the best size of each budget, 95 % confidence.")
    if answering_law(study) is law and law is not None:
        caption.append("Dashed, diamond: the next budget.")
    return Figure("isoflop", "Loss over model size at equal compute", " ".join(caption), chart)


def slice_frontier(study: Study) -> list[Slice]:
    """Return the budgets of the frontier's runs with the lines of the frontier."""
    law, runs = study.frontier, select_fitted_runs(study, study.frontier)
    if law is None or not len(runs):
        return []
    slices = []
    for rows in split_budgets(runs["C"].to_numpy()):
        group = runs.iloc[rows]
        C = float(np.exp(np.log(group["C"]).mean()))
        low, high = group["N"].min(), group["N"].max()
        best = find_optima(law, np.array([C])).iloc[0] if law.identified else None
        # far outside the sizes the law is an extrapolation
        if best is not None and not low / MAX_RATIO <= best["N"] <= high * MAX_RATIO:
            best = None
        ends = [low, high] if best is None else [low, high, best["N"]]
        N = np.geomspace(min(ends) / MARGIN, max(ends) * MARGIN, STEPS)
        slices.append(Slice(C, group, N, law.loss(N, C), best))
    return slices


def slice_parabolas(study: Study) -> list[Slice]:
    """Return the budgets of the main runs with parabolas; empty if no budget has enough sizes."""
    runs = study.main_runs.dropna(subset=["train_flops"])
    runs = runs.assign(N=runs["n_params"], D=runs["train_tokens"], C=runs["train_flops"])
    se = runs["loss_se"].to_numpy() if (runs["loss_se"] > 0).all() else None
    try:
        columns = (runs[name].to_numpy() for name in ("N", "D", "loss", "C"))
        parabolas = fit_isoflop(*columns, se, groups=group_trunks(runs)).parabolas
    except ValueError:
        return []
    slices = []
    for at in parabolas:
        used = at.N[at.used]
        N = np.geomspace(used.min() / MARGIN, used.max() * MARGIN, STEPS)
        # L = c0 + c1 x + c2 x^2 in x = log N; a factor of e^20 at most for a nearly flat parabola
        line, wide = np.polynomial.polynomial.polyval(np.log(N), at.coefficients), min(Z95 * at.log_se, 20)
        best = {"N": at.N_best, "loss": at.L_best}
        best |= {"N_low": at.N_best * math.exp(-wide), "N_high": at.N_best * math.exp(wide)}
        group = runs[(np.log(runs["C"] / at.C)).abs() < 0.1]
        slices.append(Slice(at.C, group, N, line, None if at.at_edge else best))
    return slices


def _add_slice(chart: "go.Figure", at: Slice, colour: str, dash: str) -> None:
    """Add the line, the runs and the best size of one budget."""
    chart.add_scatter(
        x=at.N.tolist(), y=at.loss.round(5).tolist(), mode="lines", hoverinfo="skip", showlegend=False,
        legendgroup=at.name, line={"color": colour if dash == "solid" else MUTED, "width": 2, "dash": dash},
    )  # fmt: skip
    chart.add_scatter(
        x=at.runs["N"].tolist(), y=at.runs["loss"].tolist(), mode="markers", name=at.name,
        legendgroup=at.name, marker={"color": colour, "size": 8}, customdata=describe_runs(at.runs),
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    if at.best is not None:
        _add_best(chart, at.best, at.name, colour, "x")


def _add_best(chart: "go.Figure", best: Mapping[str, float], name: str, colour: str, symbol: str) -> None:
    """Add the mark of the best size at one compute, with its interval."""
    low, high = best["N_low"], best["N_high"]
    error = {"type": "data", "symmetric": False, "array": [high - best["N"]],
             "arrayminus": [best["N"] - low], "thickness": 1.5}  # fmt: skip
    text = format_with_interval(best["N"], (low, high), format_count)
    # an interval over more than three decades would hide the points
    is_narrow = math.isfinite(low) and high < 1e3 * best["N"]
    chart.add_scatter(
        x=[best["N"]], y=[best["loss"]], mode="markers", legendgroup=name, showlegend=False,
        marker={"color": colour, "size": 11, "symbol": symbol}, error_x=error if is_narrow else None,
        hovertemplate=f"{name}<br>best N {text}, loss %{{y:.3f}}<extra></extra>",
    )  # fmt: skip


def _add_next(chart: "go.Figure", study: Study) -> None:
    """Add the line and the best size of the next budget by the frontier."""
    law, optima = study.frontier, find_answers(study)
    if law is None or optima is None:
        return
    at = optima.loc[optima["is_next"]].iloc[0]
    name = f"next: {format_exponent(at['C'])} FLOPs"
    N = np.geomspace(at["N"] / 3, at["N"] * 3, STEPS)
    chart.add_scatter(
        x=N.tolist(), y=law.loss(N, at["C"]).round(5).tolist(), mode="lines", name=name, legendgroup=name,
        hoverinfo="skip", line={"color": ACCENT, "width": 2, "dash": "dash"},
    )  # fmt: skip
    _add_best(chart, at, name, ACCENT, "diamond")


def frontier_figure(study: Study) -> Figure | None:
    """Return the best size and its loss over compute, with runs and forecasts; None without an answer."""
    from plotly.subplots import make_subplots  # slow import

    law = answering_law(study)
    runs = select_fitted_runs(study, law)
    if law is None or not len(runs):
        return None
    last = law.C[1] if isinstance(law, ComputeLaw) else float(runs["C"].max())
    C = np.geomspace(runs["C"].min(), LARGEST_STEP * last, STEPS)
    optima = find_optima(law, C)
    if not np.isfinite(optima[["N", "D", "loss"]]).all(axis=None):
        return None
    blank = make_chart(600)
    chart = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.06, figure=blank)
    for row, (name, y) in enumerate((("N", "N"), ("loss", "loss")), 1):
        _add_optima(chart, optima, name, runs, y, row)
    _add_forecasts(chart, study)
    chart.add_vrect(x0=last, x1=10 ** flops_axis(C)["range"][1], fillcolor=SHADE, line_width=0, layer="below")
    _set_axes(chart, optima, runs, study)
    compute = "C = 6 N D" if not isinstance(law, ComputeLaw) else "C"
    caption = (
        "Lines: the best size at each compute, and its loss. Bands: 95 %, confidence of the size, predictive "
        "for the loss of one run. Shaded: beyond the largest fitted budget."
    )
    if len(_select_run_forecasts(study)):
        caption += " Bars: forecasts of unseen runs, 95 %; diamonds: their measured loss."
    chart.update_xaxes(flops_axis(C, f"training compute, {compute} (FLOPs)"), row=2)
    chart.update_xaxes({"type": "log", "range": flops_axis(C)["range"]}, row=1)
    return Figure("frontier", "Best size, and its loss, over compute", caption, chart)


def _add_optima(
    chart: "go.Figure", optima: pd.DataFrame, name: str, runs: pd.DataFrame, y: str, row: int
) -> None:
    """Add the line, the band and the runs of one panel."""
    at: dict[str, Any] = {"row": row, "col": 1}
    C, line = optima["C"].tolist(), optima[name]
    low, high = optima[f"{name}_low"], optima[f"{name}_high"]
    if np.isfinite([low, high]).all():
        # an end far outside would hide the line
        ends = [end.clip(line.min() / 1e3, line.max() * 1e3).tolist() for end in (low, high)]
        add_band(chart, C, *ends, **at)
    write = format_count if name == "N" else "{:.3f}".format
    texts = [
        f"{format_exponent(c)} FLOPs<br>{name} {format_with_interval(value, ends, write)}"
        for c, value, *ends in zip(C, line, low, high, strict=True)
    ]
    chart.add_scatter(
        x=runs["C"].tolist(), y=runs[y].tolist(), mode="markers", name="runs of the fit", legendgroup="runs",
        showlegend=row == 1, marker={"color": MUTED, "size": 6, "symbol": "circle-open"},
        customdata=describe_runs(runs), hovertemplate="%{customdata}<extra></extra>", **at,
    )  # fmt: skip
    chart.add_scatter(
        x=C, y=line.tolist(), mode="lines", name="best", legendgroup="best", showlegend=row == 1,
        line={"color": ACCENT, "width": 2.4}, customdata=texts,
        hovertemplate="%{customdata}<extra></extra>", **at,
    )  # fmt: skip


def _select_run_forecasts(study: Study) -> pd.DataFrame:
    """Return the forecasts of runs with a known compute."""
    return study.forecasts[(study.forecasts["quantity"] == "run") & study.forecasts["C"].notna()]


def _add_forecasts(chart: "go.Figure", study: Study) -> None:
    """Add predicted intervals and measured losses of unseen runs to the lower panel."""
    runs, at = _select_run_forecasts(study), {"row": 2, "col": 1}
    if not len(runs):
        return
    up, down = runs["high"] - runs["predicted"], runs["predicted"] - runs["low"]
    error = {"type": "data", "symmetric": False, "array": up.tolist(), "arrayminus": down.tolist()}
    chart.add_scatter(
        x=runs["C"].tolist(), y=runs["predicted"].tolist(), mode="markers", name="forecast", error_y=error,
        marker={"color": ACCENT, "size": 9, "symbol": "line-ew", "line": {"width": 2, "color": ACCENT}},
        hovertemplate="forecast %{y:.3f}<extra></extra>", **at,
    )  # fmt: skip
    measured = runs[runs["observed"].notna()]
    if len(measured):
        chart.add_scatter(
            x=measured["C"].tolist(), y=measured["observed"].tolist(), mode="markers", name="measured",
            marker={"color": RAMP[3], "size": 10, "symbol": "diamond"},
            hovertemplate="measured %{y:.3f}<extra></extra>", **at,
        )  # fmt: skip


def _set_axes(chart: "go.Figure", optima: pd.DataFrame, runs: pd.DataFrame, study: Study) -> None:
    """Set the axes of both panels: around lines, runs and forecasts, and bands up to a factor."""
    forecasts = _select_run_forecasts(study)
    for row, name in enumerate(("N", "loss"), 1):
        shown = [*optima[name], *runs[name]]
        if name == "loss" and len(forecasts):
            shown += forecasts[["predicted", "low", "high", "observed"]].stack().dropna().tolist()
        ends = optima[[f"{name}_low", f"{name}_high"]].stack()
        shown += ends[np.isfinite(ends)].clip(min(shown) / 1.6, max(shown) * 1.6).tolist()
        axis = log_axis("parameters, N", shown) if name == "N" else loss_axis(shown)
        chart.update_yaxes(axis, row=row, col=1)


def loss_axis(values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis of losses with evenly spaced ticks, because losses span under a decade."""
    axis = log_axis(LOSS, values)
    low, high = (10**end for end in axis["range"])
    # the smallest round step with at most 7 ticks
    step = next((step for step in LOSS_STEPS if (high - low) / step <= 7), None)
    if step is not None:
        ticks = [round(k * step, 2) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return axis
