"""How loss depends on N and C around the compute-optimal frontier, and the search for its constants.

    L = L0 (e + (g(z) - e) y(x))               x = log(C / C0), C0 the geometric mean of the runs' C
    y(x) = exp(-gamma x)                       the reducible loss falls as a power of C
    z = log N - log_size - size_exponent x     how far N is from the best one
    g(z) = w exp(-alpha z) + (1 - w) exp(beta z),  w = beta / (alpha + beta)    1 at its minimum, z = 0

g is the slice of Chinchilla's form (arXiv 2203.15556, eq. 4) at constant C: too small a model costs as
N^-alpha, too few tokens as N^beta. The constants are what runs hold best: L0 = exp(log_loss) and the first
two derivatives of log L* by x at the centre, -slope and curvature. From them r = curvature / slope^2,
e = r / (1 + r) and gamma = slope (1 + r). A frontier that steepens (curvature < 0) has no such e: there it
is log L = log_loss - slope x + curvature x^2 / 2 + log g(z). e L0 is no irreducible loss that one should
quote: a few decades of compute do not hold it.

alpha and beta are one constant unless the runs tell them apart by an F test.
"""

import math

import numpy as np
from scipy.special import fdtrc

CONSTANTS = ("log_loss", "slope", "curvature", "log_size", "size_exponent", "alpha", "beta")
BEND = (0.02, 4.0)  # of alpha and beta: where the search ends
STARTS = (0.3, 0.5, 0.7)  # of size_exponent
TIE_LEVEL = 0.05  # alpha and beta are told apart below this p-value


def log_loss(theta: np.ndarray, x: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """log L of the form at x = log(C / C0) and log N [n]; theta [7] in the order of CONSTANTS."""
    level, slope, curvature, log_size, exponent, alpha, beta = theta
    z = log_n - log_size - exponent * x
    log_g = np.logaddexp(np.log(beta) - alpha * z, np.log(alpha) + beta * z) - np.log(alpha + beta)
    if curvature <= 0 or slope <= 0:
        return level - slope * x + curvature * x**2 / 2 + log_g
    r = curvature / slope**2
    floor = r / (1 + r)
    # log(e + (g - e) y), from log g so that a far z does not overflow
    log_part = log_g + np.log1p(-floor * np.exp(-log_g)) - slope * (1 + r) * x
    return level + np.logaddexp(math.log(floor), log_part)


def slopes(theta: np.ndarray, x: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """d log L / d theta [n, 7]."""
    _, slope, curvature, _, _, alpha, beta = theta
    z = log_n - theta[3] - theta[4] * x
    # share of the first term of g, and d log g / dz
    share = 1 / (1 + np.exp((alpha + beta) * z) * alpha / beta)
    bend = (1 - share) * beta - share * alpha
    total = alpha + beta
    of_alpha = -z * share + (1 - share) / alpha - 1 / total
    of_beta = z * (1 - share) + share / beta - 1 / total
    of_shape = np.stack([-bend, -bend * x, of_alpha, of_beta], axis=-1)
    ones = np.ones_like(x)
    if curvature <= 0 or slope <= 0:
        return np.concatenate([np.stack([ones, -x, x**2 / 2], axis=-1), of_shape], axis=-1)
    r = curvature / slope**2
    floor, y = r / (1 + r), np.exp(-slope * (1 + r) * x)
    g = (beta * np.exp(-alpha * z) + alpha * np.exp(beta * z)) / total
    whole = floor + (g - floor) * y
    falling = (g - floor) * y * x / whole  # -d log L / d gamma
    of_r = (1 - y) / (1 + r) ** 2 / whole - falling * slope
    of_slope = -falling * (1 + r) - of_r * 2 * r / slope
    of_line = np.stack([ones, of_slope, of_r / slope**2], axis=-1)
    return np.concatenate([of_line, of_shape * (g * y / whole)[:, None]], axis=-1)


def search_constants(x: np.ndarray, log_n: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least-squares constants [7], and the directions [7, p] that they are free in.

    alpha and beta apart only where that is significant and neither is at an end of its range.
    """
    tied, apart = (_search(x, log_n, y, is_tied) for is_tied in (True, False))
    squares = [float(((y - log_loss(theta, x, log_n)) ** 2).sum()) for theta in (tied, apart)]
    dof = len(y) - len(CONSTANTS)
    gain = max(squares[0] - squares[1], 0.0) * dof / max(squares[1], 1e-300)
    basis = np.eye(len(CONSTANTS))
    if not at_edge(apart).any() and fdtrc(1, dof, gain) < TIE_LEVEL:
        return apart, basis
    together = np.concatenate([basis[:, :5], basis[:, 5:].sum(axis=1, keepdims=True)], axis=1)
    return tied, together[:, :5] if at_edge(tied).any() else together


def at_edge(theta: np.ndarray) -> np.ndarray:
    """[2] bool: whether alpha, and beta, is where the search ends."""
    return np.abs(np.log(theta[5:, None]) - np.log(BEND)).min(axis=1) < 1e-3


def _search(x: np.ndarray, log_n: np.ndarray, y: np.ndarray, is_tied: bool) -> np.ndarray:
    """The least-squares constants [7]; with `is_tied` alpha = beta."""
    from scipy.optimize import least_squares  # heavy, and only needed here

    def unpack(point: np.ndarray) -> np.ndarray:
        return np.concatenate([point[:5], np.exp(point[[5, 5] if is_tied else [5, 6]])])

    def residual(point: np.ndarray) -> np.ndarray:
        return log_loss(unpack(point), x, log_n) - y

    def jacobian(point: np.ndarray) -> np.ndarray:
        theta = unpack(point)
        columns = slopes(theta, x, log_n)
        columns[:, 5:] *= theta[5:]
        return np.column_stack([columns[:, :5], columns[:, 5:].sum(axis=1)]) if is_tied else columns

    n_bends = 1 if is_tied else 2
    low = np.array([-np.inf] * 5 + [math.log(BEND[0])] * n_bends)
    high = np.array([np.inf] * 5 + [math.log(BEND[1])] * n_bends)
    fits = []
    for exponent in STARTS:
        start = np.array([y.mean(), 0.05, 0.0, log_n.mean(), exponent] + [math.log(0.3)] * n_bends)
        fits.append(
            least_squares(
                residual, start, jacobian, bounds=(low, high), x_scale="jac", xtol=1e-12, ftol=1e-12,
                gtol=1e-12, max_nfev=2000,
            )
        )  # fmt: skip
    return unpack(min(fits, key=lambda fit: fit.cost).x)
