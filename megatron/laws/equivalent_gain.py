"""Compute-equivalent gain of recipe B over recipe A: at which share of A's compute B has A's loss.

The loss of B is the curve of A at other compute, log L_B(C) = f(log C - a - b (log C' - x0)):
a ladder of B is the ladder of A, shifted by log r = a + b (log C' - x0) in log compute, where C'
is the compute of A. r is the ratio that B needs, and b says whether the gain shrinks with size.
f is a parabola in log C, a line if there are few runs. All constants are fitted to both
ladders at once, so that the error of the common curve is in the interval of r.

The same fit over training tokens is the data-equivalent gain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import validate_columns
from megatron.laws.compute_law import LEVEL, ComputeLaw, fit_compute_law, frontier_levels
from megatron.laws.fitting.noise import estimate_noise, is_dependent
from megatron.laws.isoflop import SAME_COMPUTE, split_budgets
from megatron.laws.power_law import interval_quantile

MIN_FOR_CURVATURE, MIN_DOF = 3, 3  # budgets of each ladder; degrees of freedom that remain with a parabola
MIN_PAIRS = 6  # fewer do not measure a correlation
BETTER, WORSE, UNDECIDED, UNCHANGED = "better", "worse", "undecided", "unchanged"
FALLS, RISES = "falls", "rises"


@dataclass(frozen=True)
class Ladder:
    """Losses of a recipe over compute.

    x, y      log C and log L [n], of runs or of the best sizes at each budget
    relative  covariance [n, n] of y in units of the variance of one run
    variance  of one run, as far as known from the fit of a frontier, with `dof` degrees of freedom
    pairs     labels [n]: runs of both ladders with equal labels share data order and seed
    """

    x: np.ndarray
    y: np.ndarray
    relative: np.ndarray
    variance: float = 0.0
    dof: float = 0.0
    pairs: Sequence[str] = ()


@dataclass(frozen=True)
class GainAt:
    """Share r of A's compute C that B needs for the same loss, with its interval. Below 1 B is better."""

    C: float
    ratio: float
    interval: tuple[float, float]

    @property
    def verdict(self) -> str:
        """B is "better" or "worse" if the interval excludes 1, otherwise "undecided"."""
        if self.interval[1] < 1:
            return BETTER
        return WORSE if self.interval[0] > 1 else UNDECIDED


@dataclass(frozen=True)
class EquivalentGain:
    """A fitted gain.

    constants   (a, b): log r = a + b (log C - centre)
    covariance  [2, 2] of a and b
    centre      log C where A's compute is centred
    C           range of A's compute in which both ladders have runs
    sigma, dof  noise of log L of one run, and degrees of freedom of the intervals
    correlation of paired runs; 0 without pairs
    """

    constants: tuple[float, float]
    covariance: np.ndarray
    centre: float
    C: tuple[float, float]
    sigma: float
    dof: float
    correlation: float

    def at(self, C: float, level: float = LEVEL) -> GainAt:
        """Return the ratio at A's compute C, FLOPs. Raises ValueError for C that is not positive."""
        if not 0 < C < math.inf:
            raise ValueError(f"C: got {C:.3g} FLOPs, expected a positive number")
        slopes = np.array([1.0, math.log(C) - self.centre])
        # delta method in log r, so that the ends of the interval of r are above 0
        value = float(slopes @ self.constants)
        half = self._half_width(slopes, level)
        return GainAt(C, math.exp(value), (math.exp(value - half), math.exp(value + half)))

    def trend(self, level: float = LEVEL) -> tuple[float, float, float]:
        """Return the factor on r per decade of compute, and its interval."""
        slopes = np.array([0.0, math.log(10)])
        value, half = float(slopes @ self.constants), self._half_width(slopes, level)
        return math.exp(value), math.exp(value - half), math.exp(value + half)

    @property
    def change(self) -> str:
        """What the gain does as compute grows: "shrinks", "grows", or "unchanged" if neither is shown.

        The ratio "falls" or "rises" where no gain is shown.
        """
        _, low, high = self.trend()
        middle = self.at(math.sqrt(self.C[0] * self.C[1]))
        if low <= 1 <= high:
            return UNCHANGED
        # without a gain in the middle of the range there is none to shrink
        if middle.verdict == UNDECIDED:
            return FALLS if high < 1 else RISES
        # a ratio below 1 that rises, or one above 1 that falls, approaches 1
        return "shrinks" if (low > 1) == (middle.ratio < 1) else "grows"

    def _half_width(self, slopes: np.ndarray, level: float) -> float:
        return interval_quantile(level, self.dof) * math.sqrt(float(slopes @ self.covariance @ slopes))


@dataclass(frozen=True)
class CellGain:
    """Share of A's FLOPs that B needs for the same loss, from two cells and the slope of a frontier.

    interval  (0, inf) where the data do not bound it
    slope     d log L / d log C, and its standard error
    """

    ratio: float
    interval: tuple[float, float]
    slope: float
    slope_error: float


def gain_of_cells(
    law: ComputeLaw, C: tuple[float, float], difference: float, error: float, dof: float
) -> CellGain:
    """Return the share of A's compute that B needs, from the losses of two cells at C = (A, B) FLOPs.

    difference  log L_b - log L_a, with its standard error and degrees of freedom

    The slope is exact for small differences only. Raises ValueError for losses of the law that do not fall.
    """
    # at A's compute: the ratio is a share of it
    slope, slope_error = law.slope(C[0])
    if slope >= 0:
        raise ValueError("gain: the frontier's loss does not fall at this compute.")
    # log r = difference / |slope|. Fieller (J. R. Stat. Soc. B 16, 1954): theta is inside its interval if
    # (difference - theta |slope|)^2 <= t^2 (error^2 + theta^2 slope_error^2), a parabola in theta.
    t = interval_quantile(LEVEL, dof)
    square, middle = slope**2 - (t * slope_error) ** 2, difference * -slope
    root = middle**2 - square * (difference**2 - (t * error) ** 2)
    # cells of unequal compute: B's share of A's compute as trained, which the difference multiplies
    already = math.log(C[1] / C[0])
    ends = (-math.inf, math.inf)
    # a slope that may be 0 bounds no ratio
    if square > 0:
        half = math.sqrt(max(root, 0.0))
        ends = ((middle - half) / square, (middle + half) / square)
    # exp(700) is near the largest float64
    low, high = (math.exp(min(end + already, 700.0)) for end in ends)
    return CellGain(math.exp(difference / -slope + already), (low, high), slope, slope_error)


def ladder_of_runs(C: ArrayLike, L: ArrayLike, pairs: Sequence[str] = ()) -> Ladder:
    """Return the ladder of runs [n] of one recipe. C FLOPs and L nats must be positive."""
    C, L = validate_columns(C=C, L=L)
    return Ladder(np.log(C), np.log(L), np.eye(len(C)), pairs=pairs)


def ladder_of_frontier(N: ArrayLike, D: ArrayLike, L: ArrayLike, C: ArrayLike) -> Ladder:
    """Return the ladder of best sizes, from runs [n] of several sizes at each budget.

    Raises the errors of `fit_compute_law`.
    """
    law = fit_compute_law(N, D, L, C)
    x, y, relative = frontier_levels(law, N, C, L)
    return Ladder(x, y, relative, law.spread**2, law.dof)


def _choose_degree(a: Ladder, b: Ladder) -> int:
    """Return 2 for a parabola, 1 for a line. Raises ValueError for fewer runs or budgets than constants."""
    n_budgets = min(len(split_budgets(np.exp(ladder.x))) for ladder in (a, b))
    if n_budgets < 2:
        raise ValueError("gain: got a recipe with one budget, expected two of each. Compare two cells.")
    n_runs = len(a.x) + len(b.x)
    # the curve has degree + 1 constants, the ratio two
    dof = n_runs + a.dof + b.dof - 4
    if n_budgets >= MIN_FOR_CURVATURE and dof - 1 >= MIN_DOF:
        return 2
    if dof < 1:
        raise ValueError(f"gain: got {n_runs} runs for 4 constants. Train more seeds or budgets.")
    return 1


def _fit_lines(x: np.ndarray, y: np.ndarray, is_b: np.ndarray) -> tuple[float, float]:
    """Return the slope of parallel lines through both ladders, and the step of log L from A to B.

    Raises ValueError for losses that do not fall.
    """
    slope, _, step = np.linalg.lstsq(np.stack([x, np.ones(len(x)), is_b], axis=1), y)[0]
    # equal losses have a slope of rounding errors
    if slope > -1e-9:
        raise ValueError("gain: the losses do not fall with compute. Give tuned runs.")
    return float(slope), float(step)


def _find_common_range(a: Ladder, b: Ladder) -> tuple[float, float]:
    """Return the range of log C of both. Raises ValueError without common compute or losses."""
    low, high = max(a.x.min(), b.x.min()), min(a.x.max(), b.x.max())
    if high - low < SAME_COMPUTE:
        raise ValueError("gain: got ladders without common compute. Train both at the same budgets.")
    if max(a.y.min(), b.y.min()) > min(a.y.max(), b.y.max()):
        raise ValueError("gain: got ladders without common losses. Train the better one at less compute.")
    return float(low), float(high)


def fit_gain(a: Ladder, b: Ladder) -> EquivalentGain:
    """Fit the share of compute that B needs, from two ladders.

    Raises ValueError for a ladder of one budget, without a common range of losses,
    for losses that do not fall, or for too few runs.
    """
    from scipy.optimize import least_squares  # slow import

    x, y = np.concatenate([a.x, b.x]), np.concatenate([a.y, b.y])
    is_b = np.arange(len(x)) >= len(a.x)
    degree = _choose_degree(a, b)
    # log C near 40 and its square would make the columns of the fit nearly dependent
    centre, n_free = float(x.mean()), degree + 3
    low, high = _find_common_range(a, b)
    # lines of equal slope through both ladders: their distance in log C
    slope, step = _fit_lines(x, y, is_b)

    def distances(theta: np.ndarray, root: np.ndarray) -> np.ndarray:
        # B at log C stands where A has the same loss, at u with u + log r(u) = log C
        shift, stretch = theta[:2]
        u = np.where(is_b, (x - centre - shift) / (1 + stretch), x - centre)
        return np.linalg.solve(root, y - np.polynomial.polynomial.polyval(u, theta[2:]))

    def minimise(relative: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return constants, their slopes [n, p] of the whitened losses, and whitened residuals."""
        root = np.linalg.cholesky(relative)
        # log r, its change per log C, and the curve differ in size by orders of magnitude
        scale = np.r_[1.0, 0.1, np.full(degree + 1, 0.1)]
        fit = least_squares(distances, first, args=(root,), x_scale=scale, xtol=1e-12, ftol=1e-14)
        return fit.x, fit.jac, fit.fun

    # runs of two recipes are independent, unless the labels of pairs show otherwise below
    relative = np.zeros((len(x), len(x)))
    relative[: len(a.x), : len(a.x)], relative[len(a.x) :, len(a.x) :] = a.relative, b.relative
    first = np.r_[-step / slope, 0.0, np.polynomial.polynomial.polyfit(a.x - centre, a.y, degree)]
    theta, slopes, residual = minimise(relative, first)
    correlation = 0.0
    if len(set(a.pairs) & set(b.pairs)) >= MIN_PAIRS:
        labels = np.unique([*a.pairs, *b.pairs], return_inverse=True)[1]
        # an estimate of a correlation that is not there would narrow half of the intervals
        if is_dependent(residual, slopes, labels):
            noise = estimate_noise(residual, slopes, labels)
            correlation = min(noise.between**2 / max(noise.sigma**2, 1e-300), 0.999)
            theta, slopes, residual = minimise(noise.correlate(labels), theta)
    # the fits of frontiers have measured the noise already
    dof = len(x) - n_free + a.dof + b.dof
    squares = float(residual @ residual) + a.dof * a.variance + b.dof * b.variance
    sigma = math.sqrt(squares / dof)
    covariance = sigma**2 * np.linalg.pinv(slopes.T @ slopes)[:2, :2]
    constants, ends = (float(theta[0]), float(theta[1])), (math.exp(low), math.exp(high))
    return EquivalentGain(constants, covariance, centre, ends, sigma, dof, correlation)
