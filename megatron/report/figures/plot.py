"""Figures as data, and the parts that all figures share: axes, colours, legends, hover texts of runs.

A figure is plain data ({"data": [...], "layout": {...}}) that the page draws, so this module does not need
plotly. Colours are names of palette.py with the prefix "@". Titles state results and are computed from the
numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.study.format import (
    OBJECTIVE_NAMES,
    format_count,
    format_exponent,
    format_loss,
    format_tick,
)
from megatron.study.table import Row

DASH = {AUTOREGRESSIVE: "solid", MASKED_DIFFUSION: "dash"}
SYMBOL = {AUTOREGRESSIVE: "circle", MASKED_DIFFUSION: "diamond-open"}
LOSS_UNIT = "nats per token"
MAX_DECADES = 8  # decades up to which an axis labels each


@dataclass(frozen=True)
class Chip:
    """One entry of a legend. A click on it hides the traces whose `meta` contains `key`."""

    key: str
    label: str
    colour: str = "@ink"
    dash: str = "solid"  # solid, dash, or point for a marker alone


@dataclass(frozen=True)
class Figure:
    """A figure with its texts. `alt` describes the figure for readers who do not see it."""

    key: str
    title: str
    caption: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    chips: list[Chip] = field(default_factory=list)
    height_px: int = 400


def log_axis(
    title: str, values: Sequence[float], write: Callable[[float], str] = format_tick
) -> dict[str, Any]:
    """Return a logarithmic axis around `values`, with ticks at 1, 2 and 5, or fewer over many decades."""
    low, high = min(values), max(values)
    # at least 0.3 decades, so that equal values get an axis of visible width
    pad = 0.04 * max(math.log10(high / low), 0.3)
    ends = [math.log10(low) - pad, math.log10(high) + pad]
    decades = ends[1] - ends[0]
    # 1-2-5 ticks up to 2.2 decades, 1-3 up to 3.5, then powers of ten, every `stride`-th one
    steps = (1, 2, 5) if decades <= 2.2 else (1, 3) if decades <= 3.5 else (1,)
    stride = max(1, math.ceil(decades / MAX_DECADES))
    powers = [p for p in range(math.floor(ends[0]), math.ceil(ends[1]) + 1) if p % stride == 0]
    # Example: 3e11 to 2e14 are 2.8 decades: ticks at 1 and 3, so 3e11, 1e12, ..., 1e14. Over 20 decades the
    # stride is 3.
    ticks = [m * 10.0**p for p in powers for m in steps]
    ticks = [tick for tick in ticks if ends[0] <= math.log10(tick) <= ends[1]]
    return {
        "type": "log",
        "title": {"text": title},
        "range": ends,
        "tickvals": ticks,
        "ticktext": [write(tick) for tick in ticks],
    }


def scatter_trace(x: Sequence[float], y: Sequence[float], mode: str, **more: Any) -> dict[str, Any]:
    """Return a trace of points or lines."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), **more}


def format_flops_tick(value: float) -> str:
    """Format a tick as 10<sup>14</sup>, or 3·10<sup>14</sup> between powers of ten."""
    mantissa, power = format_exponent(value, 1).split("e")
    return f"{'' if mantissa == '1' else f'{mantissa}·'}10<sup>{power}</sup>"


def linear_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """Return a linear axis with a margin around low..high."""
    # equal ends get a range of 0.1
    pad = 0.05 * (high - low or 1.0)
    return {"title": {"text": title}, "range": [low - pad, high + pad]}


def size_colour(study: Study, row: Row) -> str:
    """Return the colour name of a run's size."""
    return f"@size{study.sizes().index(row['n_params'])}"


def list_groups(row: Row) -> list[str]:
    """Return the legend keys of a run's traces."""
    return [f"size:{row['n_params']}", f"objective:{row['objective']}"]


def make_run_chips(study: Study, rows: Sequence[Row]) -> list[Chip]:
    """Return legend entries for the sizes of `rows`, and for their objectives if there are several."""
    sizes = [N for N in study.sizes() if any(row["n_params"] == N for row in rows)]
    chips = [Chip(f"size:{N}", study.size_name(N), f"@size{study.sizes().index(N)}") for N in sizes]
    objectives = [o for o in study.objectives() if any(row["objective"] == o for row in rows)]
    if len(objectives) > 1:
        chips += [
            Chip(f"objective:{o}", OBJECTIVE_NAMES.get(o, o), "@muted", DASH.get(o, "dot"))
            for o in objectives
        ]
    return chips


def format_run_hover(study: Study, row: Row) -> str:
    """Return the first line of a run's hover text: size, tokens, objective."""
    objective = OBJECTIVE_NAMES.get(row["objective"], row["objective"])
    tokens = format_count(row["train_tokens"], 3)
    return f"<b>{study.size_name(row['n_params'])}</b>, {tokens} tokens, {objective}"


def format_score_hover(study: Study, row: Row) -> str:
    """Return the first two lines of a run's hover text: the run, and its held-out loss."""
    return f"{format_run_hover(study, row)}<br>held out {format_loss(row['loss'], row['loss_se'])}"


def make_run_mark(study: Study, row: Row, x: float, more: str = "", colour: str = "") -> dict[str, Any]:
    """Return the mark of a finished run at its held-out loss, with 2 standard errors. `more`: hover text."""
    colour = colour or size_colour(study, row)
    return scatter_trace(
        [float(x)],
        [row["loss"]],
        "markers",
        meta=list_groups(row),
        cliponaxis=False,
        marker={"color": colour, "size": 9, "symbol": SYMBOL.get(row["objective"], "square")},
        error_y={"array": [2 * (row["loss_se"] or 0)], "color": colour, "thickness": 1, "width": 3},
        hovertemplate=f"{format_score_hover(study, row)}{more}<extra></extra>",
    )
