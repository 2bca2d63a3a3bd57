"""Figures of the reasons against a law: misfit relative to seed noise, and intervals of the constants."""

import math

import numpy as np

from megatron.report import verdict
from megatron.report.figures.plot import (
    Chip,
    Figure,
    Trace,
    format_flops_tick,
    format_run_hover,
    linear_axis,
    log_axis,
    make_chart,
    scatter_trace,
)
from megatron.report.figures.plot_law import select_law_points, unique_tokens
from megatron.report.palette import ACCENT, MUTED
from megatron.report.study_data import Study
from megatron.study.format import format_constant, format_interval, format_plural
from megatron.study.run_row import FinishedRow

CLIP = (0.01, 100.0)  # limits of the intervals' axis, in units of the fitted value


def misfit_figure(study: Study) -> Figure | None:
    """Return each cell's residual with the scatter of seeds; None without a lack-of-fit test."""
    law, points = study.law, select_law_points(study)
    if law is None or not points or not law.lack_of_fit:
        return None
    cells: dict[tuple[float, float, float], list[tuple[FinishedRow, float]]] = {}
    for row in points:
        predicted = float(law.loss(row.N, row.D, unique_tokens(row)))
        # a cell: equal N, D and unique tokens
        cell = (row.N, row.D, unique_tokens(row))
        cells.setdefault(cell, []).append((row, 100 * (row.loss / predicted - 1)))
    noise = 100 * law.lack_of_fit["noise"]
    data: list[Trace] = []
    for (N, D, _), pairs in cells.items():
        C, off = 6.0 * N * D, [value for _, value in pairs]
        data.append(
            scatter_trace(
                [C] * len(off), off, "markers", meta=["runs"],
                marker={"color": MUTED, "size": 6, "symbol": "circle-open"},
                customdata=[f"{format_run_hover(study, row)}<br>{value:+.2f} %" for row, value in pairs],
                hovertemplate="%{customdata}<extra>run</extra>",
            )
        )  # fmt: skip
        # the mean of n runs has the standard error noise / sqrt(n)
        half = 2 * noise / math.sqrt(len(off))
        data.append(
            scatter_trace(
                [C], [float(np.mean(off))], "markers", meta=["cells"], marker={"color": ACCENT, "size": 9},
                error_y={"array": [half], "color": ACCENT, "thickness": 1.5, "width": 4},
                hovertemplate=f"{len(off)} runs<br>%{{y:+.2f}} ± {half:.2f} %<extra></extra>",
            )
        )  # fmt: skip
    compute = [trace["x"][0] for trace in data]
    # symmetric around 0, so that the zero line is in the middle
    ends = [sign * (max(abs(y) for trace in data for y in trace["y"]) + 2 * noise) for sign in (-1, 1)]
    layout = {
        "xaxis": log_axis("compute, C = 6 N D (FLOPs)", compute, format_flops_tick),
        "yaxis": linear_axis("measured minus law (% of nats)", *ends) | {"zeroline": True},
    }
    words = verdict.describe_misfit(law)
    title = words[:1].upper() + words[1:]
    caption = (
        "Rings: runs. Dots: means of the runs of one N and D, with two standard errors of the scatter of "
        "seeds. If the form holds, about 95 % of the bars reach zero."
    )
    n_reach = sum(abs(trace.y[0]) <= trace.error_y.array[0] for trace in data if trace.error_y.array)
    alt = f"{title}. The bars of {n_reach} of {format_plural(len(cells), 'cell')} reach zero."
    chips = [Chip("cells", "cells", ACCENT, "point"), Chip("runs", "runs", MUTED, "point")]
    return Figure("misfit", title, caption, alt, make_chart(data, layout, 380), chips)


def intervals_figure(study: Study) -> Figure | None:
    """Return intervals of the constants relative to their values; None if all are identified."""
    law = study.law
    if law is None or law.identified is not False or not (law.interval or {}).get("params"):
        return None
    data: list[Trace] = []
    for name, value in law.params.items():
        ends = law.interval["params"].get(name)
        if ends is None or not value > 0 or name in law.fixed:
            continue
        # relative to the fit, so that an alpha of 0.3 and a B of 400 share one axis
        low, high = (float(np.clip(end / value, *CLIP)) for end in ends)
        colour = MUTED if name in law.not_identified else ACCENT
        data.append(
            scatter_trace(
                [low, 1.0, high], [name] * 3, "lines+markers", meta=[f"constant:{name}"],
                line={"color": colour, "width": 3, "dash": "dot" if name in law.not_identified else "solid"},
                marker={"color": colour, "size": [6, 10, 6]},
                hovertemplate=f"{name}: {format_interval(ends, format_constant)}<extra></extra>",
            )
        )  # fmt: skip
    if not data:
        return None
    shown = [x for trace in data for x in trace["x"]]
    layout = {
        "xaxis": log_axis("interval over the fitted value (1 = its nats, parameters or tokens)", shown),
        "yaxis": {"type": "category", "title": {"text": "constant (nats, parameters, tokens)"}},
    }
    n_known = sum(name not in law.not_identified for name in law.params)
    title = f"These runs identify {n_known} of the {len(law.params)} constants of the law"
    caption = (
        f"Each line: the {100 * law.interval.get('level', 0.95):.0f} % interval of a constant over its "
        "fitted value; dotted where it is not identified. Lines end at 0.01 and 100."
    )
    reasons = " ".join(dict.fromkeys(law.not_identified.values()))
    return Figure(
        "intervals", title, caption, f"{title}. {reasons}".strip(), make_chart(data, layout, 320), []
    )
