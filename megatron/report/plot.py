"""Charts of plotly, and what all figures share: template, colours, axes, points of runs.

Colours have a contrast of at least 3 with white and with the dark
page, so a figure has one set of them. Titles and captions
are fixed texts; a caption describes only what is drawn.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from megatron.report.study_data import AUTOREGRESSIVE, MASKED_DIFFUSION
from megatron.study.format import OBJECTIVE_NAMES, format_count, format_exponent, format_loss, format_short

if TYPE_CHECKING:
    import plotly.graph_objects as go

# a string, because plotly is imported when the first chart is made
Chart: TypeAlias = "go.Figure"

INK, MUTED, ACCENT, GRID = "#1d2330", "#7a8394", "#2f7fd1", "#e4e7ec"
BAND, SHADE = "rgba(47,127,209,0.18)", "rgba(122,131,148,0.12)"
# for ordered groups, such as sizes: hue and lightness change monotonically
RAMP = ("#2f6fd6", "#8a5ae0", "#c8479f", "#dd5a33", "#b57d10")
DASH = {AUTOREGRESSIVE: "solid", MASKED_DIFFUSION: "dash"}
SYMBOL = {AUTOREGRESSIVE: "circle", MASKED_DIFFUSION: "diamond-open"}
LOSS = "loss, nats per token"
MAX_LEGEND = 8  # entries for sizes; with more sizes every second or third has one
HEIGHT_PX = 380
LINE_PX = 22  # height of a line of the legend


@dataclass(frozen=True)
class Figure:
    """A chart with its texts. `is_diagnostic`: it checks a law and is not a result of the study."""

    key: str
    title: str
    caption: str
    chart: Chart
    is_diagnostic: bool = False

    @property
    def content(self) -> dict[str, Any]:
        """Key, traces and layout as plotly.js reads them, without the template, which all figures share."""
        chart = self.chart.to_plotly_json()
        layout = {name: value for name, value in chart["layout"].items() if name != "template"}
        return {"key": self.key, "data": chart["data"], "layout": layout}


@cache
def make_template() -> dict[str, Any]:
    """Return the template of all charts. The page replaces the colours of text and grid by its theme's."""
    axis = {
        "gridcolor": GRID,
        "linecolor": MUTED,
        "tickcolor": MUTED,
        "zeroline": False,
        "showline": True,
        "ticks": "outside",
        "ticklen": 4,
        "automargin": True,
        "exponentformat": "B",
        "title": {"standoff": 8},
    }
    layout = {
        "font": {"size": 12.5, "color": INK},
        "xaxis": axis,
        "yaxis": axis,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 24, "t": 12, "b": 8},
        "hovermode": "closest",
        "hoverlabel": {"align": "left"},
        "showlegend": True,
        # above the panels, so that the figure is as wide on a phone
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        "annotationdefaults": {"showarrow": False, "font": {"color": MUTED, "size": 11}},
        "shapedefaults": {"layer": "below", "line": {"width": 0}},
    }
    return {"layout": layout}


def make_chart(height_px: int = HEIGHT_PX, **grid: Any) -> Chart:
    """Return an empty chart in the style of the report. `grid`: arguments of make_subplots."""
    import plotly.graph_objects as go  # slow imports
    from plotly.subplots import make_subplots

    chart = make_subplots(**grid) if grid else go.Figure()
    return chart.update_layout(template=make_template(), height=height_px)


def draw_parallel(lines: pd.DataFrame, colour: str) -> Chart:
    """Return parallel coordinates: an axis for each column, a line for each row, coloured by one column."""
    from plotly.express import parallel_coordinates  # slow import

    return parallel_coordinates(lines, color=colour)


def read_plotly_js() -> str:
    """Return the build of plotly.js that is installed."""
    from plotly.offline import get_plotlyjs  # slow import

    return get_plotlyjs()


def ramp_colour(i: int, n: int) -> str:
    """Return colour i of n along the ramp; the middle of it for n = 1."""
    at = (len(RAMP) - 1) * (i / (n - 1) if n > 1 else 0.5)
    # RAMP has 5 colours; i = 2 of n = 4 is at 2.67: between colours 2 and 3, 67 %
    # of the latter
    left = min(int(at), len(RAMP) - 2)
    mixed = []
    for start in (1, 3, 5):
        below, above = (int(RAMP[k][start : start + 2], 16) for k in (left, left + 1))
        mixed.append(round(below + (above - below) * (at - left)))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def log_axis(
    title: str, values: Iterable[float], write: Callable[[float], str] = format_short
) -> dict[str, Any]:
    """Return a logarithmic axis around `values`, with ticks at 1, 2 and 5, or fewer over many decades."""
    shown = list(values)
    low, high = min(shown), max(shown)
    # at least 0.3 decades, so that equal values get an axis of visible width
    pad = 0.04 * max(math.log10(high / low), 0.3)
    ends = [math.log10(low) - pad, math.log10(high) + pad]
    decades = ends[1] - ends[0]
    steps = (1, 2, 5) if decades <= 2.2 else (1, 3) if decades <= 3.5 else (1,)
    # 20 decades: a tick at every third
    stride = max(1, math.ceil(decades / 8))
    powers = [p for p in range(math.floor(ends[0]), math.ceil(ends[1]) + 1) if p % stride == 0]
    ticks = [m * 10.0**p for p in powers for m in steps]
    ticks = [tick for tick in ticks if ends[0] <= math.log10(tick) <= ends[1]]
    texts = [write(tick) for tick in ticks]
    return {"type": "log", "title": {"text": title}, "range": ends, "tickvals": ticks, "ticktext": texts}


def flops_axis(values: Iterable[float], title: str = "training compute, FLOPs") -> dict[str, Any]:
    """Return a logarithmic axis of FLOPs."""
    return log_axis(title, values, format_flops_tick)


def format_flops_tick(value: float) -> str:
    """Format a tick as 10<sup>14</sup>, or 3·10<sup>14</sup> between powers of ten."""
    mantissa, power = format_exponent(value, 1).split("e")
    return f"{'' if mantissa == '1' else f'{mantissa}·'}10<sup>{power}</sup>"


def linear_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """Return a linear axis with a margin around `values`."""
    shown = list(values)
    low, high = min(shown), max(shown)
    pad = 0.05 * (high - low or 1.0)
    return {"title": {"text": title}, "range": [low - pad, high + pad]}


def name_sizes(runs: pd.DataFrame) -> pd.Series:
    """Return the size of each run as text.

    Sizes with the same text are one group of a figure.
    """
    return runs["n_params"].map(format_count)


def colour_sizes(runs: pd.DataFrame) -> dict[str, str]:
    """Return the colour of each size, in ascending order."""
    names = list(dict.fromkeys(name_sizes(runs.sort_values("n_params"))))
    return {name: ramp_colour(i, len(names)) for i, name in enumerate(names)}


def list_legend(names: Sequence[str]) -> set[str]:
    """Return at most MAX_LEGEND of the names, evenly spaced, with the first and the last."""
    n = min(len(names), MAX_LEGEND)
    return {names[round(i)] for i in np.linspace(0, len(names) - 1, n)}


def describe_runs(runs: pd.DataFrame) -> list[str]:
    """Return the hover text of each run: size, tokens, objective, held-out loss."""
    texts = []
    for run in runs.itertuples():
        objective = OBJECTIVE_NAMES.get(run.objective, run.objective)
        error = None if math.isnan(run.loss_se) else run.loss_se
        size = f"<b>{format_count(run.n_params, 3)}</b>, {format_count(run.train_tokens, 3)} tokens"
        texts.append(f"{size}, {objective}<br>held out {format_loss(run.loss, error)}")
    return texts


def add_line(
    chart: Chart,
    x: ArrayLike,
    y: ArrayLike,
    name: str,
    colour: str,
    text: Sequence[str] | str | None = None,
    **more: Any,
) -> None:
    """Add a line of the legend's group `name`, without an entry of its own unless showlegend=True.

    dash, width and shape are of the line, all others of the trace.
    """
    style = {name: more.pop(name) for name in ("dash", "width", "shape") if name in more}
    more = {"mode": "lines", "showlegend": False, "hoverinfo": "x+y+text" if text else "skip"} | more
    line = {"color": colour, "width": 2.0} | style
    _add_trace(chart, x, y, name, line=line, hovertext=text, **more)


def add_points(
    chart: Chart, x: ArrayLike, y: ArrayLike, name: str, colour: str, text: Sequence[str] | str, **more: Any
) -> None:
    """Add points of the legend's group `name`, with an entry unless showlegend=False.

    symbol and size are of the points; all others are properties of the trace.
    """
    style = {name: more.pop(name) for name in ("symbol", "size") if name in more}
    marker = {"color": colour, "size": 8} | style
    more = {"mode": "markers", "hoverinfo": "text", "cliponaxis": False} | more
    _add_trace(chart, x, y, name, marker=marker, hovertext=text, **more)


def _add_trace(chart: Chart, x: ArrayLike, y: ArrayLike, name: str, **more: Any) -> None:
    x, y = (np.asarray(values, dtype=float).tolist() for values in (x, y))
    chart.add_scatter(x=x, y=y, name=name, legendgroup=name, **more)


def make_bars(up: ArrayLike, down: ArrayLike | None = None) -> dict[str, Any]:
    """Return error bars of lengths `up` and `down` (default: as `up`).

    An unknown length has none.
    """
    bars: dict[str, Any] = {"type": "data", "thickness": 1.5, "width": 4}
    bars["array"] = np.nan_to_num(np.asarray(up, dtype=float)).tolist()
    if down is not None:
        bars |= {"symmetric": False, "arrayminus": np.nan_to_num(np.asarray(down, dtype=float)).tolist()}
    return bars


def add_band(chart: Chart, x: ArrayLike, low: ArrayLike, high: ArrayLike, name: str, **more: Any) -> None:
    """Add a filled band between two lines as one closed trace: along `low`, and back along `high`."""
    x, low, high = (np.asarray(values, dtype=float) for values in (x, low, high))
    ends = np.concatenate([low, high[::-1]])
    fill: dict[str, Any] = {"fill": "toself", "fillcolor": BAND, "width": 0}
    add_line(chart, np.concatenate([x, x[::-1]]), ends, name, ACCENT, **fill, **more)


def add_runs(chart: Chart, runs: pd.DataFrame, x: str, y: str = "loss") -> None:
    """Add the runs as points by size and objective.

    Losses have bars of 2 standard errors.
    """
    colours = colour_sizes(runs)
    unlisted = list_legend(list(colours))
    for (size, objective), group in runs.groupby([name_sizes(runs), "objective"], sort=False):
        more: dict[str, Any] = {"symbol": SYMBOL.get(objective, "square")}
        if y == "loss":
            more["error_y"] = make_bars(2 * group["loss_se"])
        more |= {"showlegend": size in unlisted, "legendrank": 1000 + list(colours).index(size)}
        add_points(chart, group[x], group[y], size, colours[size], describe_runs(group), **more)
        unlisted -= {size}


def add_objectives(chart: Chart, runs: pd.DataFrame) -> None:
    """Add legend entries for the objectives of `runs` where there are several."""
    objectives = sorted(set(runs["objective"]))
    for objective in objectives if len(objectives) > 1 else ():
        name = OBJECTIVE_NAMES.get(objective, objective)
        style: dict[str, Any] = {"dash": DASH.get(objective, "dot"), "mode": "lines+markers"}
        mark = {"symbol": SYMBOL.get(objective, "square"), "size": 8}
        add_line(
            chart, [np.nan], [np.nan], name, MUTED, **style, marker=mark, showlegend=True, legendrank=3000
        )
