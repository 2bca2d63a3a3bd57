"""Continuation of a frontier beyond its largest budget: its slope drifts, as a random walk in log C.

A form that agrees with runs over a factor of 30 in compute need not hold
beyond them: models learn to use their context, or reach their capacity. So the
slope of log L* by x = log C differs from the form's slope by a random walk, d
slope ~ Normal(0, drift^2 dx). The difference of log L* is an integrated Wiener
process, whose posterior mean is a cubic smoothing spline (Wahba, J. R. Stat.
Soc. B 40, 1978). Beyond the largest budget the form and the difference in
slope there continue, and the variance of log L* grows by drift^2 dx^3 / 3.

A frontier that steepens cannot continue as its form, since no
E + K / C^g falls ever faster. There the last slope continues.

A few budgets do not determine the drift. Predictions are averaged over a grid of
it, weighted by the restricted likelihood and a half-normal prior of scale DRIFT.
"""

from dataclasses import dataclass

import numpy as np

from megatron.laws.fitting.frontier_form import log_loss, log_loss_slopes

DRIFT = 0.02  # prior scale; over 4 times the compute of six ladders of tiny models drifts were 0.004 to 0.019
DRIFTS = np.geomspace(0.0005, 0.06, 30)
STEP = 1e-4  # in log C, for central differences


@dataclass(frozen=True)
class Continuation:
    """log L* beyond `edge` = log(C_largest / C0), where it has the value `level` and the derivative `slope`.

    covariance  [2, 2] of level and slope
    drift       posterior root mean square of the drift, per sqrt(log C)
    """

    edge: float
    level: float
    slope: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    drift: float

    def variance(self, x: float) -> float:
        """Return the variance of log L* at x >= edge."""
        reach = x - self.edge
        gradient = np.array([1.0, reach])
        # error of the line level + slope reach, plus the
        # variance of an integrated Wiener process
        return float(gradient @ np.array(self.covariance) @ gradient) + self.drift**2 * reach**3 / 3

    def evaluate(self, theta: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return log L* at x >= edge [n] for constants theta [7] of the form."""
        # a frontier that steepens continues as a line
        form = clip_curvature(theta)
        level, slope = evaluate_frontier(form, self.edge)
        log_loss_ahead = log_loss(form, x, form[3] + form[4] * x)
        return log_loss_ahead + (self.level - level) + (self.slope - slope) * (x - self.edge)


def continue_frontier(
    theta: np.ndarray,
    basis: np.ndarray,
    x: np.ndarray,
    log_n: np.ndarray,
    y: np.ndarray,
    correlation: np.ndarray | None,
    covariance: np.ndarray,
) -> Continuation:
    """Return the continuation of a fit with constants theta [7], free in the directions `basis` [7, p].

    x [n] are log(C / C0), log_n [n] are log N, y [n] are log L, and their noise has
    `correlation` [n, n]; None: it is independent. `covariance` [7, 7] belongs to theta.
    The constants other than the curvature are adjusted together with the walk,
    to first order. The walk takes the place of an error of the curvature.

    The model is y = form + columns shift + w(x) + noise: Gaussian process
    regression with the covariance noise^2 (correlation + ratio K), K from
    the integrated Wiener process and ratio = (drift / noise)^2. At
    each drift of the grid the shift is the generalised least-squares
    estimate, and the walk its kriging prediction at the edge.
    """
    form = clip_curvature(theta)
    # row 2 is the curvature: drop the directions that change it
    free = basis[:, np.abs(basis[2]) == 0]
    # [n, p]; log L is linear in the shift to first order
    columns = log_loss_slopes(form, x, log_n) @ free
    residual = y - log_loss(form, x, log_n)
    edge, u = float(x.max()), x - x.min()
    top = np.array([u.max()])
    kernel = _wiener_covariance(u, u)
    # covariance of w(top) and w'(top) with w(u), u <=
    # top, and of the two with each other
    cross_covariance = np.stack([_wiener_covariance(top, u)[0], u**2 / 2])
    # Cov(w'(T), w(u)) = integral of (u - s) ds over 0..u = u^2 / 2 for u <= T;
    # Var w(T) = T^3 / 3, Cov(w(T), w'(T)) = T^2 / 2, Var w'(T) = T.
    end_covariance = np.array([[u.max() ** 3 / 3, u.max() ** 2 / 2], [u.max() ** 2 / 2, u.max()]])
    base = np.array(evaluate_frontier(form, edge))
    ends = _differentiate_frontier(form, edge) @ free
    logs, means, covariances, squares = [], [], [], []
    # ratio = (drift / noise)^2 needs a noise before it is
    # estimated below: a fit without the walk gives it.
    for ratio in (DRIFTS / _estimate_scale(residual, columns)) ** 2:
        inverse, log_det = _invert_positive_definite(
            (np.eye(len(u)) if correlation is None else correlation) + ratio * kernel
        )
        constants_covariance = np.linalg.pinv(columns.T @ inverse @ columns)
        shift = constants_covariance @ columns.T @ inverse @ residual
        remainder = residual - columns @ shift
        dof = len(u) - columns.shape[1]
        # a variance: ratio * noise is drift^2
        noise = float(remainder @ inverse @ remainder) / dof
        # kriging weights [2, n] of (w, w') at the edge
        gain = ratio * cross_covariance @ inverse
        constants_gradient = ends - gain @ columns
        # Variance of the kriging prediction, plus variance from the
        # shift: an error of the shift changes the ends by ends -
        # gain columns, since the walk then absorbs part of it.
        spread = (
            ratio * end_covariance
            - gain @ (ratio * cross_covariance).T
            + constants_gradient @ constants_covariance @ constants_gradient.T
        )
        # log restricted likelihood with the noise profiled
        # out, plus the half-normal log prior of the drift
        logs.append(
            -0.5 * (log_det - np.linalg.slogdet(constants_covariance)[1] + dof * np.log(noise))
            - 0.5 * ratio * noise / DRIFT**2
        )
        means.append(base + ends @ shift + gain @ remainder)
        covariances.append(noise * spread)
        squares.append(ratio * noise)
    weights = np.exp(np.array(logs) - max(logs)) * DRIFTS  # Jacobian: the grid is even in log drift
    weights /= weights.sum()
    mean = weights @ np.array(means)
    deviations = np.array(means) - mean
    # law of total variance: mean of the covariances plus covariance of the means
    ends_covariance = np.einsum("k,kij->ij", weights, covariances) + (weights * deviations.T) @ deviations
    drift = float(np.sqrt(weights @ np.array(squares)))
    # The level of the fit instead of the walk's level, which differs
    # by less than its error: so the frontier has no step at the edge.
    level = evaluate_frontier(theta, edge)[0]
    if correlation is not None:
        # that fit weights all rows equally, and its level
        # is less exact than generalised least squares
        gradient = _differentiate_frontier(theta, edge)[0]
        ends_covariance[0, 0] = max(ends_covariance[0, 0], float(gradient @ covariance @ gradient))
    return Continuation(edge, level, float(mean[1]), ends_covariance.tolist(), drift)


def clip_curvature(theta: np.ndarray) -> np.ndarray:
    """Return constants [7] with a curvature below 0 replaced by 0."""
    form = np.array(theta, dtype=float)
    form[2] = max(form[2], 0.0)
    return form


def evaluate_frontier(theta: np.ndarray, x: float) -> tuple[float, float]:
    """Return log L* and its slope at x."""
    points = np.array([x, x - STEP, x + STEP])
    at_x, below, above = log_loss(theta, points, theta[3] + theta[4] * points)
    return float(at_x), float(above - below) / (2 * STEP)


def _differentiate_frontier(theta: np.ndarray, x: float) -> np.ndarray:
    """Return the derivatives [2, 7] of log L* and of its slope at x by the constants."""
    points = np.array([x, x - STEP, x + STEP])
    at_x, below, above = log_loss_slopes(theta, points, theta[3] + theta[4] * points)
    return np.stack([at_x, (above - below) / (2 * STEP)])


def _wiener_covariance(s: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return the covariance [n, m] of an integrated unit Wiener process from 0 at s [n] and t [m].

    With m = min(s, t): m^3 / 3 + m^2 |s - t| / 2.
    """
    least, apart = np.minimum.outer(s, t), np.abs(np.subtract.outer(s, t))
    return least**3 / 3 + least**2 * apart / 2


def _estimate_scale(residual: np.ndarray, columns: np.ndarray) -> float:
    """Return the standard deviation of residuals after a linear fit, at least 1e-6."""
    remainder = residual - columns @ np.linalg.lstsq(columns, residual, rcond=None)[0]
    return max(float(np.sqrt((remainder**2).sum() / max(len(residual) - columns.shape[1], 1))), 1e-6)


def _invert_positive_definite(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the inverse of a positive definite matrix, and the log of its determinant."""
    values, vectors = np.linalg.eigh(matrix)
    # correlation + ratio K with K positive semidefinite:
    # eigenvalues are at least the correlation's
    return (vectors / values) @ vectors.T, float(np.log(values).sum())
