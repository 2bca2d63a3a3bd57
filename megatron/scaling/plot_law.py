"""Figures of the fitted law, as plotly's JSON: against its points, and what it says is compute-optimal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.scaling import frontier_words, verdict, wording
from megatron.scaling.forms import FORM
from megatron.scaling.frontier import bands, optimal
from megatron.scaling.law import PUBLISHED, Law
from megatron.scaling.plot import (
    LOSS_UNIT,
    Chip,
    Figure,
    describe,
    flops_tick,
    linear_axis,
    log_axis,
    run_chips,
    run_mark,
    scatter,
)
from megatron.scaling.study import Study
from megatron.scaling.table import Row

# N* = 1.3e9 (C / 8.64e19)^0.73, on other text
KAPLAN = "Kaplan et al. 2020"
BEYOND = 10.0  # how far past the largest run the optimum is shown
LETTERS = {"n_params": "N", "n_non_embedding": "N (without embeddings)"}


@dataclass(frozen=True)
class Optimum:
    """Compute-optimal N and D at each C, with the ends of their intervals (None without bootstrap
    replicates).
    """

    C: np.ndarray  # [n] FLOPs, by C = 6 N D
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    N_ends: tuple[np.ndarray, np.ndarray] | None
    D_ends: tuple[np.ndarray, np.ndarray] | None


def law_points(study: Study) -> list[Row]:
    """The finished runs that the law was fitted on, with the N and D that it saw as `N` and `D`."""
    law = study.law
    if law is None:
        return []
    columns, wanted = law.columns or {}, dict(law.filter or {})
    most, held_out = wanted.pop("max_loss", math.inf), set(law.held_out.get("runs", ()))
    rows = [
        row
        for row in study.done()
        if all(str(row.get(name)) == str(value) for name, value in wanted.items())
        and row["loss"] <= most
        and row["run"] not in held_out
    ]
    names = {"N": columns.get("N", "n_params"), "D": columns.get("D", "train_tokens")}
    rows = [row | {letter: row.get(name) for letter, name in names.items()} for row in rows]
    return [row for row in rows if row["N"] and row["D"]]


def unique_of(row: Row) -> float:
    """The unique tokens of a run; infinite where nobody knows."""
    return row.get("unique_tokens") or math.inf


def largest_compute(study: Study) -> float:
    """The largest 6 N D of the law's runs, or the largest within its ranges if none of them is here.
    FLOPs.
    """
    points = law_points(study)
    if points:
        return max(6.0 * row["N"] * row["D"] for row in points)
    return 6.0 * study.law.ranges["N"][1] * study.law.ranges["D"][1]


def optimum(law: Law, C: np.ndarray) -> Optimum:
    """N and D that the law puts at the lowest loss for each C [n] (FLOPs), with the law's own intervals."""
    best = optimal(law, C)
    ends: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if law.replicates:
        ends = bands(law, C, law.interval.get("level", 0.95))
    return Optimum(C, best.N, best.D, best.L, ends.get("N"), ends.get("D"))


def prediction_figure(study: Study) -> Figure | None:
    """What the law says of each run, against what was measured."""
    points = law_points(study)
    if not points:
        return None
    said = np.array([float(study.law.loss(row["N"], row["D"], unique_of(row))) for row in points])
    measured = np.array([row["loss"] for row in points])
    off = 100 * (said / measured - 1)
    low, high = min(*said, *measured), max(*said, *measured)
    data = [
        scatter(
            [low, high],
            [low, high],
            "lines",
            hoverinfo="skip",
            line={"color": "@muted", "dash": "dot", "width": 1},
        )
    ]
    for row, x, error in zip(points, said, off, strict=True):
        data.append(run_mark(study, row, x, f"<br>the law {x:.3f} ({error:+.2f} %)"))
    layout = {
        "xaxis": linear_axis(f"loss the law gives ({LOSS_UNIT})", low, high),
        "yaxis": linear_axis(f"held-out loss measured ({LOSS_UNIT})", low, high),
    }
    worst, name = points[int(np.argmax(abs(off)))], verdict.law_words(study.law)
    title = (
        f"{name[:1].upper()}{name[1:]} is off by {np.median(abs(off)):.1f} % in the median of its own "
        f"{wording.plural(len(points), 'run')}, by {max(abs(off)):.1f} % at worst"
    )
    caption = (
        "On the dotted line the law is exact. Bars: two standard errors of the measured loss. These are the "
        "runs that the law "
        "was fitted on; how well it predicts others is a separate question."
    )
    alt = f"{title}. The worst is {worst['run']}, measured {worst['loss']:.3f}."
    return Figure("prediction", title, caption, alt, data, layout, run_chips(study, points))


def line_of(law: Law, colour: str, width: float) -> dict[str, Any]:
    """How a law's line is drawn: grey and dotted where it may not be quoted."""
    if verdict.is_sound(law):
        return {"color": colour, "width": width}
    return {"color": "@muted", "width": width, "dash": "dot"}


def size_figure(study: Study) -> Figure | None:
    """L against N at each D, with the law's line through it."""
    points = law_points(study)
    if not points:
        return None
    budgets = sorted({row["D"] for row in points})
    sizes = [row["N"] for row in points]
    N = np.geomspace(min(sizes) / 1.15, max(sizes) * 1.15, 60)
    data, chips, losses = [], [], [row["loss"] for row in points]
    for i, D in enumerate(budgets):
        line = np.asarray(study.law.loss(N, np.full_like(N, D)))
        losses += list(line)
        about = {"meta": [f"budget:{D}"]}
        data.append(
            scatter(
                N.tolist(),
                line.round(5).tolist(),
                "lines",
                line=line_of(study.law, f"@budget{i}", 2),
                hoverinfo="skip",
                **about,
            )
        )
        for row in points:
            if row["D"] == D:
                data.append(run_mark(study, row, row["N"], colour=f"@budget{i}") | about)
        chips.append(Chip(f"budget:{D}", f"{wording.count(D)} tokens", f"@budget{i}"))
    letter = LETTERS.get((study.law.columns or {}).get("N", "n_params"), "N")
    layout = {
        "xaxis": log_axis(f"parameters, {letter}", list(N)),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    small, large, few, many = min(sizes), max(sizes), budgets[0], budgets[-1]
    by_N, by_D = (
        float(study.law.loss(*start) - study.law.loss(large, many)) for start in ((small, many), (large, few))
    )
    parts, name = [], verdict.law_words(study.law)
    if large > small:
        parts.append(
            f"{wording.times(large / small)} times the parameters change the loss by {0 - by_N:.2f} nats"
        )
    if many > few:
        parts.append(f"{wording.times(many / few)} times the tokens change it by {0 - by_D:.2f} nats")
    title = f"By {name} {wording.listed(parts)}" if parts else f"One size and budget, by {name}"
    caption = "Lines: the fitted law at each token budget. Points: finished runs, with two standard errors."
    if FORM[study.law.form].wants_unique:
        caption += " The lines are of text read once: a point above its line has read its text more often."
    alt = f"{title}."
    if flattens(study.law, N, budgets):
        alt += " The curves flatten to the right: at fixed tokens each further doubling of N brings less."
    return Figure("size", title, caption, alt, data, layout, chips)


def flattens(law: Law, N: np.ndarray, budgets: Sequence[float]) -> bool:
    """Whether at every budget the law's loss falls with N [n], evenly spaced in log, by less and less."""
    gains = [-np.diff(law.loss(N, np.full_like(N, D))) for D in budgets]
    return len(N) > 2 and all((gain > 0).all() and (np.diff(gain) < 0).all() for gain in gains)


def optimum_figure(study: Study) -> Figure | None:
    """Compute-optimal N (above) and D (below) against C, with bands, to ten times the largest run.

    None as well for a law that may not be quoted where the study's frontier answers the question.
    """
    if study.law is None or (frontier_words.is_answer(study) and not verdict.is_sound(study.law)):
        return None
    points = law_points(study)
    last = largest_compute(study)
    first = min((6.0 * row["N"] * row["D"] for row in points), default=last / 100)
    C = np.geomspace(first, last * BEYOND, 48)
    best = optimum(study.law, C)
    data: list[dict[str, Any]] = []
    panels = (("N", "y", best.N, best.N_ends), ("D", "y2", best.D, best.D_ends))
    for panel in panels:
        data += optimum_traces(study, points, C, *panel)
    data += literature_traces(C)
    layout = optimum_layout(points, C, last, panels)
    exponent = study.law.derived.get("a_exponent")
    ends = ((study.law.interval or {}).get("derived") or {}).get("a_exponent")
    title = "What the law calls compute-optimal"
    sound = verdict.is_sound(study.law)
    if not sound:
        title = (
            f"No compute-optimal size follows from {verdict.law_words(study.law)} ({study.law.n_runs} runs)"
        )
    elif exponent is not None:
        inside = wording.interval(ends, "{:.2f}".format)
        title = f"The compute-optimal N grows as C to the power {exponent:.2f}" + (
            f" ({inside})" if inside else ""
        )
    caption = (
        f"Line: the N and D of lowest loss at each compute, C = 6 N D. Band: {band_words(study.law)}. Rings: "
        f"the runs. Dotted: {wording.listed([*PUBLISHED, KAPLAN])}. The shaded part lies beyond the largest "
        "run, where nothing has tested the law."
    )
    at = optimum(study.law, np.array([last, last * BEYOND]))
    alt = f"{title}. " + "; ".join(
        f"at {wording.exponent(c)} FLOPs N is {wording.count(n)} and D {wording.count(d)}"
        for c, n, d in zip(at.C, at.N, at.D, strict=True)
    )
    alt = alt if sound else f"{title}. The lines are grey and dotted"
    chips = [
        Chip("optimum", "optimum", "@accent"),
        Chip("runs", "runs", "@muted", "point"),
        Chip("literature", "the literature", "@muted", "dot"),
    ]
    return Figure("optimum", title, caption, f"{alt}.", data, layout, chips, 620)


def literature_traces(C: np.ndarray) -> list[dict[str, Any]]:
    """N* and D* over C [n] by published laws: other text, and Kaplan's N is without embeddings."""
    lines = {}
    for name, params in PUBLISHED.items():
        best = optimal(Law(form="chinchilla", params=params, objective=0.0, huber_delta=1.0, n_runs=0), C)
        lines[name] = (best.N, best.D)
    N = 1.3e9 * (C / 8.64e19) ** 0.73
    lines[KAPLAN] = (N, C / (6 * N))
    return [
        scatter(
            C.tolist(), y.tolist(), "lines", yaxis=axis, meta=["literature"],
            line={"color": "@muted", "width": 1.2, "dash": "dot"},
            hovertemplate=f"{name}<br>%{{y:.3s}} at %{{x:.2s}} FLOPs<extra></extra>",
        )
        for name, pair in lines.items()
        for axis, y in zip(("y", "y2"), pair, strict=True)
    ]  # fmt: skip


def optimum_traces(
    study: Study,
    points: Sequence[Row],
    C: np.ndarray,
    letter: str,
    axis: str,
    line: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray] | None,
) -> list[dict[str, Any]]:
    """One panel: the band if there is one, the runs, and the optimum over them."""
    bounds = zip(*ends, strict=True) if ends else [None] * len(C)
    texts = [
        f"{wording.exponent(c)} FLOPs<br>{letter} = {wording.with_interval(x, inside, wording.count)}"
        for c, x, inside in zip(C, line, bounds, strict=True)
    ]
    runs = scatter(
        [6.0 * row["N"] * row["D"] for row in points],
        [row[letter] for row in points],
        "markers",
        yaxis=axis,
        meta=["runs"],
        marker={"color": "@muted", "size": 6, "symbol": "circle-open"},
        customdata=[describe(study, row) for row in points],
        hovertemplate="%{customdata}<extra>run</extra>",
    )
    best = scatter(
        C.tolist(),
        line.tolist(),
        "lines",
        yaxis=axis,
        meta=["optimum"],
        customdata=texts,
        line=line_of(study.law, "@accent", 2.4),
        hovertemplate="%{customdata}<extra></extra>",
    )
    return [*([band(C, ends, axis)] if ends else []), runs, best]


def band(C: np.ndarray, ends: tuple[np.ndarray, np.ndarray], axis: str) -> dict[str, Any]:
    """A filled band between two lines, as one closed trace: hiding it hides all of it."""
    low, high = ends
    return scatter(
        [*C, *C[::-1]],
        [*low, *high[::-1]],
        "lines",
        yaxis=axis,
        fill="toself",
        fillcolor="@accent/0.18",
        line={"width": 0, "color": "@accent"},
        hoverinfo="skip",
        meta=["optimum"],
    )


def band_words(law: Law) -> str:
    """What the bands are, in words."""
    interval = law.interval or {}
    if not interval.get("n_bootstrap"):
        return "none, for the law has no bootstrap"
    refits = wording.plural(interval["n_bootstrap"], "bootstrap refit")
    return f"{100 * interval.get('level', 0.95):.0f} % confidence, of {refits}"


def optimum_layout(
    points: Sequence[Row], C: np.ndarray, last: float, panels: Sequence[tuple]
) -> dict[str, Any]:
    """Two panels above one another with one C axis; what lies beyond the runs is shaded."""
    names = {"N": "parameters, N", "D": "tokens, D"}
    domains = {"y": [0.54, 1.0], "y2": [0.0, 0.46]}
    layout: dict[str, Any] = {
        "xaxis": log_axis("compute, C = 6 N D (FLOPs)", list(C), flops_tick) | {"anchor": "y2"}
    }
    for letter, axis, line, ends in panels:
        shown = [
            *line,
            *(row[letter] for row in points),
            *(ends[0] if ends else ()),
            *(ends[1] if ends else ()),
        ]
        shown = [x for x in shown if math.isfinite(x) and x > 0]
        layout[axis.replace("y", "yaxis")] = log_axis(names[letter], shown) | {"domain": domains[axis]}
    layout["shapes"] = [
        {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": last,
            "x1": 10 ** layout["xaxis"]["range"][1],
            "y0": low,
            "y1": high,
            "fillcolor": "@ink/0.06",
            "line": {"width": 0},
            "layer": "below",
        }
        for low, high in domains.values()
    ]
    layout["annotations"] = [
        {
            "xref": "paper",
            "yref": "paper",
            "x": 0.99,
            "y": low,
            "xanchor": "right",
            "yanchor": "bottom",
            "showarrow": False,
            "text": "beyond the runs",
            "font": {"color": "@muted", "size": 11},
        }
        for low, _ in domains.values()
    ]
    return layout
