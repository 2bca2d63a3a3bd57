"""Unbiased estimate of the scatter of single runs around a law, with its degrees of freedom.

A robust fit passes through as many runs as it has constants, so its residuals
are too small. Here they are projected onto what no change of the constants
explains, e = (I - H) r with H the hat matrix of the linearised law, as for
least squares: E[e'e] = sigma^2 (n - p). Residuals beyond 3 sigma are clipped
first (Huber's pseudo-values), so that a failed run does not set the scale.

With groups (checkpoints of one run, branches of one trunk) a residual
is the sum of an effect of the group and an effect of the row. E[e'e]
and E[e'ZZ'e], with Z the indicator of groups, are linear in the two
variances, and are solved for them: the method of moments for variance
components (Searle, Casella and McCulloch 1992, chapter 5).

Where the scatter of runs without groups changes with compute, log sigma
is a line in log(N D). It is fitted by maximum likelihood, with e^2 / (1 -
h) as sigma^2 times a chi-square with one degree of freedom (Aitkin 1987).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

CLIP_SIGMAS = 3.0  # standard deviations beyond which a residual is clipped
MIN_DOF = 1.0
NORMAL_DOF = 1e6  # degrees of freedom at which Student's t is numerically normal
TREND_P = 0.01  # p-value of the likelihood ratio below which sigma has a trend
MIN_DOF_FOR_TREND = 8  # fewest degrees of freedom for a trend
MAX_TREND_SLOPE = 2.0  # change in log sigma per unit of log(N D)
GROUP_P = 0.01  # p-value of the F test below which rows of one group are dependent
MIN_SCATTER = 1e-6  # root mean square residual below which losses are exact and have no dependence
GROUPED = (
    "The residuals of rows that share N correlate: these rows are grouped. If they are independent runs, use "
    "groups=range(n), or --group none."
)
MIN_RESIDUAL_SHARE = 0.05  # lower bound of 1 - h; a run that determines a constant alone has no residual


@dataclass(frozen=True)
class Trend:
    """Trend of the noise: sigma(x) = sigma exp(slope (x - centre)), x = log(N D) clipped to [low, high].

    low, high   range of x of the runs; beyond it sigma is constant

    dof_centre  degrees of freedom of sigma at the centre
    square_sum  sum of (x - centre)^2 over runs; away from the centre sigma has fewer
                degrees of freedom
    p_value     of the likelihood ratio against a constant sigma
    """

    sigma: float
    slope: float
    centre: float
    low: float
    high: float
    dof_centre: float
    square_sum: float
    p_value: float

    def evaluate(self, log_compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (sigma, its degrees of freedom) at x = log(N D), each of the shape of x.

        Var(log sigma^2) = 2/dof for a chi-square, so the variance of the line, 2
        (1/dof_centre + (x - centre)^2 / square_sum), gives the degrees of freedom.
        """
        # A run has the information 1/2 on log
        # sigma^2, so the slope of log sigma^2
        # has the variance 2 / square_sum.
        offset = np.clip(log_compute, self.low, self.high) - self.centre
        dof = 1 / (1 / self.dof_centre + offset**2 / self.square_sum)
        return self.sigma * np.exp(self.slope * offset), dof


@dataclass(frozen=True)
class Noise:
    """Standard deviation of log L of a single new run around the law.

    sigma    sqrt(between^2 + within^2)
    between  standard deviation of the effect that rows of one group share; 0 without groups
    within   standard deviation of the effect of a row
    dof      degrees of freedom of sigma^2: runs minus free constants; with groups by
             Satterthwaite
    n_cut    number of residuals beyond 3 sigma, which were clipped
    trend    change of sigma with compute; None for a constant sigma
    """

    sigma: float
    dof: float
    between: float = 0.0
    within: float = 0.0
    n_groups: int | None = None
    n_cut: int = 0
    trend: Trend | None = None

    def correlate(self, labels: np.ndarray) -> np.ndarray:
        """Return the correlation matrix [n, n] of the noise of rows with labels [n], positive definite."""
        share = min(self.between**2 / max(self.sigma**2, 1e-300), 0.999)
        return (1 - share) * np.eye(len(labels)) + share * (labels[:, None] == labels)


def estimate_noise(
    residual: np.ndarray,
    slopes: np.ndarray,
    groups: np.ndarray | None = None,
    log_compute: np.ndarray | None = None,
) -> Noise:
    """Estimate the noise from residuals of log L [n] and slopes of the law by its free constants [n, p].

    `groups` [n] int is the group of each row; None: all runs are independent.
    `log_compute` [n] is log(N D), for a trend of the noise of independent runs.
    """
    basis = orthonormal_basis(slopes)
    n, p = basis.shape
    clipped = _winsorize(residual, p)
    n_cut = int((np.abs(residual) > np.abs(clipped)).sum())
    # H = Q Q' with Q the basis: two products of O(n p)
    # instead of the matrix H [n, n]
    remainder = clipped - basis @ (basis.T @ clipped)
    if groups is None or len(np.unique(groups)) == n:
        dof = max(n - p, MIN_DOF)
        # clipping at 3 sigma keeps 99.75 % of sigma for
        # normal residuals: divide by that share
        sigma = float(np.sqrt((remainder**2).sum() / dof)) / _sigma_retained()
        trend = None if log_compute is None else fit_trend(residual, basis, log_compute)
        return Noise(sigma, dof, 0.0, sigma, None, n_cut, trend)
    # `between` and `within` are variances here, standard deviations in Noise
    between, within, dof = _estimate_components(remainder, basis, groups)
    n_groups = len(np.unique(groups))
    scale = 1 / _sigma_retained()
    sigma = float(np.sqrt(between + within)) * scale
    return Noise(sigma, dof, float(np.sqrt(between)) * scale, float(np.sqrt(within)) * scale, n_groups, n_cut)


def validate_labels(groups: ArrayLike, n_rows: int) -> np.ndarray:
    """Return labels [n_rows] of the group of each row. Raises ValueError for another number of them."""
    labels = np.asarray(groups).ravel()
    if len(labels) != n_rows:
        raise ValueError(f"groups: got {len(labels)} labels, expected one for each of {n_rows} runs")
    return labels


def is_dependent(residual: np.ndarray, slopes: np.ndarray, labels: np.ndarray) -> bool:
    """Return whether the residuals [n] of rows with equal `labels` [n] correlate.

    F test of effects of the groups beside the law (analysis of covariance).
    """
    from scipy.special import fdtrc  # slow import

    _, index, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    basis = orthonormal_basis(slopes)
    n, p = basis.shape
    clipped = _winsorize(residual, p)
    both = np.column_stack([clipped, basis])
    both = both - np.stack([np.bincount(index, column) / sizes for column in both.T], axis=-1)[index]
    left, singular, _ = np.linalg.svd(both[:, 1:], full_matrices=False)
    within = left[:, singular > 1e-8]  # what the law explains inside the groups
    dof = n - len(sizes) - within.shape[1]
    n_effects = n - p - dof
    if min(n_effects, dof) < 1:
        return False
    squares = float(((clipped - basis @ (basis.T @ clipped)) ** 2).sum())
    error = float(((both[:, 0] - within @ (within.T @ both[:, 0])) ** 2).sum())
    if squares < n * MIN_SCATTER**2:
        return False
    statistic = (squares - error) / n_effects / max(error / dof, 1e-300)
    return bool(fdtrc(n_effects, dof, statistic) < GROUP_P)


def find_groups(
    residual: np.ndarray, slopes: np.ndarray, groups: ArrayLike | None, sizes: np.ndarray | None
) -> tuple[np.ndarray, bool]:
    """Return labels [n] of rows that share noise, and whether they are `sizes` [n] as residuals correlate.

    Without `groups` or correlated residuals every row has a label
    of its own. The other arguments are as for `is_dependent`.
    """
    n = len(residual)
    if groups is not None or sizes is None:
        return validate_labels(np.arange(n) if groups is None else groups, n), False
    labels = validate_labels(sizes, n)
    dependent = is_dependent(residual, slopes, labels)
    return (labels if dependent else np.arange(n)), dependent


@dataclass(frozen=True)
class PooledVariance:
    """Scatter of repeated runs (pure error), pooled over cells.

    sum_squares  sum of squares of log L around the mean of its cell
    dof          runs minus cells, over the cells of two runs or more
    n_cells      cells of two runs or more
    n_runs       runs of these cells
    """

    sum_squares: float
    dof: int
    n_cells: int
    n_runs: int

    @property
    def variance(self) -> float:
        """Pooled variance, unbiased if all cells have the same variance; NaN without degrees of freedom."""
        return self.sum_squares / self.dof if self.dof else float("nan")


def pool_cells(log_loss: np.ndarray, cells: np.ndarray) -> PooledVariance:
    """Pool the scatter of values [n] around the mean of their cell; `cells` [n] or [n, k] are labels."""
    # index [n] is the cell of each run,
    # sizes [cells]. Cells of 2, 1 and 3 runs
    # have 1 + 0 + 2 = 3 degrees of freedom:
    # a cell of one run adds nothing to either sum.
    _, index, sizes = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    # some versions of numpy return [n, 1] with axis=0
    index = index.ravel()
    means = np.bincount(index, log_loss, minlength=len(sizes)) / sizes  # mean of each cell
    several = sizes > 1
    squares = float(((log_loss - means[index]) ** 2).sum())
    return PooledVariance(squares, int((sizes - 1).sum()), int(several.sum()), int(sizes[several].sum()))


def sigma_interval(sigma: float, dof: float, level: float) -> tuple[float, float]:
    """Return an interval for a standard deviation: dof s^2 / sigma^2 is chi-square."""
    from scipy.special import chdtri  # slow import

    if math.isinf(dof):
        return sigma, sigma
    # chdtri(dof, p) is the value above which chi-square has probability p:
    # the smaller p gives the lower end
    low, high = (sigma * math.sqrt(dof / float(chdtri(dof, (1 + sign * level) / 2))) for sign in (-1, 1))
    return low, high


def count_independent(cells: np.ndarray, trunks: np.ndarray) -> int:
    """Return the degrees of freedom of the pooled variance of runs [n] of cells [n], which may share trunks.

    Branches of one trunk share most of its scatter. Cells that
    share trunks are counted together as trunks minus 1, the
    degrees of freedom if branches share all of it.
    """
    from scipy.sparse import coo_array  # slow import
    from scipy.sparse.csgraph import connected_components

    # Cells and trunks are nodes of a graph, each run an edge. Trunks {a, b},
    # {b, c} and {x, y} of three cells of two runs: components {a, b, c} and
    # {x, y}, so 5 trunks - 2 components = 3 degrees of freedom.
    names, labels = np.unique(trunks, return_inverse=True)
    labels = labels + int(cells.max()) + 1
    n_nodes = int(labels.max()) + 1
    graph = coo_array((np.ones(len(cells)), (cells, labels)), shape=(n_nodes, n_nodes))
    return len(names) - int(connected_components(graph, directed=False)[0])


def orthonormal_basis(slopes: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis [n, rank] of the column space of slopes [n, p].

    Columns of 0, of constants without any effect,
    and dependent columns add no dimension.
    """
    size = np.linalg.norm(slopes, axis=0)
    slopes = slopes[:, size > 0] / size[size > 0]
    # unit columns, so that the tolerance for dependent
    # columns does not depend on units
    left, singular, _ = np.linalg.svd(slopes, full_matrices=False)
    return left[:, singular > 1e-8 * max(singular.max(initial=0.0), 1e-300)]


def fit_trend(residual: np.ndarray, basis: np.ndarray, x: np.ndarray) -> Trend | None:
    """Fit log sigma as a line in x [n]; None where a constant sigma is not rejected.

    `basis` [n, p] as from `orthonormal_basis`. Clipped residuals are excluded.
    """
    from scipy.special import chdtrc

    n, p = basis.shape
    low, high = float(x.min()), float(x.max())
    if n - p < MIN_DOF_FOR_TREND or high - low < 1e-6:
        return None
    # Var(e_i) = sigma^2 (1 - h_i), with h_i the squared
    # length of row i of the basis (leverage)
    residual_share = np.maximum(1 - (basis**2).sum(axis=1), MIN_RESIDUAL_SHARE)
    slope, centre = 0.0, float(x.mean())
    for _ in range(2):  # which residuals are beyond 3 sigma depends on the trend
        scale = np.exp(slope * (x - centre))
        standard = residual / scale
        clipped = _winsorize(standard, p)
        is_used = clipped == standard  # a single failed run at either end would look like a trend
        remainder = clipped * scale - basis @ (basis.T @ (clipped * scale))
        squares = (remainder**2 / residual_share)[is_used]
        if not squares.any():
            return None
        centre = float(x[is_used].mean())
        off = x[is_used] - centre
        # off has mean 0 over the used runs, so sigma and slope are orthogonal
        slope = _fit_trend_slope(squares, off)
    scaled = squares * np.exp(-2 * slope * off)
    # -2 log likelihood = sum(log sigma^2 + squares / sigma^2), minimised over
    # sigma; off has mean 0, so the slope adds nothing to the sum of logs
    likelihood_ratio = len(off) * float(np.log(squares.mean()) - np.log(scaled.mean()))
    p_value = float(chdtrc(1, max(likelihood_ratio, 0.0)))
    if p_value >= TREND_P or abs(slope) >= MAX_TREND_SLOPE:
        return None
    sigma = float(np.sqrt(scaled.mean())) / _sigma_retained(is_dropped=True)
    return Trend(sigma, slope, centre, low, high, float(n - p), float((off**2).sum()), p_value)


def _fit_trend_slope(squares: np.ndarray, off: np.ndarray) -> float:
    """Return the slope that minimises log mean(squares exp(-2 slope off)), by bisection.

    The function is convex in the slope. Its derivative
    has the sign of -sum(squares exp(-2 slope off) off).
    """
    low, high = -MAX_TREND_SLOPE, MAX_TREND_SLOPE
    # 50 halvings of a range of 4: the slope is exact to 4e-15
    for _ in range(50):
        middle = 0.5 * (low + high)
        weights = squares * np.exp(-2 * middle * off)
        low, high = (middle, high) if float(weights @ off) > 0 else (low, middle)
    return 0.5 * (low + high)


def _winsorize(residual: np.ndarray, p: int) -> np.ndarray:
    """Clip residuals at CLIP_SIGMAS sigma.

    sigma starts at the median absolute residual / 0.6745, over the n - p
    largest, since a fit of absolute values has p residuals of 0. Then sigma^2
    = sum of clipped squares / (n - p) is iterated upwards to its fixed point.
    """
    from scipy.special import ndtri

    # the median of |z| is ndtri(0.75) = 0.6745 for a standard normal z
    size = np.sort(np.abs(residual))[min(p, len(residual) - 1) :]
    sigma = float(np.median(size)) / ndtri(0.75)
    if sigma == 0:
        return residual
    # The map sigma -> new increases with sigma. From a start below its fixed
    # point the iterates rise to it; a start above it ends the loop at once.
    for _ in range(50):
        clipped = np.clip(residual, -CLIP_SIGMAS * sigma, CLIP_SIGMAS * sigma)
        new = float(np.sqrt((clipped**2).sum() / max(len(residual) - p, MIN_DOF)))
        if new <= sigma * (1 + 1e-9):
            break
        sigma = new
    return np.clip(residual, -CLIP_SIGMAS * sigma, CLIP_SIGMAS * sigma)


def _sigma_retained(is_dropped: bool = False) -> float:
    """Return the share of sigma that remains after normal residuals are clipped or dropped.

    With c = CLIP_SIGMAS: sqrt(E[min(z^2, c^2)]) for
    clipping, sqrt(E[z^2 | |z| < c]) for dropping.
    """
    from scipy.special import ndtr

    tail = ndtr(-CLIP_SIGMAS)
    # E[z^2 1(|z| < c)]
    inner = 1 - 2 * tail - 2 * CLIP_SIGMAS * np.exp(-0.5 * CLIP_SIGMAS**2) / np.sqrt(2 * np.pi)
    return float(np.sqrt(inner / (1 - 2 * tail) if is_dropped else inner + 2 * CLIP_SIGMAS**2 * tail))


def _estimate_components(
    residual: np.ndarray, basis: np.ndarray, groups: np.ndarray
) -> tuple[float, float, float]:
    """Return (variance between groups, variance within, degrees of freedom of their sum), from e = (I - H) r.

    Both variances are 0 or above; residual [n], basis [n, p], groups [n].
    """
    n, p = basis.shape
    _, index = np.unique(groups, return_inverse=True)
    # Z [n, groups]: 1 where a row belongs to the group
    member = np.zeros((n, index.max() + 1))
    member[np.arange(n), index] = 1.0
    projected_members = member - basis @ (basis.T @ member)  # (I - H) Z
    projected_gram = member.T @ projected_members  # Z'(I - H)Z
    # with M = I - H: E[e'e] = between tr(Z'MZ) + within (n - p)
    #                 E[e'ZZ'e] = between tr(Z'MZ Z'MZ) + within tr(Z'MZ)
    trace = float(np.trace(projected_gram))
    equations = np.array([[trace, n - p], [float((projected_gram**2).sum()), trace]])
    moments = np.array([float((residual**2).sum()), float(((member.T @ residual) ** 2).sum())])
    # no solution where groups and rows coincide; a negative
    # variance becomes 0, and the other is solved alone
    if abs(np.linalg.det(equations)) < 1e-12 * np.abs(equations).max() ** 2:
        return 0.0, moments[0] / max(n - p, MIN_DOF), max(n - p, MIN_DOF)
    between, within = (float(v) for v in np.linalg.solve(equations, moments))
    if between < 0:
        return 0.0, moments[0] / max(n - p, MIN_DOF), max(n - p, MIN_DOF)
    # with within = 0 the first equation is between = e'e / tr(Z'MZ)
    if within < 0:
        between, within = moments[0] / max(trace, 1e-300), 0.0
    # groups of equal size m have dof_between = trace / m and the mean
    # square m between + within, so the sum of both variances is mean square
    # / m + within (1 - 1 / m): Satterthwaite (Biometrics Bulletin 1946)
    size = equations[1, 0] / trace
    dof_between = trace / size
    parts = between + within / size, within * (1 - 1 / size)
    spread = parts[0] ** 2 / dof_between + parts[1] ** 2 / max(n - p - dof_between, MIN_DOF)
    return between, within, max((between + within) ** 2 / max(spread, 1e-300), MIN_DOF)
