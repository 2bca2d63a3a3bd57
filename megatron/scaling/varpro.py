"""E + A/N^alpha + B/D^beta, fitted fast for many weightings of the same runs.

For fixed exponents the law is linear in E, A and B (variable projection), so a small grid of exponents with a
non-negative least-squares solution at each gives starts; a damped Newton iteration with exact derivatives
polishes the best of them, and the lowest objective wins.
"""

from itertools import combinations

import numpy as np

from megatron.scaling.huber import (
    Runs,
    derivatives,
    floor_of,
    from_floor,
    in_floor,
    objective,
    onto_surface,
    to_floor,
    without_floor,
)
from megatron.scaling.newton import Box, Fitted, solve, widths
from megatron.scaling.newton import newton as descent

GRID = np.geomspace(0.05, 2.0, 24)  # exponents tried
BOUNDS = (0.01, 5.0)  # exponents searched
SLOPES = (0.0, np.inf)  # alpha A and beta B
LOW, HIGH = (
    np.array([end, *2 * [slope], *2 * [bound]])
    for end, slope, bound in zip((-np.inf, np.inf), SLOPES, BOUNDS, strict=True)
)
N_POLISHED = 6
MAX_ITERATIONS = 200
ROUGH_ITERATIONS = 20  # at a Huber on the way to a narrower one
N_SETTLING = 40
IMMATERIAL = 1e-5  # share of the objective: n times it is a difference in -2 log likelihood
CHUNK = 100  # replicates that start from their own grid at a time: bounds the memory


def from_grid(runs: Runs, weights: np.ndarray, delta: float) -> Fitted:
    """For each weighting [R, n] the best of its polished starts, all R polished together."""
    phi = np.concatenate([starts(runs, one) for one in weights])
    polished = descend(phi, runs, np.repeat(weights, N_POLISHED, axis=0), delta)
    best = polished.objective.reshape(-1, N_POLISHED).argmin(axis=1) + N_POLISHED * np.arange(len(weights))
    return Fitted(polished.phi[best], polished.objective[best], polished.at_rest[best])


def bootstrap(runs: Runs, phi: np.ndarray, weights: np.ndarray, delta: float) -> Fitted:
    """Refit every weighting [R, n] from the whole fit's phi [5], and some from their own grid.

    Those are the ones that do not rest, and those that rest on a bound: a vanished term has no slope that
    could bring it back, though with another exponent it may lower the objective.
    """
    found = descend(np.tile(phi, (len(weights), 1)), runs, weights, delta)
    afresh = np.flatnonzero(~found.at_rest | _on_bound(found.phi))
    for i in range(0, len(afresh), CHUNK):
        chunk = afresh[i : i + CHUNK]
        again = from_grid(runs, weights[chunk], delta)
        no_worse = again.objective <= found.objective[chunk]
        kept = chunk[no_worse]
        found.phi[kept], found.objective[kept] = again.phi[no_worse], again.objective[no_worse]
        found.at_rest[kept] = again.at_rest[no_worse]
    # with the whole fit's constants a resample has this objective: no refit may end above it
    whole = np.tile(phi, (len(weights), 1))
    above = np.flatnonzero(found.objective > objective(whole, runs, weights, delta))
    if len(above):
        replace_rows(found, above, newton_above_floor(whole[above], runs, weights[above], delta))
    _settle(found, runs, weights, delta)
    return found


def _settle(found: Fitted, runs: Runs, weights: np.ndarray, delta: float) -> None:
    """Follow what did not come to rest in other coordinates, until nothing that matters is gained.

    Near the kinks of a narrow Huber the iteration zigzags; in (E, s, t, alpha, beta) the kinks are elsewhere.
    """
    for _ in range(N_SETTLING):
        rows = np.flatnonzero(~found.at_rest)
        if not len(rows):
            return
        before = found.objective[rows]
        start = np.where(
            floor_of(found.phi[rows])[:, None] < 0, onto_surface(found.phi[rows]), found.phi[rows]
        )
        replace_rows(found, rows, newton_above_floor(start, runs, weights[rows], delta))
        found.at_rest[rows] |= found.objective[rows] > before * (1 - IMMATERIAL)


def replace_rows(fitted: Fitted, rows: np.ndarray, others: Fitted) -> None:
    """Put `others` [r] in the places `rows` [r] of `fitted`, where their objective is lower."""
    lower = others.objective < fitted.objective[rows]
    rows = rows[lower]
    fitted.phi[rows], fitted.objective[rows] = others.phi[lower], others.objective[lower]
    fitted.at_rest[rows] = others.at_rest[lower]


def _on_bound(phi: np.ndarray) -> np.ndarray:
    """Whether a slope has vanished or an exponent is at an end of BOUNDS, [R]."""
    exponents_at = (phi[:, 3:] <= BOUNDS[0]) | (phi[:, 3:] >= BOUNDS[1])
    return (phi[:, 1:3] <= SLOPES[0]).any(axis=1) | exponents_at.any(axis=1)


def starts(runs: Runs, weights: np.ndarray) -> np.ndarray:
    """phi [N_POLISHED, 5] of the best grid points, by least squares of Lhat / L - 1 with E, A, B >= 0."""
    alpha, beta = (grid.ravel() for grid in np.meshgrid(GRID, GRID, indexing="ij"))
    loss = np.exp(runs.log_loss)
    ones = np.ones((len(alpha), len(loss)))
    basis = np.stack([np.exp(-alpha[:, None] * runs.x), np.exp(-beta[:, None] * runs.y), ones], axis=2)
    basis /= loss[:, None]  # [grid, n, 3], relative residuals
    weighted = np.swapaxes(basis * weights[:, None], 1, 2)
    gram, right = weighted @ basis, weighted.sum(axis=2)
    best_rss, best = np.full(len(alpha), np.inf), np.zeros((len(alpha), 3))
    for size in (1, 2, 3):  # three unknowns: every subset that is not held at 0
        for subset in combinations(range(3), size):
            at = np.ix_(range(len(alpha)), subset, subset)
            ridge = 1e-12 * np.trace(gram[at], axis1=1, axis2=2)[:, None, None] * np.eye(size)
            found = solve(gram[at] + ridge, right[:, subset])
            rss = weights.sum() - (found * right[:, subset]).sum(1)
            better = (found >= 0).all(1) & (rss < best_rss)
            best_rss[better] = rss[better]
            best[better] = 0.0
            best[np.ix_(better, subset)] = found[better]
    order = np.argsort(best_rss, kind="stable")[:N_POLISHED]
    a, b, e = best[order].T
    alpha, beta = alpha[order], beta[order]
    return np.column_stack([a + b + e, alpha * a, beta * b, alpha, beta])


def descend(phi: np.ndarray, runs: Runs, weights: np.ndarray, delta: float) -> Fitted:
    """The minimum with E >= 0 near phi [R, 5]: a free one, or where that has E < 0 one with E = 0.

    A free minimum with E < 0 may have run far along its valley, to exponents near 0; on the surface E = 0
    the way back from there can lead into another, higher minimum. So the surface is entered from the start
    too, and the lower of the two counts.
    """
    free = _narrow(phi, runs, weights, delta, floor=True)
    below = np.flatnonzero(floor_of(free.phi) < 0)
    if len(below):
        starts = np.concatenate([onto_surface(free.phi[below]), onto_surface(phi[below])])
        held = _narrow(starts, runs, np.tile(weights[below], (2, 1)), delta, floor=False)
        free.objective[below] = np.inf
        for half in (slice(0, len(below)), slice(len(below), None)):
            replace_rows(free, below, Fitted(held.phi[half], held.objective[half], held.at_rest[half]))
    return free


def _narrow(phi: np.ndarray, runs: Runs, weights: np.ndarray, delta: float, floor: bool) -> Fitted:
    """Newton at Hubers that narrow down to `delta`: see `widths`."""
    mean_square = 2 * objective(phi, runs, weights, np.inf) / np.maximum(weights.sum(axis=1), 1)
    for width in widths(mean_square, delta):
        phi = newton(phi, runs, weights, width, ROUGH_ITERATIONS, floor).phi
    return newton(phi, runs, weights, delta, MAX_ITERATIONS, floor)


def newton(
    phi: np.ndarray, runs: Runs, weights: np.ndarray, delta: float, n_iterations: int, floor: bool = True
) -> Fitted:
    """Damped Newton on R problems: phi [R, 5], weights [R, n]; without `floor` on the surface E = 0."""

    def value(at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return objective(at, runs, weights[rows], delta)

    def slopes(at: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = derivatives(at, runs, weights[rows], delta)
        return found if floor else without_floor(at, *found)

    box = Box(LOW, HIGH, None if floor else onto_surface)
    return descent(phi, value, slopes, box, n_iterations)


def newton_above_floor(phi: np.ndarray, runs: Runs, weights: np.ndarray, delta: float) -> Fitted:
    """Damped Newton in (E, s, t, alpha, beta) with the bound E >= 0, from phi [R, 5] with E >= 0.

    Slower than `descend`, but the objective never rises above that of the start.
    """

    def value(at: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return objective(from_floor(at), runs, weights[rows], delta)

    def slopes(at: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        there = from_floor(at)
        return in_floor(there, *derivatives(there, runs, weights[rows], delta))

    low = LOW.copy()
    low[0] = 0.0
    found = descent(to_floor(phi), value, slopes, Box(low, HIGH), MAX_ITERATIONS)
    return Fitted(from_floor(found.phi), found.objective, found.at_rest)
