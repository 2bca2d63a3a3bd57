"""Law of one recipe: the loss at C FLOPs, from points (C, L) of runs that follow it.

A recipe fixes N and D at each C, such as 20 tokens per parameter, so that a table
needs neither. The law is the trend of compute_trend.py: E + K C^-g with a drifting
exponent, averaged over what the points leave open.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.io import write_json
from megatron.laws.columns import takes_data_frame, validate_columns
from megatron.laws.compute_law import LEVEL, MAX_HALF_WIDTH, find_furthest, log_half_width
from megatron.laws.fitting.compute_trend import ComputeTrend, fit_trend

if TYPE_CHECKING:
    from pandas import DataFrame

MIN_POINTS = 4


@dataclass(frozen=True)
class RecipePrediction:
    """Loss of one new run at C FLOPs, nats per token, with intervals of the recipe's mean and of the run."""

    C: float
    loss: float
    level: float
    confidence: tuple[float, float]
    predictive: tuple[float, float]

    @property
    def half_width(self) -> float:
        """Half-width of log L of one new run; above MAX_HALF_WIDTH this is no forecast."""
        return log_half_width(self.predictive)


@dataclass(frozen=True, kw_only=True)
class RecipeLaw:
    """A fitted recipe. Saved as recipe_law.json.

    trend  fields of ComputeTrend
    C      range of the points
    table  path and sha256 of their table, and the columns
    """

    trend: ComputeTrend
    C: tuple[float, float]
    n_points: int
    runs: list[str] = field(default_factory=list)
    table: dict[str, str] = field(default_factory=dict)

    def predict(self, C: float, level: float = LEVEL) -> RecipePrediction:
        """Predict one run. Raises ValueError below the smallest fitted compute."""
        if not self.C[0] * (1 - 1e-9) <= C < math.inf:
            raise ValueError(
                f"C: got {C:.3g} FLOPs, expected {self.C[0]:.3g} or more, the least of the points"
            )
        x = math.log(C)
        loss = math.exp(self.trend.quantile(x, 0.5, noisy=False))
        (c_low, c_high), (low, high) = (self.trend.interval(x, level, noisy) for noisy in (False, True))
        confidence = (math.exp(c_low), math.exp(c_high))
        return RecipePrediction(C, loss, level, confidence, (math.exp(low), math.exp(high)))

    def furthest_forecast(self, half_width: float = MAX_HALF_WIDTH) -> float:
        """Return the largest C, FLOPs, whose interval of one new run has no larger half-width in log L."""
        return find_furthest(self.C[1], lambda C: self.predict(C).half_width <= half_width)

    def to_frame(self, C: ArrayLike | None = None, level: float = LEVEL) -> "DataFrame":
        """Return columns C, loss and its intervals at each `C` [n].

        The default is from the smallest to `furthest_forecast`.
        """
        from pandas import DataFrame  # slow import

        ends = np.geomspace(self.C[0], self.furthest_forecast(), 9) if C is None else np.ravel(C)
        frame = DataFrame([vars(self.predict(float(c), level)) for c in ends]).drop(columns="level")
        for name in ("confidence", "predictive"):
            frame[[f"{name}_low", f"{name}_high"]] = frame.pop(name).tolist()
        return frame

    def plot(self, C: ArrayLike | None = None) -> Any:
        """Return a plotly figure of the loss against C, with the interval of one new run."""
        from megatron.laws.plots import plot_optima

        return plot_optima(self.to_frame(C))

    def save(self, path: str | Path) -> None:
        """Write recipe_law.json atomically."""
        write_json(Path(path), asdict(self))


@takes_data_frame
def fit_recipe_law(C: ArrayLike, L: ArrayLike, runs: Sequence[str] = ()) -> RecipeLaw:
    """Fit points of one recipe: C FLOPs and L nats per token, each [n].

    Raises ValueError for fewer than MIN_POINTS different C, values that are not positive, or losses
    that do not fall.
    """
    C, L = validate_columns(C=C, L=L)
    if len(np.unique(C)) < MIN_POINTS:
        raise ValueError(f"recipe: got {len(np.unique(C))} different C, expected {MIN_POINTS} or more")
    # equal losses have a slope of rounding errors
    if np.polyfit(np.log(C), np.log(L), 1)[0] > -1e-9:
        raise ValueError("recipe: the losses do not fall with compute. Give tuned runs of one recipe.")
    trend = fit_trend(np.log(C), np.log(L))
    return RecipeLaw(trend=trend, C=(float(C.min()), float(C.max())), n_points=len(C), runs=list(runs))
