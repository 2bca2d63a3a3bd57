"""Fit a scaling law to runs, with bootstrap intervals.

For fixed exponents the law is linear in E, A and B (variable projection), so a small grid of exponents with a
non-negative least-squares solution at each gives starts; a damped Newton iteration with exact derivatives polishes the
best of them, and the lowest objective wins. Bootstrap replicates are multinomial weights of the same runs, polished
from the fit all together.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.huber import Runs, derivatives, objective
from megatron.scaling.law import FORMS, Law, exponents, warnings_of

GRID = np.geomspace(0.05, 2.0, 24)  # exponents tried
N_POLISHED = 6
MAX_ITERATIONS = 200
LEAST_RUNS = 6
LEVEL = 0.95
# A narrower Huber than this has too few runs in its bowl for Newton: come down to it in steps.
NARROW_DELTA = 1e-4


@dataclass(frozen=True)
class Fitted:
    """theta [R, 5] with its objective [R], and whether each iteration came to rest [R]."""

    theta: np.ndarray
    objective: np.ndarray
    at_rest: np.ndarray


def fit_law(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    *,
    form: str = "chinchilla",
    huber_delta: float = 1e-3,
    n_bootstrap: int = 1000,
    seed: int = 0,
    weights: np.ndarray | None = None,
) -> Law:
    """Fit `form` to n runs: N parameters, D tokens, L nats a token, each [n].

    Minimises sum Huber_delta(log L - log Lhat), as Hoffmann et al. (arXiv 2203.15556, eq. 3). Intervals are percentiles
    over `n_bootstrap` resamplings of runs; `weights` [replicates, n] are the resamplings to use instead of drawn ones.

    Raises ValueError for an unknown form, values that are not positive numbers, or too few distinct runs.
    """
    if form not in FORMS:
        raise ValueError(f"form: '{form}' is not one of {', '.join(FORMS)}")
    N, D, L = _checked(N, D, L)
    runs = Runs.of(N, D, L)
    best = _fit_one(runs, np.ones(len(N)), huber_delta)
    params = {name: float(value) for name, value in runs.constants(best.theta[0]).items()}
    if weights is None and n_bootstrap > 0:
        weights = np.random.default_rng(seed).multinomial(len(N), np.full(len(N), 1 / len(N)), n_bootstrap)
    told: list[str] = []
    replicates: dict[str, np.ndarray] = {}
    if weights is not None and len(weights):
        boot = bootstrap(runs, best.theta[0], np.asarray(weights, dtype=float), huber_delta)
        n_lost = int((~boot.at_rest).sum())
        if n_lost:
            told.append(f"{n_lost} of {len(weights)} bootstrap replicates did not converge and are left out.")
        replicates = {k: v[boot.at_rest] for k, v in runs.constants(boot.theta).items()}
    a, b = exponents(params["alpha"], params["beta"])
    return Law(
        form=form,
        params=params,
        objective=float(best.objective[0]),
        huber_delta=huber_delta,
        n_runs=len(N),
        ranges={"N": _range(N), "D": _range(D), "L": _range(L)},
        interval=_interval(replicates, seed),
        standard_error={name: float(v.std(ddof=1)) for name, v in replicates.items() if len(v) > 1},
        derived={"a_exponent": float(a), "b_exponent": float(b)},
        replicates={name: v.tolist() for name, v in replicates.items()},
        warnings=told + warnings_of(N, D, params, replicates),
    )


def _checked(*columns: ArrayLike) -> list[np.ndarray]:
    values = [np.asarray(column, dtype=float).ravel() for column in columns]
    if len({len(v) for v in values}) != 1:
        raise ValueError(
            f"N, D and L have {', '.join(str(len(v)) for v in values)} values, wanted as many of each"
        )
    for name, v in zip("NDL", values, strict=True):
        wrong = np.flatnonzero(~np.isfinite(v) | (v <= 0))
        if len(wrong):
            raise ValueError(f"{name}, run {wrong[0] + 1}: found {v[wrong[0]]}, wanted a positive number")
    n_distinct = len(np.unique(np.stack(values[:2]), axis=1).T)
    if n_distinct < LEAST_RUNS:
        raise ValueError(
            f"{n_distinct} distinct runs (N, D) for 5 constants, wanted {LEAST_RUNS} or more; add sizes or budgets"
        )
    return values


def _range(values: np.ndarray) -> list[float]:
    return [float(values.min()), float(values.max())]


def _interval(replicates: dict[str, np.ndarray], seed: int) -> dict[str, object]:
    if not replicates:
        return {}
    tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    a, b = exponents(replicates["alpha"], replicates["beta"])
    return {
        "level": LEVEL,
        "method": "bootstrap over runs, percentiles",
        "n_bootstrap": len(a),
        "seed": seed,
        "params": {name: np.quantile(v, tails).tolist() for name, v in replicates.items()},
        "derived": {
            "a_exponent": np.quantile(a, tails).tolist(),
            "b_exponent": np.quantile(b, tails).tolist(),
        },
    }


def _fit_one(runs: Runs, weights: np.ndarray, delta: float) -> Fitted:
    """The best of the polished starts, R = 1."""
    theta = starts(runs, weights)
    many = np.broadcast_to(weights, (len(theta), len(weights)))
    width = max(delta, NARROW_DELTA)
    polished = newton(theta, runs, many, width)
    while width > delta:
        width = max(delta, width / 4)
        polished = newton(polished.theta, runs, many, width)
    best = int(np.argmin(polished.objective))
    one = slice(best, best + 1)
    return Fitted(polished.theta[one], polished.objective[one], polished.at_rest[one])


def bootstrap(runs: Runs, theta: np.ndarray, weights: np.ndarray, delta: float) -> Fitted:
    """Refit every weighting [R, n] from the whole fit's theta [5]; those that do not rest start afresh."""
    found = newton(np.tile(theta, (len(weights), 1)), runs, weights, delta)
    for i in np.flatnonzero(~found.at_rest):
        again = _fit_one(runs, weights[i], delta)
        if again.objective[0] <= found.objective[i]:
            found.theta[i], found.objective[i] = again.theta[0], again.objective[0]
            found.at_rest[i] = again.at_rest[0]
    return found


def starts(runs: Runs, weights: np.ndarray) -> np.ndarray:
    """theta [N_POLISHED, 5] of the best grid points, by least squares of L / Lhat - 1 with E, A, B >= 0."""
    alpha, beta = (grid.ravel() for grid in np.meshgrid(GRID, GRID, indexing="ij"))
    loss = np.exp(runs.log_loss)
    ones = np.ones((len(alpha), len(loss)))
    basis = np.stack([np.exp(-alpha[:, None] * runs.x), np.exp(-beta[:, None] * runs.y), ones], axis=2)
    basis /= loss[:, None]  # [grid, n, 3], relative residuals
    gram = np.einsum("gni,n,gnj->gij", basis, weights, basis, optimize=True)
    right = np.einsum("gni,n->gi", basis, weights)
    best_rss, best = np.full(len(alpha), np.inf), np.zeros((len(alpha), 3))
    for size in (1, 2, 3):  # three unknowns: every subset that is not held at 0
        for subset in combinations(range(3), size):
            at = np.ix_(range(len(alpha)), subset, subset)
            ridge = 1e-12 * np.trace(gram[at], axis1=1, axis2=2)[:, None, None] * np.eye(size)
            found = np.linalg.solve(gram[at] + ridge, right[:, subset, None])[..., 0]
            rss = weights.sum() - (found * right[:, subset]).sum(1)
            better = (found >= 0).all(1) & (rss < best_rss)
            best_rss[better] = rss[better]
            best[better] = 0.0
            best[np.ix_(better, subset)] = found[better]
    order = np.argsort(best_rss, kind="stable")[:N_POLISHED]
    floor = 1e-4 * loss.mean()  # a constant held at 0 must be able to come back
    logs = np.log(np.maximum(best[order], floor))
    return np.column_stack([logs, alpha[order], beta[order]])


def newton(theta: np.ndarray, runs: Runs, weights: np.ndarray, delta: float) -> Fitted:
    """Damped Newton on R problems at once: theta [R, 5], weights [R, n].

    The step solves (Hessian + damping * majorant) step = -gradient; damping falls when the objective falls and rises
    when it does not. A problem rests when its objective, its gradient's promise, can fall no further in float64.
    """
    theta = np.array(theta, dtype=float)
    value = objective(theta, runs, weights, delta)
    damping = np.full(len(theta), 1e-3)
    at_rest = np.zeros(len(theta), dtype=bool)
    active = np.flatnonzero(np.isfinite(value))
    for _ in range(MAX_ITERATIONS):
        if not len(active):
            break
        gradient, hessian, majorant = derivatives(theta[active], runs, weights[active], delta)
        step = _solve(hessian, majorant, gradient, damping[active])
        trial = theta[active] + step
        tried = objective(trial, runs, weights[active], delta)
        promised = -np.einsum("ri,ri->r", gradient, step)
        falls = tried < value[active]
        moved = active[falls]
        theta[moved], value[moved] = trial[falls], tried[falls]
        damping[moved] = np.maximum(damping[moved] / 10, 1e-12)
        stuck = active[~falls]
        damping[stuck] = damping[stuck] * 10
        # nothing left to gain, or no step however short gains anything
        rest = (np.abs(promised) <= 1e-15 * value[active]) | (damping[active] > 1e12)
        at_rest[active[rest]] = True
        active = active[~rest]
    return Fitted(theta, value, at_rest)


def _solve(
    hessian: np.ndarray, majorant: np.ndarray, gradient: np.ndarray, damping: np.ndarray
) -> np.ndarray:
    """Steps [R, 5]. Where the damped Hessian gives no descent, the majorant's step, which always does."""
    scale = np.trace(majorant, axis1=1, axis2=2)[:, None, None]
    ridge = 1e-14 * scale * np.eye(5)
    damped = damping[:, None, None]
    step = -np.linalg.solve(hessian + damped * (majorant + ridge) + ridge, gradient[..., None])[..., 0]
    uphill = np.einsum("ri,ri->r", gradient, step) >= 0
    if uphill.any():
        safe = majorant[uphill] * (1 + damped[uphill]) + ridge[uphill]
        step[uphill] = -np.linalg.solve(safe, gradient[uphill][..., None])[..., 0]
    return np.clip(step, -2.0, 2.0)
