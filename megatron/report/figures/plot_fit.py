"""Figures of a law's fit: residuals, pairs of constants, held-out runs."""

import math
from typing import Any

import numpy as np

from megatron.laws.law import Law
from megatron.report import headlines
from megatron.report.figures.plot import (
    LOSS_UNIT,
    SYMBOL,
    Chip,
    Figure,
    Trace,
    format_flops_tick,
    format_run_hover,
    linear_axis,
    list_groups,
    log_axis,
    make_chart,
    make_run_chips,
    scatter_trace,
    size_colour,
)
from megatron.report.figures.plot_law import select_law_points, unique_tokens
from megatron.report.palette import ACCENT, CLOUD, INK, MUTED
from megatron.report.study_data import MASKED_DIFFUSION, Study
from megatron.study.format import OBJECTIVE_NAMES, format_count, format_plural, format_tick
from megatron.study.run_row import FinishedRow

PAIRS = (("alpha", "A"), ("beta", "B"), ("alpha", "beta"), ("alpha", "E"))
NAMES = {
    "alpha": "α, power of parameters",
    "beta": "β, power of tokens",
    "E": "E (nats per token)",
    "A": "A (nats, in parameters)",
    "B": "B (nats, in tokens)",
}
MIN_REPLICATES = 10
MAX_TICKS = 3
COLOUR = {MASKED_DIFFUSION: INK}


def residual_figure(study: Study) -> Figure | None:
    """Return the law's residuals over N, D and C; a pattern indicates a wrong form. None without points."""
    law, points = study.law, select_law_points(study)
    if law is None or not points:
        return None
    predicted = np.array([float(law.loss(row.N, row.D, unique_tokens(row))) for row in points])
    # in percent, since the law is fitted to log L: 1 % is the same error at every loss
    left = 100 * (np.array([row.loss for row in points]) / predicted - 1)
    data, panels = [], ("N", "D", "C")
    at = {
        "N": [row.N for row in points],
        "D": [row.D for row in points],
        "C": [row.C for row in points],
    }
    for i, letter in enumerate(panels):
        # traces come in panels of the first axis x, then x2 and x3
        for row, x, y in zip(points, at[letter], left, strict=True):
            data.append(residual_mark(study, row, x, float(y), "x" if i == 0 else f"x{i + 1}"))
    names = {"N": "parameters, N", "D": "tokens, D", "C": "compute (FLOPs)"}
    layout: dict[str, Any] = {
        "yaxis": linear_axis("measured minus law (% of nats)", float(left.min()), float(left.max()))
        | {"zeroline": True},
        "grid": {"rows": 1, "columns": 3, "pattern": "coupled", "xgap": 0.1},
    }
    for i, letter in enumerate(panels):
        write = format_flops_tick if letter == "C" else format_tick
        axis = log_axis(names[letter], at[letter], write)
        few = slice(None, None, max(1, math.ceil(len(axis["tickvals"]) / MAX_TICKS)))  # panels are narrow
        axis |= {"tickvals": axis["tickvals"][few], "ticktext": axis["ticktext"][few]}
        layout["xaxis" if i == 0 else f"xaxis{i + 1}"] = axis
    slopes = {letter: _slope_per_decade(np.log(at[letter]), left) for letter in panels}
    trend = headlines.describe_trend({letter: np.array(values) for letter, values in at.items()}, left)
    title = f"Residuals: a spread of {np.std(left):.2f} %, {trend}"
    caption = (
        "Each point is a run, in percent of its loss, over N, D and C = 6 N D. Residuals around zero without "
        "a pattern are consistent with the form; a slope or a bend is not."
    )
    alt = (
        f"{title}; slopes per tenfold "
        + ", ".join(f"{x}: {slope:+.2f} %" for x, slope in slopes.items())
        + "."
    )
    return Figure(
        "residuals", title, caption, alt, make_chart(data, layout, 360), make_run_chips(study, points)
    )


def residual_mark(study: Study, row: FinishedRow, x: float, y: float, axis: str) -> Trace:
    """Return the mark of one run in one panel."""
    return scatter_trace(
        [x], [y], "markers", xaxis=axis, meta=list_groups(row),
        marker={"color": size_colour(study, row), "size": 8},
        hovertemplate=f"{format_run_hover(study, row)}<br>{y:+.2f} %<extra></extra>",
    )  # fmt: skip


def _slope_per_decade(x: np.ndarray, y: np.ndarray) -> float:
    """Return the slope of y per tenfold of exp(x), x in natural log; 0 if x does not vary."""
    return float(np.polyfit(x, y, 1)[0] * math.log(10)) if np.ptp(x) > 0 else 0.0


def pairs_figure(study: Study) -> Figure | None:
    """Return scatter plots of pairs of bootstrapped constants; None without enough replicates."""
    law = study.law
    if law is None or law.n_replicates() < MIN_REPLICATES or not set(NAMES) <= set(law.replicates):
        return None
    data: list[Trace] = []
    layout: dict[str, Any] = {
        "grid": {"rows": 2, "columns": 2, "pattern": "independent", "xgap": 0.2, "ygap": 0.25}
    }
    together = []
    for i, (x, y) in enumerate(PAIRS):
        traces, axes, correlation = pair_panel(law, i, x, y)
        data += traces
        layout |= axes
        together.append(correlation)
    strongest = int(np.argmax(np.abs(together)))
    x, y = PAIRS[strongest]
    title = f"In the bootstrap, the constants {x} and {y} are the most correlated: {together[strongest]:.2f}"
    caption = (
        "Each point is the law of one resampling of the runs; the cross is the fit. A long thin cloud means "
        "that the runs determine a combination of the two constants but neither alone."
    )
    correlations = "; ".join(f"{a} and {b}: {r:.2f}" for (a, b), r in zip(PAIRS, together, strict=True))
    chips = [Chip("replicates", "replicates", ACCENT, "point"), Chip("fit", "the fit", INK, "point")]
    return Figure("pairs", title, caption, f"{title}. {correlations}.", make_chart(data, layout, 620), chips)


def pair_panel(law: Law, i: int, x: str, y: str) -> tuple[list[Trace], dict[str, Any], float]:
    """Return (traces, axes, correlation) of panel i in a 2 x 2 grid. Coefficients have a log axis."""
    number = "" if i == 0 else str(i + 1)
    on = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
    along, up = (np.array(law.replicates[name]) for name in (x, y))
    cloud = scatter_trace(
        # rounded to limit the size of the page
        along.round(6).tolist(),
        [float(f"{v:.6g}") for v in up],
        "markers",
        marker={"color": CLOUD, "size": 5},
        meta=["replicates"],
        hovertemplate=f"{x} %{{x:.3f}}, {y} %{{y:.4g}}<extra>replicate</extra>",
        **on,
    )
    fit = scatter_trace(
        [law.params[x]],
        [law.params[y]],
        "markers",
        marker={"color": INK, "size": 10, "symbol": "x"},
        meta=["fit"],
        hovertemplate=f"{x} {law.params[x]:.4g}, {y} {law.params[y]:.4g}<extra>the fit</extra>",
        **on,
    )
    logged = y in "AB" and bool((up > 0).all())
    axis = (
        log_axis(NAMES[y], up.tolist()) if logged else linear_axis(NAMES[y], float(up.min()), float(up.max()))
    )
    axes = {
        f"xaxis{number}": linear_axis(NAMES[x], float(along.min()), float(along.max())),
        f"yaxis{number}": axis,
    }
    # correlation with log A or log B, since these coefficients scatter over factors
    height = np.log(up) if logged else up
    # a constant cloud has no correlation
    steady = np.ptp(height) == 0 or np.ptp(along) == 0
    return [cloud, fit], axes, 0.0 if steady else float(np.corrcoef(along, height)[0, 1])


def held_out_figure(study: Study) -> Figure | None:
    """Return predicted over measured loss for held-out runs of each objective; None without such runs."""
    results = {objective: law.held_out for objective, law in study.laws.items() if law.held_out}
    if not results:
        return None
    ends = [
        min(min(result["low"] + result["measured"]) for result in results.values()),
        max(max(result["high"] + result["measured"]) for result in results.values()),
    ]
    data = [
        scatter_trace(
            ends, ends, "lines", hoverinfo="skip", line={"color": MUTED, "dash": "dot", "width": 1}
        ),
        *(held_out_marks(objective, result) for objective, result in results.items()),
    ]
    layout = {
        "xaxis": linear_axis(f"loss predicted ({LOSS_UNIT})", *ends),
        "yaxis": linear_axis(f"held-out loss measured ({LOSS_UNIT})", *ends),
    }
    n_runs, n_inside = (sum(result[key] for result in results.values()) for key in ("n_runs", "n_inside"))
    worst = max(result["worst_percent"] for result in results.values())
    title = (
        f"{format_plural(n_runs, 'run')} held out of the fit: predictions off by {worst:.1f} % at most, "
        f"{n_inside} of {n_runs} inside {'its' if n_runs == 1 else 'their'} predictive interval"
    )
    percent = f"{100 * next(iter(results.values()))['level']:.0f} %"
    caption = (
        f"The law was fitted without these runs. Bars: {percent} predictive intervals of a single run, "
        "the law's uncertainty and the scatter of runs around it. On the dotted line the prediction is "
        "exact."
    )
    alt = f"{title}. " + " ".join(
        describe_held_out(objective, result) for objective, result in results.items()
    )
    chips = [
        Chip(f"objective:{o}", OBJECTIVE_NAMES.get(o, o), COLOUR.get(o, ACCENT), "point") for o in results
    ]
    return Figure("heldout", title, caption, alt, make_chart(data, layout), chips if len(chips) > 1 else [])


def held_out_marks(objective: str, result: dict[str, Any]) -> Trace:
    """Return the trace of one law's held-out runs, with the intervals of their predictions."""
    colour = COLOUR.get(objective, ACCENT)
    columns = [result[name] for name in ("N", "D", "predicted", "low", "high", "measured")]
    return scatter_trace(
        result["predicted"],
        result["measured"],
        "markers",
        marker={"color": colour, "size": 10, "symbol": SYMBOL.get(objective, "square")},
        # x is the prediction: plotly takes distances from the point, not ends
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [b - x for b, x in zip(result["high"], result["predicted"], strict=True)],
            "arrayminus": [x - a for a, x in zip(result["low"], result["predicted"], strict=True)],
            "color": colour,
            "thickness": 1.2,
        },
        customdata=[
            f"N = {format_count(n)}, D = {format_count(d)}<br>predicted {x:.3f} ({a:.3f} to {b:.3f}, "
            f"predictive), measured {y:.3f}"
            for n, d, x, a, b, y in zip(*columns, strict=True)
        ],
        hovertemplate=f"%{{customdata}}<extra>{OBJECTIVE_NAMES.get(objective, objective)}</extra>",
        meta=[f"objective:{objective}"],
    )


def describe_held_out(objective: str, result: dict[str, Any]) -> str:
    """Return a sentence with the predicted and measured loss of each held-out run of one law."""
    columns = [result[name] for name in ("N", "D", "predicted", "low", "high", "measured")]
    predictions = (
        f"{format_count(n)} parameters on {format_count(d)} tokens, "
        f"{x:.3f} ({a:.3f} to {b:.3f}) predicted, {y:.3f} measured"
        for n, d, x, a, b, y in zip(*columns, strict=True)
    )
    name = OBJECTIVE_NAMES.get(objective, objective)
    rms = f"root mean square {result['rms_percent']:.2f} %"
    return f"{name[:1].upper()}{name[1:]}: {'; '.join(predictions)}; {rms}."
