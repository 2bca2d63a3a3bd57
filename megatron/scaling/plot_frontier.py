"""Figures of the compute-optimal frontier: slices of equal compute, N*(C) and L*(C), the blind check."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.scaling import blind_words, wording
from megatron.scaling.compute_law import ComputeLaw, Optimum
from megatron.scaling.frontier_words import FACTORS, frontier_points, is_answer, optimum_at
from megatron.scaling.isoflop import budgets
from megatron.scaling.plot import (
    LOSS_UNIT,
    Chip,
    Figure,
    describe,
    flops_tick,
    linear_axis,
    log_axis,
    scatter,
)
from megatron.scaling.study import Study
from megatron.scaling.table import Row

STEPS = 48  # of a line
REACH = 1.15  # how far a slice is drawn beyond the sizes of its runs
FAR = 3.0  # a minimum further outside of its budget's sizes is not marked
CUT = 1e3  # times the ends of its line: where a band is cut
WIDE = 1.6  # factor by which a band may go beyond what else an axis shows
MOST_TICKS = 7
LOSS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
UNKNOWN = "a frontier that these runs do not identify"


def slices_figure(study: Study) -> Figure | None:
    """Loss against N at each budget with the law's slice through it; None without a frontier and its runs."""
    rows = frontier_points(study)
    if not rows:
        return None
    law, sound = study.compute_law, is_answer(study)
    data: list[dict[str, Any]] = []
    chips, losses = [], [row["loss"] for row in rows]
    for i, indices in enumerate(budgets(np.array([row["C"] for row in rows]))):
        own = [rows[k] for k in indices]
        C = math.exp(float(np.mean(np.log([row["C"] for row in own]))))
        name, key = f"{wording.exponent(C)} FLOPs", f"isoflop:{i}"
        traces = _slice_traces(study, own, C, key, f"@slice{i}", name)
        losses += [y for trace in traces for y in trace["y"] if min(losses) / 2 < y < 2 * max(losses)]
        data += traces
        chips.append(Chip(key, name, f"@slice{i}"))
    sizes = [x for trace in data for x in trace["x"]]
    layout = {
        "xaxis": log_axis("parameters, N", sizes),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    title = _slices_title(law, len(chips), sound)
    spread = wording.digits(100 * law.spread, 2)
    caption = (
        f"Points: runs of about equal FLOPs. Lines: one law through all of them, from which single runs are "
        f"off by {spread} % (standard deviation). "
        + ("Crosses: the best N of each budget, with its 95 % confidence interval."
           if sound else "Grey and dotted: the law is not identified, and no best N is marked.")
    )  # fmt: skip
    ends = [(C, optimum_at(law, C)) for C in law.C] if sound else []
    alt = f"{title}. " + "; ".join(
        f"at {wording.exponent(C)} FLOPs the best N is {wording.count(at.N)}" for C, at in ends if at
    )
    return Figure("isoflop", title, caption, f"{alt.strip().rstrip('.')}.", data, layout, chips, 440)


def _slices_title(law: ComputeLaw, n_budgets: int, sound: bool) -> str:
    if not sound:
        return f"The isoFLOP curves of {wording.plural(n_budgets, 'budget')} do not identify the best size"
    low, high = law.interval("size_exponent")
    inside = wording.interval([low, high], "{:.2f}".format)
    power = f"power {law.params['size_exponent']:.2f}" + (f" ({inside})" if inside else "")
    way = "grows" if low > 0 else "falls" if high < 0 else ""
    if not way:  # also where there is no interval
        return f"IsoFLOP curves leave open whether N* grows with C: {power}"
    return f"By isoFLOP curves N* {way} as C to the {power}"


def _slice_traces(
    study: Study, rows: Sequence[Row], C: float, key: str, colour: str, name: str
) -> list[dict[str, Any]]:
    """One budget: the law's slice, the runs, and the cross at the minimum where the law is identified."""
    law, sizes = study.compute_law, [row["N"] for row in rows]
    at = optimum_at(law, C) if is_answer(study) else None
    if at is not None and not min(sizes) / FAR <= at.N <= max(sizes) * FAR:
        at = None
    shown = [*sizes, at.N] if at is not None else sizes
    N = np.geomspace(min(shown) / REACH, max(shown) * REACH, STEPS)
    line = {"color": colour, "width": 2} if is_answer(study) else _grey(2)
    traces = [
        scatter(
            N.tolist(), law.loss(N, C).round(5).tolist(), "lines", meta=[key], hoverinfo="skip", line=line
        ),
        scatter(
            sizes, [row["loss"] for row in rows], "markers", meta=[key], marker={"color": colour, "size": 8},
            customdata=[describe(study, row) for row in rows],
            hovertemplate=f"%{{customdata}}<br>{name}, loss %{{y:.4f}}<extra></extra>",
        ),
    ]  # fmt: skip
    if at is not None:
        traces.append(_cross(at, key, colour, name))
    return traces


def _cross(at: Optimum, key: str, colour: str, name: str) -> dict[str, Any]:
    """The minimum of a slice with the interval of its N."""
    text = wording.with_interval(at.N, at.N_interval, wording.count)
    low, high = at.N_interval
    known = math.isfinite(low) and math.isfinite(high) and high < at.N * 1e3
    error = {
        "type": "data", "symmetric": False, "array": [high - at.N], "arrayminus": [at.N - low],
        "color": colour, "thickness": 1.5,
    }  # fmt: skip
    return scatter(
        [at.N], [at.loss], "markers", meta=[key], marker={"color": colour, "size": 11, "symbol": "x"},
        hovertemplate=f"{name}<br>N* = {text}<extra>best N</extra>",
        **({"error_x": error} if known else {}),
    )  # fmt: skip


def frontier_figure(study: Study) -> Figure | None:
    """N* (above) and L* (below) against C to ten times the largest budget, with bands and the runs."""
    rows = frontier_points(study)
    if not rows:
        return None
    law, sound = study.compute_law, is_answer(study)
    best = _path(law, law.C[0], FACTORS[-1] * law.C[1])
    if not best:
        return None
    C = [at.C for at in best]
    panels = (
        ("y", "N", [at.N for at in best], [at.N_interval for at in best]),
        ("y2", "loss", [at.loss for at in best], [at.predictive for at in best]),
    )
    data: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"xaxis": log_axis("compute, C (FLOPs)", C, flops_tick) | {"anchor": "y2"}}
    domains = {"y": [0.56, 1.0], "y2": [0.0, 0.44]}
    for axis, letter, line, ends in panels:
        data += _frontier_traces(study, rows, C, axis, letter, line, ends, sound)
        runs = [row[letter] for row in rows]
        shown = [*line, *runs] if sound else [*runs, *_within(runs, line)]
        shown += _within(shown, [end for pair in ends for end in pair]) if sound else []
        panel = log_axis("parameters, N*", shown) if letter == "N" else loss_axis("loss, L*", shown)
        layout[axis.replace("y", "yaxis")] = panel | {"domain": domains[axis]}
    layout |= _beyond(law.C[1], 10 ** layout["xaxis"]["range"][1], list(domains.values()))
    title = f"No compute-optimal size follows from {UNKNOWN} ({wording.plural(law.n_runs, 'run')})"
    if sound:
        first, last = best[0], optimum_at(law, law.C[1])
        title = (
            f"From {wording.exponent(first.C)} to {wording.exponent(last.C)} FLOPs the best N goes from "
            f"{wording.count(first.N)} to {wording.count(last.N)} parameters, its loss from {first.loss:.2f} "
            f"to {last.loss:.2f}"
        )
    caption = (
        "Lines: the best N at each compute, and its loss. Bands: 95 %, confidence of N*, predictive for the "
        "measured loss of one new run. Rings: the runs. The shaded part is beyond the largest budget fitted."
        if sound
        else "Rings: the runs. Grey and dotted: the fitted frontier, which is not identified and has no band."
    )
    alt = f"{title}."
    if sound:
        at = best[-1]
        alt += f" At {wording.exponent(at.C)} FLOPs N* is {wording.count(at.N)} and L* {at.loss:.2f}."
    chips = [Chip("optimum", "frontier", "@accent" if sound else "@muted", "solid" if sound else "dot"),
             Chip("runs", "runs", "@muted", "point")]  # fmt: skip
    return Figure("frontier", title, caption, alt, data, layout, chips, 600)


def _frontier_traces(
    study: Study,
    rows: Sequence[Row],
    C: Sequence[float],
    axis: str,
    letter: str,
    line: Sequence[float],
    ends: Sequence[tuple[float, float]],
    sound: bool,
) -> list[dict[str, Any]]:
    """One panel: the band where there is one, the runs, and the line over them."""
    write: Callable[[float], str] = wording.count if letter == "N" else "{:.3f}".format
    name = "N*" if letter == "N" else "L*"
    texts = [
        f"{wording.exponent(c)} FLOPs<br>{name} = "
        + (wording.with_interval(y, pair, write) if sound else write(y))
        for c, y, pair in zip(C, line, ends, strict=True)
    ]
    return [
        *(_band(C, ends, line, axis) if sound else []),
        scatter(
            [row["C"] for row in rows], [row[letter] for row in rows], "markers", yaxis=axis, meta=["runs"],
            marker={"color": "@muted", "size": 6, "symbol": "circle-open"},
            customdata=[describe(study, row) for row in rows],
            hovertemplate="%{customdata}<extra>run</extra>",
        ),
        scatter(
            C, line, "lines", yaxis=axis, meta=["optimum"], customdata=texts,
            line={"color": "@accent", "width": 2.4} if sound else _grey(2.4),
            hovertemplate="%{customdata}<extra></extra>",
        ),
    ]  # fmt: skip


def blind_figure(study: Study) -> Figure | None:
    """The blind run against its prediction, at the end of the frontier; None without a blind check."""
    blind = study.blind
    if blind is None:
        return None
    rows = frontier_points(study)
    data, losses, compute = _way_there(study, rows)
    measured = blind_words.is_measured(blind) and math.isfinite(blind.measured)
    known = all(map(math.isfinite, blind.interval))
    seen = [blind.predicted, *(blind.interval if known else ()), *([blind.measured] if measured else ())]
    for axes in ({}, {"xaxis": "x2", "yaxis": "y2"}):
        data += _blind_marks(blind, known, measured, axes)
    layout = {
        "xaxis": log_axis("compute, C (FLOPs)", [*compute, blind.C, blind.C * 1.15], flops_tick)
        | {"anchor": "y"},
        "yaxis": loss_axis("loss", [*losses, *seen]) | {"domain": [0.42, 1.0]},
        "xaxis2": linear_axis(f"loss of the blind run ({LOSS_UNIT})", min(seen), max(seen))
        | {"anchor": "y2"},
        "yaxis2": {
            "domain": [0.0, 0.18], "range": [-0.6, 1.6],
            "tickvals": [1, 0][: 1 + measured], "ticktext": ["predicted", "measured"][: 1 + measured],
            "title": {"text": ""}, "showgrid": False,
        },
    }  # fmt: skip
    if known:
        layout["shapes"] = [
            {
                "type": "rect", "xref": "x2", "yref": "y2 domain", "x0": blind.interval[0],
                "x1": blind.interval[1], "y0": 0, "y1": 1, "fillcolor": "@accent/0.18", "line": {"width": 0},
                "layer": "below",
            }
        ]  # fmt: skip
    caption = (
        f"Bar: the {100 * blind.level:.0f} % predictive interval stored for this run. Diamond: what it "
        "measured. Rings: the runs of the fit. Line: the loss at the best N of each compute, with its "
        "predictive band. Below: the blind run alone."
    )
    if not measured:
        caption = caption.replace(" Diamond: what it measured.", "")
    if blind_words.is_refitted(study):
        caption += " The line is of a later fit than the prediction."
    title = blind_words.title(blind)
    alt = f"{title}. {wording.plural(len(rows), 'run')} of the fit are to its left."
    chips = [Chip("blind", "prediction", "@accent", "point"), Chip("runs", "runs", "@muted", "point")]
    if study.compute_law is not None:
        chips.insert(1, Chip("optimum", "frontier", "@accent" if is_answer(study) else "@muted"))
    return Figure("blind", title, caption, alt, data, layout, chips, 460)


def _way_there(study: Study, rows: Sequence[Row]) -> tuple[list[dict[str, Any]], list[float], list[float]]:
    """The runs and the frontier up to the blind run: traces, losses and FLOPs that the axes must show."""
    law, blind = study.compute_law, study.blind
    losses, compute = [row["loss"] for row in rows], [row["C"] for row in rows]
    if law is None or not rows:
        return [], losses, compute
    best = _path(law, law.C[0], max(blind.C, law.C[1]))
    sound, C = is_answer(study), [at.C for at in best]
    traces = _frontier_traces(
        study, rows, C, "y", "loss", [at.loss for at in best], [at.predictive for at in best], sound
    )
    return traces, [*losses, *(at.loss for at in best)], compute


def _blind_marks(blind: Any, known: bool, measured: bool, axes: dict[str, str]) -> list[dict[str, Any]]:
    """The predicted interval and the measured loss, upright over C or lying in their own panel."""
    lying = bool(axes)
    text = f"predicted {blind.predicted:.3f} ({wording.interval(blind.interval, '{:.3f}'.format)})"
    low, high = blind.interval
    error = {
        "type": "data", "symmetric": False, "array": [high - blind.predicted],
        "arrayminus": [blind.predicted - low], "color": "@accent", "thickness": 3, "width": 6,
    }  # fmt: skip

    def mark(value: float, row: int, more: dict[str, Any], words: str) -> dict[str, Any]:
        x, y = (value, row) if lying else (blind.C, value)
        return scatter(
            [x], [y], "markers", meta=["blind"], cliponaxis=False, hovertemplate=f"{words}<extra></extra>",
            **axes, **more,
        )  # fmt: skip

    bar = {"marker": {"color": "@accent", "size": 9, "symbol": "line-ns" if lying else "line-ew",
                      "line": {"width": 2, "color": "@accent"}}}  # fmt: skip
    if known:
        bar["error_x" if lying else "error_y"] = error
    marks = [mark(blind.predicted, 1, bar, text)]
    if measured:
        diamond = {"marker": {"color": "@ink", "size": 10, "symbol": "diamond"}}
        marks.append(mark(blind.measured, 0, diamond, f"measured {blind.measured:.3f}"))
    return marks


def _path(law: ComputeLaw, first: float, last: float) -> list[Optimum]:
    """Optima along the frontier, as far as the law predicts and a float can hold them."""
    found = (optimum_at(law, float(C)) for C in np.geomspace(first, last, STEPS))
    return [at for at in found if at is not None]


def _band(
    C: Sequence[float], ends: Sequence[tuple[float, float]], line: Sequence[float], axis: str
) -> list[dict[str, Any]]:
    """The band as one closed trace, cut at CUT times the ends of the line; none without an interval."""
    if not all(math.isfinite(end) for pair in ends for end in pair):
        return []
    cut = (min(line) / CUT, max(line) * CUT)
    low, high = (np.clip([pair[i] for pair in ends], *cut).tolist() for i in (0, 1))
    return [
        scatter(
            [*C, *C[::-1]], [*low, *high[::-1]], "lines", yaxis=axis, fill="toself", fillcolor="@accent/0.18",
            line={"width": 0, "color": "@accent"}, hoverinfo="skip", meta=["optimum"],
        )
    ]  # fmt: skip


def _within(shown: Sequence[float], more: Sequence[float]) -> list[float]:
    """What of `more` an axis shall show as well: nothing further than WIDE times from `shown`."""
    return [float(np.clip(x, min(shown) / WIDE, max(shown) * WIDE)) for x in more if math.isfinite(x)]


def _grey(width: float) -> dict[str, Any]:
    """The line of a law that may not be quoted."""
    return {"color": "@muted", "width": width, "dash": "dot"}


def _beyond(last: float, end: float, domains: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Shapes and words of the part beyond the largest budget, in each panel."""
    shapes = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": last, "x1": end, "y0": low, "y1": high,
            "fillcolor": "@ink/0.06", "line": {"width": 0}, "layer": "below",
        }
        for low, high in domains
    ]  # fmt: skip
    words = [
        {
            "xref": "paper", "yref": "paper", "x": 0.99, "y": low, "xanchor": "right", "yanchor": "bottom",
            "showarrow": False, "text": "beyond the runs", "font": {"color": "@muted", "size": 11},
        }
        for low, _ in domains[:1]
    ]  # fmt: skip
    return {"shapes": shapes, "annotations": words}


def loss_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis of losses with evenly spaced ticks: a loss spans less than a decade."""
    axis = log_axis(f"{title} ({LOSS_UNIT})", values)
    low, high = (10**end for end in axis["range"])
    step = next((step for step in LOSS_STEPS if (high - low) / step <= MOST_TICKS), None)
    if step is not None:
        ticks = [round(k * step, 2) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return axis
