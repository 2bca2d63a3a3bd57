"""General fit of any form of scaling law: many starts, damped Newton iterations, the lowest objective.

1. `find_starts` proposes constants. At a fixed R_D* a form with repetition is a plain sum of powers of N and
   of the effective data D', so variable projection (varpro.py) solves it, for each R_D* of a grid.
2. `fit_theta` minimises from every start, keeps a few distinct minima and refines them.
3. `bootstrap_theta` refits every bootstrap weighting from those minima.

The objective and its derivatives are in fit_problem.py.

Shapes: R problems (starts, or bootstrap replicates), n runs, p coordinates theta.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from megatron.laws.fitting.fit_problem import CHUNK, Problem
from megatron.laws.fitting.huber import CentredRuns
from megatron.laws.fitting.newton import Box, Minima, iterate_huber_widths, minimize_newton
from megatron.laws.fitting.surface import LOG_R, OwnSurface, RunPoints, Surface
from megatron.laws.fitting.varpro import find_grid_starts
from megatron.laws.forms import effective_count

# Values of further constants from which fits start;
# R_D* and R_N* in epochs' worth, see forms.py
GRID_R_D = (0.5, 2.0, 6.0, 15.0, 45.0, 100.0, 300.0)
GRID_R_N = (0.3, 0.8, 1.7, 2.5, 5.0, 20.0, 1000.0)
GRID_K = (0.003, 0.03, 0.3)  # `over_repetition`: its term at the centre, as a share of the loss
GRID_G, GRID_H = (0.0, 0.7, 2.0), (0.5, 1.2)
NO_DECAY = np.exp(LOG_R[1])  # R* of about 1e9 repeats, at which nothing decays
N_OWN_STARTS, OWN_START_SPREAD = 32, 0.5  # an own form: starts, and their standard deviation in theta
FEW_ITERATIONS, CULL_ITERATIONS, ROUGH_ITERATIONS, MAX_ITERATIONS = 6, 15, 20, 300
BOOTSTRAP_ITERATIONS = 50  # iterations of a replicate between two checks of its progress
FIRST_ITERATIONS = 25  # most problems converge within these
N_POLISHED = 8  # distinct minima that are refined at the final Huber width
FEW_FREE = 3  # with this many free constants or fewer, every start is refined
CULL_DELTA = 0.03  # Huber width at which starts are compared
N_MINIMA = 3  # minima from which each bootstrap replicate starts
MAX_REFINEMENTS = 40
NEGLIGIBLE_GAIN = 1e-3  # share of the objective; n times it is a difference in -2 log likelihood

# constant of a form -> coordinate of theta, where the names differ (surface.THETA)
COORDINATE_OF = {
    "E": "e", "A": "a", "B": "b", "K": "k", "R_D": "r_D", "R_N": "r_N",
}  # fmt: skip
# A coordinate is the log of a whole term at the centre of the
# runs, such as a = log(A / N0^alpha). So A is a function of two
# coordinates, and can be fixed only together with its exponent.
PARTNERS_OF = {
    "A": ("alpha",), "B": ("beta",), "K": ("g", "h"),
    "a": ("eta",), "b": ("eta",),
}  # fmt: skip


def minimize_in_chunks(problem: Problem, theta: np.ndarray, weights: np.ndarray, box: Box, n: int) -> Minima:
    """Return the minima near theta [R, p] after at most `n` iterations, in chunks of CHUNK problems.

    Problems that have not converged after FIRST_ITERATIONS continue in one batch
    across chunks: a step of a few problems costs as much as a step of many.
    """
    # low = high marks a coordinate as fixed: its
    # derivatives are 0 (fit_problem.derivatives)
    free = box.low < box.high

    def minimize_rows(at: np.ndarray, w: np.ndarray, most: int) -> Minima:
        return minimize_newton(
            at,
            lambda phi, rows: problem.objective(phi, w[rows]),
            lambda phi, rows: problem.derivatives(phi, w[rows], free),
            box,
            most,
        )

    chunks = [slice(i, i + CHUNK) for i in range(0, len(theta), CHUNK)]
    minima = concatenate_minima(
        [minimize_rows(theta[chunk], weights[chunk], min(n, FIRST_ITERATIONS)) for chunk in chunks]
    )
    late = np.flatnonzero(~minima.converged)
    if n > FIRST_ITERATIONS and len(late):
        rest = minimize_rows(minima.phi[late], weights[late], n - FIRST_ITERATIONS)
        for name in ("phi", "objective", "converged"):
            getattr(minima, name)[late] = getattr(rest, name)
    return minima


def concatenate_minima(parts: Sequence[Minima]) -> Minima:
    """Concatenate the minima of several sets of problems."""
    return Minima(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("phi", "objective", "converged"))
    )


def minimize_by_narrowing(
    problem: Problem,
    theta: np.ndarray,
    weights: np.ndarray,
    box: Box,
    n_rough: int = ROUGH_ITERATIONS,
    n_last: int = MAX_ITERATIONS,
) -> Minima:
    """Return the minima near theta [R, p], reached through a sequence of narrowing Huber widths.

    Each wider Huber has at most `n_rough` iterations, the final
    one at most `n_last`. The sequence starts at the root mean
    square residual of theta (newton.iterate_huber_widths).
    """
    # sum of the weights, about n; the objective of least squares is sum w r^2 / 2
    least_squares, counts = replace(problem, delta=np.inf), np.maximum(weights.sum(axis=1), 1)
    mean_square = 2 * least_squares.objective(theta, weights) / counts
    for width in iterate_huber_widths(mean_square, problem.delta):
        wider = replace(problem, delta=width)
        theta = minimize_in_chunks(wider, theta, weights, box, n_rough).phi
    return minimize_in_chunks(problem, theta, weights, box, n_last)


def fit_theta(problem: Problem, weights: np.ndarray, fixed: Mapping[str, float] | None = None) -> Minima:
    """Return the distinct minima for one weighting [n], lowest first.

    Raises ValueError where a coefficient is fixed
    and its exponent is not, such as A without alpha.
    """
    fixed = fixed or {}
    box = build_search_box(problem, fixed)
    # starts that differ only by rounding, or that the
    # bounds made equal, are one start
    theta = np.unique(box.project(find_starts(problem, weights, fixed)).round(12), axis=0)
    all_weights = np.broadcast_to(weights, (len(theta), len(weights)))
    if (box.low < box.high).sum() > FEW_FREE:
        # A Huber about as wide as the residuals is smooth, and the
        # iteration is fast there: most of the many starts reach the same
        # few minima, and only those are refined at the final width.
        wide = replace(problem, delta=max(problem.delta, CULL_DELTA))
        culled = minimize_in_chunks(wide, theta, all_weights, box, CULL_ITERATIONS)
        theta = culled.phi[_select_distinct(culled.objective, 1e-6)[:N_POLISHED]]
        # data_constrained with R_N* at its upper bound is
        # repeated_data: from the best fits with one decay only,
        # the fit with both is never worse. Recursion of depth 1.
        if {"R_D", "R_N"} <= set(problem.surface.constants) - set(fixed):
            single = [fit_theta(problem, weights, {**fixed, name: NO_DECAY}) for name in ("R_N", "R_D")]
            theta = np.concatenate([theta, *(minima.phi[:1] for minima in single)])
    all_weights = np.broadcast_to(weights, (len(theta), len(weights)))
    minima = minimize_by_narrowing(problem, theta, all_weights, box)
    # Wider Hubers lead most starts into one valley. The lowest minimum may be in a
    # narrow one beside it, so every start is also followed at the final width only.
    direct = minimize_in_chunks(problem, theta, all_weights, box, MAX_ITERATIONS)
    minima = concatenate_minima([minima, direct])
    return minima.select(_select_distinct(minima.objective, 1e-7))


def _select_distinct(objective: np.ndarray, min_gap: float) -> list[int]:
    """Return the indices of distinct minima, lowest first.

    Objectives [R] within a relative difference of `min_gap`
    count as one minimum; Inf and NaN are skipped.
    """
    selected: list[int] = []
    for i in np.argsort(objective, kind="stable"):
        if np.isfinite(objective[i]) and (
            not selected or objective[i] > objective[selected[-1]] * (1 + min_gap)
        ):
            selected.append(int(i))
    return selected


def _refine_unconverged(minima: Minima, problem: Problem, weights: np.ndarray, box: Box) -> None:
    """Continue problems that have not converged, in place, until the gain is negligible.

    Near the kinks of a narrow Huber some replicates take ever
    shorter steps and do not meet the convergence test. A gain
    below NEGLIGIBLE_GAIN of the objective counts as convergence.
    """
    for _ in range(MAX_REFINEMENTS):
        rows = np.flatnonzero(~minima.converged)
        if not len(rows):
            return
        before = minima.objective[rows]
        # a rejected step leaves theta as it is, so the objective never rises
        refined = minimize_in_chunks(problem, minima.phi[rows], weights[rows], box, BOOTSTRAP_ITERATIONS)
        minima.phi[rows], minima.objective[rows] = refined.phi, refined.objective
        minima.converged[rows] = refined.converged | (refined.objective > before * (1 - NEGLIGIBLE_GAIN))


def bootstrap_theta(
    problem: Problem, starts: np.ndarray, weights: np.ndarray, fixed: Mapping[str, float] | None = None
) -> Minima:
    """Refit every weighting [R, n] from the N_MINIMA best `starts` [m, p]; return the lowest minima."""
    box = build_search_box(problem, fixed or {})
    starts = starts[:N_MINIMA]
    n = len(starts)
    # a few iterations show which minimum is the lowest for a
    # replicate; only that one is followed to the end Rows m r to m
    # r + m - 1 of `near` are the m starts of replicate r: `tile`
    # repeats the list of starts, `repeat` each weighting m times.
    near = minimize_in_chunks(
        problem, np.tile(starts, (len(weights), 1)), np.repeat(weights, n, axis=0), box, FEW_ITERATIONS
    )
    best = near.objective.reshape(-1, n).argmin(axis=1) + n * np.arange(len(weights))
    fitted = minimize_by_narrowing(
        problem, near.phi[best], weights, box, FEW_ITERATIONS, BOOTSTRAP_ITERATIONS
    )
    # wider Hubers may end in a worse minimum than the few
    # direct iterations did: continue from these instead
    worse = np.flatnonzero(fitted.objective > near.objective[best])
    if len(worse):
        theta = near.phi[best[worse]]
        others = minimize_in_chunks(problem, theta, weights[worse], box, BOOTSTRAP_ITERATIONS)
        fitted.replace_if_lower(worse, others)
    _refine_unconverged(fitted, problem, weights, box)
    return fitted


def build_search_box(problem: Problem, fixed: Mapping[str, float]) -> Box:
    """Return the bounds of theta [p]; a coordinate of a `fixed` constant has low = high.

    Raises ValueError for a constant that the form
    lacks, or a coefficient fixed without its exponent.
    """
    surface, points = problem.surface, problem.points
    low, high = surface.bounds()
    if fixed:
        available = surface.to_constants(np.clip(np.ones((1, len(low))), low, high), points)
        unknown = sorted(set(fixed) - set(available))
        if unknown:
            raise ValueError(
                f"fixed: got '{unknown[0]}', expected constants of the form ({', '.join(available)})"
            )
        for name in fixed:
            free_partners = [
                other
                for other in (PARTNERS_OF.get(name, ()) if isinstance(surface, Surface) else ())
                if other in available and other not in fixed
            ]
            if free_partners:
                raise ValueError(
                    f"fixed: got {name} without {free_partners[0]}, expected both. Fix {free_partners[0]} "
                    "too."
                )
        # only the coordinates of the fixed constants are
        # used; the others have any valid value
        params = {name: float(value[0]) for name, value in available.items()} | dict(fixed)
        at = surface.from_constants(params, points)
        for name in fixed:
            i = surface.names.index(name if name in surface.names else COORDINATE_OF[name])
            low[i] = high[i] = at[i]
    return Box(low, high)


def find_starts(problem: Problem, weights: np.ndarray, fixed: Mapping[str, float]) -> np.ndarray:
    """Return starts theta [S, p] near which a minimum may be, for weights [n].

    At a fixed R_D* a form is a sum of powers of N and of D' (forms.effective_count).
    Each R_D* of GRID_R_D has its variable projection on (N, D', L), and each of its
    three best solutions is completed with the form's further constants by
    `_complete_start`. An own form has random starts around the caller's.
    """
    surface, at = problem.surface, problem.points
    if isinstance(surface, OwnSurface):
        middle = surface.from_constants(surface.start, at)
        spread = OWN_START_SPREAD * np.random.default_rng(0).standard_normal((N_OWN_STARTS, len(middle)))
        return middle + np.concatenate([np.zeros((1, len(middle))), spread])
    N, D, U, L = (np.exp(v) for v in (at.x, at.y, at.u, at.log_loss))
    # Numbers of starts: chinchilla 3, repeated_data 7 x 3 = 21,
    # data_constrained 7 x 3 x 7 = 147, over_repetition 3 x 18 = 54.
    thetas = []
    decays = (fixed["R_D"],) if "R_D" in fixed else GRID_R_D
    for r_D in decays if "R_D" in surface.constants else (np.inf,):
        worth = effective_count(U, D, r_D) if "R_D" in surface.constants else D
        # over_repetition adds a term that grows with
        # repetition: runs with few epochs determine the others
        trust = weights / (D / U) if "K" in surface.constants else weights
        runs = CentredRuns.from_columns(N, worth, L)
        for phi in find_grid_starts(runs, trust)[:3]:
            base = {name: float(v) for name, v in runs.to_constants(phi).items()}
            # the coordinate of E is its log: E = 0 becomes 1e-6 of the lowest loss
            base = {name: max(v, 1e-6 * L.min()) if name == "E" else v for name, v in base.items()}
            thetas += _complete_start(surface, base, r_D, at)
    return np.array(thetas)


def _complete_start(surface: Surface, base: dict[str, float], r_D: float, at: RunPoints) -> list[np.ndarray]:
    """Return starts theta [p] near the sum of powers E + A/N^alpha + B/D^beta of `base`.

    over_training      one start: eta = (alpha + beta) / 2, and a, b such
                       that both terms keep their values at the centre (N0, D0):
                       a = A N0^(eta - alpha), b 6^(-eta/2) = B D0^(eta - beta)
    over_repetition    K such that the term is GRID_K of the loss at its centre, over
                       grids of K, g and h
    otherwise          `r_D` with every R_N* of GRID_R_N, where the form has them
    """
    if surface.form == "over_training":
        # A N0^-alpha = a N0^-eta at the centre;
        # b 6^(-eta/2) is the factor of D^-eta
        eta = 0.5 * (base["alpha"] + base["beta"])
        terms = (base["A"] * np.exp(-base["alpha"] * at.x0), base["B"] * np.exp(-base["beta"] * at.y0))
        a, b = (t * np.exp(eta * c) for t, c in zip(terms, (at.x0, at.y0), strict=True))
        params = {"E": base["E"], "a": a, "b": b * 6 ** (eta / 2), "eta": eta}
        return [surface.from_constants(params, at)]
    if surface.form == "over_repetition":
        first, loss = Surface("chinchilla").from_constants(base, at), at.log_loss.mean()
        return [
            np.concatenate([first, [loss + np.log(k), g, h]]) for k in GRID_K for g in GRID_G for h in GRID_H
        ]
    grid = [{"R_N": r} for r in GRID_R_N] if "R_N" in surface.constants else [{}]
    return [surface.from_constants(base | {"R_D": r_D} | constants, at) for constants in grid]
