"""y = coefficient x^exponent through points with errors, and its intervals.

A straight line in logs by weighted least squares. Where points have errors, their scatter around the line is
compared with them: if it is larger the errors are scaled up (Birge), and never down. Intervals are Student's
t with n - 2 degrees of freedom.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri, stdtrit

LEVEL = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """A straight line in logs. `interval` [2] is of the exponent, NaN where nothing says how sure it is.

    covariance  [2, 2] of (log y at the centre, exponent); NaN where nothing says it
    centre      weighted mean of log x, where the two are independent
    scatter     standard deviation of log y of a typical point around the line
    dof         n - 2 degrees of freedom; 0: the errors of the points alone, normal
    """

    coefficient: float
    exponent: float
    interval: tuple[float, float]
    covariance: np.ndarray = field(default_factory=lambda: np.full((2, 2), np.nan))
    centre: float = 0.0
    scatter: float = float("nan")
    dof: int = 0

    def at(self, x: ArrayLike) -> np.ndarray:
        """y at x; broadcasts."""
        return self.coefficient * np.asarray(x, dtype=float) ** self.exponent

    def predict(
        self, x: ArrayLike, level: float = LEVEL, kind: str = "predictive", log_se: float | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(y, low, high) at x, each of its shape.

        kind  "predictive": for one new point, whose log has the error `log_se` (default: `scatter`).
              "confidence": for the line.
        Raises ValueError for another kind.
        """
        if kind not in ("predictive", "confidence"):
            raise ValueError(f"kind: got '{kind}', expected predictive or confidence")
        off = np.log(np.asarray(x, dtype=float)) - self.centre
        variance = self.covariance[0, 0] + self.covariance[1, 1] * off**2
        if kind == "predictive":
            variance = variance + (self.scatter if log_se is None else log_se) ** 2
        half = quantile(level, self.dof) * np.sqrt(variance)
        return self.at(x), self.at(x) * np.exp(-half), self.at(x) * np.exp(half)


def quantile(level: float, dof: int) -> float:
    """Half-width of a two-sided interval in standard deviations."""
    return float(stdtrit(dof, (1 + level) / 2) if dof else ndtri((1 + level) / 2))


def fit_power(x: ArrayLike, y: ArrayLike, log_se: ArrayLike | None = None) -> PowerLaw:
    """Weighted least squares of log y on log x, each [n]; `log_se` [n] are standard errors of log y.

    With two points the interval is that of `log_se` alone, and without them there is none.

    Raises ValueError for fewer than two different x, or values that are not positive.
    """
    x, y = np.log(_positive("x", x)), np.log(_positive("y", y))
    if len(x) != len(y):
        raise ValueError(f"power law: got {len(x)} x and {len(y)} y, expected as many of each")
    if len(np.unique(x)) < 2:
        raise ValueError(f"power law: found {len(np.unique(x))} different x, wanted two or more")
    weights = np.ones_like(x)
    if log_se is not None:
        errors = np.asarray(log_se, dtype=float)
        if errors.shape != x.shape or not (np.isfinite(errors) & (errors >= 0)).all():
            raise ValueError(f"log_se: got {errors}, expected {len(x)} numbers of 0 or more")
        weights = 1 / np.maximum(errors, 1e-9) ** 2
    total = weights.sum()
    centre, middle = float(weights @ x / total), float(weights @ y / total)
    off = x - centre
    square = float(weights @ off**2)
    slope = float(weights @ (off * (y - middle))) / square
    dof = len(x) - 2
    scale = float(weights @ (y - middle - slope * off) ** 2) / dof if dof else float("nan")
    if log_se is not None:
        scale = max(scale, 1.0) if dof else 1.0
    covariance = scale * np.diag([1 / total, 1 / square])
    half = quantile(LEVEL, dof) * float(np.sqrt(covariance[1, 1]))
    scatter = float(np.sqrt(scale / np.median(weights)))
    coefficient = float(np.exp(middle - slope * centre))
    return PowerLaw(coefficient, slope, (slope - half, slope + half), covariance, centre, scatter, dof)


def _positive(name: str, values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if len(wrong):
        raise ValueError(f"{name}: found {wrong[0]}, wanted positive numbers")
    return values
