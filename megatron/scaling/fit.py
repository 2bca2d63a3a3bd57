"""Fit a scaling law to runs, with bootstrap intervals.

Bootstrap replicates are random weights of the same runs, refitted all together. Weights that are how often
each run was drawn leave a third of the runs out: with few runs a replicate then loses more than sampling
takes, and at 15 runs its constants scatter 1.6 times as far as those of new sets of runs. So weights are
fractional (Dirichlet: Rubin, Annals of Statistics 1981; Xu et al., American Statistician 2020), 0 for none.
Chinchilla's form has a fast way of its own (varpro.py); the others, and it with constants held or with plain
residuals, go by fit_form.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.diagnostics import diagnose
from megatron.scaling.fit_form import Problem, bootstrap_theta, fit_theta, limits_of
from megatron.scaling.forms import FORM
from megatron.scaling.huber import Runs
from megatron.scaling.lack_of_fit import LackOfFit, check_fit
from megatron.scaling.law import Law, expanded_level, exponents_of
from megatron.scaling.newton import Fitted
from megatron.scaling.noise import Noise, estimate_noise, orthonormal
from megatron.scaling.priors import Prior, prior_scale
from megatron.scaling.surface import Points, constants, theta_of
from megatron.scaling.varpro import bootstrap, from_grid

LEVEL = 0.95
TIED = ("alpha", "beta", "alpha_N", "alpha_D", "gamma", "delta")  # exponents that may be fitted as one


@dataclass(frozen=True)
class _Found:
    """Constants, the objective, the constants of the replicates, and what did not come to rest."""

    params: dict[str, float]
    objective: float
    replicates: dict[str, np.ndarray]
    told: list[str]


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
    """Fit `form` to n runs: N parameters, D tokens, L nats a token, U unique tokens, each [n].

    Minimises sum Huber_delta(log L - log Lhat), as Hoffmann et al. (arXiv 2203.15556, eq. 3); with residual
    "nats", of L - Lhat. Intervals are percentiles over `n_bootstrap` random weightings of runs, expanded for
    the number of runs; `weights` [replicates, n] are the weightings to use instead, as how often each run was
    drawn, and their percentiles are plain. `groups` [n] labels rows that share a model, a trunk or a seed:
    they have one weight, and their noise has a common part. `run_weights` [n] multiply each run's term;
    `spread` is then that of a run of weight 1. `loss_se` [n] are standard errors of L by the held-out text
    that all runs share (NaN: not known), for predictions on another text. A very large `huber_delta` is least
    squares. `fixed` constants are held at their values, `tied` exponents have the value of another
    ({"alpha": "beta"}). `priors` weigh against the runs by the noise that a fit without them estimates; each
    replicate draws their means anew.

    Raises ValueError for an unknown form or setting, a form that wants U without it, values that are not
    positive numbers, or too few distinct runs.
    """
    if form not in FORM:
        raise ValueError(f"form: '{form}' is not one of {', '.join(FORM)}")
    if residual not in ("log", "nats"):
        raise ValueError(f"residual: '{residual}' is not one of log, nats")
    if FORM[form].wants_unique and U is None:
        raise ValueError(f"U: form '{form}' wants the unique tokens of each run, and there are none")
    _check_settings(huber_delta, n_bootstrap, seed)
    fixed, tied = dict(fixed or {}), dict(tied or {})
    _check_ties(form, tied, fixed)
    _check_priors(form, priors, fixed)
    n_free = len(FORM[form].constants) - len(fixed) - len(tied)
    N, D, L, *rest = _checked(n_free, N, D, L, *([] if U is None else [U]))
    unique = rest[0] if rest else None
    members = None if groups is None else _checked_groups(groups, len(N), n_free)
    is_drawn = weights is None
    weights = _drawn(len(N), n_bootstrap, seed, members) if is_drawn else _checked_weights(weights, len(N))
    each = np.ones(len(N)) if run_weights is None else _checked_weights([run_weights], len(N))[0]
    weights = weights * each
    points, ties = Points.of(N, D, L, unique), tuple(sorted(tied.items()))
    problem = Problem(form, points, huber_delta, residual == "nats", ties)
    if priors:
        problem = _weigh_priors(problem, tuple(priors), fixed, members, each)
        drawn = np.random.default_rng([seed, 1]).standard_normal((len(weights), len(priors)))
        found = _general(problem, np.append(each, np.zeros(len(priors))), np.hstack([weights, drawn]), fixed)
    elif form == "chinchilla" and residual == "log" and not fixed and not tied:
        found = _fast(Runs.of(N, D, L), each, weights, huber_delta)
    else:
        found = _general(problem, each, weights, fixed)
    a, b = exponents_of(found.params)
    problem = Problem(form, points, huber_delta, ties=ties)
    noise, tested = _scatter(problem, found.params, fixed, members, each)
    diagnosis = diagnose(form, N, D, unique, found.params, found.replicates, fixed, float(L.min()), n_free)
    return Law(
        form=form,
        params=found.params,
        objective=found.objective,
        huber_delta=huber_delta,
        n_runs=len(N),
        ranges=_ranges(N, D, L, unique),
        interval=_interval(
            found.replicates, seed if is_drawn else None, noise.n_groups, len(N) if is_drawn else None
        ),
        standard_error={name: float(v.std(ddof=1)) for name, v in found.replicates.items() if len(v) > 1},
        derived={"a_exponent": float(a), "b_exponent": float(b)},
        replicates={name: v.tolist() for name, v in found.replicates.items()},
        warnings=found.told + diagnosis.warnings,
        residual=residual,
        fixed=sorted(fixed),
        tied=tied,
        priors=[asdict(one) for one in priors],
        spread=noise.sigma,
        text_error=_text_error(L, loss_se),
        noise=noise.as_dict(),
        lack_of_fit=tested.as_dict() if tested else {},
        identified=diagnosis.identified,
        not_identified=diagnosis.not_identified,
    )


def _weigh_priors(
    problem: Problem,
    priors: tuple[Prior, ...],
    fixed: dict[str, float],
    members: np.ndarray | None,
    each: np.ndarray,
) -> Problem:
    """The problem with priors, weighed by the noise around a fit without them."""
    alone = _general(problem, each, np.empty((0, len(each))), fixed)
    noise, _ = _scatter(replace(problem, in_nats=False), alone.params, fixed, members, each)
    sigma = noise.sigma
    if problem.in_nats:
        sigma *= float(np.exp(problem.points.log_loss.mean()))
    scale = prior_scale(sigma, problem.delta)
    if noise.n_groups and noise.sigma > 0:  # rows that share noise hold the constants less well
        rows = len(each) / noise.n_groups
        scale *= (rows * noise.between**2 + noise.within**2) / (noise.between**2 + noise.within**2)
    return replace(problem, priors=priors, prior_scale=scale)


def _check_ties(form: str, tied: Mapping[str, str], fixed: Mapping[str, float]) -> None:
    known = [name for name in TIED if name in FORM[form].constants]
    for follower, leader in tied.items():
        for name in (follower, leader):
            if name not in known:
                raise ValueError(
                    f"tied: got {follower}={leader}, expected two exponents of {form} "
                    f"({', '.join(known) or 'it has none to tie'})"
                )
        if follower == leader or leader in tied or follower in fixed:
            raise ValueError(
                f"tied: got {follower}={leader}, where {follower if follower in fixed else leader} is "
                "tied or fixed itself. Tie each exponent once, to one that is free or fixed."
            )


def _check_priors(form: str, priors: Sequence[Prior], fixed: Mapping[str, float]) -> None:
    names = [one.name for one in priors]
    for name in names:
        if name not in FORM[form].constants:
            raise ValueError(
                f"prior of {name}: got no constant of {form}, expected one of "
                f"{', '.join(FORM[form].constants)}"
            )
        if name in fixed or names.count(name) > 1:
            raise ValueError(f"prior of {name}: got it twice, or fixed too; expected one statement of each")


def _scatter(
    problem: Problem,
    params: dict[str, float],
    fixed: Mapping[str, float],
    members: np.ndarray | None,
    each: np.ndarray,
) -> tuple[Noise, LackOfFit | None]:
    """The scatter of single runs around the fit, in log L, and whether runs of one design agree with it.

    Residuals are in units of a run of weight 1; a run of weight 0 has none.
    """
    points = problem.points
    theta = theta_of(problem.form, params, points)
    log_loss, slopes = problem.log_fitted(theta[None])
    limits = limits_of(problem, fixed)
    counted = each > 0
    root = np.sqrt(each[counted])
    residual = root * (points.log_loss - log_loss[0])[counted]
    slopes = root[:, None] * slopes[0][counted][:, limits.low < limits.high]
    members = None if members is None else members[counted]
    basis = orthonormal(slopes)
    left = residual - basis @ (basis.T @ residual)
    noise = estimate_noise(residual, slopes, members, (points.x + points.y)[counted])
    if (root != root[0]).any():  # runs of one design and several weights are no pure error
        return noise, None
    cells = np.column_stack([points.x, points.y, points.u])[counted]
    return noise, check_fit(left, cells, basis.shape[1])


def _fast(runs: Runs, each: np.ndarray, weights: np.ndarray, delta: float) -> _Found:
    best = from_grid(runs, each[None], delta)
    boot = bootstrap(runs, best.phi[0], weights, delta) if len(weights) else None
    params = {name: float(value) for name, value in runs.constants(best.phi[0]).items()}
    replicates = runs.constants(boot.phi) if boot else {}
    return _Found(params, float(best.objective[0]), replicates, _restless(best, boot))


def _general(problem: Problem, each: np.ndarray, weights: np.ndarray, fixed: dict[str, float]) -> _Found:
    best = fit_theta(problem, each, fixed)
    boot = bootstrap_theta(problem, best.phi, weights, fixed) if len(weights) else None
    params = constants(problem.form, best.phi[:1], problem.points)
    params = {name: float(value[0]) for name, value in params.items()} | fixed
    replicates = constants(problem.form, boot.phi, problem.points) if boot else {}
    objective = float(best.objective[0])
    if problem.priors:  # of the runs alone
        runs = replace(problem, priors=())
        objective = float(runs.objective(best.phi[:1], each[None, : len(problem.points.x)])[0])
    return _Found(params, objective, replicates, _restless(best, boot))


def _restless(best: Fitted, boot: Fitted | None) -> list[str]:
    told = []
    if not best.at_rest[0]:
        told.append("The fit did not converge: the runs hardly hold these constants.")
    n_lost = 0 if boot is None else int((~boot.at_rest).sum())
    if boot is not None and n_lost:
        # left out they would make the interval too narrow: they are the ones with the least to hold on to
        told.append(f"{n_lost} of {len(boot.at_rest)} replicates did not converge; the intervals count them.")
    return told


def _check_settings(huber_delta: float, n_bootstrap: int, seed: int) -> None:
    if not 0 < huber_delta < np.inf:  # false for NaN too
        raise ValueError(
            f"huber_delta: found {huber_delta}, wanted a positive number; 1e3 is as good as least squares"
        )
    for name, value in (("n_bootstrap", n_bootstrap), ("seed", seed)):
        if value < 0:
            raise ValueError(f"{name}: found {value}, wanted 0 or more")


def _text_error(L: np.ndarray, loss_se: ArrayLike | None) -> dict[str, float | int]:
    """What losses [n] on one text have in common: medians of their standard errors, in nats and of log L."""
    if loss_se is None:
        return {}
    errors = np.asarray(loss_se, dtype=float).ravel()
    if len(errors) != len(L):
        raise ValueError(f"loss_se: got {len(errors)} values, expected one for each of {len(L)} runs")
    is_known = ~np.isnan(errors)
    if not is_known.any():
        return {}
    if not (np.isfinite(errors[is_known]) & (errors[is_known] >= 0)).all():
        raise ValueError("loss_se: got a negative or infinite value, expected 0 or more, or NaN")
    return {
        "loss_se": float(np.median(errors[is_known])),
        "relative": float(np.median(errors[is_known] / L[is_known])),
        "n_runs": int(is_known.sum()),
    }


def _drawn(n_runs: int, n_bootstrap: int, seed: int, members: np.ndarray | None = None) -> np.ndarray:
    """Random weights of the runs, float64 [n_bootstrap, n_runs], 1 on average, uniform on the simplex.

    `members` [n_runs] int: groups 0, 1, ... whose rows have one weight (block bootstrap).
    """
    n_units = n_runs if members is None else int(members.max()) + 1
    drawn = n_units * np.random.default_rng(seed).dirichlet(np.ones(n_units), n_bootstrap)
    return drawn if members is None else drawn[:, members]


def _checked_groups(groups: ArrayLike, n_runs: int, n_free: int) -> np.ndarray:
    """Groups 0, 1, ... [n_runs] of labels [n_runs]."""
    labels = np.asarray(groups).ravel()
    if len(labels) != n_runs:
        raise ValueError(f"groups: got {len(labels)} labels, expected one for each of {n_runs} runs")
    names, members = np.unique(labels, return_inverse=True)
    if len(names) <= n_free:
        raise ValueError(
            f"groups: got {len(names)} groups, expected more than the {n_free} constants of the form. "
            "Train more independent runs, or hold constants with --fix."
        )
    return members


def _checked_weights(weights: ArrayLike, n_runs: int) -> np.ndarray:
    weights = np.asarray(weights, dtype=float)
    if weights.ndim != 2 or weights.shape[1] != n_runs:
        raise ValueError(
            f"weights: found shape {weights.shape}, wanted [replicates, {n_runs}], a run a column"
        )
    if not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any(axis=1).all():
        raise ValueError("weights: wanted numbers of 0 or more, in every replicate one above 0")
    return weights


def _checked(n_free: int, *columns: ArrayLike) -> list[np.ndarray]:
    values = [np.asarray(column, dtype=float).ravel() for column in columns]
    if len({len(v) for v in values}) != 1:
        raise ValueError(
            f"{'N, D and L' if len(values) == 3 else 'N, D, L and U'} have "
            f"{', '.join(str(len(v)) for v in values)} values, wanted as many of each"
        )
    for name, v in zip("NDLU", values, strict=False):
        wrong = np.flatnonzero(~np.isfinite(v) | (v <= 0))
        if len(wrong):
            raise ValueError(f"{name}, run {wrong[0] + 1}: found {v[wrong[0]]}, wanted a positive number")
    design = np.stack([values[0], values[1], *values[3:]])
    n_distinct = len(np.unique(design, axis=1).T)
    if n_distinct <= n_free:
        raise ValueError(
            f"{n_distinct} distinct ({'N, D' if len(values) == 3 else 'N, D, U'}) for {n_free} constants, "
            f"wanted {n_free + 1} or more; add sizes or budgets"
        )
    return values


def _ranges(N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None) -> dict[str, list[float]]:
    """The least and the most of each, [low, high]."""
    columns = {"N": N, "D": D, "L": L} | ({} if U is None else {"U": U})
    return {name: [float(values.min()), float(values.max())] for name, values in columns.items()}


def _interval(
    replicates: dict[str, np.ndarray], seed: int | None, n_groups: int | None, n_runs: int | None
) -> dict[str, object]:
    """Percentiles of the replicates, expanded for the number of groups, or of runs (None: weights given)."""
    if not replicates:
        return {}
    n_units = n_groups or n_runs
    level = expanded_level(LEVEL, n_units)
    tails = [(1 - level) / 2, (1 + level) / 2]
    a, b = exponents_of(replicates)
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
