"""How far single runs scatter around a law, without bias, and how many degrees of freedom that rests on.

A robust fit passes through as many runs as it has constants, so the median of its residuals is far below the
scatter: at 15 runs and 5 constants it is half of it. Here the residuals are projected onto what no change of
the constants can explain, e = (I - H) r with H the hat matrix of the linearised law, as for least squares:
E[e'e] = sigma^2 (n - p). Residuals beyond 3 sigma are pulled in first (Huber's pseudo-values), so that a run
that went wrong does not set the scale.

With groups (checkpoints of one run, branches of one trunk) a residual is the sum of a group's and a row's own
part. E[e'e] and E[e'ZZ'e], Z the indicator of groups, are linear in the two variances; solving for them is
the method of moments for variance components (Searle, Casella and McCulloch 1992, chapter 5).

Where the scatter of runs without groups changes with compute, log sigma is a line in log(N D), by maximum
likelihood of e^2 / (1 - h) as sigma^2 times a chi-square with one degree of freedom (Aitkin 1987).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import chdtrc, ndtr, ndtri, stdtrit

CUT = 3.0  # standard deviations beyond which a residual is pulled in
SMALLEST_DOF = 1.0
NORMAL_DOF = 1e6  # Student's t is normal
TREND_P = 0.01  # of the likelihood ratio below which sigma has a trend
FEWEST_FOR_TREND = 8  # degrees of freedom
STEEPEST = 2.0  # of log sigma for each unit of log(N D)
LEAST_FREEDOM = 0.05  # of 1 - h: a run that sets the law alone has no residual


@dataclass(frozen=True)
class Trend:
    """sigma(x) = sigma exp(slope (x - centre)) of x = log(N D), which is clipped to [low, high] of the runs.

    dof_centre  degrees of freedom of sigma at the centre
    square_sum  sum of (x - centre)^2 over runs: elsewhere sigma has fewer
    p_value     of the likelihood ratio against one sigma for all
    """

    sigma: float
    slope: float
    centre: float
    low: float
    high: float
    dof_centre: float
    square_sum: float
    p_value: float

    def at(self, log_compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sigma, its degrees of freedom) at x = log(N D), each of its shape.

        Var(log sigma^2) is 2/dof of a chi-square, so the line's variance gives the degrees of freedom.
        """
        off = np.clip(log_compute, self.low, self.high) - self.centre
        dof = 1 / (1 / self.dof_centre + off**2 / self.square_sum)
        return self.sigma * np.exp(self.slope * off), dof


@dataclass(frozen=True)
class Noise:
    """Standard deviation of log L of a single new run around the law.

    sigma    sqrt(between^2 + within^2)
    between  of what the rows of one group share; 0 without groups
    within   of a row alone
    dof      degrees of freedom of sigma^2: runs, or groups, minus free constants
    n_cut    residuals beyond 3 sigma, which were pulled in
    trend    how sigma changes with compute, where it does
    """

    sigma: float
    dof: float
    between: float = 0.0
    within: float = 0.0
    n_groups: int | None = None
    n_cut: int = 0
    trend: Trend | None = None

    def half_width(self, level: float) -> float:
        """Of a two-sided interval for one new run, in log L: Student's t, since sigma is itself estimated."""
        return float(stdtrit(self.dof, (1 + level) / 2)) * self.sigma

    def as_dict(self) -> dict[str, Any]:
        """For law.json."""
        return asdict(self)


def estimate_noise(
    residual: np.ndarray,
    slopes: np.ndarray,
    groups: np.ndarray | None = None,
    log_compute: np.ndarray | None = None,
) -> Noise:
    """Noise from residuals of log L [n] and the slopes of the law by its free constants [n, p].

    `groups` [n] int names the group of each row; None: every run stands alone. `log_compute` [n] is log(N D),
    for a trend of the noise of such runs.
    """
    basis = orthonormal(slopes)
    n, p = basis.shape
    pulled = _pull_in(residual, p)
    n_cut = int((np.abs(residual) > np.abs(pulled)).sum())
    left = pulled - basis @ (basis.T @ pulled)
    if groups is None or len(np.unique(groups)) == n:
        dof = max(n - p, SMALLEST_DOF)
        sigma = float(np.sqrt((left**2).sum() / dof)) / _kept_share()
        trend = None if log_compute is None else find_trend(residual, basis, log_compute)
        return Noise(sigma, dof, 0.0, sigma, None, n_cut, trend)
    between, within = _components(left, basis, groups)
    n_groups = len(np.unique(groups))
    dof = max(n_groups - p, SMALLEST_DOF)
    scale = 1 / _kept_share()
    sigma = float(np.sqrt(between + within)) * scale
    return Noise(sigma, dof, float(np.sqrt(between)) * scale, float(np.sqrt(within)) * scale, n_groups, n_cut)


@dataclass(frozen=True)
class PooledVariance:
    """Scatter of repeated runs, pooled over cells.

    sum_squares  of log L around the mean of its cell
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
        """Unbiased where runs of all cells scatter alike; NaN without degrees of freedom."""
        return self.sum_squares / self.dof if self.dof else float("nan")


def pool_cells(log_loss: np.ndarray, cells: np.ndarray) -> PooledVariance:
    """Pure error: values [n] around the mean of their cell; `cells` [n] or [n, k] labels runs of one cell."""
    _, index, sizes = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    index = index.ravel()
    means = np.bincount(index, log_loss, minlength=len(sizes)) / sizes
    several = sizes > 1
    squares = float(((log_loss - means[index]) ** 2).sum())
    return PooledVariance(squares, int((sizes - 1).sum()), int(several.sum()), int(sizes[several].sum()))


def orthonormal(slopes: np.ndarray) -> np.ndarray:
    """[n, rank] basis of what the constants can move; a constant without any effect has no dimension."""
    size = np.linalg.norm(slopes, axis=0)
    slopes = slopes[:, size > 0] / size[size > 0]
    left, singular, _ = np.linalg.svd(slopes, full_matrices=False)
    return left[:, singular > 1e-8 * max(singular.max(initial=0.0), 1e-300)]


def find_trend(residual: np.ndarray, basis: np.ndarray, x: np.ndarray) -> Trend | None:
    """The line of log sigma in x [n] where one sigma is rejected; `basis` [n, p] as of `orthonormal`."""
    n, p = basis.shape
    low, high = float(x.min()), float(x.max())
    if n - p < FEWEST_FOR_TREND or high - low < 1e-6:
        return None
    freedom = np.maximum(1 - (basis**2).sum(axis=1), LEAST_FREEDOM)
    slope, centre = 0.0, float(x.mean())
    for _ in range(2):  # what is beyond 3 sigma depends on the trend
        scale = np.exp(slope * (x - centre))
        standard = residual / scale
        pulled = _pull_in(standard, p)
        counted = pulled == standard  # one run that went wrong at either end would be a trend
        left = pulled * scale - basis @ (basis.T @ (pulled * scale))
        squares = (left**2 / freedom)[counted]
        if not squares.any():
            return None
        centre = float(x[counted].mean())
        off = x[counted] - centre
        slope = _likeliest_slope(squares, off)
    scaled = squares * np.exp(-2 * slope * off)
    # -2 log likelihood is sum of log sigma^2 + squares / sigma^2, and off has no mean
    gained = len(off) * float(np.log(squares.mean()) - np.log(scaled.mean()))
    p_value = float(chdtrc(1, max(gained, 0.0)))
    if p_value >= TREND_P or abs(slope) >= STEEPEST:
        return None
    sigma = float(np.sqrt(scaled.mean())) / _kept_share(is_dropped=True)
    return Trend(sigma, slope, centre, low, high, float(n - p), float((off**2).sum()), p_value)


def _likeliest_slope(squares: np.ndarray, off: np.ndarray) -> float:
    """Minimum of log mean(squares exp(-2 slope off)), which is convex in slope, by bisection of its slope."""
    low, high = -STEEPEST, STEEPEST
    for _ in range(50):
        middle = 0.5 * (low + high)
        weights = squares * np.exp(-2 * middle * off)
        low, high = (middle, high) if float(weights @ off) > 0 else (low, middle)
    return 0.5 * (low + high)


def _pull_in(residual: np.ndarray, p: int) -> np.ndarray:
    """Residuals cut at CUT sigma, sigma being the fixed point above the median of the n - p largest.

    A fit of absolute values has p residuals of 0, which are left out of the median.
    """
    size = np.sort(np.abs(residual))[min(p, len(residual) - 1) :]
    sigma = float(np.median(size)) / ndtri(0.75)
    if sigma == 0:
        return residual
    for _ in range(50):
        pulled = np.clip(residual, -CUT * sigma, CUT * sigma)
        new = float(np.sqrt((pulled**2).sum() / max(len(residual) - p, SMALLEST_DOF)))
        if new <= sigma * (1 + 1e-9):
            break
        sigma = new
    return np.clip(residual, -CUT * sigma, CUT * sigma)


def _kept_share(is_dropped: bool = False) -> float:
    """What pulling in at CUT, or dropping beyond it, leaves of sigma: sqrt of E[min(z^2, CUT^2)]."""
    tail = ndtr(-CUT)
    inner = 1 - 2 * tail - 2 * CUT * np.exp(-0.5 * CUT**2) / np.sqrt(2 * np.pi)  # E[z^2, |z| < CUT]
    return float(np.sqrt(inner / (1 - 2 * tail) if is_dropped else inner + 2 * CUT**2 * tail))


def _components(left: np.ndarray, basis: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """(variance between groups, variance within), both 0 or above, from e = (I - H) r."""
    n, p = basis.shape
    _, index = np.unique(groups, return_inverse=True)
    member = np.zeros((n, index.max() + 1))
    member[np.arange(n), index] = 1.0
    projected = member - basis @ (basis.T @ member)  # (I - H) Z
    inside = member.T @ projected  # Z'(I - H)Z
    # E[e'e] = between tr(Z'MZ) + within (n - p); E[e'ZZ'e] = between tr(Z'MZ Z'MZ) + within tr(Z'MZ)
    trace = float(np.trace(inside))
    equations = np.array([[trace, n - p], [float((inside**2).sum()), trace]])
    moments = np.array([float((left**2).sum()), float(((member.T @ left) ** 2).sum())])
    if abs(np.linalg.det(equations)) < 1e-12 * np.abs(equations).max() ** 2:
        return 0.0, moments[0] / max(n - p, SMALLEST_DOF)
    between, within = (float(v) for v in np.linalg.solve(equations, moments))
    if between < 0:
        return 0.0, moments[0] / max(n - p, SMALLEST_DOF)
    if within < 0:
        return moments[0] / max(trace, 1e-300), 0.0
    return between, within
