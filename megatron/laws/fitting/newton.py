"""Damped Newton iteration with bounds for many small problems at once.

The objective and its derivatives are passed as functions. R problems have p
coordinates each, of which the last q move.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

N_TRIES = 3  # values of the damping tried with the same derivatives
# The damping is decreased only after a step whose decrease of the
# objective was more than half of the predicted one. Where residuals
# cross the kinks of a narrow Huber at each step, a decrease of the
# damping after every successful step makes the next step fail.
GOOD_GAIN_RATIO, DAMPING_DECREASE, DAMPING_INCREASE = 0.5, 3.0, 10.0

# (phi [r, p], indices of the problems [r]) ->
# objective [r], Inf where it is not defined
ObjectiveFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]
# gradient [r, q], Hessian [r, q, q], positive semidefinite majorant [r, q, q]
Derivatives = tuple[np.ndarray, np.ndarray, np.ndarray]
# (phi [r, p], indices [r]) -> derivatives
DerivativesFunction = Callable[[np.ndarray, np.ndarray], Derivatives]


@dataclass(frozen=True)
class Minima:
    """Minima phi [R, p], their objective [R], and whether each iteration converged [R]."""

    phi: np.ndarray
    objective: np.ndarray
    converged: np.ndarray

    def select(self, rows: np.ndarray | slice | list[int]) -> "Minima":
        """Return the minima at `rows`."""
        return Minima(self.phi[rows], self.objective[rows], self.converged[rows])

    def replace_if_lower(self, rows: np.ndarray, others: "Minima") -> None:
        """Replace `rows` [r] by `others` [r] where these have the lower objective, in place."""
        lower = others.objective < self.objective[rows]
        for name in ("phi", "objective", "converged"):
            getattr(self, name)[rows[lower]] = getattr(others, name)[lower]


@dataclass(frozen=True)
class Box:
    """Feasible set of phi: bounds low and high [p]; `projection` moves phi [r, p] onto a surface, if set."""

    low: np.ndarray
    high: np.ndarray
    projection: Callable[[np.ndarray], np.ndarray] | None = None

    def project(self, phi: np.ndarray) -> np.ndarray:
        """Return phi [r, p] clipped to the bounds, then projected onto the surface."""
        phi = np.clip(phi, self.low, self.high)
        return phi if self.projection is None else self.projection(phi)


def minimize_newton(
    phi: np.ndarray,
    value: ObjectiveFunction,
    derivatives: DerivativesFunction,
    box: Box,
    n_iterations: int,
    tolerance: float = 1e-15,
) -> Minima:
    """Return the minima near phi [R, p] after at most `n_iterations` steps.

    The step solves (Hessian + damping * majorant) step = -gradient, as Levenberg-Marquardt does with the
    majorant for the scale. A step that does not decrease the objective is rejected and the damping increased.
    A problem has converged when the predicted decrease is below `tolerance` of the objective (its resolution
    in float64), or no step decreases it at a damping of 1e12. With derivatives in the last q of p
    coordinates only those move.
    """
    phi = box.project(np.array(phi, dtype=float))
    all_rows = np.arange(len(phi))
    objective = value(phi, all_rows)
    # each problem has its own damping and convergence; `active` holds the indices of those that still move
    damping = np.full(len(phi), 1e-3)
    converged = np.zeros(len(phi), dtype=bool)
    # a start where the objective is Inf has no derivatives: it is returned as it is, with converged False
    active = all_rows[np.isfinite(objective)]
    for _ in range(n_iterations):
        if not len(active):
            break
        gradient, hessian, majorant = derivatives(phi[active], active)
        pending = np.arange(len(active))  # rows of the derivatives without a successful step so far
        is_converged = np.zeros(len(active), dtype=bool)
        # derivatives cost many times as much as a value, so
        # a failed step is shortened with the same ones
        for _ in range(N_TRIES):
            # `pending` counts within `active`, and `rows` within all R
            # problems: active = [0, 2, 4] and pending = [1] give rows = [2]
            rows = active[pending]
            step, predicted_decrease = _compute_step(
                phi[rows], (gradient[pending], hessian[pending], majorant[pending]), damping[rows], box
            )
            trial = box.project(phi[rows] + step)
            tried = value(trial, rows)
            before = objective[rows]
            # False for NaN too, so a step to a point without a value is rejected
            falls = tried < before
            # the objective is resolved to about 1e-16 of its value: a smaller predicted decrease is rounding
            is_small = predicted_decrease <= tolerance * before
            is_converged[pending] = is_small | (~falls & (damping[rows] > 1e12))
            moved, stuck = rows[falls], rows[~falls]
            phi[moved], objective[moved] = trial[falls], tried[falls]
            is_good = before[falls] - tried[falls] > GOOD_GAIN_RATIO * predicted_decrease[falls]
            damping[moved[is_good]] = np.maximum(damping[moved[is_good]] / DAMPING_DECREASE, 1e-12)
            # a step that failed is shortened for the next try, with the same derivatives
            damping[stuck] = damping[stuck] * DAMPING_INCREASE
            pending = pending[~falls & ~is_converged[pending]]
            if not len(pending):
                break
        converged[active[is_converged]] = True
        active = active[~is_converged]
    return Minima(phi, objective, converged)


def iterate_huber_widths(mean_square: np.ndarray, delta: float) -> Iterator[float]:
    """Yield Huber widths from the root of the median `mean_square` residual [R] down to above `delta`.

    A Huber much narrower than the residuals is nearly an absolute value,
    and Newton zigzags at its kinks. The minimum of a Huber three times as
    wide is close to its minimum, so each width starts from the one before.
    """
    # Residuals of 0.1 and delta = 1e-3 have
    # the widths 0.1, 0.033, 0.011, 0.0037 and 0.0012.
    # All R problems share them, so that they stay
    # in one batch; the median ignores a few bad starts.
    # A start that overflows has an objective of Inf,
    # which no division by 3 would bring below delta.
    finite = mean_square[np.isfinite(mean_square)]
    width = float(np.sqrt(np.median(finite))) if np.isfinite(delta) and len(finite) else 0.0
    while width > delta:
        yield width
        width /= 3


def _compute_step(
    phi: np.ndarray,
    derivative_values: Derivatives,
    damping: np.ndarray,
    box: Box,
) -> tuple[np.ndarray, np.ndarray]:
    """Return (step [R, p], predicted decrease of the objective [R]).

    Coordinates at a bound whose gradient points outwards are blocked:
    their rows and columns become the identity's and their gradient
    0, so that the step solves for the others alone (an active set).
    """
    # The arrays are copies of rows (fancy indexing in the
    # caller), so the zeros written below do not reach the
    # next try, in which other coordinates may be blocked.
    gradient, hessian, majorant = derivative_values
    n = gradient.shape[1]
    free_phi = phi[:, -n:]
    # Descent moves against the gradient: at the low
    # bound a positive gradient points out of the box.
    is_blocked = ((free_phi <= box.low[-n:]) & (gradient > 0)) | (
        (free_phi >= box.high[-n:]) & (gradient < 0)
    )
    if is_blocked.any():
        gradient[is_blocked] = 0
        rows, columns = np.nonzero(is_blocked)
        # One entry of `rows`, `columns` for each blocked coordinate: problem 0 with
        # coordinates 1 and 4 blocked gives rows = [0, 0] and columns = [1, 4].
        for matrix in (hessian, majorant):
            matrix[rows, columns, :] = 0
            matrix[rows, :, columns] = 0
            matrix[rows, columns, columns] = 1
    # Levenberg-Marquardt: the majorant sets
    # the scale of the damping in each coordinate.
    # a ridge relative to each diagonal entry; the tiny
    # constant keeps a row of zeros from being singular
    diagonal = np.einsum("rii->ri", majorant)
    ridge = (1e-12 * diagonal + np.finfo(float).tiny ** 0.5)[:, :, None] * np.eye(n)
    damped = damping[:, None, None]
    step = -solve_symmetric(hessian + damped * majorant + ridge, gradient)
    uphill = np.einsum("ri,ri->r", gradient, step) > 0
    if uphill.any():  # the Hessian is indefinite: a step by the majorant is always a descent direction
        safe = majorant[uphill] * (1 + damped[uphill]) + ridge[uphill]
        step[uphill] = -solve_symmetric(safe, gradient[uphill])
    # Decrease of the linear model. A convex quadratic falls by half of it
    # without damping, and by up to all of it as the damping grows:
    # GOOD_GAIN_RATIO = 0.5 is the ratio of an exact quadratic without damping.
    predicted_decrease = -np.einsum("ri,ri->r", gradient, step)
    n_fixed = phi.shape[1] - n
    return (np.column_stack([np.zeros((len(step), n_fixed)), step]) if n_fixed else step), predicted_decrease


def solve_symmetric(matrices: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve M x = y for each symmetric M [R, p, p] and y [R, p]; least-norm solutions if one is singular.

    A resample of very few distinct runs has directions without any curvature.
    """
    try:
        # right is [R, p, 1], since numpy 2 reads a right-hand
        # side [R, p] as one matrix. One singular matrix raises
        # for the whole batch, and pinv then solves all R systems.
        return np.linalg.solve(matrices, right[..., None])[..., 0]
    except np.linalg.LinAlgError:
        return (np.linalg.pinv(matrices, hermitian=True) @ right[..., None])[..., 0]
