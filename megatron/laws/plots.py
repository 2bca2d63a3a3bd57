"""Figures of laws: the loss against compute, and the optima along a frontier."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from pandas import DataFrame

N_POINTS, N_SIZES = 60, 6  # points of a line, sizes drawn
BAND = {"fill": "toself", "mode": "lines", "line": {"width": 0}, "opacity": 0.3, "hoverinfo": "skip"}
# column of the optima, stem of its interval's columns, title
PANELS = (("N", "N", "N*, parameters"), ("loss", "predictive", "loss, nats per token"))


def plot_law(
    law: Any, N: ArrayLike | None = None, D: ArrayLike | None = None, L: ArrayLike | None = None
) -> Any:
    """Return a plotly figure of the loss of several sizes of a `Law` against compute.

    N, D, L [n] are runs to draw as points. Sizes and compute are from the ranges of
    the fitted runs.
    """
    from plotly.graph_objects import Figure  # slow import

    figure = Figure(layout={"title": law.formula(), "template": "plotly_white"})
    (n_low, n_high), (d_low, d_high) = (law.ranges.get(x, [1e6, 1e10]) for x in "ND")
    tokens = np.geomspace(d_low, d_high, N_POINTS)
    for size in np.geomspace(n_low, n_high, N_SIZES):
        figure.add_scatter(
            x=6 * size * tokens, y=law.loss(size, tokens), name=f"N = {size:.3g}", mode="lines"
        )
    if N is not None and D is not None and L is not None:
        runs = 6 * np.asarray(N, dtype=float) * np.asarray(D, dtype=float)
        figure.add_scatter(x=runs, y=np.asarray(L), name="runs", mode="markers")
    figure.update_xaxes(type="log", title="6 N D, FLOPs")
    figure.update_yaxes(type="log", title="loss, nats per token")
    return figure


def plot_optima(optima: "DataFrame") -> Any:
    """Return a plotly figure of the best N and its loss against C, from `to_frame` of a law of compute.

    Bands are the confidence interval of N
    and the predictive interval of the loss.
    """
    from plotly.subplots import make_subplots  # slow import

    # the law of a recipe has no sizes
    panels = [panel for panel in PANELS if panel[0] in optima]
    figure = make_subplots(rows=len(panels), shared_xaxes=True)
    C = optima["C"].to_numpy()
    for row, (name, interval, title) in enumerate(panels, 1):
        low, high = (optima[f"{interval}_{end}"].to_numpy() for end in ("low", "high"))
        x, y = np.concatenate([C, C[::-1]]), np.concatenate([low, high[::-1]])
        figure.add_scatter(x=x, y=y, row=row, col=1, **BAND)
        figure.add_scatter(x=C, y=optima[name].tolist(), mode="lines", row=row, col=1)
        figure.update_yaxes(type="log", title=title, row=row)
    figure.update_xaxes(type="log")
    figure.update_xaxes(title="C, FLOPs", row=len(panels))
    return figure.update_layout(showlegend=False, template="plotly_white")
