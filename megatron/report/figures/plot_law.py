"""Figures of the fitted law: the law and its runs, and the compute-optimal N and D."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from megatron.laws.forms import FORM
from megatron.laws.frontier import frontier_bands, optimal_frontier
from megatron.laws.law import PUBLISHED, Law
from megatron.report import frontier_text, verdict
from megatron.report.figures.plot import (
    LOSS_UNIT,
    Chip,
    Figure,
    Trace,
    band_trace,
    format_flops_tick,
    format_run_hover,
    linear_axis,
    log_axis,
    make_chart,
    make_run_chips,
    make_run_mark,
    scatter_trace,
    shade_beyond,
)
from megatron.report.palette import ACCENT, MUTED
from megatron.report.study_data import RunPoint, Study
from megatron.study.format import (
    format_count,
    format_exponent,
    format_interval,
    format_plural,
    format_ratio,
    format_with_interval,
    join_list,
)
from megatron.study.run_row import FinishedRow

# N* = 1.3e9 (C / 8.64e19)^0.73, fitted on another corpus
KAPLAN = "Kaplan et al. 2020"
EXTRAPOLATION = 10.0  # the optimum is shown up to this multiple of the largest run's compute
# a panel of the optimum: letter, y axis, line [n] and the ends of its band
Panel: TypeAlias = tuple[str, str, np.ndarray, tuple[np.ndarray, np.ndarray] | None]
LETTERS = {"n_params": "N", "n_non_embedding": "N (without embeddings)"}


@dataclass(frozen=True)
class OptimumPath:
    """Compute-optimal N and D at each C, with interval ends (None without bootstrap replicates)."""

    C: np.ndarray  # [n] FLOPs, by C = 6 N D
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    N_ends: tuple[np.ndarray, np.ndarray] | None
    D_ends: tuple[np.ndarray, np.ndarray] | None


def select_law_points(study: Study) -> list[RunPoint]:
    """Return the finished runs that the law was fitted on, with N and D of the fitted columns and C = 6 N D.

    These are the runs that the law lists, or without a list those of `select_matching_runs`.
    """
    law = study.law
    if law is None:
        return []
    rows = select_matching_runs(study)
    if law.runs:
        rows = [row for row in study.finished_rows() if row.run in set(law.runs)]
    columns = law.columns or {}
    points = []
    for row in rows:
        N = row.number(columns.get("N", "n_params"))
        D = row.number(columns.get("D", "train_tokens"))
        if N and D:
            points.append(RunPoint(**vars(row), N=N, D=D, C=6.0 * N * D))
    return points


def select_matching_runs(study: Study) -> list[FinishedRow]:
    """Return the finished runs that the law's filter selects, which may have finished after the fit."""
    law = study.law
    if law is None:
        return []
    filters = dict(law.filter or {})
    most, held_out = filters.pop("max_loss", math.inf), set(law.held_out.get("runs", ()))
    return [
        row
        for row in study.finished_rows()
        # values of `filter` come from JSON and rows from files, so they are compared as text
        if all(str(row.value(name)) == str(value) for name, value in filters.items())
        and row.loss <= most
        and row.run not in held_out
    ]


def unique_tokens(row: FinishedRow) -> float:
    """Return the unique tokens of a run; Inf if unknown."""
    return row.unique_tokens or math.inf


def largest_compute(study: Study) -> float:
    """Return the largest 6 N D of the law's runs in FLOPs, or of its ranges if the study has none of them."""
    points = select_law_points(study)
    if points:
        return max(row.C for row in points)
    assert study.law is not None, "callers return early without a law"
    return 6.0 * study.law.ranges["N"][1] * study.law.ranges["D"][1]


def find_optimum_path(law: Law, C: np.ndarray) -> OptimumPath:
    """Return the law's compute-optimal N and D for each C [n] in FLOPs, with the law's intervals."""
    best = optimal_frontier(law, C)
    ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if law.replicates:
        ends = frontier_bands(law, C, law.interval.get("level", 0.95))
    return OptimumPath(C, best.N, best.D, best.L, ends.get("N"), ends.get("D"))


def prediction_figure(study: Study) -> Figure | None:
    """Return measured over predicted loss of each run; None without points."""
    law, points = study.law, select_law_points(study)
    if law is None or not points:
        return None
    predicted = np.array([float(law.loss(row.N, row.D, unique_tokens(row))) for row in points])
    measured = np.array([row.loss for row in points])
    off = 100 * (predicted / measured - 1)
    low, high = min(*predicted, *measured), max(*predicted, *measured)
    data = [
        scatter_trace(
            [low, high],
            [low, high],
            "lines",
            hoverinfo="skip",
            line={"color": MUTED, "dash": "dot", "width": 1},
        )
    ]
    for row, x, error in zip(points, predicted, off, strict=True):
        data.append(make_run_mark(study, row, x, f"<br>the law {x:.3f} ({error:+.2f} %)"))
    layout = {
        "xaxis": linear_axis(f"loss the law gives ({LOSS_UNIT})", low, high),
        "yaxis": linear_axis(f"held-out loss measured ({LOSS_UNIT})", low, high),
    }
    worst, name = points[int(np.argmax(abs(off)))], verdict.name_law(law)
    title = (
        f"{name[:1].upper()}{name[1:]} is off by {np.median(abs(off)):.1f} % in the median of its own "
        f"{format_plural(len(points), 'run')}, by {max(abs(off)):.1f} % at worst"
    )
    caption = (
        "On the dotted line the law is exact. Bars: two standard errors of the measured loss. These runs "
        "were used in the fit, so the figure does not show how well the law predicts other runs."
    )
    alt = f"{title}. The worst is {worst.run}, measured {worst.loss:.3f}."
    return Figure("prediction", title, caption, alt, make_chart(data, layout), make_run_chips(study, points))


def line_style(law: Law, colour: str, width: float) -> dict[str, Any]:
    """Return the line style of a law: grey and dotted if the law is not sound."""
    if verdict.is_sound(law):
        return {"color": colour, "width": width}
    return {"color": MUTED, "width": width, "dash": "dot"}


def size_figure(study: Study) -> Figure | None:
    """Return L over N at each D, with the law's line; None without points."""
    law, points = study.law, select_law_points(study)
    if law is None or not points:
        return None
    budgets = sorted({row.D for row in points})
    sizes = [row.N for row in points]
    N = np.geomspace(min(sizes) / 1.15, max(sizes) * 1.15, 60)
    data, chips, losses = [], [], [row.loss for row in points]
    for i, D in enumerate(budgets):
        line = np.asarray(law.loss(N, np.full_like(N, D)))
        losses += list(line)
        about = {"meta": [f"budget:{D}"]}
        data.append(
            scatter_trace(
                N.tolist(),
                line.round(5).tolist(),
                "lines",
                line=line_style(law, f"var(--budget{i})", 2),
                hoverinfo="skip",
                **about,
            )
        )
        for row in points:
            if row.D == D:
                data.append(make_run_mark(study, row, row.N, colour=f"var(--budget{i})").update(about))
        chips.append(Chip(f"budget:{D}", f"{format_count(D)} tokens", f"var(--budget{i})"))
    letter = LETTERS.get((law.columns or {}).get("N", "n_params"), "N")
    layout = {
        "xaxis": log_axis(f"parameters, {letter}", list(N)),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    small, large, few, many = min(sizes), max(sizes), budgets[0], budgets[-1]
    # the gain of N at the largest D, and of D at the largest N
    by_N, by_D = (float(law.loss(*start) - law.loss(large, many)) for start in ((small, many), (large, few)))
    parts, name = [], verdict.name_law(law)
    if large > small:
        # `0 - x` instead of `-x`: no "-0.00" in the text
        parts.append(
            f"{format_ratio(large / small)} times the parameters change the loss by {0 - by_N:.2f} nats"
        )
    if many > few:
        parts.append(f"{format_ratio(many / few)} times the tokens change it by {0 - by_D:.2f} nats")
    title = f"By {name} {join_list(parts)}" if parts else f"One size and budget, by {name}"
    caption = "Lines: the fitted law at each token budget. Points: finished runs, with two standard errors."
    if FORM[law.form].needs_unique:
        caption += " The lines are for text read once: runs above their line read their text several times."
    alt = f"{title}."
    if is_flattening(law, N, budgets):
        alt += " The curves flatten to the right: at fixed tokens each further doubling of N brings less."
    return Figure("size", title, caption, alt, make_chart(data, layout), chips)


def is_flattening(law: Law, N: np.ndarray, budgets: Sequence[float]) -> bool:
    """Return whether the law's loss falls with N [n] (log-spaced) by decreasing steps at every budget."""
    # differences of log-spaced N: positive and decreasing gains mean a curve that falls and flattens
    gains = [-np.diff(law.loss(N, np.full_like(N, D))) for D in budgets]
    return len(N) > 2 and all((gain > 0).all() and (np.diff(gain) < 0).all() for gain in gains)


def optimum_figure(study: Study) -> Figure | None:
    """Return compute-optimal N (top) and D (bottom) over C, with bands, up to ten times the largest run.

    None without a law, and for a law that is not sound if the study's frontier has the answer.
    """
    if study.law is None or (frontier_text.has_answer(study) and not verdict.is_sound(study.law)):
        return None
    points = select_law_points(study)
    last = largest_compute(study)
    first = min((row.C for row in points), default=last / 100)
    C = np.geomspace(first, last * EXTRAPOLATION, 48)
    best = find_optimum_path(study.law, C)
    data: list[Trace] = []
    panels = (("N", "y", best.N, best.N_ends), ("D", "y2", best.D, best.D_ends))
    for panel in panels:
        data += optimum_traces(study, points, C, *panel)
    data += literature_traces(C)
    layout = optimum_layout(points, C, last, panels)
    exponent = study.law.derived.get("a_exponent")
    ends = ((study.law.interval or {}).get("derived") or {}).get("a_exponent")
    title = "Compute-optimal N and D by the law"
    sound = verdict.is_sound(study.law)
    if not sound:
        title = (
            f"No compute-optimal size follows from {verdict.name_law(study.law)} ({study.law.n_runs} runs)"
        )
    elif exponent is not None:
        inside = format_interval(ends, "{:.2f}".format)
        title = f"The compute-optimal N grows as C to the power {exponent:.2f}" + (
            f" ({inside})" if inside else ""
        )
    caption = (
        f"Line: the N and D of lowest loss at each compute, C = 6 N D. Band: {describe_band(study.law)}. "
        f"Rings: the runs. Dotted: {join_list([*PUBLISHED, KAPLAN])}. The shaded part is beyond the largest "
        "run, where the law is not tested."
    )
    at = find_optimum_path(study.law, np.array([last, last * EXTRAPOLATION]))
    alt = f"{title}. " + "; ".join(
        f"at {format_exponent(c)} FLOPs N is {format_count(n)} and D {format_count(d)}"
        for c, n, d in zip(at.C, at.N, at.D, strict=True)
    )
    alt = alt if sound else f"{title}. The lines are grey and dotted"
    chips = [
        Chip("optimum", "optimum", ACCENT),
        Chip("runs", "runs", MUTED, "point"),
        Chip("literature", "the literature", MUTED, "dot"),
    ]
    return Figure("optimum", title, caption, f"{alt}.", make_chart(data, layout, 620), chips)


def literature_traces(C: np.ndarray) -> list[Trace]:
    """Return N* and D* over C [n] of published laws. They used other text; Kaplan's N excludes embeddings."""
    lines = {}
    for name, params in PUBLISHED.items():
        best = optimal_frontier(
            Law(form="chinchilla", params=params, objective=0.0, huber_delta=1.0, n_runs=0), C
        )
        lines[name] = (best.N, best.D)
    # Kaplan's exponent is for N without embeddings, so the line is only indicative
    # in FLOPs: 8.64e19 is one petaflop/s-day, the unit of arXiv 2001.08361
    N = 1.3e9 * (C / 8.64e19) ** 0.73
    lines[KAPLAN] = (N, C / (6 * N))
    return [
        scatter_trace(
            C.tolist(), y.tolist(), "lines", yaxis=axis, meta=["literature"],
            line={"color": MUTED, "width": 1.2, "dash": "dot"},
            hovertemplate=f"{name}<br>%{{y:.3s}} at %{{x:.2s}} FLOPs<extra></extra>",
        )
        for name, pair in lines.items()
        for axis, y in zip(("y", "y2"), pair, strict=True)
    ]  # fmt: skip


def optimum_traces(
    study: Study,
    points: Sequence[RunPoint],
    C: np.ndarray,
    letter: str,
    axis: str,
    line: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray] | None,
) -> list[Trace]:
    """Return the traces of one panel: the band if there is one, the runs, and the optimum on top."""
    assert study.law is not None, "optimum_figure returns early without a law"
    bounds = zip(*ends, strict=True) if ends else [None] * len(C)
    texts = [
        f"{format_exponent(c)} FLOPs<br>{letter} = {format_with_interval(x, inside, format_count)}"
        for c, x, inside in zip(C, line, bounds, strict=True)
    ]
    runs = scatter_trace(
        [row.C for row in points],
        [row.N if letter == "N" else row.D for row in points],
        "markers",
        yaxis=axis,
        meta=["runs"],
        marker={"color": MUTED, "size": 6, "symbol": "circle-open"},
        customdata=[format_run_hover(study, row) for row in points],
        hovertemplate="%{customdata}<extra>run</extra>",
    )
    best = scatter_trace(
        C.tolist(),
        line.tolist(),
        "lines",
        yaxis=axis,
        meta=["optimum"],
        customdata=texts,
        line=line_style(study.law, ACCENT, 2.4),
        hovertemplate="%{customdata}<extra></extra>",
    )
    return [*([band_trace(C, ends, "optimum", yaxis=axis)] if ends else []), runs, best]


def describe_band(law: Law) -> str:
    """Return a description of the bands."""
    interval = law.interval or {}
    if not interval.get("n_bootstrap"):
        return "none, because the law has no bootstrap"
    refits = format_plural(interval["n_bootstrap"], "bootstrap refit")
    return f"{100 * interval.get('level', 0.95):.0f} % confidence, of {refits}"


def optimum_layout(
    points: Sequence[RunPoint], C: np.ndarray, last: float, panels: Sequence[Panel]
) -> dict[str, Any]:
    """Return a layout of two stacked panels with one C axis; the range beyond the runs is shaded."""
    names = {"N": "parameters, N", "D": "tokens, D"}
    layout: dict[str, Any] = {
        "grid": {"rows": 2, "columns": 1, "pattern": "coupled", "ygap": 0.15},
        "xaxis": log_axis("compute, C = 6 N D (FLOPs)", list(C), format_flops_tick),
    }
    for letter, axis, line, ends in panels:
        shown = [
            *line,
            *(row.N if letter == "N" else row.D for row in points),
            *(ends[0] if ends else ()),
            *(ends[1] if ends else ()),
        ]
        # a vanished term (A = 0 or B = 0) has its optimum at N = 0 or infinite D, which a log axis cannot
        # show
        shown = [x for x in shown if math.isfinite(x) and x > 0]
        layout[axis.replace("y", "yaxis")] = log_axis(names[letter], shown)
    axes = [axis for _, axis, *_ in panels]
    return layout | shade_beyond(last, 10 ** layout["xaxis"]["range"][1], axes, axes)
