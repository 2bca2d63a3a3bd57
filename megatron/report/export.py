"""Figures for papers as PNG, PDF and SVG, with their data and the command that made them.

kaleido draws each chart of a figure in a headless chromium and downloads nothing. The legend, which on a page
consists of buttons, becomes one of plotly. Colours are those of the light theme.
"""

import math
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.io import replace_nonfinite, write_atomic_bytes, write_json
from megatron.report.figures.plot import Chart, Figure, make_legend_traces, read_chart

FORMATS = ("png", "pdf", "svg")
WIDTH_PX = 640
TIMEOUT_S = 120.0  # of one file
SCALE = 2  # pixels of a PNG per px
LINE_PX = 22  # height of a line of the legend


def export_figures(
    figures: Sequence[Figure],
    colours: dict[str, dict[str, str]],
    folder: Path,
    command: str,
    width_px: int = WIDTH_PX,
) -> list[Path]:
    """Write <folder>/<key>.png, .pdf, .svg and .json of every figure, each atomically, and return the paths.

    command  the command line that makes the files, stored in the .json next to the data

    Raises FileNotFoundError without a browser, and OSError if the browser produces no file.
    """
    written = []
    with tempfile.TemporaryDirectory(prefix="figures-") as name:
        sheets = {figure.key: make_sheet(figure, colours["light"], width_px) for figure in figures}
        rendered = render_charts(sheets, Path(name))
        folder.mkdir(parents=True, exist_ok=True)
        # rendered to a temporary folder and then copied, so that an interrupted export leaves no partial file
        for path in rendered:
            write_atomic_bytes(folder / path.name, path.read_bytes())
            written.append(folder / path.name)
    for figure in figures:
        path = folder / f"{figure.key}.json"
        write_json(path, replace_nonfinite(list_data(figure) | {"command": command}))
        written.append(path)
    return written


def make_sheet(figure: Figure, colours: dict[str, str], width_px: int) -> Chart:
    """Return the figure's chart with its legend above it, on white, in the colours of one theme."""
    chart = read_chart(figure.chart.to_json())  # a copy
    chart.update_traces(showlegend=False).add_traces(make_legend_traces(figure.chips))
    legend = legend_height_px(figure, width_px)
    chart.update_layout(
        width=width_px, height=figure.height_px + legend, margin_t=legend + 8, paper_bgcolor="#fff",
        font_family="sans-serif", showlegend=bool(figure.chips),
        # measured from the sheet and not from the panels, whose height depends on that of the legend
        legend={"orientation": "h", "x": 0, "xref": "container", "y": 1, "yref": "container",
                "yanchor": "top"},
    )  # fmt: skip
    # a whole string that is the name of a colour; other text stays as it is
    name = re.compile(r'"var\(--([\w-]+)\)"')
    return read_chart(name.sub(lambda match: f'"{colours.get(match[1], match[1])}"', chart.to_json()))


def legend_height_px(figure: Figure, width_px: int) -> int:
    """Return the height of the legend in px, whose entries are all as wide as the longest."""
    if not figure.chips:
        return 0
    # 40 px for the mark and 7 px per letter. Example: 8 entries of at most 10 letters take 110 px each, so 5
    # fit into 640 px: 2 lines
    per_line = max(1, width_px // (40 + 7 * max(len(chip.label) for chip in figure.chips)))
    return 8 + LINE_PX * math.ceil(len(figure.chips) / per_line)


def list_data(figure: Figure) -> dict[str, Any]:
    """Return what a figure shows: its texts, and of each trace its legend keys, values and error bars."""
    names = ("type", "mode", "meta", "xaxis", "yaxis", "x", "y", "z", "error_x", "error_y", "customdata")
    traces = [{name: trace[name] for name in names if name in trace} for trace in figure.data]
    legend = {chip.key: chip.label for chip in figure.chips}
    return {"title": figure.title, "caption": figure.caption, "legend": legend, "traces": traces}


def render_charts(charts: dict[str, Chart], folder: Path) -> list[Path]:
    """Write each chart in each of FORMATS to <folder>/<key>.<format> and return the paths."""
    try:
        import kaleido
        from choreographer.browsers.chromium import ChromeNotFoundError
    except ImportError as error:
        raise FileNotFoundError(
            "--figures: got no package kaleido. Install it with pip install kaleido, or omit --figures."
        ) from error
    paths = {folder / f"{key}.{kind}": chart for key, chart in charts.items() for kind in FORMATS}
    sheets = [
        {"fig": chart, "path": path, "opts": {"format": path.suffix[1:], "scale": SCALE}}
        for path, chart in paths.items()
    ]
    try:
        # one browser for all; mathjax would be downloaded
        errors = kaleido.write_fig_from_object_sync(sheets, kopts={"mathjax": False, "timeout": TIMEOUT_S})
    except ChromeNotFoundError as error:
        raise FileNotFoundError(
            "--figures: got no browser, expected chromium or Google Chrome. Install chromium, or omit "
            "--figures."
        ) from error
    for path in paths:
        if not path.is_file() or not path.stat().st_size:
            reason = str(next(iter(errors or ()), "no reason")).splitlines()[0]
            raise OSError(
                f"{path.name}: got no output from the browser ({reason}), expected a file. Check that "
                "chromium starts on this machine."
            )
    return list(paths)
