"""Fit a scaling law to runs, with bootstrap intervals.

Bootstrap replicates are random weightings of the same runs, and all of them are
refitted at once. Integer weights from drawing with replacement omit a third of
the runs. With few runs that loses more information than sampling does: at 15
runs the constants of such replicates scatter 1.6 times as far as with new
sets of runs. So the weights are fractional and none is 0 (Dirichlet: Rubin,
Annals of Statistics 1981; Xu et al., American Statistician 2020).

Chinchilla's form has a fast fit (varpro.py). Other forms,
including a caller's, and Chinchilla's with fixed
constants or residuals in nats, are fitted by fit_form.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import takes_data_frame, validate_columns
from megatron.laws.diagnostics import diagnose
from megatron.laws.fitting.fit_form import bootstrap_theta, build_search_box, fit_theta
from megatron.laws.fitting.fit_problem import Problem
from megatron.laws.fitting.huber import CentredRuns
from megatron.laws.fitting.lack_of_fit import check_lack_of_fit
from megatron.laws.fitting.newton import Minima
from megatron.laws.fitting.noise import (
    GROUPED,
    estimate_noise,
    is_dependent,
    orthonormal_basis,
    validate_labels,
)
from megatron.laws.fitting.surface import OwnSurface, RunPoints, Surface
from megatron.laws.fitting.varpro import bootstrap_chinchilla, fit_all_runs
from megatron.laws.forms import FORM, check_fitted_form
from megatron.laws.law import Law, expanded_level, optimum_exponents_from

LEVEL = 0.95
LARGEST_LOSS = 14.0  # nats per token; log of a vocabulary of a million


@takes_data_frame
def fit_law(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    *,
    U: ArrayLike | None = None,
    form: str | Callable[..., np.ndarray] = "chinchilla",
    start: Mapping[str, float] | None = None,
    huber_delta: float = 1e-3,
    n_bootstrap: int = 1000,
    seed: int = 0,
    groups: ArrayLike | None = None,
    loss_se: ArrayLike | None = None,
    residual: str = "log",
    fixed: Mapping[str, float] | None = None,
) -> Law:
    """Fit `form` to n runs: N parameters, D tokens, L nats per token, U unique tokens, each [n].

    With a data frame as the first argument, the
    others are names of its columns (columns.py).

    Minimises sum Huber_delta(log L - log Lhat), as Hoffmann et al. (arXiv
    2203.15556, eq. 3). Intervals are percentiles over `n_bootstrap`
    random weightings of runs, expanded for the number of runs.

    form          name in FORM, or a function loss(constants, N, D,
                  U) of arrays that broadcast, with the constants by name
    start         of such a function: {constant: value near which the fit
                  starts}; a constant that starts above 0 stays above 0
    huber_delta   width of the Huber loss; a very large one gives least squares
    groups        [n] labels of rows that share a model, a trunk or a seed:
                  such rows have one bootstrap weight, and their noise has a common part.
                  None: rows that share N are grouped, with a warning,
                  if their residuals correlate. range(n): every row is independent
    loss_se       [n] standard errors of L by the held-out
                  text that all runs share (NaN: unknown)
    residual      "log", or "nats" for residuals L - Lhat
    fixed         constants that are not fitted, with their values

    Raises ValueError for an unknown form or setting, a form that needs U
    without it, values that are not positive numbers, or too few distinct runs.
    """
    _check_settings(residual, huber_delta, n_bootstrap, seed)
    surface = _build_surface(form, start, U is not None)
    fixed = dict(fixed or {})
    n_free = len(surface.constants) - len(fixed)
    N, D, L, *rest = validate_columns(N=N, D=D, L=L, **({} if U is None else {"U": U}))
    unique = rest[0] if rest else None
    _check_design(n_free, N=N, D=D, **({} if unique is None else {"U": unique}))
    problem = Problem(surface, RunPoints.from_columns(N, D, L, unique), huber_delta, residual == "nats")
    # the fast fit, where it applies
    is_fast = form == "chinchilla" and residual == "log" and not fixed
    runs = CentredRuns.from_columns(N, D, L) if is_fast else None
    best, params = _fit_constants(problem, runs, fixed)
    # near the optimum the law is linear in its constants, as noise, lack of fit and groups take it
    scatter, slopes = _linearize(problem, params, fixed)
    labels = None if groups is None else _validate_groups(groups, len(N), n_free)
    dependent = groups is None and is_dependent(scatter, slopes, N)
    # too few sizes for a bootstrap over sizes: rows stay independent, and a warning says so
    if dependent and len(np.unique(N)) > n_free:
        labels = np.unique(N, return_inverse=True)[1]
    weights = _draw_weights(len(N), n_bootstrap, seed, labels)
    boot, replicates = _bootstrap(problem, runs, best, weights, fixed)
    points, columns = problem.points, {"N": N, "D": D, "L": L} | ({} if unique is None else {"U": unique})
    # the scatter is of log L also for a fit in nats
    noise = estimate_noise(scatter, slopes, labels, points.x + points.y)
    # runs of equal N, D and U are repetitions, whose scatter no form can explain
    cells = np.column_stack([points.x, points.y, points.u])
    lack_of_fit = check_lack_of_fit(scatter, orthonormal_basis(slopes), cells)
    diagnosis = diagnose(form, columns, params, replicates, fixed, dependent and labels is None)
    warnings = _collect_warnings(L, best, boot) + [GROUPED] * (dependent and labels is not None)
    derived = optimum_exponents_from(params) if isinstance(form, str) else {}
    return Law(
        form=form if isinstance(form, str) else form.__name__,
        own_loss=None if isinstance(form, str) else form,
        params=params,
        objective=float(best.objective[0]),
        huber_delta=huber_delta,
        n_runs=len(N),
        ranges={name: [float(v.min()), float(v.max())] for name, v in columns.items()},
        interval=_compute_interval(replicates, bool(derived), noise.n_groups, len(N), seed),
        standard_error={name: float(v.std(ddof=1)) for name, v in replicates.items() if len(v) > 1},
        derived={name: float(value) for name, value in derived.items()},
        replicates={name: v.tolist() for name, v in replicates.items()},
        warnings=warnings + diagnosis.warnings,
        residual=residual,
        fixed=sorted(fixed),
        spread=noise.sigma,
        text_error=_summarize_text_error(L, loss_se),
        noise=asdict(noise),
        lack_of_fit=asdict(lack_of_fit) if lack_of_fit else {},
        identified=diagnosis.identified,
        not_identified=diagnosis.not_identified,
    )


def _linearize(
    problem: Problem, params: dict[str, float], fixed: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the residuals of log L [n] and the slopes of the law by its free constants [n, free]."""
    points, box = problem.points, build_search_box(problem, fixed)
    theta = problem.surface.from_constants(params, points)[None]
    log_loss, slopes = problem.surface.evaluate(theta, points)
    return points.log_loss - log_loss[0], slopes[0][:, box.low < box.high]


def _fit_constants(
    problem: Problem, runs: CentredRuns | None, fixed: dict[str, float]
) -> tuple[Minima, dict[str, float]]:
    """Return the minima, lowest first, and the constants of the lowest."""
    weights = np.ones(len(problem.points.x))
    if runs is not None:
        best = fit_all_runs(runs, weights[None], problem.delta)
        return best, {name: float(value) for name, value in runs.to_constants(best.phi[0]).items()}
    best = fit_theta(problem, weights, fixed)
    fitted = problem.surface.to_constants(best.phi[:1], problem.points)
    return best, {name: float(value[0]) for name, value in fitted.items()} | fixed


def _bootstrap(
    problem: Problem, runs: CentredRuns | None, best: Minima, weights: np.ndarray, fixed: dict[str, float]
) -> tuple[Minima | None, dict[str, np.ndarray]]:
    """Return the minima of the replicates and their constants; None without weights."""
    if not len(weights):
        return None, {}
    if runs is not None:
        boot = bootstrap_chinchilla(runs, best.phi[0], weights, problem.delta)
        return boot, runs.to_constants(boot.phi)
    boot = bootstrap_theta(problem, best.phi, weights, fixed)
    return boot, problem.surface.to_constants(boot.phi, problem.points)


def _collect_warnings(L: np.ndarray, best: Minima, boot: Minima | None) -> list[str]:
    warnings = []
    if np.median(L) > LARGEST_LOSS:
        warnings.append(
            f"The median loss is {np.median(L):.3g}, expected nats per token. Take the log of perplexities."
        )
    if not best.converged[0]:
        warnings.append("The fit did not converge: the runs hardly determine these constants.")
    if boot is not None and not boot.converged.all():
        # these replicates determine the constants least:
        # without them intervals would be too narrow
        shares = f"{int((~boot.converged).sum())} of {len(boot.converged)}"
        warnings.append(f"{shares} replicates did not converge; the intervals include them.")
    return warnings


def _build_surface(
    form: str | Callable[..., np.ndarray], start: Mapping[str, float] | None, has_unique: bool
) -> Surface | OwnSurface:
    if not isinstance(form, str):
        if not start:
            raise ValueError("start: got none, expected {constant: value} for a form of your own")
        return OwnSurface(form, dict(start))
    check_fitted_form(form)
    if FORM[form].needs_unique and not has_unique:
        raise ValueError(f"U: got none, expected the unique tokens of each run for form '{form}'")
    return Surface(form)


def _check_settings(residual: str, huber_delta: float, n_bootstrap: int, seed: int) -> None:
    if residual not in ("log", "nats"):
        raise ValueError(f"residual: got '{residual}', expected one of log, nats")
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
    finite = errors[~np.isnan(errors)]
    if not (np.isfinite(finite) & (finite >= 0)).all():
        raise ValueError("loss_se: got a negative or infinite value, expected 0 or more, or NaN")
    if not len(finite):
        return {}
    # an error of log L, as the others: to first order that of L over L
    relative = finite / L[~np.isnan(errors)]
    medians = {"loss_se": float(np.median(finite)), "relative": float(np.median(relative))}
    return medians | {"n_runs": len(finite)}


def _draw_weights(
    n_runs: int, n_bootstrap: int, seed: int, group_indices: np.ndarray | None = None
) -> np.ndarray:
    """Draw weights of the runs, float64 [n_bootstrap, n_runs], 1 on average, uniform on the simplex.

    `group_indices` [n_runs] int: groups 0, 1, ...,
    whose rows have one weight (block bootstrap).
    """
    n_units = n_runs if group_indices is None else int(group_indices.max()) + 1
    # the Bayesian bootstrap (Rubin, Ann. Stat. 9, 1981): unlike resampled rows, no weight is 0
    weights = n_units * np.random.default_rng(seed).dirichlet(np.ones(n_units), n_bootstrap)
    return weights if group_indices is None else weights[:, group_indices]


def _validate_groups(groups: ArrayLike, n_runs: int, n_free: int) -> np.ndarray:
    """Return group indices 0, 1, ... [n_runs]. Raises ValueError for too few groups."""
    names, group_indices = np.unique(validate_labels(groups, n_runs), return_inverse=True)
    if len(names) <= n_free:
        raise ValueError(
            f"groups: got {len(names)} groups, expected more than the {n_free} constants of the form. "
            "Train more independent runs, fix constants with --fix, or use --group none for independent rows."
        )
    return group_indices


def _check_design(n_free: int, **design: np.ndarray) -> None:
    """Raise ValueError unless there are more distinct runs than free constants."""
    # repetitions show the noise, and determine no constant
    n_distinct = len(np.unique(np.stack(list(design.values())), axis=1).T)
    if n_distinct <= n_free:
        raise ValueError(
            f"runs: got {n_distinct} distinct ({', '.join(design)}) for {n_free} constants, expected "
            f"{n_free + 1} or more. Add sizes or budgets."
        )


def _compute_interval(
    replicates: dict[str, np.ndarray], has_optimum: bool, n_groups: int | None, n_runs: int, seed: int
) -> dict[str, object]:
    """Return percentiles of replicates, expanded for the number of runs or groups."""
    if not replicates:
        return {}
    n_units = n_groups or n_runs
    units = f"{n_units} {'groups of ' if n_groups else ''}runs"
    method = f"bootstrap of weights over {units}, percentiles expanded for their number"
    # percentiles of few units are too narrow
    level = expanded_level(LEVEL, n_units)
    derived = optimum_exponents_from(replicates) if has_optimum else {}
    params, ends = (
        {name: np.quantile(v, [(1 - level) / 2, (1 + level) / 2]).tolist() for name, v in values.items()}
        for values in (replicates, derived)
    )
    n_bootstrap = len(next(iter(replicates.values())))
    counts = {"level": LEVEL, "method": method, "n_units": n_units, "n_bootstrap": n_bootstrap, "seed": seed}
    return counts | {"params": params, "derived": ends}
