"""Choice of runs from a pool, and prediction of expensive runs from the chosen ones, on any numeric axes.

Axes are what a run is described by: learning rate, batch size, parameters, tokens,
experts, all above 0. In their logarithms z, relative to the mean of the targets,

    log(L - E) = level + linear + quadratic + smooth(z) + noise

is a Gaussian process (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
chapter 2): power laws are linear in z, an optimum as of a rate is quadratic, and a
smooth part of length LENGTH takes up what is neither. The next run is the one that
reduces the summed variance at the targets most for its cost (greedy, V-optimal). After
the runs, the irreducible loss E and the scales are averaged over a grid by
their marginal likelihood.

The constants were chosen once for the five public pools of ScaleBench (arXiv 2604.22753).
"""

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike

LEVEL, LINEAR, QUADRATIC, SMOOTH, LENGTH = 3.0, 0.3, 0.005, 0.01, 2.0  # standard deviations, and a length
DESIGN_NOISE, NOISE = 0.03, 0.005  # standard deviations of log(L - E) for the design, of log L for the fit
COST_POWER = 0.2  # gain / cost^COST_POWER decides: at 1 only the cheapest runs are chosen
SHARES = np.linspace(0.02, 0.96, 24)  # E as a share of the lowest loss
OFFSETS = np.geomspace(0.02, 20.0, 24)  # lowest loss - E over the range of losses, for losses not above 0
SMOOTHS = SMOOTH * np.array([0.3, 1.0, 3.0])
SCALES, NOISES = np.array([0.6, 1.0, 1.6]), np.array([0.3, 1.0, 3.0, 6.0])
MAX_RUNS = 150


@dataclass(frozen=True)
class PoolChoice:
    """Rows of the pool in the order of their choice, their cost, and the mean error at the targets.

    error_before, error_after   standard deviations of log(L - E) by the design's prior, by the finished
                                runs, and by the chosen ones too
    """

    rows: np.ndarray
    cost: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class TargetPrediction:
    """Median loss of the targets [m] and its 95 % interval, which includes E and the noise of one run."""

    loss: np.ndarray
    low: np.ndarray
    high: np.ndarray


def choose_from_pool(
    axes: ArrayLike,
    cost: ArrayLike,
    targets: ArrayLike,
    budget: float,
    *,
    done: ArrayLike | None = None,
    n_runs: int = MAX_RUNS,
) -> PoolChoice:
    """Choose runs of a pool for the prediction of targets.

    axes     [n, k] values of the pool's runs, above 0
    cost     [n] above 0, in the unit of `budget`
    targets  [m, k]
    done     mask [n]: runs that are finished, which inform the choice and cost nothing
    Raises ValueError for values that are not above 0, or if no run that is left is within the budget.
    """
    z, z_targets = _log_axes(axes, targets)
    price = np.asarray(cost, dtype=float)
    if price.shape != (len(z),) or not (np.isfinite(price).all() and (price > 0).all()):
        raise ValueError(f"cost: expected a number above 0 for each of {len(z)} runs")
    is_done = np.zeros(len(z), bool) if done is None else np.asarray(done, dtype=bool)
    # covariances of targets with runs [m, n], and variances, given what was chosen so far
    between, at_runs = _covariance(z_targets, z), _variance(z)
    at_targets, columns = _variance(z_targets), np.zeros((0, len(z)))

    def add(i: int) -> None:
        nonlocal between, at_runs, at_targets, columns
        column = _covariance(z, z[i : i + 1])[:, 0] - columns.T @ columns[:, i]
        scale = np.sqrt(at_runs[i] + DESIGN_NOISE**2)
        at_run = between[:, i] / scale
        columns = np.vstack([columns, column / scale])
        between = between - np.outer(at_run, columns[-1])
        at_runs, at_targets = at_runs - columns[-1] ** 2, at_targets - at_run**2

    for row in np.flatnonzero(is_done).tolist():
        add(row)
    before = at_targets
    chosen: list[int] = []
    is_free, spent = ~is_done, 0.0
    while len(chosen) < n_runs and (is_open := is_free & (spent + price <= budget)).any():
        gain = (between**2).sum(axis=0) / (at_runs + DESIGN_NOISE**2)
        i = int(np.where(is_open, gain / price**COST_POWER, -1.0).argmax())
        add(i)
        chosen.append(i)
        is_free[i], spent = False, spent + float(price[i])
    if not chosen and is_free.any():
        least = price[is_free].min()
        raise ValueError(f"budget: got {budget:.3g}, expected {least:.3g} or more, the cost of a run")
    errors = (float(np.sqrt(np.maximum(v, 0).mean())) for v in (before, at_targets))
    return PoolChoice(np.array(chosen, dtype=int), spent, *errors)


def predict_targets(axes: ArrayLike, L: ArrayLike, targets: ArrayLike) -> TargetPrediction:
    """Predict the loss of targets [m, k] from runs: `axes` [n, k] above 0, and losses L [n].

    Losses may be negative, as normalised ones are. Raises ValueError for fewer than two runs.
    """
    z, z_targets = _log_axes(axes, targets)
    loss = np.asarray(L, dtype=float)
    if loss.shape != (len(z),) or len(loss) < 2 or not np.isfinite(loss).all():
        raise ValueError(f"L: got {loss.size} losses of {len(z)} runs, expected two finite ones or more")
    lowest, is_positive = float(loss.min()), bool((loss > 0).all())
    kernels = [(_covariance(z, z, s), _covariance(z_targets, z, s), _variance(z_targets, s)) for s in SMOOTHS]
    evidence, floors, means, variances = [], [], [], []
    for share in SHARES if is_positive else OFFSETS:
        floor = share * lowest if is_positive else lowest - share * max(np.ptp(loss), 1e-3)
        y = np.log(loss - floor)
        # d log(L - E) / d log L; the noise of losses that are not above 0 is one of log(L - E)
        stretch = loss / (loss - floor) if is_positive else np.ones_like(y)
        prior = np.log(share * (1 - share)) if is_positive else 0.0
        # density of L and not of log(L - E): add the log of the Jacobian
        prior -= y.sum()
        for (covariance, between, at_targets), scale, times in product(kernels, SCALES, NOISES):
            total = scale**2 * covariance + np.diag((NOISE * times * stretch) ** 2 + 1e-10)
            root = np.linalg.cholesky(total)
            white = np.linalg.solve(root, np.column_stack([y - y.mean(), scale**2 * between.T]))
            fit, ahead = white[:, 0], white[:, 1:]
            evidence.append(prior - 0.5 * fit @ fit - np.log(np.diag(root)).sum() - np.log(times) ** 2 / 4)
            floors.append(floor)
            means.append(y.mean() + fit @ ahead)
            variance = scale**2 * at_targets - (ahead**2).sum(axis=0)
            variances.append(np.maximum(variance, 0) + (NOISE * times) ** 2)
    weight = np.exp(np.array(evidence) - max(evidence))
    return _mix(weight / weight.sum(), np.array(floors), np.array(means), np.array(variances))


def _log_axes(axes: ArrayLike, targets: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of both, relative to the mean of the targets."""
    parts = []
    for name, values in (("axes", axes), ("targets", targets)):
        table = np.asarray(values, dtype=float)
        if table.ndim != 2 or not len(table) or not (np.isfinite(table).all() and (table > 0).all()):
            raise ValueError(f"{name}: expected rows of numbers above 0")
        parts.append(np.log(table))
    if parts[0].shape[1] != parts[1].shape[1]:
        raise ValueError(f"targets: got {parts[1].shape[1]} axes, expected {parts[0].shape[1]}")
    centre = parts[1].mean(axis=0)
    return parts[0] - centre, parts[1] - centre


def _covariance(z: np.ndarray, other: np.ndarray, smooth: float = SMOOTH) -> np.ndarray:
    """Return the prior covariance [n, m] of log(L - E) at z [n, k] and other [m, k]."""
    inner = z @ other.T
    squared = (z**2).sum(axis=1)[:, None] + (other**2).sum(axis=1) - 2 * inner
    local = smooth**2 * np.exp(-0.5 * squared / LENGTH**2)
    return LEVEL**2 + LINEAR**2 * inner + QUADRATIC**2 * inner**2 / 2 + local


def _variance(z: np.ndarray, smooth: float = SMOOTH) -> np.ndarray:
    """Return the diagonal [n] of `_covariance(z, z)`."""
    squared = (z**2).sum(axis=1)
    return LEVEL**2 + LINEAR**2 * squared + QUADRATIC**2 * squared**2 / 2 + smooth**2


def _mix(weight: np.ndarray, floor: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> TargetPrediction:
    """Return median and interval of a mixture [g] of E + lognormal distributions, for targets [g, m]."""
    from scipy.special import ndtr  # slow import

    deviation = np.sqrt(variance)
    reach = np.exp(np.clip(mean + 8 * deviation, -30, 30))
    quantiles = []
    for share in (0.5, 0.025, 0.975):
        low, high = np.full(mean.shape[1], floor.min()), (floor[:, None] + reach).max(axis=0)
        for _ in range(80):
            middle = (low + high) / 2
            above = np.maximum(middle - floor[:, None], 1e-300)
            is_below = weight @ ndtr((np.log(above) - mean) / deviation) < share
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        quantiles.append(low)
    return TargetPrediction(*quantiles)
