"""Charts of plotly, and what all figures share: template, axes, legends, hover texts of runs.

This is the only module that imports plotly, inside functions. The template has the style, so the other
modules of this folder contain only what is drawn. Colours are names of palette.py. Titles state results and
are computed from the numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from megatron.report.palette import ACCENT, BAND, GRID, INK, LABEL, MUTED, PAPER, SHADE
from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION, Study
from megatron.study.format import (
    NOT_KNOWN,
    OBJECTIVE_NAMES,
    format_count,
    format_exponent,
    format_loss,
    format_tick,
)
from megatron.study.run_row import FinishedRow, RunRow

if TYPE_CHECKING:
    import plotly.graph_objects as go

# strings, because plotly is imported when the first chart is made
Chart: TypeAlias = "go.Figure"
Trace: TypeAlias = "go.Scatter"

DASH = {AUTOREGRESSIVE: "solid", MASKED_DIFFUSION: "dash"}
SYMBOL = {AUTOREGRESSIVE: "circle", MASKED_DIFFUSION: "diamond-open"}
LOSS_UNIT = "nats per token"
MAX_DECADES = 8  # decades up to which an axis labels each


@dataclass(frozen=True)
class Chip:
    """One entry of a legend. A click on it hides the traces whose `meta` contains `key`."""

    key: str
    label: str
    colour: str = INK
    dash: str = "solid"  # solid, dash, or point for a marker alone


@dataclass(frozen=True)
class Figure:
    """A chart with its texts. `alt` describes the figure for readers who do not see it."""

    key: str
    title: str
    caption: str
    alt: str
    chart: Chart
    chips: list[Chip] = field(default_factory=list)

    @property
    def height_px(self) -> int:
        """Return the height of the chart."""
        return self.chart.layout.height

    @property
    def data(self) -> list[dict[str, Any]]:
        """Return the traces as plotly.js reads them."""
        return self.chart.to_plotly_json()["data"]

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout as plotly.js reads it, without the template, which all figures share."""
        layout = self.chart.to_plotly_json()["layout"]
        return {name: value for name, value in layout.items() if name != "template"}


def make_chart(traces: Sequence[Trace], layout: dict[str, Any], height_px: int = 400) -> Chart:
    """Return a chart in the style of the report. Raises ValueError for properties that plotly lacks."""
    import plotly.graph_objects as go

    return go.Figure(list(traces), {**layout, "height": height_px, "template": make_template()})


@cache
def make_template() -> dict[str, Any]:
    """Return the template of all charts: fonts, axes, hover boxes, labels and shapes."""
    axis = {
        "gridcolor": GRID, "linecolor": MUTED, "tickcolor": MUTED, "zeroline": False, "zerolinecolor": MUTED,
        "showline": True, "ticks": "outside", "ticklen": 4, "automargin": True, "exponentformat": "B",
        "title": {"standoff": 8},
    }  # fmt: skip
    clear = "rgba(0,0,0,0)"
    layout = {
        "font": {"size": 12.5, "color": INK},
        "xaxis": axis,
        "yaxis": axis,
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "margin": {"l": 8, "r": 16, "t": 26, "b": 8},
        "modebar": {"bgcolor": clear, "color": MUTED, "activecolor": INK},
        "hoverlabel": {"bgcolor": PAPER, "bordercolor": MUTED, "align": "left", "font": {"color": INK}},
        "hovermode": "closest",
        "showlegend": False,  # the page has legends of its own, which the keyboard reaches: Chip
        "annotationdefaults": {"showarrow": False, "font": {"color": MUTED, "size": 11}},
        "shapedefaults": {"layer": "below", "line": {"width": 0}},
    }
    return {"layout": layout}


def read_chart(text: str) -> Chart:
    """Return a chart from its JSON."""
    import plotly.io

    return plotly.io.from_json(text)


def make_legend_traces(chips: Sequence[Chip]) -> list[Trace]:
    """Return a trace without points for each entry of a legend of plotly."""
    traces = []
    for chip in chips:
        style: dict[str, Any] = {"line": {"color": chip.colour, "width": 2.5, "dash": chip.dash}}
        if chip.dash == "point":
            style = {"marker": {"color": chip.colour, "size": 8, "symbol": "circle-open"}}
        mode = "markers" if chip.dash == "point" else "lines"
        traces.append(scatter_trace([None], [None], mode, name=chip.label, showlegend=True, **style))
    return traces


def read_plotly_js() -> str:
    """Return plotly.js for a script element."""
    from plotly.offline import get_plotlyjs

    # without this, "</script" in a string of plotly.js would end the element
    return get_plotlyjs().replace("</script", r"<\/script")


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


def scatter_trace(
    x: Sequence[float | None], y: Sequence[float | str | None], mode: str, **more: Any
) -> Trace:
    """Return a trace of points or lines; y is text on an axis of categories.

    Raises ValueError for properties that plotly lacks.
    """
    import plotly.graph_objects as go

    return go.Scatter(x=list(x), y=list(y), mode=mode, **more)


def contour_trace(x: Sequence[float], y: Sequence[float], z: Sequence[Sequence[float]], **more: Any) -> Trace:
    """Return lines of equal z [len(y), len(x)], with their values."""
    import plotly.graph_objects as go

    style = {"contours": {"coloring": "none", "showlabels": True}, "showscale": False}
    return go.Contour(x=x, y=y, z=z, line={"color": MUTED, "width": 1.2}, **style, **more)


def band_trace(
    x: Sequence[float] | np.ndarray,
    ends: tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray],
    meta: str,
    **more: Any,
) -> Trace:
    """Return a filled band between two lines as one closed trace, so that it is hidden as a whole."""
    low, high = ends
    # one closed polygon: forward along the lower end, back along the upper
    return scatter_trace(
        [*x, *x[::-1]], [*low, *high[::-1]], "lines", fill="toself", fillcolor=BAND,
        line={"width": 0, "color": ACCENT}, hoverinfo="skip", meta=[meta], **more,
    )  # fmt: skip


def shade_beyond(last: float, end: float, shaded: Sequence[str], labelled: Sequence[str]) -> dict[str, Any]:
    """Return the layout's shading of x from `last` to `end` in the panels of y axes, and their labels."""
    rectangles = [
        {"type": "rect", "xref": "x", "yref": f"{axis} domain", "x0": last, "x1": end, "y0": 0, "y1": 1,
         "fillcolor": SHADE}
        for axis in shaded
    ]  # fmt: skip
    labels = [
        {"xref": "x domain", "yref": f"{axis} domain", "x": 0.99, "y": 0, "xanchor": "right",
         "yanchor": "bottom", "text": "beyond the runs"}
        for axis in labelled
    ]  # fmt: skip
    return {"shapes": rectangles, "annotations": labels}


def level_line(y: float, text: str) -> dict[str, Any]:
    """Return the layout's dotted horizontal line with a label at the right, where the curves are below."""
    line = {"type": "line", "xref": "x domain", "x0": 0, "x1": 1, "y0": y, "y1": y,
            "line": {"color": MUTED, "width": 1.2, "dash": "dot"}}  # fmt: skip
    label = {"xref": "x domain", "x": 1, "xanchor": "right", "y": y, "yanchor": "bottom", "text": text,
             "bgcolor": LABEL, "borderpad": 1}  # fmt: skip
    return {"shapes": [line], "annotations": [label]}


def format_flops_tick(value: float) -> str:
    """Format a tick as 10<sup>14</sup>, or 3·10<sup>14</sup> between powers of ten."""
    mantissa, power = format_exponent(value, 1).split("e")
    return f"{'' if mantissa == '1' else f'{mantissa}·'}10<sup>{power}</sup>"


def linear_axis(title: str, low: float, high: float) -> dict[str, Any]:
    """Return a linear axis with a margin around low..high."""
    # equal ends get a range of 0.1
    pad = 0.05 * (high - low or 1.0)
    return {"title": {"text": title}, "range": [low - pad, high + pad]}


def size_colour(study: Study, row: RunRow) -> str:
    """Return the colour name of a run's size."""
    return f"var(--size{study.sizes().index(row.n_params)})" if row.n_params else MUTED


def list_groups(row: RunRow) -> list[str]:
    """Return the legend keys of a run's traces."""
    return [f"size:{row.n_params}", f"objective:{row.objective}"]


def make_run_chips(study: Study, rows: Sequence[RunRow]) -> list[Chip]:
    """Return legend entries for the sizes of `rows`, and for their objectives if there are several."""
    sizes = [N for N in study.sizes() if any(row.n_params == N for row in rows)]
    chips = [Chip(f"size:{N}", study.size_name(N), f"var(--size{study.sizes().index(N)})") for N in sizes]
    objectives = [o for o in study.objectives() if any(row.objective == o for row in rows)]
    if len(objectives) > 1:
        chips += [
            Chip(f"objective:{o}", OBJECTIVE_NAMES.get(o, o), MUTED, DASH.get(o, "dot")) for o in objectives
        ]
    return chips


def format_run_hover(study: Study, row: RunRow) -> str:
    """Return the first line of a run's hover text: size, tokens, objective."""
    objective = row.objective or NOT_KNOWN
    objective = OBJECTIVE_NAMES.get(objective, objective)
    tokens = format_count(row.train_tokens, 3)
    return f"<b>{study.size_name(row.n_params)}</b>, {tokens} tokens, {objective}"


def format_score_hover(study: Study, row: RunRow) -> str:
    """Return the first two lines of a run's hover text: the run, and its held-out loss."""
    return f"{format_run_hover(study, row)}<br>held out {format_loss(row.loss, row.loss_se)}"


def make_error_bars(rows: Sequence[RunRow], colour: str) -> dict[str, Any]:
    """Return bars of 2 standard errors of the held-out loss of runs."""
    bars = [2 * (row.loss_se or 0) for row in rows]
    return {"array": bars, "color": colour, "thickness": 1, "width": 3}


def make_run_mark(study: Study, row: FinishedRow, x: float, more: str = "", colour: str = "") -> Trace:
    """Return the mark of a finished run at its held-out loss, with 2 standard errors. `more`: hover text."""
    colour = colour or size_colour(study, row)
    return scatter_trace(
        [float(x)],
        [row.loss],
        "markers",
        meta=list_groups(row),
        cliponaxis=False,
        marker={"color": colour, "size": 9, "symbol": SYMBOL.get(row.objective, "square")},
        error_y=make_error_bars([row], colour),
        hovertemplate=f"{format_score_hover(study, row)}{more}<extra></extra>",
    )
