"""Damped Newton on many small problems at once, with bounds. What is minimised comes as functions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

N_TRIES = 3  # of damping with the same derivatives
# Damping falls only after a step that kept more than half of its promise: where residuals cross the kinks of
# a narrow Huber at each step, easing it after every fall makes the next step rise.
GOOD, EASED, STIFFENED = 0.5, 3.0, 10.0

# (theta [r, p], which problems [r]) -> the objective [r], infinity where it has none
Value = Callable[[np.ndarray, np.ndarray], np.ndarray]
# the same -> (gradient [r, q], Hessian [r, q, q], a positive semidefinite stand-in for it [r, q, q])
Derivatives = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Fitted:
    """phi [R, p] with its objective [R], and whether each iteration came to rest [R]."""

    phi: np.ndarray
    objective: np.ndarray
    at_rest: np.ndarray


@dataclass(frozen=True)
class Box:
    """Where phi may be: low and high [p]; `surface` puts phi [r, p] back onto a surface, if there is one."""

    low: np.ndarray
    high: np.ndarray
    surface: Callable[[np.ndarray], np.ndarray] | None = None

    def inside(self, phi: np.ndarray) -> np.ndarray:
        """phi [r, p], moved to the nearest allowed place."""
        phi = np.clip(phi, self.low, self.high)
        return phi if self.surface is None else self.surface(phi)


def newton(phi: np.ndarray, value: Value, derivatives: Derivatives, box: Box, n_iterations: int) -> Fitted:
    """The minima near phi [R, p].

    The step solves (Hessian + damping * majorant) step = -gradient; damping falls when the objective falls
    and rises when it does not. A problem rests when the step promises nothing that float64 could show.
    Derivatives in the last q of p coordinates move only those.
    """
    phi = box.inside(np.array(phi, dtype=float))
    everyone = np.arange(len(phi))
    at = value(phi, everyone)
    damping = np.full(len(phi), 1e-3)
    at_rest = np.zeros(len(phi), dtype=bool)
    active = everyone[np.isfinite(at)]
    for _ in range(n_iterations):
        if not len(active):
            break
        derived = derivatives(phi[active], active)
        tries = np.arange(len(active))  # rows of `derived` that have not fallen yet
        resting = np.zeros(len(active), dtype=bool)
        # derivatives cost many times what a value costs, so a step that rises is tried shorter with the same
        for _ in range(N_TRIES):
            rows = active[tries]
            step, promised = _step(phi[rows], tuple(one[tries] for one in derived), damping[rows], box)
            trial = box.inside(phi[rows] + step)
            tried = value(trial, rows)
            before = at[rows]
            falls = tried < before
            resting[tries] = (promised <= 1e-15 * before) | (~falls & (damping[rows] > 1e12))
            moved, stuck = rows[falls], rows[~falls]
            phi[moved], at[moved] = trial[falls], tried[falls]
            kept_promise = before[falls] - tried[falls] > GOOD * promised[falls]
            damping[moved[kept_promise]] = np.maximum(damping[moved[kept_promise]] / EASED, 1e-12)
            damping[stuck] = damping[stuck] * STIFFENED
            tries = tries[~falls & ~resting[tries]]
            if not len(tries):
                break
        at_rest[active[resting]] = True
        active = active[~resting]
    return Fitted(phi, at, at_rest)


def widths(mean_square: np.ndarray, delta: float) -> Iterator[float]:
    """Huber widths that narrow from the spread of residuals, of mean square [R], down towards `delta`.

    A Huber much narrower than the residuals is nearly an absolute value, at whose kinks Newton zigzags; the
    minimum of one three times as wide is close by and easy to come from.
    """
    width = float(np.sqrt(np.median(mean_square))) if np.isfinite(delta) else 0.0
    while width > delta:
        yield width
        width /= 3


def _step(
    phi: np.ndarray,
    derived: tuple[np.ndarray, np.ndarray, np.ndarray],
    damping: np.ndarray,
    box: Box,
) -> tuple[np.ndarray, np.ndarray]:
    """(step [R, p], by how much it promises the objective to fall [R]); none out of a bound."""
    gradient, hessian, majorant = derived
    n = gradient.shape[1]
    moving = phi[:, -n:]
    held = ((moving <= box.low[-n:]) & (gradient > 0)) | ((moving >= box.high[-n:]) & (gradient < 0))
    if held.any():
        gradient[held] = 0
        rows, columns = np.nonzero(held)
        for matrix in (hessian, majorant):
            matrix[rows, columns, :] = 0
            matrix[rows, :, columns] = 0
            matrix[rows, columns, columns] = 1
    # relative to each diagonal entry; the least normal number keeps a row of zeros from being singular
    diagonal = np.einsum("rii->ri", majorant)
    ridge = (1e-12 * diagonal + np.finfo(float).tiny ** 0.5)[:, :, None] * np.eye(n)
    damped = damping[:, None, None]
    step = -solve(hessian + damped * majorant + ridge, gradient)
    uphill = np.einsum("ri,ri->r", gradient, step) > 0
    if uphill.any():  # the majorant's step always leads down
        safe = majorant[uphill] * (1 + damped[uphill]) + ridge[uphill]
        step[uphill] = -solve(safe, gradient[uphill])
    promised = -np.einsum("ri,ri->r", gradient, step)
    still = phi.shape[1] - n
    return (np.column_stack([np.zeros((len(step), still)), step]) if still else step), promised


def solve(matrices: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x of M x = y for each symmetric M [R, p, p] and y [R, p]; the least x where one of them is singular.

    A resampling that drew very few distinct runs leaves directions without any curvature.
    """
    try:
        return np.linalg.solve(matrices, right[..., None])[..., 0]
    except np.linalg.LinAlgError:
        return (np.linalg.pinv(matrices, hermitian=True) @ right[..., None])[..., 0]
