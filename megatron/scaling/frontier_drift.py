"""How a frontier may go on beyond its largest budget: its slope drifts, as a random walk in log C.

A form that agrees with runs over a factor of 30 in compute is not a law beyond them: models learn to use
their context, or reach what they can hold. So the slope of log L* by x = log C differs from the form's by a
random walk, d slope ~ Normal(0, drift^2 dx): the difference is an integrated Wiener process, whose posterior
mean is a cubic smoothing spline (Wahba, J. R. Stat. Soc. B 40, 1978). Beyond the largest budget the form and
the difference in slope there continue, and the variance of log L* grows by drift^2 dx^3 / 3.

A frontier that steepens has no form beyond: no E + K / C^g falls ever faster. There its last slope continues.

The drift is not known from a few budgets: predictions are averaged over a grid of it, weighted by the
restricted likelihood and a half-normal prior of scale DRIFT.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.scaling.frontier_form import log_loss, slopes

DRIFT = 0.02  # over four times the compute of six ladders of tiny models it was off by 0.004 to 0.019
DRIFTS = np.geomspace(0.0005, 0.06, 30)
STEP = 1e-4  # in log C, of derivatives by differences


@dataclass(frozen=True)
class Continuation:
    """log L* beyond `edge` = log(C_largest / C0), where it is `level` and falls by -`slope`.

    covariance  [2, 2] of level and slope
    drift       root mean square of the drift over the grid, per sqrt(log C)
    """

    edge: float
    level: float
    slope: float
    covariance: list[list[float]]
    drift: float

    def variance(self, x: float) -> float:
        """Of log L* at x >= edge."""
        reach = x - self.edge
        ahead = np.array([1.0, reach])
        return float(ahead @ np.array(self.covariance) @ ahead) + self.drift**2 * reach**3 / 3

    def at(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """log L* at x >= edge [n] for the form's constants theta [7]."""
        form = unbent(theta)
        level, slope = frontier_at(form, self.edge)
        ahead = log_loss(form, x, form[3] + form[4] * x)
        return ahead + (self.level - level) + (self.slope - slope) * (x - self.edge)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def continue_frontier(
    theta: np.ndarray, basis: np.ndarray, x: np.ndarray, log_n: np.ndarray, y: np.ndarray
) -> Continuation:
    """The continuation of a fit with constants theta [7], free in the directions `basis` [7, p].

    x [n] are log(C / C0), log_n [n], y [n] log L. The constants other than the curvature are adjusted with
    the walk, to first order; the walk is the error of the curvature.
    """
    form = unbent(theta)
    free = basis[:, np.abs(basis[2]) == 0]
    columns = slopes(form, x, log_n) @ free
    left = y - log_loss(form, x, log_n)
    edge, u = float(x.max()), x - x.min()
    top = np.array([u.max()])
    kernel = _kernel(u, u)
    across = np.stack([_kernel(top, u)[0], u**2 / 2])  # of w(top), w'(top) with w(u), u <= top
    own = np.array([[u.max() ** 3 / 3, u.max() ** 2 / 2], [u.max() ** 2 / 2, u.max()]])
    base = np.array(frontier_at(form, edge))
    ends = _derivatives_at(form, edge) @ free
    logs, means, covariances, squares = [], [], [], []
    for ratio in (DRIFTS / _scale(left, columns)) ** 2:
        inverse, log_det = _inverse(np.eye(len(u)) + ratio * kernel)
        normal = np.linalg.pinv(columns.T @ inverse @ columns)
        shift = normal @ columns.T @ inverse @ left
        rest = left - columns @ shift
        dof = len(u) - columns.shape[1]
        noise = float(rest @ inverse @ rest) / dof
        gain = ratio * across @ inverse
        of_constants = ends - gain @ columns
        spread = ratio * own - gain @ (ratio * across).T + of_constants @ normal @ of_constants.T
        logs.append(
            -0.5 * (log_det - np.linalg.slogdet(normal)[1] + dof * np.log(noise))
            - 0.5 * ratio * noise / DRIFT**2
        )
        means.append(base + ends @ shift + gain @ rest)
        covariances.append(noise * spread)
        squares.append(ratio * noise)
    weights = np.exp(np.array(logs) - max(logs)) * DRIFTS  # the grid is even in log drift
    weights /= weights.sum()
    mean = weights @ np.array(means)
    apart = np.array(means) - mean
    covariance = np.einsum("k,kij->ij", weights, covariances) + (weights * apart.T) @ apart
    drift = float(np.sqrt(weights @ np.array(squares)))
    # the fit's own level, from which the walk's differs by less than its error: the frontier has no step
    level = frontier_at(theta, edge)[0]
    return Continuation(edge, level, float(mean[1]), covariance.tolist(), drift)


def unbent(theta: np.ndarray) -> np.ndarray:
    """The constants [7] without a curvature below 0."""
    form = np.array(theta, dtype=float)
    form[2] = max(form[2], 0.0)
    return form


def frontier_at(theta: np.ndarray, x: float) -> tuple[float, float]:
    """log L* and its slope at x."""
    around = np.array([x, x - STEP, x + STEP])
    here, below, above = log_loss(theta, around, theta[3] + theta[4] * around)
    return float(here), float(above - below) / (2 * STEP)


def _derivatives_at(theta: np.ndarray, x: float) -> np.ndarray:
    """Those of log L* and its slope at x by the constants, [2, 7]."""
    around = np.array([x, x - STEP, x + STEP])
    here, below, above = slopes(theta, around, theta[3] + theta[4] * around)
    return np.stack([here, (above - below) / (2 * STEP)])


def _kernel(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Covariance [n, m] of an integrated Wiener process of unit variance at s [n] and t [m], both from 0."""
    least, apart = np.minimum.outer(s, t), np.abs(np.subtract.outer(s, t))
    return least**3 / 3 + least**2 * apart / 2


def _scale(left: np.ndarray, columns: np.ndarray) -> float:
    """Standard deviation of what the constants leave, at least 1e-6 of the loss."""
    rest = left - columns @ np.linalg.lstsq(columns, left, rcond=None)[0]
    return max(float(np.sqrt((rest**2).sum() / max(len(left) - columns.shape[1], 1))), 1e-6)


def _inverse(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """The inverse of a positive definite matrix, and the log of its determinant."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors / values) @ vectors.T, float(np.log(values).sum())
