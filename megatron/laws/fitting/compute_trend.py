"""Forecast of the loss at more compute than the runs have: a power law above a floor, whose slope drifts.

    log(L - E) = level - slope (x - edge) + w(x),    x = log C, edge = log of the largest C

E is the irreducible loss, which a few decades of compute do not determine. The
slope is not constant either: models learn to use their context, or reach their
capacity. So the difference w of the slope is a random walk in log C, in both
directions from the edge, d slope ~ Normal(0, drift^2 dx), and w is an integrated
Wiener process (Wahba, J. R. Stat. Soc. B 40, 1978), whose variance at a
distance d from the edge is drift^2 d^3 / 3.

At a fixed E, drift and noise, level and slope have a normal posterior in closed
form. A grid of these three, weighted by the marginal likelihood and a prior, makes
a forecast a mixture of log-normal distributions above E: the profile of E, the
drift of the points themselves, and their noise are all in its interval.

The constants of PRIOR were chosen on published ladders, where each is predicted with
the constants that the others choose (tools/bench/extrapolate.py --choose).
"""

import math
from dataclasses import dataclass

import numpy as np

N_FLOORS, LARGEST_FLOOR = 40, 0.97  # of E, as a share of the lowest loss
DRIFTS = np.array([0.1, 0.3, 0.6, 1.0, 1.8, 3.0, 5.0])  # times the prior's scale
NOISES = np.geomspace(0.1, 6.0, 8)  # times the prior's scale, or the known noise's
MIN_WEIGHT = 1e-4  # components of less weight, as a share of the largest, are omitted
N_BISECTIONS = 50  # of an interval of 10 in log L


@dataclass(frozen=True)
class TrendPrior:
    """Prior of a trend.

    slope, slope_error  mean and standard deviation of the slope of log(L - E) by log C at the edge
    drift               scale of the drift, per sqrt(log C); half-Cauchy
    noise               scale of the standard deviation of log L of one point
    floor               (a, b): E as a share of the lowest loss has a density as share^(a-1) (1 - share)^(b-1)
    """

    slope: float
    slope_error: float
    drift: float
    noise: float
    floor: tuple[float, float]


PRIOR = TrendPrior(slope=0.165, slope_error=0.035, drift=0.006, noise=0.005, floor=(2.0, 1.8))


@dataclass(frozen=True)
class ComputeTrend:
    """Mixture of m components, each a list [m]; log C at the largest compute is `edge`.

    weight      sum to 1
    floor       E, nats per token
    level       log(L - E) at the edge
    slope       its decrease per unit of log C
    covariance  [m, 3]: variance of the level, covariance with the slope, variance of the slope
    drift       of the slope, per sqrt(log C)
    noise       standard deviation of log L of one run
    """

    edge: float
    weight: list[float]
    floor: list[float]
    level: list[float]
    slope: list[float]
    covariance: list[list[float]]
    drift: list[float]
    noise: list[float]

    def __post_init__(self) -> None:
        """Raise ValueError for lists of other lengths than that of `weight`, as of an edited file."""
        lists = (self.floor, self.level, self.slope, self.covariance, self.drift, self.noise)
        lengths = {len(self.weight), *(len(values) for values in lists)}
        if not self.weight or len(lengths) > 1 or any(len(row) != 3 for row in self.covariance):
            raise ValueError(f"trend: got lists of {sorted(lengths)} components, expected one length")

    def quantile(self, x: float, share: float, noisy: bool = True) -> float:
        """Return the quantile of log L at log C = x; `noisy` includes the noise of one run."""
        # around 0, or around losses in larger units than nats per token
        largest = max(self.floor) + math.exp(max(self.level))
        low, high = (end + 5 * round(math.log(largest) / 5) for end in (-5.0, 5.0))
        for _ in range(N_BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._probability(x, middle, noisy) < share else (low, middle)
        return low

    def interval(self, x: float, level: float, noisy: bool = True) -> tuple[float, float]:
        """Return the interval of log L at log C = x."""
        return self.quantile(x, (1 - level) / 2, noisy), self.quantile(x, (1 + level) / 2, noisy)

    def floor_interval(self, level: float) -> tuple[float, float]:
        """Return the interval of E, nats per token."""
        shares = [(1 - level) / 2, (1 + level) / 2]
        low, high = np.quantile(self.floor, shares, weights=self.weight, method="inverted_cdf")
        return float(low), float(high)

    def _probability(self, x: float, log_loss: float, noisy: bool) -> float:
        """Return the probability of a smaller loss at log C = x."""
        from scipy.special import ndtr  # slow import

        ahead = x - self.edge
        weight, floor, level, slope, drift, noise = (
            np.array(values)
            for values in (self.weight, self.floor, self.level, self.slope, self.drift, self.noise)
        )
        of_level, between, of_slope = np.array(self.covariance).T
        mean = level - slope * ahead
        variance = of_level - 2 * ahead * between + ahead**2 * of_slope + drift**2 * abs(ahead) ** 3 / 3
        if noisy:
            # d log(L - E) = L / (L - E) d log L
            variance = variance + (noise * (1 + floor * np.exp(-mean))) ** 2
        reducible = np.maximum(np.exp(log_loss) - floor, 1e-300)
        return float(weight @ ndtr((np.log(reducible) - mean) / np.sqrt(variance)))


def fit_trend(
    x: np.ndarray,
    log_loss: np.ndarray,
    covariance: np.ndarray | None = None,
    noise: tuple[float, float] | None = None,
    prior: TrendPrior = PRIOR,
) -> ComputeTrend:
    """Fit a trend to points x = log C and log L, each [n].

    covariance  [n, n] of the noise, relative to the variance of one run; None: independent runs
    noise       known (standard deviation of log L of one run, degrees of freedom of it); None: unknown
    """
    scale, dof = noise or (prior.noise, 1.0)
    noises, drifts = NOISES * scale, DRIFTS * prior.drift
    # n^2 + n numbers: an n-vector of h scales the noise's rows and columns
    relative = np.eye(len(x)) if covariance is None else covariance
    behind = float(x.max()) - x
    walk = _wiener_covariance(behind)
    shares = np.linspace(0.0, LARGEST_FLOOR, N_FLOORS)
    a, b = prior.floor
    parts = []
    for share in shares:
        floor = share * float(np.exp(log_loss.min()))
        reducible = np.exp(log_loss) - floor
        stretch = np.exp(log_loss) / reducible  # d log(L - E) / d log L
        noise_part = relative * np.outer(stretch, stretch)
        # [noises, drifts, n, n]
        total = noises[:, None, None, None] ** 2 * noise_part + drifts[:, None, None] ** 2 * walk
        evidence, mean, errors = _fit_lines(total, behind, np.log(reducible), prior)
        # density of log L and not of log(L - E): add log of the Jacobian
        evidence = (
            evidence + np.log(stretch).sum() + (a - 1) * np.log(share + 0.01) + (b - 1) * np.log1p(-share)
        )
        # half-Cauchy drift, times the Jacobian of a grid that is even in logs; the
        # noise has the density of a scaled inverse chi-squared
        evidence -= (
            np.log1p(DRIFTS**2) - np.log(DRIFTS) + dof * (np.log(NOISES) + 0.5 * NOISES**-2.0)[:, None]
        )
        parts.append((np.full(evidence.shape, floor), evidence, mean, errors))
    floors, evidence, means, errors = (np.stack(values) for values in zip(*parts, strict=True))
    selected = np.nonzero(evidence > evidence.max() + np.log(MIN_WEIGHT))
    weight = np.exp(evidence[selected] - evidence.max())
    columns = errors[selected][:, [0, 0, 1], [0, 1, 1]]
    of_line = (weight / weight.sum(), floors[selected], *means[selected].T, columns)
    lists = (*of_line, drifts[selected[2]], noises[selected[1]])
    return ComputeTrend(float(x.max()), *(values.tolist() for values in lists))


def _fit_lines(
    total: np.ndarray, behind: np.ndarray, y: np.ndarray, prior: TrendPrior
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fit y = level + slope behind by generalised least squares for each covariance of `total` [s, t, n, n].

    Returns the log marginal likelihood [s, t], and mean [s, t, 2] and covariance [s, t, 2, 2] of
    (level, slope). The level has a flat prior, the slope a normal one.
    """
    root = np.linalg.cholesky(total)
    columns = np.stack([np.ones_like(y), behind, y - prior.slope * behind], axis=-1)
    whitened = np.linalg.solve(root, np.broadcast_to(columns, (*total.shape[:2], *columns.shape)))
    products = np.swapaxes(whitened, -1, -2) @ whitened  # [s, t, 3, 3]
    precision = products[..., :2, :2] + np.diag([0.0, prior.slope_error**-2.0])
    covariance = np.linalg.inv(precision)
    mean = (covariance @ products[..., :2, 2:])[..., 0]
    unexplained = products[..., 2, 2] - (mean * products[..., :2, 2]).sum(axis=-1)
    log_det = 2 * np.log(np.diagonal(root, axis1=-2, axis2=-1)).sum(axis=-1)
    evidence = -0.5 * (unexplained + log_det - np.linalg.slogdet(covariance)[1])
    return evidence, mean + [0.0, prior.slope], covariance


def _wiener_covariance(distance: np.ndarray) -> np.ndarray:
    """Return the covariance [n, n] of an integrated unit Wiener process at distances [n] from its start.

    With m = min(s, t): m^3 / 3 + m^2 |s - t| / 2.
    """
    least, apart = np.minimum.outer(distance, distance), np.abs(np.subtract.outer(distance, distance))
    return least**3 / 3 + least**2 * apart / 2
