"""Figures of the compute-optimal frontier: slices of equal compute, N*(C) and L*(C), the blind check."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron.laws.compute_law import ComputeLaw, Optimum
from megatron.laws.isoflop import split_budgets
from megatron.report import blind_text
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
    scatter_trace,
    shade_beyond,
)
from megatron.report.frontier_text import FACTORS, find_optimum, has_answer, select_frontier_points
from megatron.report.palette import ACCENT, BAND, INK, MUTED
from megatron.report.study_data import RunPoint, Study
from megatron.study.blind import BlindOutcome
from megatron.study.format import (
    format_count,
    format_digits,
    format_exponent,
    format_interval,
    format_plural,
    format_with_interval,
)

STEPS = 48  # points of a line
SLICE_MARGIN = 1.15  # factor by which a slice extends beyond the sizes of its runs
MAX_MINIMUM_RATIO = 3.0  # minima further outside their budget's sizes than this factor are not marked
BAND_LIMIT = 1e3  # bands are clipped at this factor beyond the ends of their line
MAX_BAND_RATIO = 1.6  # factor by which a band may extend an axis beyond its other content
MAX_TICKS = 7
LOSS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
UNKNOWN = "a frontier that these runs do not identify"


def slices_figure(study: Study) -> Figure | None:
    """Return loss over N at each budget with the law's slice; None without a frontier and its runs."""
    law, rows = study.compute_law, select_frontier_points(study)
    if law is None or not rows:
        return None
    sound = has_answer(study)
    data: list[Trace] = []
    chips, losses = [], [row.loss for row in rows]
    for i, indices in enumerate(split_budgets(np.array([row.C for row in rows]))):
        group = [rows[k] for k in indices]
        # geometric mean of the budget: its runs differ by the rounding to whole steps
        C = math.exp(float(np.mean(np.log([row.C for row in group]))))
        name, key = f"{format_exponent(C)} FLOPs", f"isoflop:{i}"
        traces = _slice_traces(study, law, group, C, key, f"var(--slice{i})", name)
        # The ends of a slice can rise far above the runs. They would compress the points into a line at the
        # bottom.
        losses += [y for trace in traces for y in trace["y"] if min(losses) / 2 < y < 2 * max(losses)]
        data += traces
        chips.append(Chip(key, name, f"var(--slice{i})"))
    sizes = [x for trace in data for x in trace["x"]]
    layout = {
        "xaxis": log_axis("parameters, N", sizes),
        "yaxis": linear_axis(f"held-out loss ({LOSS_UNIT})", min(losses), max(losses)),
    }
    title = _describe_slices(law, len(chips), sound)
    spread = format_digits(100 * law.spread, 2)
    caption = (
        "Points: runs of about equal FLOPs. Lines: one law fitted to all of them, from which single runs "
        f"are off by {spread} % (standard deviation). "
        + ("Crosses: the best N of each budget, with its 95 % confidence interval."
           if sound else "Grey and dotted: the law is not identified, and no best N is marked.")
    )  # fmt: skip
    ends = [(C, find_optimum(law, C)) for C in law.C] if sound else []
    alt = f"{title}. " + "; ".join(
        f"at {format_exponent(C)} FLOPs the best N is {format_count(at.N)}" for C, at in ends if at
    )
    return Figure(
        "isoflop", title, caption, f"{alt.strip().rstrip('.')}.", make_chart(data, layout, 440), chips
    )


def _describe_slices(law: ComputeLaw, n_budgets: int, sound: bool) -> str:
    if not sound:
        return f"The isoFLOP curves of {format_plural(n_budgets, 'budget')} do not identify the best size"
    low, high = law.interval("size_exponent")
    inside = format_interval([low, high], "{:.2f}".format)
    power = f"power {law.params['size_exponent']:.2f}" + (f" ({inside})" if inside else "")
    way = "grows" if low > 0 else "falls" if high < 0 else ""
    if not way:  # also where there is no interval
        return f"IsoFLOP curves leave open whether N* grows with C: {power}"
    return f"By isoFLOP curves N* {way} as C to the {power}"


def _slice_traces(
    study: Study, law: ComputeLaw, rows: Sequence[RunPoint], C: float, key: str, colour: str, name: str
) -> list[Trace]:
    """Return the traces of one budget: the law's slice, the runs, and the minimum of an identified law."""
    sizes = [row.N for row in rows]
    at = find_optimum(law, C) if has_answer(study) else None
    # the minimum of a slice that is far outside its sizes is not shown: the law is an extrapolation there
    if at is not None and not min(sizes) / MAX_MINIMUM_RATIO <= at.N <= max(sizes) * MAX_MINIMUM_RATIO:
        at = None
    shown = [*sizes, at.N] if at is not None else sizes
    N = np.geomspace(min(shown) / SLICE_MARGIN, max(shown) * SLICE_MARGIN, STEPS)
    line = {"color": colour, "width": 2} if has_answer(study) else _unsound_line(2)
    traces = [
        scatter_trace(
            N.tolist(), law.loss(N, C).round(5).tolist(), "lines", meta=[key], hoverinfo="skip", line=line
        ),
        scatter_trace(
            sizes, [row.loss for row in rows], "markers", meta=[key], marker={"color": colour, "size": 8},
            customdata=[format_run_hover(study, row) for row in rows],
            hovertemplate=f"%{{customdata}}<br>{name}, loss %{{y:.4f}}<extra></extra>",
        ),
    ]  # fmt: skip
    if at is not None:
        traces.append(_minimum_mark(at, key, colour, name))
    return traces


def _minimum_mark(at: Optimum, key: str, colour: str, name: str) -> Trace:
    """Return the mark of a slice's minimum with the interval of its N."""
    text = format_with_interval(at.N, at.N_interval, format_count)
    low, high = at.N_interval
    # an interval over more than three decades would hide the points
    is_finite = math.isfinite(low) and math.isfinite(high) and high < at.N * 1e3
    error = {
        "type": "data", "symmetric": False, "array": [high - at.N], "arrayminus": [at.N - low],
        "color": colour, "thickness": 1.5,
    }  # fmt: skip
    return scatter_trace(
        [at.N], [at.loss], "markers", meta=[key], marker={"color": colour, "size": 11, "symbol": "x"},
        hovertemplate=f"{name}<br>N* = {text}<extra>best N</extra>",
        **({"error_x": error} if is_finite else {}),
    )  # fmt: skip


def frontier_figure(study: Study) -> Figure | None:
    """Return N* (top) and L* (bottom) over C up to ten times the largest budget, with bands and runs."""
    law, rows = study.compute_law, select_frontier_points(study)
    if law is None or not rows:
        return None
    sound = has_answer(study)
    best = _find_optima(law, law.C[0], FACTORS[-1] * law.C[1])
    if not best:
        return None
    C = [at.C for at in best]
    panels = (
        ("y", "N", [at.N for at in best], [at.N_interval for at in best]),
        ("y2", "loss", [at.loss for at in best], [at.predictive for at in best]),
    )
    data: list[Trace] = []
    layout: dict[str, Any] = {
        "grid": {"rows": 2, "columns": 1, "pattern": "coupled", "ygap": 0.2},
        "xaxis": log_axis("compute, C (FLOPs)", C, format_flops_tick),
    }
    for axis, letter, line, ends in panels:
        data += _frontier_traces(study, rows, C, axis, letter, line, ends, sound)
        runs = [row.N if letter == "N" else row.loss for row in rows]
        # the axis covers the runs and the sound part of the line; intervals extend it by at most
        # MAX_BAND_RATIO
        shown = [*line, *runs] if sound else [*runs, *_clip_to_axis(runs, line)]
        shown += _clip_to_axis(shown, [end for pair in ends for end in pair]) if sound else []
        panel = log_axis("parameters, N*", shown) if letter == "N" else loss_axis("loss, L*", shown)
        layout[axis.replace("y", "yaxis")] = panel
    # the range of a log axis is in powers of ten
    layout |= shade_beyond(law.C[1], 10 ** layout["xaxis"]["range"][1], ("y", "y2"), ("y",))
    title = f"No compute-optimal size follows from {UNKNOWN} ({format_plural(law.n_runs, 'run')})"
    if sound:
        first, last = best[0], find_optimum(law, law.C[1])
        assert last is not None, "has_answer requires this optimum"
        title = (
            f"From {format_exponent(first.C)} to {format_exponent(last.C)} FLOPs the best N goes from "
            f"{format_count(first.N)} to {format_count(last.N)} parameters, its loss from {first.loss:.2f} "
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
        alt += f" At {format_exponent(at.C)} FLOPs N* is {format_count(at.N)} and L* {at.loss:.2f}."
    chips = [Chip("optimum", "frontier", ACCENT if sound else MUTED, "solid" if sound else "dot"),
             Chip("runs", "runs", MUTED, "point")]  # fmt: skip
    return Figure("frontier", title, caption, alt, make_chart(data, layout, 600), chips)


def _frontier_traces(
    study: Study,
    rows: Sequence[RunPoint],
    C: Sequence[float],
    axis: str,
    letter: str,
    line: Sequence[float],
    ends: Sequence[tuple[float, float]],
    sound: bool,
) -> list[Trace]:
    """Return the traces of one panel: the band if there is one, the runs, and the line on top."""
    write: Callable[[float], str] = format_count if letter == "N" else "{:.3f}".format
    runs = [row.N if letter == "N" else row.loss for row in rows]
    name = "N*" if letter == "N" else "L*"
    texts = [
        f"{format_exponent(c)} FLOPs<br>{name} = "
        + (format_with_interval(y, pair, write) if sound else write(y))
        for c, y, pair in zip(C, line, ends, strict=True)
    ]
    return [
        *(_band_traces(C, ends, line, axis) if sound else []),
        scatter_trace(
            [row.C for row in rows], runs, "markers", yaxis=axis, meta=["runs"],
            marker={"color": MUTED, "size": 6, "symbol": "circle-open"},
            customdata=[format_run_hover(study, row) for row in rows],
            hovertemplate="%{customdata}<extra>run</extra>",
        ),
        scatter_trace(
            C, line, "lines", yaxis=axis, meta=["optimum"], customdata=texts,
            line={"color": ACCENT, "width": 2.4} if sound else _unsound_line(2.4),
            hovertemplate="%{customdata}<extra></extra>",
        ),
    ]  # fmt: skip


def blind_figure(study: Study) -> Figure | None:
    """Return the blind run and its prediction at the end of the frontier; None without a blind check."""
    blind = study.blind
    if blind is None:
        return None
    rows = select_frontier_points(study)
    data, losses, compute = _approach_traces(study, rows)
    measured = blind.measured is not None and math.isfinite(blind.measured)
    has_interval = all(map(math.isfinite, blind.interval))
    seen = [
        blind.predicted,
        *(blind.interval if has_interval else ()),
        *([blind.measured] if measured else ()),
    ]
    # the same marks twice: vertically over C, and horizontally in the lower panel
    for axes in ({}, {"xaxis": "x2", "yaxis": "y2"}):
        data += _blind_marks(blind, has_interval, measured, axes)
    layout: dict[str, Any] = {
        "xaxis": log_axis("compute, C (FLOPs)", [*compute, blind.C, blind.C * 1.15], format_flops_tick)
        | {"anchor": "y"},
        "yaxis": loss_axis("loss", [*losses, *seen]) | {"domain": [0.42, 1.0]},
        "xaxis2": linear_axis(f"loss of the blind run ({LOSS_UNIT})", min(seen), max(seen))
        | {"anchor": "y2"},
        "yaxis2": {
            "domain": [0.0, 0.18], "range": [-0.6, 1.6],
            "tickvals": [1, 0][: 1 + measured], "ticktext": ["predicted", "measured"][: 1 + measured],
            "showgrid": False,
        },
    }  # fmt: skip
    if has_interval:
        layout["shapes"] = [
            {
                "type": "rect", "xref": "x2", "yref": "y2 domain", "x0": blind.interval[0],
                "x1": blind.interval[1], "y0": 0, "y1": 1, "fillcolor": BAND,
            }
        ]  # fmt: skip
    caption = (
        f"Bar: the {100 * blind.level:.0f} % predictive interval stored for this run. Diamond: the "
        "measured loss. Rings: the runs of the fit. Line: the loss at the best N of each compute, with its "
        "predictive band. Below: the blind run alone."
    )
    if not measured:
        caption = caption.replace(" Diamond: the measured loss.", "")
    if blind_text.is_refitted(study):
        caption += " The line is from a later fit than the prediction."
    title = blind_text.format_blind_title(blind)
    alt = f"{title}. {format_plural(len(rows), 'run')} of the fit are to its left."
    chips = [Chip("blind", "prediction", ACCENT, "point"), Chip("runs", "runs", MUTED, "point")]
    if study.compute_law is not None:
        chips.insert(1, Chip("optimum", "frontier", ACCENT if has_answer(study) else MUTED))
    return Figure("blind", title, caption, alt, make_chart(data, layout, 460), chips)


def _approach_traces(study: Study, rows: Sequence[RunPoint]) -> tuple[list[Trace], list[float], list[float]]:
    """Return (traces, losses, FLOPs) of the runs and of the frontier up to the blind run."""
    law, blind = study.compute_law, study.blind
    losses, compute = [row.loss for row in rows], [row.C for row in rows]
    if law is None or blind is None or not rows:
        return [], losses, compute
    best = _find_optima(law, law.C[0], max(blind.C, law.C[1]))
    sound, C = has_answer(study), [at.C for at in best]
    traces = _frontier_traces(
        study, rows, C, "y", "loss", [at.loss for at in best], [at.predictive for at in best], sound
    )
    return traces, [*losses, *(at.loss for at in best)], compute


def _blind_marks(
    blind: BlindOutcome, has_interval: bool, measured: bool, axes: dict[str, str]
) -> list[Trace]:
    """Return marks of predicted interval and measured loss: vertical over C, or horizontal in a panel."""
    horizontal = bool(axes)
    text = f"predicted {blind.predicted:.3f} ({format_interval(blind.interval, '{:.3f}'.format)})"
    low, high = blind.interval
    error = {
        "type": "data", "symmetric": False, "array": [high - blind.predicted],
        "arrayminus": [blind.predicted - low], "color": ACCENT, "thickness": 3, "width": 6,
    }  # fmt: skip

    def mark(value: float, row: int, more: dict[str, Any], words: str) -> Trace:
        # rows of the lower panel: 1 predicted, 0 measured
        x, y = (value, row) if horizontal else (blind.C, value)
        return scatter_trace(
            [x], [y], "markers", meta=["blind"], cliponaxis=False, hovertemplate=f"{words}<extra></extra>",
            **axes, **more,
        )  # fmt: skip

    bar = {"marker": {"color": ACCENT, "size": 9, "symbol": "line-ns" if horizontal else "line-ew",
                      "line": {"width": 2, "color": ACCENT}}}  # fmt: skip
    if has_interval:
        bar["error_x" if horizontal else "error_y"] = error
    marks = [mark(blind.predicted, 1, bar, text)]
    if measured and blind.measured is not None:
        diamond = {"marker": {"color": INK, "size": 10, "symbol": "diamond"}}
        marks.append(mark(blind.measured, 0, diamond, f"measured {blind.measured:.3f}"))
    return marks


def _find_optima(law: ComputeLaw, first: float, last: float) -> list[Optimum]:
    """Return optima along the frontier, without those that overflow a float."""
    optima = (find_optimum(law, float(C)) for C in np.geomspace(first, last, STEPS))
    return [at for at in optima if at is not None]


def _band_traces(
    C: Sequence[float], ends: Sequence[tuple[float, float]], line: Sequence[float], axis: str
) -> list[Trace]:
    """Return the band as one closed trace, clipped at BAND_LIMIT; empty without an interval."""
    if not all(math.isfinite(end) for pair in ends for end in pair):
        return []
    cut = (min(line) / BAND_LIMIT, max(line) * BAND_LIMIT)
    low, high = (np.clip([pair[i] for pair in ends], *cut).tolist() for i in (0, 1))
    return [band_trace(C, (low, high), "optimum", yaxis=axis)]


def _clip_to_axis(shown: Sequence[float], more: Sequence[float]) -> list[float]:
    """Clip `more` to the values that an axis shows: at most MAX_BAND_RATIO beyond `shown`."""
    return [
        float(np.clip(x, min(shown) / MAX_BAND_RATIO, max(shown) * MAX_BAND_RATIO))
        for x in more
        if math.isfinite(x)
    ]


def _unsound_line(width: float) -> dict[str, Any]:
    """Return the line style of a law that is not identified: grey and dotted."""
    return {"color": MUTED, "width": width, "dash": "dot"}


def loss_axis(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Return a logarithmic axis of losses with evenly spaced ticks, because losses span under a decade."""
    axis = log_axis(f"{title} ({LOSS_UNIT})", values)
    low, high = (10**end for end in axis["range"])
    # fewest ticks of a round step that cover the range
    step = next((step for step in LOSS_STEPS if (high - low) / step <= MAX_TICKS), None)
    if step is not None:
        ticks = [round(k * step, 2) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
    return axis
