"""Page of a coordinate check: change of activations in a few training steps, over width and depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.io import write_atomic
from megatron.report.plot import Figure, log_axis, make_chart, ramp_colour
from megatron.report.report import render_figure_page

MAX_CONSTANT_SLOPE = 0.25  # largest slope that counts as constant; growth with size shows as 0.5 or more
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
        # change = c size^slope: standard parametrization grows as a power of
        # the width, muP has slope 0
        return float(np.polyfit(np.log(self.sizes), np.log(self.moved[quantity]), 1)[0])

    def is_constant(self) -> bool:
        """Return whether no quantity's change depends on the size."""
        return all(abs(self.fit_slope(quantity)) < MAX_CONSTANT_SLOPE for quantity in self.moved)


def write_coordinate_page(sweeps: Sequence[CoordinateSweep], settings: str, path: Path) -> None:
    """Write the check as one HTML page, atomically. `settings`: a sentence on what was trained."""
    axes = list(dict.fromkeys(sweep.axis for sweep in sweeps))
    figures = [coordinate_figure([sweep for sweep in sweeps if sweep.axis == axis]) for axis in axes]
    title = "How far activations move in the first steps"
    write_atomic(path, render_figure_page("Coordinate check", title, settings, figures))


def coordinate_figure(sweeps: Sequence[CoordinateSweep]) -> Figure:
    """Return the figure of one axis: a panel per parametrization, a line per quantity, a shared y axis."""
    titles = [sweep.parametrization for sweep in sweeps]
    grid = {"cols": len(sweeps), "shared_yaxes": True, "subplot_titles": titles}
    chart = make_chart(400, **grid, horizontal_spacing=0.05)
    # the legend is below, because the names of the panels are above
    chart.update_layout(legend={"y": -0.2, "yanchor": "top"}, margin={"t": 30})
    axis = sweeps[0].axis
    for col, sweep in enumerate(sweeps, 1):
        for k, (quantity, values) in enumerate(sweep.moved.items()):
            chart.add_scatter(
                x=sweep.sizes,
                y=values,
                mode="lines+markers",
                name=NAMES[quantity],
                legendgroup=quantity,
                showlegend=col == 1,
                line={"color": ramp_colour(k, len(sweep.moved)), "width": 2},
                hovertemplate=f"%{{y:.3g}} at {axis} %{{x}}<extra>{NAMES[quantity]}</extra>",
                row=1,
                col=col,
            )
        ticks = {"tickvals": sweep.sizes, "ticktext": [str(size) for size in sweep.sizes]}
        chart.update_xaxes(log_axis(axis, sweep.sizes) | ticks, col=col)
    moved = [value for sweep in sweeps for values in sweep.moved.values() for value in values]
    chart.update_yaxes(log_axis("change, root mean square", moved), col=1)
    chart.update_yaxes({"type": "log", "range": log_axis("", moved)["range"]}, col=2)
    caption = "Change of each activation since initialisation. Flat: one learning rate works for each size."
    constant = [sweep.parametrization for sweep in sweeps if sweep.is_constant()]
    if constant:
        caption = f"{caption} Constant: {', '.join(constant)}."
    return Figure(axis, f"Change of activations over {axis}", caption, chart)
