"""Fit a scaling law to runs, with bootstrap intervals.

Bootstrap replicates are random weightings of the same runs, and all of them are refitted at once. Integer
weights from drawing with replacement omit a third of the runs. With few runs that loses more information than
sampling does: at 15 runs the constants of such replicates scatter 1.6 times as far as those of new sets of
runs. So the weights are fractional and none is 0 (Dirichlet: Rubin, Annals of Statistics 1981; Xu et al.,
American Statistician 2020).

Chinchilla's form has a fast fit (varpro.py). Other forms, and Chinchilla's with fixed or tied constants,
priors, or residuals in nats, are fitted by fit_form.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.diagnostics import diagnose
from megatron.laws.fitting.fit_form import bootstrap_theta, build_search_box, fit_theta
from megatron.laws.fitting.fit_problem import Problem
from megatron.laws.fitting.huber import CentredRuns
from megatron.laws.fitting.lack_of_fit import LackOfFit, check_lack_of_fit
from megatron.laws.fitting.newton import Minima
from megatron.laws.fitting.noise import (
    GROUPED,
    Noise,
    estimate_noise,
    is_dependent,
    orthonormal_basis,
    validate_labels,
)
from megatron.laws.fitting.priors import Prior, prior_scale
from megatron.laws.fitting.surface import RunPoints, constants_from_theta, theta_from_constants
from megatron.laws.fitting.varpro import bootstrap_chinchilla, fit_all_runs
from megatron.laws.forms import FORM
from megatron.laws.law import Law, expanded_level, optimum_exponents_from

LEVEL = 0.95
TIED = ("alpha", "beta", "alpha_N", "alpha_D", "gamma", "delta")  # exponents that may be fitted as one


def fit_law(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    *,
    U: ArrayLike | None = None,
    form: str = "chinchilla",
    huber_delta: float = 1e-3,
    n_bootstrap: int = 1000,
    seed: int = 0,
    weights: np.ndarray | None = None,
    groups: ArrayLike | None = None,
    run_weights: ArrayLike | None = None,
    loss_se: ArrayLike | None = None,
    residual: str = "log",
    fixed: Mapping[str, float] | None = None,
    tied: Mapping[str, str] | None = None,
    priors: Sequence[Prior] = (),
) -> Law:
    """Fit `form` to n runs: N parameters, D tokens, L nats per token, U unique tokens, each [n].

    Minimises sum Huber_delta(log L - log Lhat), as Hoffmann et al. (arXiv 2203.15556, eq. 3). Intervals are
    percentiles over `n_bootstrap` random weightings of runs, expanded for the number of runs.

    huber_delta   width of the Huber loss; a very large one gives least squares
    weights       [replicates, n] weightings to use instead of random ones, such as counts of how often each
                  run was drawn; their percentiles are not expanded
    groups        [n] labels of rows that share a model, a trunk or a seed: such rows have one bootstrap
                  weight, and their noise has a common part. None: rows that share N are grouped, with a
                  warning, if their residuals correlate. range(n): every row is independent
    run_weights   [n] factors of each run's term; `spread` is then that of a run of weight 1
    loss_se       [n] standard errors of L by the held-out text that all runs share (NaN: unknown), for
                  predictions on another text
    residual      "log", or "nats" for residuals L - Lhat
    fixed         constants that are not fitted, with their values
    tied          exponents that have the value of another, {"alpha": "beta"}
    priors        weighted against the runs by the noise that a fit without them estimates; each replicate
                  draws new means of the priors

    Raises ValueError for an unknown form or setting, a form that needs U without it, values that are not
    positive numbers, or too few distinct runs.
    """
    _check_settings(form, residual, U, huber_delta, n_bootstrap, seed)
    fixed, tied = dict(fixed or {}), dict(tied or {})
    _check_ties(form, tied, fixed)
    _check_priors(form, priors, fixed)
    n_free = len(FORM[form].constants) - len(fixed) - len(tied)
    N, D, L, *rest = _validate_columns(n_free, N, D, L, *([] if U is None else [U]))
    unique = rest[0] if rest else None
    group_indices = None if groups is None else _validate_groups(groups, len(N), n_free)
    is_sampled = weights is None
    unit_weights = np.ones(len(N)) if run_weights is None else _validate_weights([run_weights], len(N))[0]
    points, ties = RunPoints.from_columns(N, D, L, unique), tuple(sorted(tied.items()))
    problem = Problem(form, points, huber_delta, residual == "nats", ties)
    is_fast = form == "chinchilla" and residual == "log" and not fixed and not tied
    runs = CentredRuns.from_columns(N, D, L) if is_fast else None
    best, params = _fit_constants(problem, runs, unit_weights, fixed)
    dependent = False
    if groups is None and is_sampled:
        is_used, scatter, slopes = _linearize(problem, params, fixed, unit_weights)
        dependent = is_dependent(scatter, slopes, N[is_used])
        if dependent and len(np.unique(N)) > n_free:
            group_indices = np.unique(N, return_inverse=True)[1]
    if priors:
        problem = _scale_priors(problem, params, tuple(priors), fixed, group_indices, unit_weights)
        runs, prior_weights = None, np.append(unit_weights, np.zeros(len(priors)))
        best, params = _fit_constants(problem, runs, prior_weights, fixed)
    boot_weights = (
        _draw_weights(len(N), n_bootstrap, seed, group_indices)
        if weights is None
        else _validate_weights(weights, len(N))
    )
    boot_weights = boot_weights * unit_weights  # bootstrap weights multiply the weights of the fit
    if priors:
        # parametric bootstrap of the priors: each replicate has their means shifted by a standard normal draw
        prior_shifts = np.random.default_rng([seed, 1]).standard_normal((len(boot_weights), len(priors)))
        boot_weights = np.hstack([boot_weights, prior_shifts])
    boot, replicates = _bootstrap(problem, runs, best, boot_weights, fixed)
    a, b = optimum_exponents_from(params)
    noise, lack_of_fit = _estimate_scatter(problem, params, fixed, group_indices, unit_weights)
    diagnosis = diagnose(
        form,
        N,
        D,
        unique,
        params,
        replicates,
        fixed,
        float(L.min()),
        n_free,
        dependent and group_indices is None,
    )
    return Law(
        form=form,
        params=params,
        # of the runs, without the terms of the priors
        objective=float(
            replace(problem, priors=()).objective(best.phi[:1], unit_weights[None])[0]
            if priors
            else best.objective[0]
        ),
        huber_delta=huber_delta,
        n_runs=len(N),
        ranges=_compute_ranges(N, D, L, unique),
        interval=_compute_interval(
            replicates, seed if is_sampled else None, noise.n_groups, len(N) if is_sampled else None
        ),
        standard_error={name: float(v.std(ddof=1)) for name, v in replicates.items() if len(v) > 1},
        derived={"a_exponent": float(a), "b_exponent": float(b)},
        replicates={name: v.tolist() for name, v in replicates.items()},
        warnings=_warn_unconverged(best, boot)
        + [GROUPED] * (dependent and group_indices is not None)
        + diagnosis.warnings,
        residual=residual,
        fixed=sorted(fixed),
        tied=tied,
        priors=[asdict(prior) for prior in priors],
        spread=noise.sigma,
        text_error=_summarize_text_error(L, loss_se),
        noise=noise.as_dict(),
        lack_of_fit=lack_of_fit.as_dict() if lack_of_fit else {},
        identified=diagnosis.identified,
        not_identified=diagnosis.not_identified,
    )


def _scale_priors(
    problem: Problem,
    params: dict[str, float],
    priors: tuple[Prior, ...],
    fixed: dict[str, float],
    group_indices: np.ndarray | None,
    run_weights: np.ndarray,
) -> Problem:
    """Return the problem with priors, whose scale is the noise around the fit `params` without them."""
    noise, _ = _estimate_scatter(problem, params, fixed, group_indices, run_weights)
    sigma = noise.sigma
    if problem.in_nats:  # log L has sigma, L about sigma times its geometric mean
        sigma *= float(np.exp(problem.points.log_loss.mean()))
    scale = prior_scale(sigma, problem.delta)
    if noise.n_groups and noise.sigma > 0:  # rows that share noise determine the constants less well
        rows = len(run_weights) / noise.n_groups
        scale *= (rows * noise.between**2 + noise.within**2) / (noise.between**2 + noise.within**2)
    return replace(problem, priors=priors, prior_scale=scale)


def _check_ties(form: str, tied: Mapping[str, str], fixed: Mapping[str, float]) -> None:
    exponents = [name for name in TIED if name in FORM[form].constants]
    for follower, leader in tied.items():
        for name in (follower, leader):
            if name not in exponents:
                raise ValueError(
                    f"tied: got {follower}={leader}, expected two exponents of {form} "
                    f"({', '.join(exponents) or 'it has none to tie'})"
                )
        if follower == leader or leader in tied or follower in fixed:
            raise ValueError(
                f"tied: got {follower}={leader}, where {follower if follower in fixed else leader} is "
                "already tied or fixed. Tie each exponent once, to a free or fixed one."
            )


def _check_priors(form: str, priors: Sequence[Prior], fixed: Mapping[str, float]) -> None:
    names = [prior.name for prior in priors]
    for name in names:
        if name not in FORM[form].constants:
            raise ValueError(
                f"prior: got '{name}', which is not a constant of {form}, expected one of "
                f"{', '.join(FORM[form].constants)}"
            )
        if name in fixed or names.count(name) > 1:
            raise ValueError(
                f"prior of {name}: got it twice or fixed too, expected one value or prior per constant"
            )


def _linearize(
    problem: Problem, params: dict[str, float], fixed: Mapping[str, float], run_weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (is_used [n], residuals of log L [used], their slopes by the free constants [used, free]).

    Both are scaled to a run of weight 1 by the root of the weight; runs of weight 0 are not used.
    """
    points = problem.points
    log_loss, slopes = problem.evaluate_log_loss(theta_from_constants(problem.form, params, points)[None])
    box = build_search_box(problem, fixed)
    is_used = run_weights > 0
    root_weights = np.sqrt(run_weights[is_used])
    residual = root_weights * (points.log_loss - log_loss[0])[is_used]
    return is_used, residual, root_weights[:, None] * slopes[0][is_used][:, box.low < box.high]


def _estimate_scatter(
    problem: Problem,
    params: dict[str, float],
    fixed: Mapping[str, float],
    group_indices: np.ndarray | None,
    run_weights: np.ndarray,
) -> tuple[Noise, LackOfFit | None]:
    """Return the scatter of single runs around the fit in log L, and the lack-of-fit test by repeated runs.

    It is of log L also for a fit in nats. The test is None without repeated runs, or with different weights.
    """
    points = problem.points
    is_used, residual, slopes = _linearize(problem, params, fixed, run_weights)
    group_indices = None if group_indices is None else group_indices[is_used]
    basis = orthonormal_basis(slopes)
    remainder = residual - basis @ (basis.T @ residual)
    noise = estimate_noise(residual, slopes, group_indices, (points.x + points.y)[is_used])
    # repeats with different weights have different variances: there is no pure error
    if len(np.unique(run_weights[is_used])) > 1:
        return noise, None
    cells = np.column_stack([points.x, points.y, points.u])[is_used]
    return noise, check_lack_of_fit(remainder, cells, basis.shape[1])


def _fit_constants(
    problem: Problem, runs: CentredRuns | None, weights: np.ndarray, fixed: dict[str, float]
) -> tuple[Minima, dict[str, float]]:
    """Return the minima, lowest first, and the constants of the lowest; with `runs` by the fast fit."""
    if runs is not None:
        best = fit_all_runs(runs, weights[None], problem.delta)
        return best, {name: float(value) for name, value in runs.to_constants(best.phi[0]).items()}
    best = fit_theta(problem, weights, fixed)
    fitted = constants_from_theta(problem.form, best.phi[:1], problem.points)
    return best, {name: float(value[0]) for name, value in fitted.items()} | fixed


def _bootstrap(
    problem: Problem, runs: CentredRuns | None, best: Minima, weights: np.ndarray, fixed: dict[str, float]
) -> tuple[Minima | None, dict[str, np.ndarray]]:
    """Return the minima of the replicates and their constants, as `_fit_constants`; None without weights."""
    if not len(weights):
        return None, {}
    if runs is not None:
        boot = bootstrap_chinchilla(runs, best.phi[0], weights, problem.delta)
        return boot, runs.to_constants(boot.phi)
    boot = bootstrap_theta(problem, best.phi, weights, fixed)
    return boot, constants_from_theta(problem.form, boot.phi, problem.points)


def _warn_unconverged(best: Minima, boot: Minima | None) -> list[str]:
    warnings = []
    if not best.converged[0]:
        warnings.append("The fit did not converge: the runs hardly determine these constants.")
    n_unconverged = 0 if boot is None else int((~boot.converged).sum())
    if boot is not None and n_unconverged:
        # these replicates determine the constants least: without them intervals would be too narrow
        warnings.append(
            f"{n_unconverged} of {len(boot.converged)} replicates did not converge; the intervals include "
            "them."
        )
    return warnings


def _check_settings(
    form: str, residual: str, U: ArrayLike | None, huber_delta: float, n_bootstrap: int, seed: int
) -> None:
    if form not in FORM:
        raise ValueError(f"form: got '{form}', expected one of {', '.join(FORM)}")
    if residual not in ("log", "nats"):
        raise ValueError(f"residual: got '{residual}', expected one of log, nats")
    if FORM[form].needs_unique and U is None:
        raise ValueError(f"U: got none, expected the unique tokens of each run for form '{form}'")
    if not 0 < huber_delta < np.inf:  # false for NaN too
        raise ValueError(
            f"huber_delta: got {huber_delta}, expected a positive number. 1e3 is in effect least squares."
        )
    for name, value in (("n_bootstrap", n_bootstrap), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name}: got {value}, expected 0 or more")


def _summarize_text_error(L: np.ndarray, loss_se: ArrayLike | None) -> dict[str, float | int]:
    """Return the medians of the standard errors of losses [n] on one text, in nats and of log L."""
    if loss_se is None:
        return {}
    errors = np.asarray(loss_se, dtype=float).ravel()
    if len(errors) != len(L):
        raise ValueError(f"loss_se: got {len(errors)} values, expected one for each of {len(L)} runs")
    has_error = ~np.isnan(errors)
    if not has_error.any():
        return {}
    if not (np.isfinite(errors[has_error]) & (errors[has_error] >= 0)).all():
        raise ValueError("loss_se: got a negative or infinite value, expected 0 or more, or NaN")
    return {
        "loss_se": float(np.median(errors[has_error])),
        "relative": float(np.median(errors[has_error] / L[has_error])),
        "n_runs": int(has_error.sum()),
    }


def _draw_weights(
    n_runs: int, n_bootstrap: int, seed: int, group_indices: np.ndarray | None = None
) -> np.ndarray:
    """Draw weights of the runs, float64 [n_bootstrap, n_runs], 1 on average, uniform on the simplex.

    `group_indices` [n_runs] int: groups 0, 1, ..., whose rows have one weight (block bootstrap).
    """
    n_units = n_runs if group_indices is None else int(group_indices.max()) + 1
    weights = n_units * np.random.default_rng(seed).dirichlet(np.ones(n_units), n_bootstrap)
    return weights if group_indices is None else weights[:, group_indices]


def _validate_groups(groups: ArrayLike, n_runs: int, n_free: int) -> np.ndarray:
    """Return group indices 0, 1, ... [n_runs] of labels [n_runs]. Raises ValueError for too few groups."""
    names, group_indices = np.unique(validate_labels(groups, n_runs), return_inverse=True)
    if len(names) <= n_free:
        raise ValueError(
            f"groups: got {len(names)} groups, expected more than the {n_free} constants of the form. "
            "Train more independent runs, fix constants with --fix, or use --group none for independent rows."
        )
    return group_indices


def _validate_weights(weights: ArrayLike | Sequence[ArrayLike], n_runs: int) -> np.ndarray:
    weights = np.asarray(weights, dtype=float)
    if weights.ndim != 2 or weights.shape[1] != n_runs:
        raise ValueError(
            f"weights: got shape {weights.shape}, expected [replicates, {n_runs}], one column per run"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any(axis=1).all():
        raise ValueError(
            "weights: got a negative or infinite weight or a replicate of zeros, expected 0 or more, one "
            "above 0"
        )
    return weights


def _validate_columns(n_free: int, *columns: ArrayLike) -> list[np.ndarray]:
    values = [np.asarray(column, dtype=float).ravel() for column in columns]
    if len({len(v) for v in values}) != 1:
        raise ValueError(
            f"{'N, D and L' if len(values) == 3 else 'N, D, L and U'}: got "
            f"{', '.join(str(len(v)) for v in values)} values, expected equally many"
        )
    for name, v in zip("NDLU", values, strict=False):
        wrong = np.flatnonzero(~np.isfinite(v) | (v <= 0))
        if len(wrong):
            raise ValueError(f"{name}, run {wrong[0] + 1}: got {v[wrong[0]]}, expected a positive number")
    design = np.stack([values[0], values[1], *values[3:]])
    n_distinct = len(np.unique(design, axis=1).T)
    if n_distinct <= n_free:
        raise ValueError(
            f"runs: got {n_distinct} distinct ({'N, D' if len(values) == 3 else 'N, D, U'}) for {n_free} "
            f"constants, expected {n_free + 1} or more. Add sizes or budgets."
        )
    return values


def _compute_ranges(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None
) -> dict[str, list[float]]:
    """Return [minimum, maximum] of each column."""
    columns = {"N": N, "D": D, "L": L} | ({} if U is None else {"U": U})
    return {name: [float(values.min()), float(values.max())] for name, values in columns.items()}


def _compute_interval(
    replicates: dict[str, np.ndarray], seed: int | None, n_groups: int | None, n_runs: int | None
) -> dict[str, object]:
    """Return percentiles of replicates, expanded for the number of groups or runs (None: weights given)."""
    if not replicates:
        return {}
    n_units = n_groups or n_runs  # None for given weights without groups: the level is not expanded
    level = expanded_level(LEVEL, n_units)
    tails = [(1 - level) / 2, (1 + level) / 2]
    a, b = optimum_exponents_from(replicates)
    return {
        "level": LEVEL,
        "method": "bootstrap by the weights given, percentiles"
        if n_units is None
        else f"bootstrap of weights over {n_units} {'groups of ' if n_groups else ''}runs, percentiles "
        "expanded for their number",
        "n_units": n_units,
        "n_bootstrap": len(a),
        "seed": seed,
        "params": {name: np.quantile(v, tails).tolist() for name, v in replicates.items()},
        "derived": {
            "a_exponent": np.quantile(a, tails).tolist(),
            "b_exponent": np.quantile(b, tails).tolist(),
        },
    }
