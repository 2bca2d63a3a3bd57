"""Power law y = coefficient x^exponent through points with errors, with intervals.

A straight line in logs is fitted by weighted least squares. Where
points have errors and their scatter around the line is larger, the
errors are scaled up to it (Birge ratio); they are never scaled
down. Intervals use Student's t with n - 2 degrees of freedom.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import validate_columns

LEVEL = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """A fitted straight line in logs.

    interval    confidence interval of the exponent; NaN for two points without errors
    covariance  [2, 2] of (log y at the centre, exponent); NaN for two points without errors
    centre      weighted mean of log x, where log y and the exponent are uncorrelated
    scatter     standard deviation of log y of a typical point around the line
    dof         n - 2 degrees of freedom; 0: normal, by the errors of the two points alone
    """

    coefficient: float
    exponent: float
    interval: tuple[float, float]
    covariance: np.ndarray = field(default_factory=lambda: np.full((2, 2), np.nan))
    centre: float = 0.0
    scatter: float = float("nan")
    dof: int = 0

    def evaluate(self, x: ArrayLike) -> np.ndarray:
        """Return y at x; broadcasts."""
        return self.coefficient * np.asarray(x, dtype=float) ** self.exponent

    def widen(self, factor: float) -> "PowerLaw":
        """Return the law with errors of its constants multiplied by `factor`."""
        low, high = (self.exponent + factor * (end - self.exponent) for end in self.interval)
        return replace(self, interval=(low, high), covariance=factor**2 * self.covariance)

    def predict(
        self, x: ArrayLike, level: float = LEVEL, kind: str = "predictive", log_se: float | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (y, low, high) at x, each of the shape of x.

        kind  "predictive": interval for one new point whose log has the error
              `log_se` (default: `scatter`). "confidence": interval for the line.
        Raises ValueError for another kind.
        """
        if kind not in ("predictive", "confidence"):
            raise ValueError(f"kind: got '{kind}', expected predictive or confidence")
        offset = np.log(np.asarray(x, dtype=float)) - self.centre
        variance = self.covariance[0, 0] + self.covariance[1, 1] * offset**2
        if kind == "predictive":
            variance = variance + (self.scatter if log_se is None else log_se) ** 2
        half = interval_quantile(level, self.dof) * np.sqrt(variance)
        return self.evaluate(x), self.evaluate(x) * np.exp(-half), self.evaluate(x) * np.exp(half)


def interval_quantile(level: float, dof: float) -> float:
    """Return the half-width of a two-sided interval in standard deviations: t, or normal for dof = 0."""
    from scipy.special import ndtri, stdtrit  # slow import

    return float(stdtrit(dof, (1 + level) / 2) if dof else ndtri((1 + level) / 2))


def fit_power(x: ArrayLike, y: ArrayLike, log_se: ArrayLike | None = None) -> PowerLaw:
    """Fit log y on log x, each [n], by weighted least squares; `log_se` [n] are standard errors of log y.

    With two points the interval is by `log_se` alone, and NaN without `log_se`.

    Raises ValueError for fewer than two different
    x, or values that are not positive.
    """
    log_x, log_y = (np.log(values) for values in validate_columns(x=x, y=y))
    if len(np.unique(log_x)) < 2:
        raise ValueError(f"power law: got {len(np.unique(log_x))} different x, expected two or more")
    weights = np.ones_like(log_x)
    if log_se is not None:
        errors = np.asarray(log_se, dtype=float)
        if errors.shape != log_x.shape or not (np.isfinite(errors) & (errors >= 0)).all():
            raise ValueError(f"log_se: got {errors}, expected {len(log_x)} numbers of 0 or more")
        # an error of 0 would have an infinite weight
        weights = 1 / np.maximum(errors, 1e-9) ** 2
    total = weights.sum()
    # centring x makes the estimates of the level and of the slope uncorrelated
    centre, mean_y = float(weights @ log_x / total), float(weights @ log_y / total)
    offset = log_x - centre
    square = float(weights @ offset**2)
    slope = float(weights @ (offset * (log_y - mean_y))) / square
    dof = len(log_x) - 2
    # reduced chi-square: about 1 if the errors explain
    # the scatter, NaN for two points
    scale = float(weights @ (log_y - mean_y - slope * offset) ** 2) / dof if dof else float("nan")
    if log_se is not None:
        scale = max(scale, 1.0) if dof else 1.0  # Birge ratio
    covariance = scale * np.diag([1 / total, 1 / square])
    half = interval_quantile(LEVEL, dof) * float(np.sqrt(covariance[1, 1]))
    scatter = float(np.sqrt(scale / np.median(weights)))
    coefficient = float(np.exp(mean_y - slope * centre))
    return PowerLaw(coefficient, slope, (slope - half, slope + half), covariance, centre, scatter, dof)
