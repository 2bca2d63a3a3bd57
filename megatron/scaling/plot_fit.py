"""Figures of the fit itself: residuals, pairs of constants, the profile of one, runs held out of it."""

import math
from typing import Any

import numpy as np

from megatron.scaling import headlines, wording
from megatron.scaling.law import Law
from megatron.scaling.plot import (
    LOSS_UNIT,
    SYMBOL,
    Chip,
    Figure,
    describe,
    flops_tick,
    groups,
    linear_axis,
    log_axis,
    run_chips,
    scatter,
    size_colour,
)
from megatron.scaling.plot_law import law_points, unique_of
from megatron.scaling.study import MASKED_DIFFUSION, Study
from megatron.scaling.table import Row

PAIRS = (("alpha", "A"), ("beta", "B"), ("alpha", "beta"), ("alpha", "E"))
NAMES = {
    "alpha": "α, power of parameters",
    "beta": "β, power of tokens",
    "E": "E (nats per token)",
    "A": "A (nats, in parameters)",
    "B": "B (nats, in tokens)",
}
FEWEST_REPLICATES = 10
MOST_TICKS = 3
COLOUR = {MASKED_DIFFUSION: "@ink"}
THRESHOLD = 3.84  # of chi-square with one degree of freedom, 95 %


def residual_figure(study: Study) -> Figure | None:
    """What the law leaves over, against N, D and C: a pattern would say that the form is wrong."""
    points = law_points(study)
    if not points:
        return None
    said = np.array([float(study.law.loss(row["N"], row["D"], unique_of(row))) for row in points])
    left = 100 * (np.array([row["loss"] for row in points]) / said - 1)
    data, panels = [], ("N", "D", "C")
    at = {
        "N": [row["N"] for row in points],
        "D": [row["D"] for row in points],
        "C": [6.0 * row["N"] * row["D"] for row in points],
    }
    for i, letter in enumerate(panels):
        for row, x, y in zip(points, at[letter], left, strict=True):
            data.append(residual_mark(study, row, x, float(y), "x" if i == 0 else f"x{i + 1}"))
    names = {"N": "parameters, N", "D": "tokens, D", "C": "compute (FLOPs)"}
    layout: dict[str, Any] = {
        "yaxis": linear_axis("measured minus law (% of nats)", float(left.min()), float(left.max()))
        | {"zeroline": True, "zerolinecolor": "@muted"}
    }
    for i, letter in enumerate(panels):
        write = flops_tick if letter == "C" else wording.tick
        axis = log_axis(names[letter], at[letter], write) | {"domain": [i * 0.345, i * 0.345 + 0.31]}
        few = slice(None, None, max(1, math.ceil(len(axis["tickvals"]) / MOST_TICKS)))  # a panel is narrow
        axis |= {"tickvals": axis["tickvals"][few], "ticktext": axis["ticktext"][few], "anchor": "y"}
        layout["xaxis" if i == 0 else f"xaxis{i + 1}"] = axis
    slopes = {letter: _trend(np.log(at[letter]), left) for letter in panels}
    trend = headlines.trend_claim({letter: np.array(values) for letter, values in at.items()}, left)
    title = f"Residuals: a spread of {np.std(left):.2f} %, {trend}"
    caption = (
        "Each point is a run, in per cent of its loss, against N, D and C = 6 N D. Around zero without a "
        "pattern they do not speak against the form; a slope or a bend does."
    )
    alt = (
        f"{title}; slopes by tenfold "
        + ", ".join(f"{x}: {slope:+.2f} %" for x, slope in slopes.items())
        + "."
    )
    return Figure("residuals", title, caption, alt, data, layout, run_chips(study, points), 360)


def residual_mark(study: Study, row: Row, x: float, y: float, axis: str) -> dict[str, Any]:
    """One run in one panel."""
    return scatter(
        [x], [y], "markers", xaxis=axis, meta=groups(row),
        marker={"color": size_colour(study, row), "size": 8},
        hovertemplate=f"{describe(study, row)}<br>{y:+.2f} %<extra></extra>",
    )  # fmt: skip


def _trend(x: np.ndarray, y: np.ndarray) -> float:
    """By how much y rises over a tenfold, x being a natural log; 0 where x does not vary."""
    return float(np.polyfit(x, y, 1)[0] * math.log(10)) if np.ptp(x) > 0 else 0.0


def pairs_figure(study: Study) -> Figure | None:
    """Constants of the bootstrap replicates, two by two; None where a law has no such replicates."""
    law = study.law
    if law is None or law.n_replicates() < FEWEST_REPLICATES or not set(NAMES) <= set(law.replicates):
        return None
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {}
    together = []
    for i, (x, y) in enumerate(PAIRS):
        traces, axes, correlation = pair_panel(law, i, x, y)
        data += traces
        layout |= axes
        together.append(correlation)
    strongest = int(np.argmax(np.abs(together)))
    x, y = PAIRS[strongest]
    title = f"Of the bootstrap's constants {x} and {y} are the most correlated: {together[strongest]:.2f}"
    caption = (
        "Each point is the law of one resampling of the runs; the cross is the fit. A long thin cloud means "
        "that the runs hold a combination of the two and neither alone."
    )
    told = "; ".join(f"{a} and {b}: {r:.2f}" for (a, b), r in zip(PAIRS, together, strict=True))
    chips = [Chip("replicates", "replicates", "@accent", "point"), Chip("fit", "the fit", "@ink", "point")]
    return Figure("pairs", title, caption, f"{title}. {told}.", data, layout, chips, 620)


def pair_panel(law: Law, i: int, x: str, y: str) -> tuple[list[dict[str, Any]], dict[str, Any], float]:
    """(traces, axes, correlation) of panel i of four, two by two; a coefficient is drawn by its log."""
    number = "" if i == 0 else str(i + 1)
    on = {"xaxis": f"x{number}", "yaxis": f"y{number}"}
    along, up = (np.array(law.replicates[name]) for name in (x, y))
    cloud = scatter(
        along.round(6).tolist(),
        [float(f"{v:.6g}") for v in up],
        "markers",
        marker={"color": "@accent/0.45", "size": 5},
        meta=["replicates"],
        hovertemplate=f"{x} %{{x:.3f}}, {y} %{{y:.4g}}<extra>replicate</extra>",
        **on,
    )
    fit = scatter(
        [law.params[x]],
        [law.params[y]],
        "markers",
        marker={"color": "@ink", "size": 10, "symbol": "x"},
        meta=["fit"],
        hovertemplate=f"{x} {law.params[x]:.4g}, {y} {law.params[y]:.4g}<extra>the fit</extra>",
        **on,
    )
    left, low = (i % 2) * 0.55, 0.57 * (1 - i // 2)
    logged = y in "AB" and bool((up > 0).all())
    axis = (
        log_axis(NAMES[y], up.tolist()) if logged else linear_axis(NAMES[y], float(up.min()), float(up.max()))
    )
    axes = {
        f"xaxis{number}": linear_axis(NAMES[x], float(along.min()), float(along.max()))
        | {"domain": [left, left + 0.45], "anchor": on["yaxis"]},
        f"yaxis{number}": axis | {"domain": [low, low + 0.43], "anchor": on["xaxis"]},
    }
    height = np.log(up) if logged else up
    steady = np.ptp(height) == 0 or np.ptp(along) == 0
    return [cloud, fit], axes, 0.0 if steady else float(np.corrcoef(along, height)[0, 1])


def profile_figure(study: Study) -> Figure | None:
    """How much worse the fit is with one constant held elsewhere; None where fit_law.py made no --profile."""
    told = study.law.profile if study.law is not None else {}
    if not told:
        return None
    values, statistic = (np.array(told[name], dtype=float) for name in ("values", "statistic"))
    shown = statistic < 60
    values, statistic = values[shown], statistic[shown]
    name = told["name"]
    data = [
        scatter(
            values.tolist(),
            statistic.round(4).tolist(),
            "lines+markers",
            line={"color": "@accent", "width": 2},
            marker={"color": "@accent", "size": 6},
            hovertemplate=f"{name}* %{{x:.3g}}: worse by %{{y:.2f}}<extra></extra>",
            meta=["profile"],
        ),
        scatter(
            [values.min(), values.max()],
            [THRESHOLD, THRESHOLD],
            "lines",
            line={"color": "@muted", "width": 1.2, "dash": "dot"},
            hoverinfo="skip",
            meta=["threshold"],
        ),
    ]
    unit = "nats per token" if name == "E" else "repeats of the unique tokens"
    layout = {
        "xaxis": log_axis(f"{name}* ({unit})", values.tolist()),
        "yaxis": linear_axis(
            "−2 log likelihood above the best (nats)", 0.0, max(8.0, float(statistic.max()))
        ),
    }
    caption = (
        "Line: the constant held there and the others fitted again. Below the dotted line a value is as good "
        "as the best at 95 % confidence; where the line stays below it to an end of the figure, the runs do "
        "not say."
    )
    chips = [Chip("profile", "profile", "@accent"), Chip("threshold", "95 %", "@muted", "dot")]
    return Figure(
        "profile", told["words"], caption, f"{told['words']} Threshold {THRESHOLD}.", data, layout, chips
    )


def held_out_figure(study: Study) -> Figure | None:
    """Predictions for runs that no law was fitted on, each objective by its own; None without such runs."""
    told = {objective: law.held_out for objective, law in study.laws.items() if law.held_out}
    if not told:
        return None
    ends = [
        min(min(one["low"] + one["measured"]) for one in told.values()),
        max(max(one["high"] + one["measured"]) for one in told.values()),
    ]
    data = [
        scatter(ends, ends, "lines", hoverinfo="skip", line={"color": "@muted", "dash": "dot", "width": 1}),
        *(held_out_marks(objective, one) for objective, one in told.items()),
    ]
    layout = {
        "xaxis": linear_axis(f"loss predicted ({LOSS_UNIT})", *ends),
        "yaxis": linear_axis(f"held-out loss measured ({LOSS_UNIT})", *ends),
    }
    n_runs, n_inside = (sum(one[key] for one in told.values()) for key in ("n_runs", "n_inside"))
    worst = max(one["worst_percent"] for one in told.values())
    title = (
        f"{wording.plural(n_runs, 'run')} held out of the fit: predictions off by {worst:.1f} % at most, "
        f"{n_inside} of {n_runs} inside {'its' if n_runs == 1 else 'their'} predictive interval"
    )
    percent = f"{100 * next(iter(told.values()))['level']:.0f} %"
    caption = (
        f"The law was fitted without these runs. Bars: {percent} predictive intervals of a single run, "
        "the law's own uncertainty and the spread of runs around it. On the dotted line the prediction is "
        "exact."
    )
    alt = f"{title}. " + " ".join(held_out_words(objective, one) for objective, one in told.items())
    chips = [
        Chip(f"objective:{o}", wording.OBJECTIVES.get(o, o), COLOUR.get(o, "@accent"), "point") for o in told
    ]
    return Figure("heldout", title, caption, alt, data, layout, chips if len(chips) > 1 else [])


def held_out_marks(objective: str, told: dict[str, Any]) -> dict[str, Any]:
    """The runs held out of one law, with the intervals of their predictions."""
    colour = COLOUR.get(objective, "@accent")
    columns = [told[name] for name in ("N", "D", "predicted", "low", "high", "measured")]
    return scatter(
        told["predicted"],
        told["measured"],
        "markers",
        marker={"color": colour, "size": 10, "symbol": SYMBOL.get(objective, "square")},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [b - x for b, x in zip(told["high"], told["predicted"], strict=True)],
            "arrayminus": [x - a for a, x in zip(told["low"], told["predicted"], strict=True)],
            "color": colour,
            "thickness": 1.2,
        },
        customdata=[
            f"N = {wording.count(n)}, D = {wording.count(d)}<br>predicted {x:.3f} ({a:.3f} to {b:.3f}, "
            f"predictive), measured {y:.3f}"
            for n, d, x, a, b, y in zip(*columns, strict=True)
        ],
        hovertemplate=f"%{{customdata}}<extra>{wording.OBJECTIVES.get(objective, objective)}</extra>",
        meta=[f"objective:{objective}"],
    )


def held_out_words(objective: str, told: dict[str, Any]) -> str:
    """Each prediction of one law beside what was measured."""
    columns = [told[name] for name in ("N", "D", "predicted", "low", "high", "measured")]
    each = (
        f"{wording.count(n)} parameters on {wording.count(d)} tokens, "
        f"{x:.3f} ({a:.3f} to {b:.3f}) predicted, {y:.3f} measured"
        for n, d, x, a, b, y in zip(*columns, strict=True)
    )
    name = wording.OBJECTIVES.get(objective, objective)
    return f"{name[:1].upper()}{name[1:]}: {'; '.join(each)}; root mean square {told['rms_percent']:.2f} %."
