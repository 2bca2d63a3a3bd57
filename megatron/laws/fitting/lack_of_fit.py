"""Lack-of-fit test: does the form of a law fit, compared with the scatter of repeated runs?

Runs of one (N, D, U) that differ only in their seed show the noise for any form. The residual sum of squares
is this pure error plus the misfit of the form. An F test compares their mean squares (Draper and Smith 1998,
section 2.1).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.laws.fitting.noise import pool_cells

LEVEL = 0.05  # below this p-value the form is rejected


@dataclass(frozen=True)
class LackOfFit:
    """F test of a form against pure error.

    statistic     mean square of the misfit over that of pure error
    p_value       probability of a statistic at least as large if the form is true
    dof           degrees of freedom (of the misfit, of pure error)
    noise         standard deviation of log L of repeated runs
    misfit        standard deviation of log L from the misfit of the form, beyond the noise; 0 if there is
                  none
    passes        p_value is at least LEVEL: these runs do not contradict the form
    """

    statistic: float
    p_value: float
    dof: tuple[int, int]
    noise: float
    misfit: float
    passes: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the content for law.json."""
        return asdict(self)


def check_lack_of_fit(residual: np.ndarray, cells: np.ndarray, n_free: int) -> LackOfFit | None:
    """Test least-squares residuals of log L [n]; `cells` [n] or [n, k] label runs of one (N, D, U).

    `n_free` is the number of fitted constants. Returns None where no cell has two runs of different loss, or
    the form has as many constants as there are cells.
    """
    from scipy.special import fdtrc  # slow import

    names, index, sizes = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    index = index.ravel()
    pooled = pool_cells(residual, cells)
    # runs of one cell have one fitted value, so residuals scatter around their mean as log L does
    # 20 runs in 12 cells and 5 constants: 8 degrees of freedom of pure error, 7 of the misfit
    n_error, n_misfit, pure = pooled.dof, len(names) - n_free, pooled.sum_squares
    if n_error < 1 or n_misfit < 1:
        return None
    means = np.bincount(index, residual) / sizes
    # residual sum of squares = pure error (around cell means) + misfit (of the cell means)
    misfit = float((sizes * means**2).sum())
    if pure <= n_error * 1e-24:  # equal losses are copies of rows, not repeated runs
        return None
    error_square, misfit_square = pure / n_error, misfit / n_misfit
    statistic = misfit_square / error_square
    p_value = float(fdtrc(n_misfit, n_error, statistic))
    # E[misfit mean square] = noise^2 + a mean of squared deviations of the form
    beyond = float(np.sqrt(max(misfit_square - error_square, 0.0)))
    return LackOfFit(
        statistic, p_value, (n_misfit, n_error), float(np.sqrt(error_square)), beyond, p_value >= LEVEL
    )
