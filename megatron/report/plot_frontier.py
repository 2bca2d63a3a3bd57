"""Figures of the answer: loss over size at equal compute, and the best size and its loss over compute."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from megatron.laws.compute_law import ComputeLaw
from megatron.laws.isoflop import fit_isoflop, split_budgets
from megatron.report.answer import answering_law, find_answers, find_optima
from megatron.report.plot import (
    ACCENT,
    LOSS,
    MUTED,
    RAMP,
    SHADE,
    Chart,
    Figure,
    add_band,
    add_line,
    add_points,
    describe_runs,
    flops_axis,
    linear_axis,
    log_axis,
    make_bars,
    make_chart,
    ramp_colour,
)
from megatron.report.study_data import Study, select_fitted_runs
from megatron.study.forecast import RUN
from megatron.study.format import format_count, format_exponent, format_with_interval
from megatron.study.frontier import group_trunks

STEPS = 48  # points of a line
REACH = 10.0  # times the largest budget, of the lines of the frontier
MARGIN = 1.15  # factor by which a line extends beyond the sizes of its runs
MAX_BAND_RATIO = 1.6  # factor by which a band may extend an axis beyond its other content
MAX_RATIO = 3.0  # minima further outside the sizes of a budget than this factor are not marked
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
    """Return loss over size at each compute.

    None without a budget of several sizes.
    """
    slices, law = slice_frontier(study), study.frontier
    if not slices:
        slices, law = slice_parabolas(study), None
    if not slices:
        return None
    chart = make_chart(430)
    is_dotted = law is not None and not law.identified
    for i, at in enumerate(slices):
        _add_slice(chart, at, ramp_colour(i, len(slices)), is_dotted)
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
    """Return the budgets of the main runs with parabolas.

    Empty if no budget has enough sizes.
    """
    runs = study.main_runs.dropna(subset=["train_flops"])
    if not len(runs):
        return []
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
        # L = c0 + c1 x + c2 x^2 in x = log N; a factor of e^20 at most for a
        # nearly flat parabola
        line, wide = (np.polynomial.polynomial.polyval(np.log(N), at.coefficients), min(Z95 * at.log_se, 20))
        best = {"N": at.N_best, "loss": at.L_best}
        best |= {"N_low": at.N_best * math.exp(-wide), "N_high": at.N_best * math.exp(wide)}
        group = runs[(np.log(runs["C"] / at.C)).abs() < 0.1]
        slices.append(Slice(at.C, group, N, line, None if at.at_edge else best))
    return slices


def _add_slice(chart: Chart, at: Slice, colour: str, is_dotted: bool) -> None:
    """Add the line, the runs and the best size of one budget."""
    style = {"colour": MUTED, "dash": "dot"} if is_dotted else {"colour": colour}
    add_line(chart, at.N, at.loss.round(5), at.name, **style)
    add_points(chart, at.runs["N"], at.runs["loss"], at.name, colour, describe_runs(at.runs))
    if at.best is not None:
        _add_best(chart, at.best, at.name, colour, "x")


def _add_best(chart: Chart, best: Mapping[str, float], name: str, colour: str, symbol: str) -> None:
    """Add the mark of the best size at one compute, with its interval."""
    N, low, high = best["N"], best["N_low"], best["N_high"]
    text = f"{name}<br>best N {format_with_interval(N, (low, high), format_count)}, loss {best['loss']:.3f}"
    style: dict[str, Any] = {"symbol": symbol, "size": 11, "showlegend": False}
    # an interval over more than three decades would hide the points
    if math.isfinite(low) and high < 1e3 * N:
        style["error_x"] = make_bars([high - N], [N - low])
    add_points(chart, [N], [best["loss"]], name, colour, text, **style)


def _add_next(chart: Chart, study: Study) -> None:
    """Add the line and the best size of the next budget by the frontier."""
    law, optima = study.frontier, find_answers(study)
    if law is None or optima is None:
        return
    at = optima.loc[optima["is_next"]].iloc[0]
    name = f"next: {format_exponent(at['C'])} FLOPs"
    N = np.geomspace(at["N"] / 3, at["N"] * 3, STEPS)
    add_line(chart, N, law.loss(N, at["C"]).round(5), name, ACCENT, dash="dash", showlegend=True)
    _add_best(chart, at, name, ACCENT, "diamond")


def frontier_figure(study: Study) -> Figure | None:
    """Return the best size and its loss over compute, with runs and forecasts.

    None without an answer.
    """
    law = answering_law(study)
    runs = select_fitted_runs(study, law)
    if law is None or not len(runs):
        return None
    last = law.C[1] if isinstance(law, ComputeLaw) else float(runs["C"].max())
    forecasts = _select_run_forecasts(study)
    C = np.geomspace(runs["C"].min(), max([REACH * last, *forecasts["C"]]), STEPS)
    optima = find_optima(law, C)
    if not np.isfinite(optima[["N", "D", "loss"]]).all(axis=None):
        return None
    chart = make_chart(540, rows=2, shared_xaxes=True, vertical_spacing=0.06)
    for row, name in enumerate(("N", "loss"), 1):
        _add_optima(chart, optima, name, runs, row)
        _set_axis(chart, optima, name, runs, study, row)
    if len(forecasts):
        _add_forecasts(chart, forecasts)
    title = "training compute, FLOPs" if isinstance(law, ComputeLaw) else "6 N D, FLOPs"
    axis = flops_axis(C, title)
    shade = {"fillcolor": SHADE, "line_width": 0, "layer": "below"}
    chart.add_vrect(x0=last, x1=10 ** axis["range"][1], **shade)
    chart.update_xaxes(axis, row=2)
    chart.update_xaxes({"type": "log", "range": axis["range"]}, row=1)
    caption = (
        "Lines: the best size at each compute, and its loss. Bands: 95 %, confidence of the size, predictive "
        "for the loss of one run. Shaded: beyond the largest fitted budget."
    )
    if len(forecasts):
        caption += " Bars: forecasts of unseen runs, 95 %."
    if forecasts["observed"].notna().any():
        caption += " Diamonds: their measured loss."
    return Figure("frontier", "Best size, and its loss, over compute", caption, chart)


def _add_optima(chart: Chart, optima: pd.DataFrame, name: str, runs: pd.DataFrame, row: int) -> None:
    """Add the line, the band and the runs of one panel."""
    at: dict[str, Any] = {"row": row, "col": 1, "showlegend": row == 1}
    C, line = optima["C"], optima[name]
    low, high = optima[f"{name}_low"], optima[f"{name}_high"]
    if np.isfinite([low, high]).all():
        # an end far outside would hide the line
        shown = [end.clip(line.min() / 1e3, line.max() * 1e3) for end in (low, high)]
        add_band(chart, C, shown[0], shown[1], "best", row=row, col=1)
    write = format_count if name == "N" else "{:.3f}".format
    texts = [
        f"{format_exponent(c)} FLOPs: {name} {format_with_interval(value, ends, write)}"
        for c, value, *ends in zip(C, line, low, high, strict=True)
    ]
    style = {"symbol": "circle-open", "size": 6}
    add_points(chart, runs["C"], runs[name], "runs of the fit", MUTED, describe_runs(runs), **style, **at)
    add_line(chart, C, line, "best", ACCENT, texts, width=2.4, hoverinfo="text", **at)


def _select_run_forecasts(study: Study) -> pd.DataFrame:
    """Return the forecasts of runs with a known compute."""
    return study.forecasts[(study.forecasts["quantity"] == RUN) & study.forecasts["C"].notna()]


def _add_forecasts(chart: Chart, runs: pd.DataFrame) -> None:
    """Add predicted intervals and measured losses of unseen runs to the lower panel."""
    at = {"row": 2, "col": 1}
    bars = make_bars(runs["high"] - runs["predicted"], runs["predicted"] - runs["low"])
    texts = [f"forecast {value:.3f}" for value in runs["predicted"]]
    style = {"symbol": "line-ew-open", "size": 9, "error_y": bars | {"thickness": 3}}
    add_points(chart, runs["C"], runs["predicted"], "forecast", ACCENT, texts, **style, **at)
    seen = runs[runs["observed"].notna()]
    if len(seen):
        texts = [f"measured {value:.3f}" for value in seen["observed"]]
        style = {"symbol": "diamond", "size": 10}
        add_points(chart, seen["C"], seen["observed"], "measured", RAMP[3], texts, **style, **at)


def _set_axis(
    chart: Chart, optima: pd.DataFrame, name: str, runs: pd.DataFrame, study: Study, row: int
) -> None:
    """Set the y axis of a panel: around line, runs and forecasts, and the band up to a factor beyond them."""
    shown = [*optima[name], *runs[name]]
    if name == "loss":
        forecasts = _select_run_forecasts(study)[["predicted", "low", "high", "observed"]]
        shown += forecasts.astype(float).stack().dropna().tolist()
    ends = optima[[f"{name}_low", f"{name}_high"]].stack()
    limits = min(shown) / MAX_BAND_RATIO, max(shown) * MAX_BAND_RATIO
    shown += ends[np.isfinite(ends)].clip(*limits).tolist()
    axis = log_axis("parameters, N", shown) if name == "N" else linear_axis(LOSS, shown)
    chart.update_yaxes(axis, row=row, col=1)
