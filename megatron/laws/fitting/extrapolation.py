"""Error of a law beyond its runs, which grows with the distance in log compute.

No form is exact beyond the runs. The form is fitted without the runs of most
compute, and its errors on them are compared with the variance that the fit
and the noise explain. The rest is the square of `growth` times the distance
log(C / C_max).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

MIN_DISTANCE = 0.1  # RMS distance below which held-out runs are not an extrapolation


@dataclass(frozen=True)
class Extrapolation:
    """Standard deviation of log L that a law adds beyond its runs: growth * log(6 N D / compute).

    growth   per unit of log compute
    dof      degrees of freedom of growth^2
    compute  largest 6 N D of the runs, below which nothing is added
    """

    growth: float
    dof: float
    compute: float

    def half_width(self, N: ArrayLike, D: ArrayLike, level: float) -> np.ndarray:
        """Return half the width of an interval of log L for this error at N, D; broadcasts."""
        from scipy.special import stdtrit  # slow import

        compute = 6 * np.asarray(N, dtype=float) * np.asarray(D, dtype=float)
        distance = np.maximum(np.log(compute / self.compute), 0.0)
        # growth is an estimate: Student's t instead of the normal quantile
        return stdtrit(self.dof, (1 + level) / 2) * self.growth * distance


@dataclass(frozen=True)
class HeldOutPart:
    """Runs of most compute, predicted by a fit to the others, each [n].

    distance  log(C / largest C of the fitted runs)
    error     log(measured / predicted)
    variance  of log L of one run, as estimated by the fit
    """

    distance: np.ndarray
    error: np.ndarray
    variance: np.ndarray


def estimate_growth(parts: Sequence[HeldOutPart]) -> float:
    """Return the standard deviation of log L per unit of distance that no fit explains.

    It is sqrt(sum max(mean(error^2 - variance),
    0) / sum mean(distance^2)), sums over parts.
    """
    unexplained = squares = 0.0
    for part in parts:
        square = float((part.distance**2).mean())
        if square > MIN_DISTANCE**2:
            # a part with smaller errors than expected adds 0, not a negative value
            unexplained += max(float((part.error**2 - part.variance).mean()), 0.0)
            squares += square
    return float(np.sqrt(unexplained / squares)) if squares else 0.0
