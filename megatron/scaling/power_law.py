"""y = coefficient x^exponent through points with errors, and its interval."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

LEVEL = 0.95


@dataclass(frozen=True)
class PowerLaw:
    """A straight line in logs. `interval` [2] is of the exponent, NaN where nothing says how sure it is."""

    coefficient: float
    exponent: float
    interval: tuple[float, float]

    def at(self, x: ArrayLike) -> np.ndarray:
        """y at x; broadcasts."""
        return self.coefficient * np.asarray(x, dtype=float) ** self.exponent


def fit_power(
    x: ArrayLike, y: ArrayLike, log_se: ArrayLike | None = None, n_bootstrap: int = 1000, seed: int = 0
) -> PowerLaw:
    """Weighted least squares of log y on log x, each [n]; `log_se` [n] are standard errors of log y.

    The interval is of resampled points, or, with fewer than four, of `log_se` alone.

    Raises ValueError for fewer than two different x, or values that are not positive.
    """
    x, y = np.log(_positive("x", x)), np.log(_positive("y", y))
    if len(np.unique(x)) < 2:
        raise ValueError(f"power law: found {len(np.unique(x))} different x, wanted two or more")
    weights = np.ones_like(x) if log_se is None else 1 / np.maximum(np.asarray(log_se, float), 1e-9) ** 2
    slope, level = (float(v) for v in _line(x, y, weights))
    rng = np.random.default_rng(seed)
    slopes = np.empty(0)
    if len(x) >= 4:
        rows = rng.integers(0, len(x), (n_bootstrap, len(x)))
        rows = rows[np.ptp(x[rows], axis=1) > 0]
        slopes = _line(x[rows], y[rows], weights[rows])[0]
    elif log_se is not None:
        noise = rng.standard_normal((n_bootstrap, len(x))) * np.asarray(log_se, float)
        slopes = _line(np.broadcast_to(x, noise.shape), y + noise, np.broadcast_to(weights, noise.shape))[0]
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(slopes, tails) if len(slopes) else (np.nan, np.nan)
    return PowerLaw(float(np.exp(level)), slope, (float(low), float(high)))


def _line(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(slope, value at x = 0) of the weighted least-squares lines through points [..., n]."""
    total = weights.sum(axis=-1)
    mean_x, mean_y = (weights * x).sum(axis=-1) / total, (weights * y).sum(axis=-1) / total
    off = x - mean_x[..., None]
    slope = (weights * off * (y - mean_y[..., None])).sum(axis=-1) / (weights * off**2).sum(axis=-1)
    return slope, mean_y - slope * mean_x


def _positive(name: str, values: ArrayLike) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    wrong = values[~(np.isfinite(values) & (values > 0))]
    if len(wrong):
        raise ValueError(f"{name}: found {wrong[0]}, wanted positive numbers")
    return values
