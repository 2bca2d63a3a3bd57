"""Page of a coordinate check: change of activations in a few training steps, over width and depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import write_atomic
from megatron.report.figures.plot import (
    Chip,
    Figure,
    Trace,
    log_axis,
    make_chart,
    scatter_trace,
)
from megatron.report.palette import INK, make_palette
from megatron.report.report import render_figure_page
from megatron.study.format import format_tick

MAX_CONSTANT_SLOPE = 0.25  # largest slope that counts as constant; growth with size shows as 0.5 or more
GAP = 0.05  # between panels, as a share of the figure's width
NAMES = {
    "embedding": "embedding",
    "attention": "attention, last block",
    "feed_forward": "feed-forward, last block",
    "residual": "residual stream, at the end",
    "logits": "logits",
}


@dataclass(frozen=True)
class CoordinateSweep:
    """One parametrization over some sizes of one axis.

    axis   "width" or "depth"
    sizes  values of the axis
    moved  {quantity: root-mean-square change at each size}
    """

    parametrization: str
    axis: str
    sizes: list[int]
    moved: dict[str, list[float]]

    def fit_slope(self, quantity: str) -> float:
        """Return the power of the size that a change follows, by log-log least squares. 0 means constant."""
        # change = c size^slope: standard parametrization grows as a power of the width, muP has slope 0
        return float(np.polyfit(np.log(self.sizes), np.log(self.moved[quantity]), 1)[0])

    def is_constant(self) -> bool:
        """Return whether no quantity's change depends on the size."""
        return all(abs(self.fit_slope(quantity)) < MAX_CONSTANT_SLOPE for quantity in self.moved)


def write_coordinate_page(sweeps: Sequence[CoordinateSweep], settings: str, path: Path) -> None:
    """Write the check as one HTML page, atomically. `settings`: a sentence on what was trained."""
    axes = list(dict.fromkeys(sweep.axis for sweep in sweeps))
    figures = [coordinate_figure([sweep for sweep in sweeps if sweep.axis == axis]) for axis in axes]
    text = render_figure_page(
        kicker="Coordinate check",
        title="How far activations move in the first steps",
        opening=settings,
        figures=figures,
        colours=make_palette(len(NAMES), 1),
    )
    write_atomic(path, text)


def coordinate_figure(sweeps: Sequence[CoordinateSweep]) -> Figure:
    """Return the figure of one axis: a panel per parametrization, a line per quantity, a shared y axis."""
    axis, n = sweeps[0].axis, len(sweeps)
    every = [value for sweep in sweeps for values in sweep.moved.values() for value in values]
    # n panels and n - 1 gaps fill the width: n = 3 gives (1 - 0.1) / 3 = 0.3 each
    width = (1 - GAP * (n - 1)) / n
    layout: dict[str, Any] = {"yaxis": log_axis("change, root mean square", every), "annotations": []}
    data = []
    for i, sweep in enumerate(sweeps):
        # the first axis of a plotly figure has no number: xaxis, xaxis2, xaxis3
        suffix = "" if i == 0 else str(i + 1)
        begin = i * (width + GAP)
        layout[f"xaxis{suffix}"] = {
            **log_axis(axis, sweep.sizes),
            "tickvals": sweep.sizes,
            "ticktext": [str(size) for size in sweep.sizes],
            "domain": [begin, begin + width],
            "anchor": f"y{suffix}",
        }
        if suffix:
            # later panels share the y axis of the first: `matches` links zoom and range
            linked = {"matches": "y", "anchor": f"x{suffix}", "showticklabels": False}
            layout[f"yaxis{suffix}"] = log_axis("", every) | linked
        layout["annotations"].append(
            {
                "text": f"<b>{sweep.parametrization}</b>", "xref": "paper", "yref": "paper",
                "x": begin, "y": 1, "xanchor": "left", "yanchor": "bottom", "font": {"color": INK},
            }
        )  # fmt: skip
        data += [_quantity_line(sweep, quantity, k, suffix) for k, quantity in enumerate(sweep.moved)]
    constant = [sweep.parametrization for sweep in sweeps if sweep.is_constant()]
    alt = " ".join(_describe_slopes(sweep) for sweep in sweeps)
    title = (
        f"{' and '.join(constant)}: no activation's change depends on the {axis}"
        if constant
        else f"The change of some activation depends on the {axis} under every parametrization"
    )
    caption = (
        "Change of each activation since initialisation. Flat lines: one learning rate works for every "
        f"{axis}."
    )
    chips = [Chip(q, NAMES[q], f"var(--size{k})") for k, q in enumerate(sweeps[0].moved)]
    return Figure(axis, title, caption, alt, make_chart(data, layout, 400), chips)


def _quantity_line(sweep: CoordinateSweep, quantity: str, k: int, suffix: str) -> Trace:
    colour = f"var(--size{k})"
    point = f"%{{y:.3g}} at {sweep.axis} %{{x}}<extra></extra>"
    return scatter_trace(
        sweep.sizes,
        sweep.moved[quantity],
        "lines+markers",
        meta=[quantity],
        line={"color": colour, "width": 2},
        marker={"color": colour, "size": 7},
        xaxis=f"x{suffix}",
        yaxis=f"y{suffix}",
        cliponaxis=False,
        hovertemplate=f"{NAMES[quantity]}, {sweep.parametrization}<br>{point}",
    )


def _describe_slopes(sweep: CoordinateSweep) -> str:
    slopes = ", ".join(f"{NAMES[q]} {sweep.fit_slope(q):+.2f}" for q in sweep.moved)
    low, high = format_tick(sweep.sizes[0]), format_tick(sweep.sizes[-1])
    return f"{sweep.parametrization}, {sweep.axis} {low} to {high}, the power of it by quantity: {slopes}."
