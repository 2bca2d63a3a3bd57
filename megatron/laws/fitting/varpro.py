"""Fast fits of E + A/N^alpha + B/D^beta for many weightings of the same runs.

Variable projection: at fixed exponents the law is linear in E, A and
B. A small grid of exponents with the non-negative least-squares
solution at each gives the starts. A damped Newton iteration with exact
derivatives refines the best of them, and the lowest objective is kept.

The bound E >= 0 needs care, since phi = (c, s, t, alpha, beta) of
huber.py has E as a function of all five coordinates: a minimum with E
< 0 is replaced by one on the surface E = 0 (`minimize_with_floor`).
In the coordinates (E, s, t, alpha, beta) E >= 0 is a plain bound, but
the iteration is slower there (`minimize_in_floor_coordinates`).
"""

from itertools import combinations

import numpy as np

from megatron.laws.fitting import newton
from megatron.laws.fitting.huber import (
    CentredRuns,
    compute_floor,
    from_floor_coordinates,
    huber_derivatives,
    huber_objective,
    project_to_zero_floor,
    restrict_to_zero_floor,
    to_floor_coordinates,
    transform_to_floor,
)
from megatron.laws.fitting.newton import Box, Derivatives, Minima

EXPONENT_GRID = np.geomspace(0.05, 2.0, 24)  # exponents of the starts
EXPONENT_BOUNDS = (0.01, 5.0)  # range of the search
SLOPE_BOUNDS = (0.0, np.inf)  # for s = alpha A and t = beta B, in centred units
# zip pairs the low ends and the high ends:
# LOW = (-Inf, 0, 0, 0.01, 0.01), HIGH = (Inf, Inf, Inf, 5, 5) for (c, s, t, alpha, beta).
LOW, HIGH = (  # bounds of phi [5]; c is free
    np.array([end, *2 * [slope], *2 * [bound]])
    for end, slope, bound in zip((-np.inf, np.inf), SLOPE_BOUNDS, EXPONENT_BOUNDS, strict=True)
)
N_POLISHED = 6  # starts refined for each weighting
N_DIRECT = 24  # starts refined at the final Huber width only, in the fit to all runs
MAX_ITERATIONS = 200
ROUGH_ITERATIONS = 20  # at each Huber width above the final one
MAX_REFINEMENTS = 40
NEGLIGIBLE_GAIN = 1e-5  # share of the objective; n times it is a difference in -2 log likelihood
CHUNK = 100  # replicates fitted from their own grid at a time, which bounds the memory


def fit_chinchilla(runs: CentredRuns, weights: np.ndarray, delta: float) -> Minima:
    """Fit each weighting [R, n] from its own grid, and return the lowest minimum of its N_POLISHED starts."""
    phi = np.concatenate([find_grid_starts(runs, row_weights) for row_weights in weights])
    polished = minimize_with_floor(phi, runs, np.repeat(weights, N_POLISHED, axis=0), delta)
    # rows are grouped by weighting: index of the best
    # of each group of N_POLISHED rows
    best = polished.objective.reshape(-1, N_POLISHED).argmin(axis=1) + N_POLISHED * np.arange(len(weights))
    return polished.select(best)


def fit_all_runs(runs: CentredRuns, weights: np.ndarray, delta: float) -> Minima:
    """Fit one weighting [1, n] by `fit_chinchilla`, and from N_DIRECT starts at the final Huber width only.

    Wider Hubers lead most starts into one valley. The
    lowest minimum may be in a narrow one beside it.
    """
    fitted = fit_chinchilla(runs, weights, delta)
    phi = find_grid_starts(runs, weights[0], N_DIRECT)
    direct = minimize_in_floor_coordinates(phi, runs, np.repeat(weights, N_DIRECT, axis=0), delta)
    fitted.replace_if_lower(np.array([0]), direct.select([int(direct.objective.argmin())]))
    return fitted


def bootstrap_chinchilla(runs: CentredRuns, phi: np.ndarray, weights: np.ndarray, delta: float) -> Minima:
    """Refit every weighting [R, n] from the phi [5] of the fit to all runs, and some from their own grid.

    A replicate that has not converged, or has converged on a bound, is refitted
    from its own grid: a term that has vanished has no slope that could bring it
    back, although with another exponent it may lower the objective.
    """
    fitted = minimize_with_floor(np.tile(phi, (len(weights), 1)), runs, weights, delta)
    retried = np.flatnonzero(~fitted.converged | _is_on_bound(fitted.phi))
    for i in range(0, len(retried), CHUNK):
        chunk = retried[i : i + CHUNK]
        fitted.replace_if_lower(chunk, fit_chinchilla(runs, weights[chunk], delta))
    # the constants of the fit to all runs are one candidate
    # for a replicate: no refit may end above them
    whole = np.tile(phi, (len(weights), 1))
    above = np.flatnonzero(fitted.objective > huber_objective(whole, runs, weights, delta))
    if len(above):
        others = minimize_in_floor_coordinates(whole[above], runs, weights[above], delta)
        fitted.replace_if_lower(above, others)
    _refine_unconverged(fitted, runs, weights, delta)
    return fitted


def _refine_unconverged(fitted: Minima, runs: CentredRuns, weights: np.ndarray, delta: float) -> None:
    """Continue problems that have not converged, in other coordinates, until the gain is negligible.

    Near the kinks of a narrow Huber the iteration zigzags. The steps in
    (E, s, t, alpha, beta) have other directions, and meet other kinks.
    A gain below NEGLIGIBLE_GAIN of the objective counts as convergence.
    """
    for _ in range(MAX_REFINEMENTS):
        rows = np.flatnonzero(~fitted.converged)
        if not len(rows):
            return
        before = fitted.objective[rows]
        # the bound E >= 0 holds from the start on in floor coordinates
        start = np.where(
            compute_floor(fitted.phi[rows])[:, None] < 0,
            project_to_zero_floor(fitted.phi[rows]),
            fitted.phi[rows],
        )
        fitted.replace_if_lower(rows, minimize_in_floor_coordinates(start, runs, weights[rows], delta))
        fitted.converged[rows] |= fitted.objective[rows] > before * (1 - NEGLIGIBLE_GAIN)


def _is_on_bound(phi: np.ndarray) -> np.ndarray:
    """Return which phi [R, 5] have a slope of 0, or an exponent at an end of its bounds."""
    exponents_at = (phi[:, 3:] <= EXPONENT_BOUNDS[0]) | (phi[:, 3:] >= EXPONENT_BOUNDS[1])
    return np.logical_or((phi[:, 1:3] <= SLOPE_BOUNDS[0]).any(axis=1), exponents_at.any(axis=1))


def find_grid_starts(runs: CentredRuns, weights: np.ndarray, n_starts: int = N_POLISHED) -> np.ndarray:
    """Return phi [n_starts, 5] of the best grid points, by least squares of Lhat / L - 1 with E, A, B >= 0.

    Non-negative least squares in three unknowns: the optimum is the
    unconstrained solution of one of the seven subsets of unknowns that are not
    0, so all are solved and the best one without a negative entry is taken.
    """
    # 576 grid points: index 24 i + j has alpha =
    # EXPONENT_GRID[i] and beta = EXPONENT_GRID[j]
    alpha, beta = (grid.ravel() for grid in np.meshgrid(EXPONENT_GRID, EXPONENT_GRID, indexing="ij"))
    loss = np.exp(runs.log_loss)
    ones = np.ones((len(alpha), len(loss)))
    # Columns (A, B, E). x and y are centred, so that all columns
    # are of order 1. Plain N^-2 of 1e9 parameters is 1e-18, and the
    # ridge below would swamp its entry of 1e-36 in the Gram matrix.
    basis = np.stack([np.exp(-alpha[:, None] * runs.x), np.exp(-beta[:, None] * runs.y), ones], axis=2)
    basis /= loss[:, None]  # [grid, n, 3], relative residuals
    # normal equations of all grid points at once: gram
    # [grid, 3, 3], right [grid, 3]; the target is 1
    weighted = np.swapaxes(basis * weights[:, None], 1, 2)
    gram, right = weighted @ basis, weighted.sum(axis=2)
    best_rss, best = np.full(len(alpha), np.inf), np.zeros((len(alpha), 3))
    # A, B and E are never all 0 at the optimum: E alone already lowers
    # the sum, as the target is 1. A subset whose solution has a
    # negative entry has its optimum on a smaller subset, by convexity.
    for size in (1, 2, 3):
        for subset in combinations(range(3), size):
            # the block of each Gram matrix for this subset:
            # gram[at] is [grid, size, size]
            at = np.ix_(range(len(alpha)), subset, subset)
            # a term may be the same for all runs of a resample:
            # the ridge keeps such a system solvable
            ridge = 1e-12 * np.trace(gram[at], axis1=1, axis2=2)[:, None, None] * np.eye(size)
            solution = newton.solve_symmetric(gram[at] + ridge, right[:, subset])
            # residual sum of squares at a least-squares
            # solution: y'Wy - solution . X'Wy, with y = 1
            rss = weights.sum() - (solution * right[:, subset]).sum(1)
            better = (solution >= 0).all(1) & (rss < best_rss)
            best_rss[better] = rss[better]
            best[better] = 0.0
            best[np.ix_(better, subset)] = solution[better]
    order = np.argsort(best_rss, kind="stable")[:n_starts]
    a, b, e = best[order].T
    alpha, beta = alpha[order], beta[order]
    # c = E + A + B, s = alpha A, t = beta B in centred units
    return np.column_stack([a + b + e, alpha * a, beta * b, alpha, beta])


def minimize_with_floor(phi: np.ndarray, runs: CentredRuns, weights: np.ndarray, delta: float) -> Minima:
    """Return the minima with E >= 0 near phi [R, 5]: free ones, or on E = 0 where the free one has E < 0.

    A free minimum with E < 0 may be far along its valley, at exponents
    near 0. Descent on the surface E = 0 from there can end in another,
    higher minimum. So the descent on the surface also starts at the
    projection of `phi`, and the lower of the two minima is kept.
    """
    # `below` are rows of phi; their two starts are
    # stacked as two halves, so the weights are too
    free = _minimize_by_narrowing(phi, runs, weights, delta, floor=True)
    below = np.flatnonzero(compute_floor(free.phi) < 0)
    if len(below):
        starts = np.concatenate([project_to_zero_floor(free.phi[below]), project_to_zero_floor(phi[below])])
        on_surface = _minimize_by_narrowing(starts, runs, np.tile(weights[below], (2, 1)), delta, floor=False)
        free.objective[below] = np.inf  # infeasible: any minimum on the surface replaces it
        for half in (slice(0, len(below)), slice(len(below), None)):
            free.replace_if_lower(below, on_surface.select(half))
    return free


def _minimize_by_narrowing(
    phi: np.ndarray, runs: CentredRuns, weights: np.ndarray, delta: float, floor: bool
) -> Minima:
    """Minimise at Huber widths that narrow to `delta` (newton.iterate_huber_widths).

    With `floor` False the minimum is on the surface E = 0.
    """
    # with an infinite width the Huber term is r^2 / 2
    mean_square = 2 * huber_objective(phi, runs, weights, np.inf) / np.maximum(weights.sum(axis=1), 1)
    for width in newton.iterate_huber_widths(mean_square, delta):
        phi = minimize_in_phi(phi, runs, weights, width, ROUGH_ITERATIONS, floor).phi
    return minimize_in_phi(phi, runs, weights, delta, MAX_ITERATIONS, floor)


def minimize_in_phi(
    phi: np.ndarray,
    runs: CentredRuns,
    weights: np.ndarray,
    delta: float,
    n_iterations: int,
    floor: bool = True,
) -> Minima:
    """Minimise R problems in phi [R, 5] with weights [R, n]; without `floor`, on the surface E = 0."""

    def compute_objective(at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return huber_objective(at, runs, weights[rows], delta)

    def compute_derivatives(at: np.ndarray, rows: np.ndarray) -> Derivatives:
        values = huber_derivatives(at, runs, weights[rows], delta)
        return values if floor else restrict_to_zero_floor(at, values)

    # On E = 0 the derivatives have 4 coordinates, so Newton moves (s,
    # t, alpha, beta) only. The projection then sets c, after each step.
    box = Box(LOW, HIGH, None if floor else project_to_zero_floor)
    return newton.minimize_newton(phi, compute_objective, compute_derivatives, box, n_iterations)


def minimize_in_floor_coordinates(
    phi: np.ndarray, runs: CentredRuns, weights: np.ndarray, delta: float
) -> Minima:
    """Minimise in (E, s, t, alpha, beta) with the bound E >= 0, from phi [R, 5] with E >= 0.

    Slower than `minimize_with_floor`, but the
    objective never rises above its value at the start.
    """

    def compute_objective(floored: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return huber_objective(from_floor_coordinates(floored), runs, weights[rows], delta)

    def compute_derivatives(floored: np.ndarray, rows: np.ndarray) -> Derivatives:
        phi = from_floor_coordinates(floored)
        # chain rule from phi, in which the derivatives are
        # cheap, to (E, s, t, alpha, beta)
        return transform_to_floor(phi, huber_derivatives(phi, runs, weights[rows], delta))

    # coordinate 0 is E here, and c in LOW
    low = LOW.copy()
    low[0] = 0.0
    fitted = newton.minimize_newton(
        to_floor_coordinates(phi), compute_objective, compute_derivatives, Box(low, HIGH), MAX_ITERATIONS
    )
    return Minima(from_floor_coordinates(fitted.phi), fitted.objective, fitted.converged)
