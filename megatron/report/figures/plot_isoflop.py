"""Figures of equal compute and of equal loss: isoFLOP curves, and contours of L(N, D)."""

import math

import numpy as np

from megatron.laws.frontier import optimal_frontier
from megatron.laws.isoflop import IsoFlop, Parabola, fit_isoflop
from megatron.report import verdict
from megatron.report.figures.plot import (
    LOSS_UNIT,
    Chip,
    Figure,
    Trace,
    contour_trace,
    linear_axis,
    log_axis,
    make_chart,
    make_run_chips,
    make_run_mark,
    scatter_trace,
)
from megatron.report.figures.plot_law import largest_compute, line_style, select_law_points
from megatron.report.frontier_text import select_frontier_points
from megatron.report.palette import ACCENT
from megatron.report.study_data import Study
from megatron.study.format import (
    format_count,
    format_exponent,
    format_interval,
    format_with_interval,
)
from megatron.study.study_frontier import group_trunks

STEPS = 40  # points per side of the contour grid
Z95 = 1.96


def fit_study_isoflop(study: Study) -> IsoFlop | None:
    """Fit parabolas to the finished runs of the first objective with enough runs; None without a budget."""
    for objective in study.objectives():
        rows = [row for row in study.finished_rows(objective) if row.train_flops]
        if not rows:
            continue
        N, D, L, C = (
            np.array([row.number(name) for row in rows], dtype=float)
            for name in ("n_params", "train_tokens", "loss", "train_flops")
        )
        # standard errors are used only if every run has one
        errors = [row.loss_se for row in rows]
        try:
            se = np.array(errors) if all(errors) else None
            return fit_isoflop(N, D, L, C, se, groups=group_trunks(rows))
        except ValueError:
            continue
    return None


def isoflop_figure(study: Study) -> Figure | None:
    """Return loss over N at each compute with parabolas and minima; None if no budget has enough runs.

    Also None if the study's frontier has its own slices (plot_frontier.slices_figure).
    """
    isoflop = fit_study_isoflop(study)
    if isoflop is None or select_frontier_points(study):
        return None
    data: list[Trace] = []
    chips = []
    for i, parabola in enumerate(isoflop.parabolas):
        name = f"{format_exponent(parabola.C)} FLOPs"
        data += parabola_traces(parabola, f"isoflop:{i}", f"var(--budget{i})", name)
        chips.append(Chip(f"isoflop:{i}", name, f"var(--budget{i})"))
    sizes = np.concatenate([parabola.N for parabola in isoflop.parabolas])
    losses = np.concatenate([parabola.L for parabola in isoflop.parabolas])
    layout = {
        "xaxis": log_axis("parameters, N", sizes.tolist()),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", losses.min(), losses.max()),
    }
    last = isoflop.parabolas[-1]
    where = "beyond the sizes tried, at" if last.at_edge else "at"
    title = (
        f"At {format_exponent(last.C)} FLOPs the parabola's minimum is {where} "
        f"{format_count(last.N_best)} parameters"
    )
    if isoflop.size is not None:
        low, high = isoflop.size.interval
        inside = format_interval([low, high], "{:.2f}".format)
        power = f"power {isoflop.size.exponent:.2f}" + (f" ({inside})" if inside else "")
        # the direction is stated only if the interval of the exponent excludes 0
        way = "grows" if low > 0 else "falls" if high < 0 else ""
        title = f"By isoFLOP curves N* {way} as C to the {power}"
        if not way:  # also without an interval
            title = f"IsoFLOP curves leave open whether N* grows with C: {power}"
    caption = (
        "Points: finished runs of about equal FLOPs. Lines: parabolas in log N. Crosses: their minima, with "
        "95 % confidence intervals of the fit. A parabola is symmetric and a loss is not: compare with the "
        "law's optimum. " + " ".join(isoflop.warnings)
    ).strip()
    alt = f"{title}. " + "; ".join(
        f"at {format_exponent(parabola.C)} FLOPs the minimum is at N = {format_count(parabola.N_best)}"
        for parabola in isoflop.parabolas
    )
    return Figure("isoflop", title, caption, f"{alt}.", make_chart(data, layout), chips)


def parabola_traces(parabola: Parabola, key: str, colour: str, name: str) -> list[Trace]:
    """Return the traces of one budget: runs, parabola, and minimum with its error."""
    fitted = parabola.N[parabola.used]
    # L = c0 + c1 x + c2 x^2 in x = log N; coefficients in this order
    x = np.log(np.geomspace(fitted.min() / 1.1, fitted.max() * 1.1, 50))
    line = np.polynomial.polynomial.polyval(x, parabola.coefficients)
    # a factor of e^20 at most, so that a nearly flat parabola does not overflow
    wide = min(Z95 * parabola.log_se, 20.0)
    ends = (parabola.N_best * math.exp(-wide), parabola.N_best * math.exp(wide))
    label = f"{name}<br>N* = {format_with_interval(parabola.N_best, ends, format_count)}"
    return [
        scatter_trace(
            np.exp(x).tolist(), line.round(5).tolist(), "lines", meta=[key], hoverinfo="skip",
            line={"color": colour, "width": 2},
        ),
        scatter_trace(
            parabola.N.tolist(), parabola.L.tolist(), "markers", meta=[key],
            marker={"color": colour, "size": 8},
            hovertemplate=f"{name}<br>N = %{{x:.3s}}, loss %{{y:.4f}}<extra></extra>",
        ),
        scatter_trace(
            [parabola.N_best], [parabola.L_best], "markers", meta=[key],
            marker={"color": colour, "size": 11, "symbol": "x"},
            error_x={
                "type": "data", "symmetric": False, "array": [ends[1] - parabola.N_best],
                "arrayminus": [parabola.N_best - ends[0]], "color": colour, "thickness": 1.5,
            },
            hovertemplate=f"{label}<extra>minimum</extra>",
        ),
    ]  # fmt: skip


def contour_figure(study: Study) -> Figure | None:
    """Return contours of L(N, D), the runs, and the compute-optimal path; None without a law."""
    law, points = study.law, select_law_points(study)
    if law is None or not points:
        return None
    N, D = (
        np.geomspace(min(values) / 2, max(values) * 2, STEPS)
        for values in ([row.N for row in points], [row.D for row in points])
    )
    # [STEPS (D, rows), STEPS (N, columns)], as plotly expects z
    z = law.loss(N[None, :], D[:, None])
    first, last = (min(row.C for row in points), largest_compute(study))
    best = optimal_frontier(law, np.geomspace(first, last, 30))
    data: list[Trace] = [
        contour_trace(
            N.tolist(), D.tolist(), z.round(4).tolist(), ncontours=14, meta=["contours"],
            hovertemplate="N %{x:.3s}, D %{y:.3s}<br>the law %{z:.3f}<extra></extra>",
        ),
        scatter_trace(
            best.N.tolist(), best.D.tolist(), "lines", meta=["optimum"],
            line=line_style(law, ACCENT, 2.4),
            customdata=[format_exponent(c) for c in best.C],
            hovertemplate="optimum at %{customdata} FLOPs<extra></extra>",
        ),
    ]  # fmt: skip
    for row in points:
        # a vertical error bar of the loss is invisible on a contour figure
        mark = make_run_mark(study, row, row.N)
        data.append(mark.update(y=[row.D], error_y={"visible": False}))
    layout = {
        "xaxis": log_axis("parameters, N", N.tolist()),
        "yaxis": log_axis("training tokens, D", D.tolist()),
    }
    low, high = float(z.min()), float(z.max())
    title = (
        f"Over these sizes and tokens {verdict.name_law(law)} goes from {high:.2f} down to {low:.2f} "
        "nats per token"
    )
    caption = (
        "Thin lines: equal loss by the law, with every token new. Heavy line: the N and D of lowest loss at "
        "each compute. Points: the runs of the fit."
    )
    alt = f"{title}."
    if verdict.is_sound(law):
        start, end = (
            f"N = {format_count(best.N[i])}, D = {format_count(best.D[i])}" for i in (0, len(best.N) - 1)
        )
        alt += f" The compute-optimal path runs from {start} to {end}."
    chips = [Chip("optimum", "optimum", ACCENT), *make_run_chips(study, points)]
    return Figure("contours", title, caption, alt, make_chart(data, layout, 460), chips)
