"""Lack-of-fit test: does the form of a law fit, compared with the scatter of repeated runs?

Runs of one (N, D, U) that differ only in their seed show the noise for any
form. The residual sum of squares is this pure error plus the misfit of the
form. An F test compares their mean squares (Draper and Smith 1998, section
2.1). It assumes normal noise of one variance: under heavy tails it rejects
10 to 20 % of true laws at 5 %, and 90 % where only the runs of the least
noise are repeated. So a form is rejected only if a bootstrap that keeps the
size of each residual rejects it too, as it does for 1 to 7 % of true laws,
and for up to 25 % where only the runs of the least noise are repeated.
"""

from dataclasses import dataclass

import numpy as np

LEVEL = 0.05  # below this p-value the form is rejected
N_DRAWS = 999  # draws of the wild bootstrap
MAX_LEVERAGE = 0.95  # a run that determines a constant alone has no residual


@dataclass(frozen=True)
class LackOfFit:
    """F test of a form against pure error.

    statistic     ratio of the mean squares of misfit and pure error
    p_value       probability of a statistic at least as large if the form is true:
                  the larger one of the F test and the wild bootstrap
    dof           degrees of freedom (of the misfit, of pure error)
    noise         standard deviation of log L of repeated runs
    misfit        standard deviation of log L from the misfit
                  of the form, beyond the noise; 0 without misfit
    passes        p_value is at least LEVEL: these runs do not contradict the form
    """

    statistic: float
    p_value: float
    dof: tuple[int, int]
    noise: float
    misfit: float
    passes: bool


def check_lack_of_fit(residual: np.ndarray, basis: np.ndarray, cells: np.ndarray) -> LackOfFit | None:
    """Test residuals of log L [n] beside the orthonormal slopes `basis` [n, p] of the law.

    `cells` [n] or [n, k] label runs of one (N, D, U). Returns None where no cell has
    two runs of different loss, or the form has as many constants as there are cells.
    """
    from scipy.special import fdtrc  # slow import

    names, index = np.unique(cells, axis=0, return_inverse=True)
    remainder = residual - basis @ (basis.T @ residual)
    # runs of one cell have one fitted value,
    # so residuals scatter around their mean as log L does.
    # 20 runs in 12 cells and 5 constants:
    # 8 degrees of freedom of pure error, 7 of the misfit
    n_error, n_misfit = len(residual) - len(names), len(names) - basis.shape[1]
    (misfit,), (pure,) = _split_squares(remainder[None], index.ravel())
    # equal losses are copies of rows, not repeated runs
    if n_error < 1 or n_misfit < 1 or pure <= n_error * 1e-24:
        return None
    error_square, misfit_square = pure / n_error, misfit / n_misfit
    statistic = misfit_square / error_square
    p_value = float(fdtrc(n_misfit, n_error, statistic))
    # Wild bootstrap (Davidson and Flachaire, J. Econometrics 2008): residuals
    # at their own runs, scaled to the variance of the noise, with random signs.
    leverage = np.minimum((basis**2).sum(axis=1), MAX_LEVERAGE)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (N_DRAWS, len(residual)))
    draws = signs * remainder / np.sqrt(1 - leverage)
    squares = _split_squares(draws - (draws @ basis) @ basis.T, index.ravel())
    n_above = (squares[0] * n_error >= statistic * n_misfit * squares[1]).sum()
    p_value = max(p_value, float(n_above + 1) / (N_DRAWS + 1))
    # E[misfit mean square] = noise^2 + a mean of squared deviations of the form
    beyond = float(np.sqrt(max(misfit_square - error_square, 0.0)))
    noise = float(np.sqrt(error_square))
    return LackOfFit(float(statistic), p_value, (n_misfit, n_error), noise, beyond, p_value >= LEVEL)


def _split_squares(values: np.ndarray, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of squares [R] of the means of cells `index` [n], and around them, of values [R, n]."""
    member = np.eye(index.max() + 1)[index]  # [n, cells]
    means = values @ member / member.sum(axis=0)
    return (member.sum(axis=0) * means**2).sum(axis=1), ((values - means[:, index]) ** 2).sum(axis=1)
