"""Form of the loss around the compute-optimal frontier as a function of N and C, and its fit.

    L = L0 (e + (g(z) - e) y(x))               x = log(C / C0), C0 the geometric mean of the runs' C
    y(x) = exp(-gamma x)                       the reducible loss falls as a power of C
    z = log N - log_size - size_exponent x     distance of N from the best one in logs
    g(z) = w exp(-alpha z) + (1 - w) exp(beta z),  w = beta / (alpha + beta)    1 at its minimum, z = 0

g is the slice of Chinchilla's form (arXiv 2203.15556, eq. 4) at constant C:
a model that is too small costs N^-alpha, too few tokens cost N^beta. The
constants are those that runs determine best: L0 = exp(log_loss) and the
first two derivatives of log L* by x at the centre, -slope and curvature.
From them r = curvature / slope^2, e = r / (1 + r) and gamma = slope (1 + r).
A frontier that steepens (curvature < 0) has no such e: its form is log L =
log_loss - slope x + curvature x^2 / 2 + log g(z). e L0 is not an estimate of
the irreducible loss: a few decades of compute do not determine it.

alpha and beta are one constant unless an F test separates them.
"""

import math

import numpy as np

CONSTANTS = ("log_loss", "slope", "curvature", "log_size", "size_exponent", "alpha", "beta")
EXPONENT_RANGE = (0.02, 4.0)  # range of the search for alpha and beta
STARTS = (0.3, 0.5, 0.7)  # starts of size_exponent
TIE_LEVEL = 0.05  # p-value of the F test below which alpha and beta are separate


def log_loss(theta: np.ndarray, x: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """Return log L at x = log(C / C0) and log N [n]; theta [7] in the order of CONSTANTS."""
    level, slope, curvature, log_size, exponent, alpha, beta = theta
    z = log_n - log_size - exponent * x
    # log g = log-sum-exp of log w - alpha z and log(1 - w) + beta z
    log_g = np.logaddexp(np.log(beta) - alpha * z, np.log(alpha) + beta * z) - np.log(alpha + beta)
    # curvature = 0 is the limit of both formulas: e =
    # 0, and log L = level - slope x + log g
    if curvature <= 0 or slope <= 0:
        return level - slope * x + curvature * x**2 / 2 + log_g
    # With these e and gamma, at x = 0 and z = 0:
    # (log L)'  = -(1 - e) gamma      = -slope
    # (log L)'' = e (1 - e) gamma^2   = r slope^2 = curvature
    r = curvature / slope**2
    floor = r / (1 + r)  # e
    # log(e + (g - e) y) by log-sum-exp from log g,
    # so that a large |z| does not overflow.
    # g >= 1 > e, so log1p has an argument above -1;
    # the last term is log y = -gamma x
    log_part = log_g + np.log1p(-floor * np.exp(-log_g)) - slope * (1 + r) * x
    return level + np.logaddexp(math.log(floor), log_part)


def log_loss_slopes(theta: np.ndarray, x: np.ndarray, log_n: np.ndarray) -> np.ndarray:
    """Return d log L / d theta [n, 7]."""
    _, slope, curvature, _, _, alpha, beta = theta
    z = log_n - theta[3] - theta[4] * x
    # share of the first term of g, and d log g / dz
    share = 1 / (1 + np.exp((alpha + beta) * z) * alpha / beta)
    bend = (1 - share) * beta - share * alpha
    total = alpha + beta
    # d log g at fixed z: a logarithm of a sum has the
    # mean of the derivatives, weighted by the shares
    of_alpha = -z * share + (1 - share) / alpha - 1 / total
    of_beta = z * (1 - share) + share / beta - 1 / total
    # derivatives of log g by log_size, size_exponent, alpha,
    # beta: z has d z / d log_size = -1, and d z / d size_exponent
    # = -x; log w and log(1 - w) depend on alpha and beta too
    of_shape = np.stack([-bend, -bend * x, of_alpha, of_beta], axis=-1)
    ones = np.ones_like(x)
    if curvature <= 0 or slope <= 0:
        return np.concatenate([np.stack([ones, -x, x**2 / 2], axis=-1), of_shape], axis=-1)
    r = curvature / slope**2
    floor, y = r / (1 + r), np.exp(-slope * (1 + r) * x)
    g = (beta * np.exp(-alpha * z) + alpha * np.exp(beta * z)) / total
    whole = floor + (g - floor) * y
    # log L = log L0 + log whole, whole = e + (g - e) exp(-gamma
    # x): chain rule through r to slope and curvature, with e = r
    # / (1 + r), gamma = slope (1 + r), r = curvature / slope^2
    falling = (g - floor) * y * x / whole  # -d log L / d gamma
    of_r = (1 - y) / (1 + r) ** 2 / whole - falling * slope
    of_slope = -falling * (1 + r) - of_r * 2 * r / slope
    # d r / d slope = -2 r / slope, d r / d curvature =
    # 1 / slope^2, d gamma / d slope = 1 + r at fixed r
    of_line = np.stack([ones, of_slope, of_r / slope**2], axis=-1)
    # d log whole / d log g = g y / whole: the shape
    # counts less as the share of e grows
    return np.concatenate([of_line, of_shape * (g * y / whole)[:, None]], axis=-1)


def search_constants(x: np.ndarray, log_n: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least-squares constants [7], and the directions [7, p] in which they are free.

    alpha and beta are separate only if that is significant and neither
    is at an end of its range. Constants at an end are not free.
    """
    from scipy.special import fdtrc  # slow import

    tied, untied = (_fit_constants(x, log_n, y, is_tied) for is_tied in (True, False))
    squares = [float(((y - log_loss(theta, x, log_n)) ** 2).sum()) for theta in (tied, untied)]
    dof = len(y) - len(CONSTANTS)
    # F statistic of one further constant: (RSS_tied -
    # RSS_untied) / (RSS_untied / dof)
    gain = max(squares[0] - squares[1], 0.0) * dof / max(squares[1], 1e-300)
    basis = np.eye(len(CONSTANTS))
    if not is_at_edge(untied).any() and fdtrc(1, dof, gain) < TIE_LEVEL:
        return untied, basis
    # [7, 6]: the last direction moves alpha and beta
    # together; at an edge it is dropped, [7, 5]
    tied_basis = np.concatenate([basis[:, :5], basis[:, 5:].sum(axis=1, keepdims=True)], axis=1)
    return tied, tied_basis[:, :5] if is_at_edge(tied).any() else tied_basis


def is_at_edge(theta: np.ndarray) -> np.ndarray:
    """Return [2] bool: whether alpha, and beta, is at an end of EXPONENT_RANGE."""
    return np.abs(np.log(theta[5:, None]) - np.log(EXPONENT_RANGE)).min(axis=1) < 1e-3


def _fit_constants(x: np.ndarray, log_n: np.ndarray, y: np.ndarray, is_tied: bool) -> np.ndarray:
    """Fit the constants [7] by least squares from several starts; with `is_tied`, alpha = beta.

    The search is over the logs of alpha and beta.
    """
    from scipy.optimize import least_squares  # slow to import, used only here

    def unpack(point: np.ndarray) -> np.ndarray:
        return np.concatenate([point[:5], np.exp(point[[5, 5] if is_tied else [5, 6]])])

    def residual(point: np.ndarray) -> np.ndarray:
        return log_loss(unpack(point), x, log_n) - y

    def jacobian(point: np.ndarray) -> np.ndarray:
        theta = unpack(point)
        columns = log_loss_slopes(theta, x, log_n)
        # d / d log alpha = alpha d / d alpha; tied, both
        # columns move with one coordinate and are added
        columns[:, 5:] *= theta[5:]
        return np.column_stack([columns[:, :5], columns[:, 5:].sum(axis=1)]) if is_tied else columns

    n_bends = 1 if is_tied else 2
    low = np.array([-np.inf] * 5 + [math.log(EXPONENT_RANGE[0])] * n_bends)
    high = np.array([np.inf] * 5 + [math.log(EXPONENT_RANGE[1])] * n_bends)
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
