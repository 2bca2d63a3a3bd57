"""Figure of a law: the loss against compute."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

N_POINTS, N_SIZES = 60, 6  # points of a line, sizes drawn


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
