"""How far single runs scatter around a law, without bias, and how many degrees of freedom that rests on.

A robust fit passes through as many runs as it has constants, so the median of its residuals is far below the
scatter: at 15 runs and 5 constants it is half of it. Here the residuals are projected onto what no change of
the constants can explain, e = (I - H) r with H the hat matrix of the linearised law, as for least squares:
E[e'e] = sigma^2 (n - p). Residuals beyond 3 sigma are pulled in first (Huber's pseudo-values), so that a run
that went wrong does not set the scale.

With groups (checkpoints of one run, branches of one trunk) a residual is the sum of a group's and a row's own
part. E[e'e] and E[e'ZZ'e], Z the indicator of groups, are linear in the two variances; solving for them is
the method of moments for variance components (Searle, Casella and McCulloch 1992, chapter 5).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

CUT = 3.0  # standard deviations beyond which a residual is pulled in
SMALLEST_DOF = 1.0


@dataclass(frozen=True)
class Noise:
    """Standard deviation of log L of a single new run around the law.

    sigma    sqrt(between^2 + within^2)
    between  of what the rows of one group share; 0 without groups
    within   of a row alone
    dof      degrees of freedom of sigma^2: runs, or groups, minus free constants
    n_cut    residuals beyond 3 sigma, which were pulled in
    """

    sigma: float
    dof: float
    between: float = 0.0
    within: float = 0.0
    n_groups: int | None = None
    n_cut: int = 0

    def half_width(self, level: float) -> float:
        """Of a two-sided interval for one new run, in log L: Student's t, since sigma is itself estimated."""
        return float(stdtrit(self.dof, (1 + level) / 2)) * self.sigma

    def as_dict(self) -> dict[str, Any]:
        """For law.json."""
        return asdict(self)


def estimate_noise(residual: np.ndarray, slopes: np.ndarray, groups: np.ndarray | None = None) -> Noise:
    """Noise from residuals of log L [n] and the slopes of the law by its free constants [n, p].

    `groups` [n] int names the group of each row; None: every run stands alone.
    """
    basis = orthonormal(slopes)
    n, p = basis.shape
    pulled = _pull_in(residual, p)
    n_cut = int((np.abs(residual) > np.abs(pulled)).sum())
    left = pulled - basis @ (basis.T @ pulled)
    if groups is None or len(np.unique(groups)) == n:
        dof = max(n - p, SMALLEST_DOF)
        sigma = float(np.sqrt((left**2).sum() / dof)) / _kept_share()
        return Noise(sigma, dof, 0.0, sigma, None, n_cut)
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


def _kept_share() -> float:
    """sqrt of E[min(z^2, CUT^2)] for a standard normal z: what cutting at CUT leaves of sigma."""
    tail = ndtr(-CUT)
    density = np.exp(-0.5 * CUT**2) / np.sqrt(2 * np.pi)
    return float(np.sqrt(1 - 2 * tail - 2 * CUT * density + 2 * CUT**2 * tail))


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
