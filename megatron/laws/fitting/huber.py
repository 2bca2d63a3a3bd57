"""Huber objective of Chinchilla's form and its derivatives, for many weightings of the same runs at once.

With x = log N and y = log D centred at their means,
the law is written in phi = (c, s, t, alpha, beta),

    Lhat = c + s (exp(-alpha x) - 1) / alpha + t (exp(-beta y) - 1) / beta,

that is c = E + A + B (the loss at the centre), s = alpha A and t = beta B
(minus its slopes there), with A and B in centred units. In (E, A, B) the
minimum is in a long curved valley when the runs determine the exponents poorly,
and Newton takes many short steps. In phi the valley is nearly straight.

The objective is sum_i w_i Huber(log L_i - log Lhat_i). R is the number of
weightings (starts of a fit, or bootstrap replicates), n the number of runs.
"""

from dataclasses import dataclass

import numpy as np

from megatron.laws.fitting.newton import Derivatives


@dataclass(frozen=True)
class CentredRuns:
    """Centred logs of N and D and the log of L, each float64 [n]; `x0` and `y0` are the means subtracted."""

    x: np.ndarray
    y: np.ndarray
    log_loss: np.ndarray
    x0: float
    y0: float

    @classmethod
    def from_columns(cls, N: np.ndarray, D: np.ndarray, L: np.ndarray) -> "CentredRuns":
        """Build from plain values [n]: N parameters, D tokens, L nats per token."""
        x, y = np.log(N), np.log(D)
        return cls(x - x.mean(), y - y.mean(), np.log(L), float(x.mean()), float(y.mean()))

    def to_constants(self, phi: np.ndarray) -> dict[str, np.ndarray]:
        """Return E, A, B, alpha, beta in the units of N and D, from phi [..., 5]."""
        c, s, t, alpha, beta = np.moveaxis(phi, -1, 0)
        # At x = log N - x0 the term is a exp(-alpha x) = a
        # exp(alpha x0) N^-alpha, so A = a exp(alpha x0).
        a, b = s / alpha, t / beta
        return {
            # on the surface E = 0 rounding may leave a value of about -1e-16
            "E": np.maximum(c - a - b, 0.0),
            "A": a * np.exp(alpha * self.x0),
            "B": b * np.exp(beta * self.y0),
            "alpha": alpha,
            "beta": beta,
        }


def compute_floor(phi: np.ndarray) -> np.ndarray:
    """Return E [R] of phi [R, 5], the irreducible loss, which a valid law has at 0 or above."""
    c, s, t, alpha, beta = phi.T
    return c - s / alpha - t / beta


def _evaluate_law(phi: np.ndarray, runs: CentredRuns) -> tuple[np.ndarray, ...]:
    """Return Lhat [R, n] and what its derivatives need: exp(-alpha x), exp(-beta y) and both Box-Cox terms.

    The Box-Cox terms are h = (exp(-alpha x) - 1)
    / alpha and k = (exp(-beta y) - 1) / beta.
    """
    # [R, 1] each; with runs.x [n] the terms broadcast to [R, n]
    c, s, t, alpha, beta = (phi[:, i, None] for i in range(5))
    of_x, of_y = np.exp(-alpha * runs.x), np.exp(-beta * runs.y)
    # h tends to -x as alpha tends to 0, so phi stays finite
    # where A = s / alpha and E = c - A - B diverge. At alpha
    # = 0.01 and |x| = 1 the subtraction loses 2 of 16 digits.
    h, k = (of_x - 1) / alpha, (of_y - 1) / beta
    return c + s * h + t * k, of_x, of_y, h, k


def huber_objective(phi: np.ndarray, runs: CentredRuns, weights: np.ndarray, delta: float) -> np.ndarray:
    """Return the sum of weighted Huber terms [R] at phi [R, 5], weights [R, n].

    It is Inf where Lhat is not positive.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # Lhat <= 0 gives NaN or Inf here. It makes the total
        # NaN or Inf also in a run of weight 0, as 0 * Inf is
        # NaN, so the step is rejected whatever the weights are.
        r = np.abs(runs.log_loss - np.log(_evaluate_law(phi, runs)[0]))
        # r^2 / 2 inside the width and delta (r - delta / 2)
        # outside, in one expression
        clipped = np.minimum(r, delta)
        total = (weights * clipped * (r - 0.5 * clipped)).sum(axis=1)
    return np.where(np.isfinite(total), total, np.inf)


def huber_derivatives(phi: np.ndarray, runs: CentredRuns, weights: np.ndarray, delta: float) -> Derivatives:
    """Return (gradient [R, 5], Hessian [R, 5, 5], positive semidefinite majorant [R, 5, 5]).

    With g = d log Lhat / d phi and psi = Huber'(r):
        gradient = -sum w psi g
        Hessian  = sum w ((psi' + psi) g g^T - psi Lhat'' / Lhat), as (log Lhat)'' = Lhat'' / Lhat - g g^T
        majorant = sum w min(1, delta / |r|) g g^T, as in iteratively reweighted least squares
    """
    s, t, alpha, beta = (phi[:, i, None] for i in range(1, 5))
    fitted, of_x, of_y, h, k = _evaluate_law(phi, runs)
    # first and second derivatives of the Box-Cox terms by
    # their exponents; the exponents are bounded below by
    # varpro.EXPONENT_BOUNDS, so that the divisions are safe
    # Differentiate alpha h = exp(-alpha x) - 1 once:
    # h + alpha h1 = -x exp(-alpha x), and twice:
    # 2 h1 + alpha h2 = x^2 exp(-alpha x). Solve for h1 and h2.
    h1, k1 = -(runs.x * of_x + h) / alpha, -(runs.y * of_y + k) / beta  # d h / d alpha, d k / d beta
    h2, k2 = (runs.x**2 * of_x - 2 * h1) / alpha, (runs.y**2 * of_y - 2 * k1) / beta
    r = runs.log_loss - np.log(fitted)
    g = np.stack([np.ones_like(h), h, k, s * h1, t * k1], axis=2) / fitted[:, :, None]  # [R, n, 5]
    influence = weights * np.clip(r, -delta, delta)  # w psi(r)
    size = np.abs(r)
    # psi' is 1 for |r| <= delta. A residual at the width itself counts
    # as inside: with delta near 0 there would be no curvature otherwise.
    hessian_weights = weights * (size <= delta) + influence
    # psi(r) / r: 1 inside the width and delta / |r|
    # outside. delta = Inf (least squares) would give NaN.
    reweighted = weights * (delta / np.maximum(size, delta) if np.isfinite(delta) else 1.0)
    # [R, 5, n]; each product below is one batched matmul over the n runs
    transposed = np.swapaxes(g, 1, 2)
    gradient = -np.matmul(transposed, influence[:, :, None])[:, :, 0]
    hessian = np.matmul(transposed * hessian_weights[:, None, :], g)
    curvature_weight = influence / fitted
    # Lhat is linear in c, s, t: of Lhat'' only (s, alpha),
    # (t, beta), (alpha, alpha), (beta, beta) are not 0
    for i, j, second in ((1, 3, h1), (2, 4, k1), (3, 3, s * h2), (4, 4, t * k2)):
        correction = (curvature_weight * second).sum(axis=1)
        hessian[:, i, j] -= correction
        if i != j:
            hessian[:, j, i] -= correction
    return gradient, hessian, np.matmul(transposed * reweighted[:, None, :], g)


def transform_to_floor(phi: np.ndarray, derivatives: Derivatives) -> Derivatives:
    """Transform derivatives by phi into derivatives by (E, s, t, alpha, beta): [R, 5] and twice [R, 5, 5].

    The Jacobian d phi / d (E, ...) is the identity but for the row
    of c = E + s / alpha + t / beta. c is not linear, so its second
    derivatives times the gradient by c are added to the Hessian.
    """
    gradient, hessian, majorant = derivatives
    _, s, t, alpha, beta = phi.T
    jacobian = np.broadcast_to(np.eye(5), (len(phi), 5, 5)).copy()
    # row 0 is d c / d (E, s, t, alpha, beta) = (1, 1 /
    # alpha, 1 / beta, -s / alpha^2, -t / beta^2)
    jacobian[:, 0, 1:] = np.stack([1 / alpha, 1 / beta, -s / alpha**2, -t / beta**2], axis=1)
    transposed = np.swapaxes(jacobian, 1, 2)
    # H' = J^T H J + (d objective / d c) (second derivatives of c).
    # The majorant has the first term only: J^T M J is positive
    # semidefinite, and the second term need not be.
    transformed = transposed @ hessian @ jacobian
    of_c = gradient[:, 0]
    for i, j, second in ((1, 3, -1 / alpha**2), (2, 4, -1 / beta**2)):
        transformed[:, i, j] += of_c * second
        transformed[:, j, i] += of_c * second
    transformed[:, 3, 3] += of_c * 2 * s / alpha**3
    transformed[:, 4, 4] += of_c * 2 * t / beta**3
    return (transposed @ gradient[:, :, None])[:, :, 0], transformed, transposed @ majorant @ jacobian


def restrict_to_zero_floor(phi: np.ndarray, derivatives: Derivatives) -> Derivatives:
    """Transform derivatives by phi into those by (s, t, alpha, beta) on E = 0: [R, 4] and twice [R, 4, 4]."""
    # on the surface E is constant, so its row and column are dropped
    gradient, hessian, majorant = transform_to_floor(phi, derivatives)
    return gradient[:, 1:], hessian[:, 1:, 1:], majorant[:, 1:, 1:]


def to_floor_coordinates(phi: np.ndarray) -> np.ndarray:
    """Return (E, s, t, alpha, beta) [R, 5] of phi [R, 5]."""
    return np.column_stack([compute_floor(phi), phi[:, 1:]])


def from_floor_coordinates(floored: np.ndarray) -> np.ndarray:
    """Return phi [R, 5] of (E, s, t, alpha, beta) [R, 5]."""
    floor, s, t, alpha, beta = floored.T
    return np.column_stack([floor + s / alpha + t / beta, floored[:, 1:]])


def project_to_zero_floor(phi: np.ndarray) -> np.ndarray:
    """Return phi [R, 5] with c changed such that E = 0."""
    moved = phi.copy()
    moved[:, 0] -= compute_floor(phi)
    return moved
