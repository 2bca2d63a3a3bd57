"""The objective of a law and its derivatives, for many weightings of the same runs at once.

theta = (a, b, e, alpha, beta) and log Lhat = log(exp(a - alpha x) + exp(b - beta y) + exp(e)), x = log N and
y = log D, centred. The objective is sum_i w_i Huber(log L_i - log Lhat_i). R is the number of weightings (one fit,
the starts of a fit, or bootstrap replicates), n that of runs.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Runs:
    """Centred logs of N, D and the log of L, each float64 [n]; `x0`, `y0` were taken away from x and y."""

    x: np.ndarray
    y: np.ndarray
    log_loss: np.ndarray
    x0: float
    y0: float

    @classmethod
    def of(cls, N: np.ndarray, D: np.ndarray, L: np.ndarray) -> "Runs":
        """From plain values, centred at the geometric means: A and B then are of the loss's own size."""
        x, y = np.log(N), np.log(D)
        return cls(x - x.mean(), y - y.mean(), np.log(L), float(x.mean()), float(y.mean()))

    def constants(self, theta: np.ndarray) -> dict[str, np.ndarray]:
        """E, A, B, alpha, beta in the units of N and D, from theta [..., 5]."""
        a, b, e, alpha, beta = np.moveaxis(theta, -1, 0)
        return {
            "E": np.exp(e),
            "A": np.exp(a + alpha * self.x0),
            "B": np.exp(b + beta * self.y0),
            "alpha": alpha,
            "beta": beta,
        }


def residuals(theta: np.ndarray, runs: Runs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log L - log Lhat, share of the N term, share of the D term), each [R, n], for theta [R, 5]."""
    a, b, e, alpha, beta = (theta[:, i, None] for i in range(5))
    of_n, of_d = np.exp(a - alpha * runs.x), np.exp(b - beta * runs.y)
    fitted = of_n + of_d + np.exp(e)
    return runs.log_loss - np.log(fitted), of_n / fitted, of_d / fitted


def objective(theta: np.ndarray, runs: Runs, weights: np.ndarray, delta: float) -> np.ndarray:
    """Sum of weighted Huber terms, [R]; weights [R, n]. No number where theta has run away: infinity."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        r = np.abs(residuals(theta, runs)[0])
        terms = np.where(r <= delta, 0.5 * r * r, _linear(r, delta))
        total = (weights * terms).sum(axis=1)
    return np.where(np.isfinite(total), total, np.inf)


def _linear(r: np.ndarray, delta: float) -> np.ndarray:
    return delta * (r - 0.5 * delta) if np.isfinite(delta) else r


def derivatives(
    theta: np.ndarray, runs: Runs, weights: np.ndarray, delta: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gradient [R, 5], Hessian [R, 5, 5], its convex majorant [R, 5, 5]).

    With g = d log Lhat / d theta and H = d2 log Lhat / d theta2 = sum_m u_m J_m J_m^T - g g^T (u_m the share of term m,
    J_m its gradient), the Hessian is sum w (psi' g g^T - psi H). The majorant has min(1, delta / |r|) g g^T in its
    place, the weight of iteratively reweighted least squares: always positive semidefinite.
    """
    r, u1, u2 = residuals(theta, runs)
    u3 = 1 - u1 - u2
    inside = np.abs(r) <= delta
    slope = weights * np.clip(r, -delta, delta)  # w psi(r)
    one = np.ones_like(runs.x)
    gradient = -np.stack(
        [
            (slope * u1).sum(1),
            (slope * u2).sum(1),
            (slope * u3).sum(1),
            -(slope * u1) @ runs.x,
            -(slope * u2) @ runs.y,
        ],
        axis=1,
    )
    outer = weights * inside + slope  # of g g^T in the Hessian
    hessian = _outer_sum(outer, u1, u2, u3, runs)
    terms = np.stack([one, runs.x, runs.x**2], axis=1), np.stack([one, runs.y, runs.y**2], axis=1)
    for i, share, powers in ((0, u1, terms[0]), (1, u2, terms[1])):
        zeroth, first, second = ((slope * share) @ powers).T
        hessian[:, i, i] -= zeroth
        hessian[:, 3 + i, 3 + i] -= second
        hessian[:, i, 3 + i] += first
        hessian[:, 3 + i, i] += first
    hessian[:, 2, 2] -= (slope * u3).sum(1)
    with np.errstate(divide="ignore"):
        reweighted = weights * np.minimum(1.0, delta / np.abs(r))
    return gradient, hessian, _outer_sum(reweighted, u1, u2, u3, runs)


def _outer_sum(c: np.ndarray, u1: np.ndarray, u2: np.ndarray, u3: np.ndarray, runs: Runs) -> np.ndarray:
    """sum_i c_i g_i g_i^T, [R, 5, 5], with g = (u1, u2, u3, -u1 x, -u2 y)."""
    x, y = runs.x, runs.y
    one = np.ones_like(x)
    shares = (u1, u2, u3)
    powers = np.stack([one, x, y, x * x, y * y, x * y], axis=1)
    total = np.empty((len(c), 5, 5))
    for i in range(3):
        for j in range(i, 3):
            s1, sx, sy, sxx, syy, sxy = ((c * shares[i] * shares[j]) @ powers).T
            total[:, i, j] = s1
            if i == 0:
                total[:, j, 3] = -sx
            if j == 1:
                total[:, i, 4] = -sy
            if (i, j) == (1, 2):
                total[:, 2, 4] = -sy
            if (i, j) == (0, 0):
                total[:, 3, 3] = sxx
            if (i, j) == (0, 1):
                total[:, 3, 4] = sxy
            if (i, j) == (1, 1):
                total[:, 4, 4] = syy
    lower = np.tril_indices(5, -1)
    total[:, lower[0], lower[1]] = total[:, lower[1], lower[0]]
    return total
