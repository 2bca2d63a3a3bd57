"""What a figure is, and what all figures share: axes, colours, legends, how a run is named.

A figure is plain data ({"data": [...], "layout": {...}}), so nothing here needs plotly; the page draws it.
Colours are names of palette.py with "@" before them. Its title says what the numbers say, so it is computed
from them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.scaling import wording
from megatron.scaling.study import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.scaling.table import Row

DASH = {AUTOREGRESSIVE: "solid", MASKED_DIFFUSION: "dash"}
SYMBOL = {AUTOREGRESSIVE: "circle", MASKED_DIFFUSION: "diamond-open"}
LOSS_UNIT = "nats per token"
MOST_DECADES = 8  # that an axis names each of


@dataclass(frozen=True)
class Chip:
    """One entry of a legend. Pressing it hides the traces whose `meta` lists `key`."""

    key: str
    label: str
    colour: str = "@ink"
    dash: str = "solid"  # solid, dash, or point for a marker alone


@dataclass(frozen=True)
class Figure:
    """A figure and its words. `alt` says in words what a reader would see."""

    key: str
    title: str
    caption: str
    alt: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    chips: list[Chip] = field(default_factory=list)
    height_px: int = 400


def log_axis(
    title: str, values: Sequence[float], write: Callable[[float], str] = wording.tick
) -> dict[str, Any]:
    """A logarithmic axis around `values`, with ticks at 1, 2, 5; the more decades, the fewer."""
    low, high = min(values), max(values)
    pad = 0.04 * max(math.log10(high / low), 0.3)
    ends = [math.log10(low) - pad, math.log10(high) + pad]
    decades = ends[1] - ends[0]
    steps = (1, 2, 5) if decades <= 2.2 else (1, 3) if decades <= 3.5 else (1,)
    each = max(1, math.ceil(decades / MOST_DECADES))
    powers = [p for p in range(math.floor(ends[0]), math.ceil(ends[1]) + 1) if p % each == 0]
    ticks = [m * 10.0**p for p in powers for m in steps]
    ticks = [tick for tick in ticks if ends[0] <= math.log10(tick) <= ends[1]]
    return {
        "type": "log",
        "title": {"text": title},
        "range": ends,
        "tickvals": ticks,
        "ticktext": [write(tick) for tick in ticks],
    }


def scatter(x: Sequence[float], y: Sequence[float], mode: str, **more: Any) -> dict[str, Any]:
    """A trace of points or lines."""
    return {"type": "scatter", "mode": mode, "x": list(x), "y": list(y), **more}


def flops_tick(value: float) -> str:
    """10<sup>14</sup>, or 3·10<sup>14</sup> between the powers."""
    mantissa, power = wording.exponent(value, 1).split("e")
    return f"{'' if mantissa == '1' else f'{mantissa}·'}10<sup>{power}</sup>"


def linear_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """A linear axis that leaves some air around low..high."""
    pad = 0.05 * (high - low or 1.0)
    return {"title": {"text": title}, "range": [low - pad, high + pad]}


def size_colour(study: Study, row: Row) -> str:
    """The colour of a run's size."""
    return f"@size{study.sizes().index(row['n_params'])}"


def groups(row: Row) -> list[str]:
    """What a trace of this run belongs to, as chips name it."""
    return [f"size:{row['n_params']}", f"objective:{row['objective']}"]


def run_chips(study: Study, rows: Sequence[Row]) -> list[Chip]:
    """Chips for the sizes of `rows`, and for their objectives if there are two."""
    sizes = [N for N in study.sizes() if any(row["n_params"] == N for row in rows)]
    chips = [Chip(f"size:{N}", study.size_name(N), f"@size{study.sizes().index(N)}") for N in sizes]
    objectives = [o for o in study.objectives() if any(row["objective"] == o for row in rows)]
    if len(objectives) > 1:
        chips += [
            Chip(f"objective:{o}", wording.OBJECTIVES.get(o, o), "@muted", DASH.get(o, "dot"))
            for o in objectives
        ]
    return chips


def describe(study: Study, row: Row) -> str:
    """One run in a hover's first line."""
    objective = wording.OBJECTIVES.get(row["objective"], row["objective"])
    tokens = wording.count(row["train_tokens"], 3)
    return f"<b>{study.size_name(row['n_params'])}</b>, {tokens} tokens, {objective}"


def score(study: Study, row: Row) -> str:
    """A hover's first two lines: the run, and its held-out loss."""
    return f"{describe(study, row)}<br>held out {wording.loss(row['loss'], row['loss_se'])}"


def run_mark(study: Study, row: Row, x: float, more: str = "", colour: str = "") -> dict[str, Any]:
    """A finished run marked at its held-out loss, with two standard errors; `more` goes into its hover."""
    colour = colour or size_colour(study, row)
    return scatter(
        [float(x)],
        [row["loss"]],
        "markers",
        meta=groups(row),
        cliponaxis=False,
        marker={"color": colour, "size": 9, "symbol": SYMBOL.get(row["objective"], "square")},
        error_y={"array": [2 * (row["loss_se"] or 0)], "color": colour, "thickness": 1, "width": 3},
        hovertemplate=f"{score(study, row)}{more}<extra></extra>",
    )
