"""The objective of a law and its derivatives, for many weightings of the same runs at once.

With x = log N and y = log D centred at their means, the law is written in phi = (c, s, t, alpha, beta),

    Lhat = c + s (exp(-alpha x) - 1) / alpha + t (exp(-beta y) - 1) / beta,

that is c = E + A + B (the loss at the centre), s = alpha A, t = beta B (its slopes there), A and B in centred
units. In E, A, B the minimum lies in a long curved valley when the exponents are loosely held, and Newton
creeps; in phi the valley is nearly straight. The objective is sum_i w_i Huber(log L_i - log Lhat_i). R is the
number of weightings (the starts of a fit, or bootstrap replicates), n that of runs.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Runs:
    """Centred logs of N and D and the log of L, each float64 [n]; `x0`, `y0` were taken away from x and y."""

    x: np.ndarray
    y: np.ndarray
    log_loss: np.ndarray
    x0: float
    y0: float

    @classmethod
    def of(cls, N: np.ndarray, D: np.ndarray, L: np.ndarray) -> "Runs":
        """From plain values: N parameters, D tokens, L nats a token."""
        x, y = np.log(N), np.log(D)
        return cls(x - x.mean(), y - y.mean(), np.log(L), float(x.mean()), float(y.mean()))

    def constants(self, phi: np.ndarray) -> dict[str, np.ndarray]:
        """E, A, B, alpha, beta in the units of N and D, from phi [..., 5]."""
        c, s, t, alpha, beta = np.moveaxis(phi, -1, 0)
        a, b = s / alpha, t / beta
        return {
            "E": np.maximum(c - a - b, 0.0),
            "A": a * np.exp(alpha * self.x0),
            "B": b * np.exp(beta * self.y0),
            "alpha": alpha,
            "beta": beta,
        }


def floor_of(phi: np.ndarray) -> np.ndarray:
    """E of phi [R, 5]: the loss that neither size nor tokens take away. A law wants it at 0 or above."""
    c, s, t, alpha, beta = phi.T
    return c - s / alpha - t / beta


def _fitted(phi: np.ndarray, runs: Runs) -> tuple[np.ndarray, ...]:
    """Lhat [R, n] and what its derivatives want: exp(-alpha x), exp(-beta y) and both Box-Cox terms."""
    c, s, t, alpha, beta = (phi[:, i, None] for i in range(5))
    of_x, of_y = np.exp(-alpha * runs.x), np.exp(-beta * runs.y)
    h, k = (of_x - 1) / alpha, (of_y - 1) / beta
    return c + s * h + t * k, of_x, of_y, h, k


def objective(phi: np.ndarray, runs: Runs, weights: np.ndarray, delta: float) -> np.ndarray:
    """Sum of weighted Huber terms [R] for phi [R, 5], weights [R, n]; infinity where Lhat is not positive."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        r = np.abs(runs.log_loss - np.log(_fitted(phi, runs)[0]))
        inside = np.minimum(r, delta)
        total = (weights * inside * (r - 0.5 * inside)).sum(axis=1)
    return np.where(np.isfinite(total), total, np.inf)


def derivatives(
    phi: np.ndarray, runs: Runs, weights: np.ndarray, delta: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gradient [R, 5], Hessian [R, 5, 5], its convex majorant [R, 5, 5]).

    With g = d log Lhat / d phi, the Hessian is sum w ((psi' + psi) g g^T - psi Lhat'' / Lhat). The majorant
    is sum w min(1, delta / |r|) g g^T, as in iteratively reweighted least squares: positive semidefinite.
    """
    s, t, alpha, beta = (phi[:, i, None] for i in range(1, 5))
    fitted, of_x, of_y, h, k = _fitted(phi, runs)
    h1, k1 = -(runs.x * of_x + h) / alpha, -(runs.y * of_y + k) / beta  # d h / d alpha, d k / d beta
    h2, k2 = (runs.x**2 * of_x - 2 * h1) / alpha, (runs.y**2 * of_y - 2 * k1) / beta
    r = runs.log_loss - np.log(fitted)
    g = np.stack([np.ones_like(h), h, k, s * h1, t * k1], axis=2) / fitted[:, :, None]  # [R, n, 5]
    slope = weights * np.clip(r, -delta, delta)  # w psi(r)
    size = np.abs(r)
    # at the width itself inside: an absolute value's kink would otherwise have no curvature at all
    outer = weights * (size <= delta) + slope
    reweighted = weights * (delta / np.maximum(size, delta) if np.isfinite(delta) else 1.0)
    transposed = np.swapaxes(g, 1, 2)
    gradient = -np.matmul(transposed, slope[:, :, None])[:, :, 0]
    hessian = np.matmul(transposed * outer[:, None, :], g)
    bent = slope / fitted
    for i, j, second in ((1, 3, h1), (2, 4, k1), (3, 3, s * h2), (4, 4, t * k2)):
        moved = (bent * second).sum(axis=1)
        hessian[:, i, j] -= moved
        if i != j:
            hessian[:, j, i] -= moved
    return gradient, hessian, np.matmul(transposed * reweighted[:, None, :], g)


def in_floor(
    phi: np.ndarray, gradient: np.ndarray, hessian: np.ndarray, majorant: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same derivatives in (E, s, t, alpha, beta): [R, 5] and twice [R, 5, 5]."""
    _, s, t, alpha, beta = phi.T
    jacobian = np.broadcast_to(np.eye(5), (len(phi), 5, 5)).copy()
    jacobian[:, 0, 1:] = np.stack([1 / alpha, 1 / beta, -s / alpha**2, -t / beta**2], axis=1)
    back = np.swapaxes(jacobian, 1, 2)
    curved = back @ hessian @ jacobian
    of_c = gradient[:, 0]  # c = E + s / alpha + t / beta is itself bent
    for i, j, second in ((1, 3, -1 / alpha**2), (2, 4, -1 / beta**2)):
        curved[:, i, j] += of_c * second
        curved[:, j, i] += of_c * second
    curved[:, 3, 3] += of_c * 2 * s / alpha**3
    curved[:, 4, 4] += of_c * 2 * t / beta**3
    return (back @ gradient[:, :, None])[:, :, 0], curved, back @ majorant @ jacobian


def without_floor(
    phi: np.ndarray, gradient: np.ndarray, hessian: np.ndarray, majorant: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same derivatives on the surface E = 0, in (s, t, alpha, beta): [R, 4] and twice [R, 4, 4]."""
    slope, curved, convex = in_floor(phi, gradient, hessian, majorant)
    return slope[:, 1:], curved[:, 1:, 1:], convex[:, 1:, 1:]


def to_floor(phi: np.ndarray) -> np.ndarray:
    """(E, s, t, alpha, beta) [R, 5] of phi [R, 5]."""
    return np.column_stack([floor_of(phi), phi[:, 1:]])


def from_floor(floored: np.ndarray) -> np.ndarray:
    """Undo `to_floor`."""
    floor, s, t, alpha, beta = floored.T
    return np.column_stack([floor + s / alpha + t / beta, floored[:, 1:]])


def onto_surface(phi: np.ndarray) -> np.ndarray:
    """phi [R, 5] with c such that E = 0."""
    moved = phi.copy()
    moved[:, 0] -= floor_of(phi)
    return moved
