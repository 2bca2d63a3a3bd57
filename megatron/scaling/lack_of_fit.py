"""Does the form of a law fit, against the scatter of repeated runs?

Runs of one (N, D, U) that differ in their seed alone show the noise whatever the form. The residual sum of
squares is that pure error plus the misfit of the form, and their mean squares are compared by an F test
(Draper and Smith 1998, section 2.1).
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.special import fdtrc

from megatron.scaling.noise import pool_cells

LEVEL = 0.05  # below this p-value the form is rejected


@dataclass(frozen=True)
class LackOfFit:
    """F test of a form against pure error.

    statistic     mean square of the misfit over that of pure error
    p_value       of a statistic at least so large if the form holds
    dof           (of the misfit, of pure error)
    noise         standard deviation of log L of repeated runs
    misfit        standard deviation of log L that the form leaves beyond the noise; 0 where there is none
    passes        p_value is at least LEVEL: these runs do not contradict the form
    """

    statistic: float
    p_value: float
    dof: tuple[int, int]
    noise: float
    misfit: float
    passes: bool

    def as_dict(self) -> dict[str, Any]:
        """For law.json."""
        return asdict(self)


def check_fit(residual: np.ndarray, cells: np.ndarray, n_free: int) -> LackOfFit | None:
    """The test for least-squares residuals of log L [n]; `cells` [n] labels runs of one (N, D, U).

    `n_free` constants were fitted. None where no cell has two runs of different loss, or the form has as many
    constants as there are cells.
    """
    names, index, sizes = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    index = index.ravel()
    pooled = pool_cells(residual, cells)
    n_error, n_misfit, pure = pooled.dof, len(names) - n_free, pooled.sum_squares
    if n_error < 1 or n_misfit < 1:
        return None
    means = np.bincount(index, residual) / sizes
    misfit = float((sizes * means**2).sum())
    if pure <= n_error * 1e-24:  # rows written twice, not runs repeated: they show no noise
        return None
    error_square, misfit_square = pure / n_error, misfit / n_misfit
    statistic = misfit_square / error_square
    p_value = float(fdtrc(n_misfit, n_error, statistic))
    # E[misfit mean square] = noise^2 + a mean of squared deviations of the form
    beyond = float(np.sqrt(max(misfit_square - error_square, 0.0)))
    return LackOfFit(
        statistic, p_value, (n_misfit, n_error), float(np.sqrt(error_square)), beyond, p_value >= LEVEL
    )
