"""Profile likelihood of one constant: the best fit of the others with it fixed at each of many values."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.fitting.fit_form import build_search_box, fit_theta, minimize_by_narrowing
from megatron.laws.fitting.fit_problem import Problem
from megatron.laws.fitting.surface import EXPONENT, THETA, RunPoints, constants_from_theta
from megatron.laws.forms import FORM

LEVEL = 0.95
DECAY_VALUES = tuple(np.geomspace(0.3, 3e4, 26))  # values of R_D* or R_N*
EXPONENT_SPAN, N_EXPONENT_VALUES = 6.0, 26  # an exponent is profiled from best / span to best * span
MIN_E_SHARE = 1e-3  # of the lowest loss: smallest value of E
REFINED_SPAN, N_REFINED_VALUES = 1.3, 14  # largest factor around a rough interval, and number of values
MAX_REFINEMENTS, REFINED_SHARE, CONVERGED_SHARE = (
    4,
    0.25,
    0.02,
)  # shares are of the log width of the interval
PROFILED_COORDINATES = {  # constant -> its coordinate in theta; a coefficient depends on two coordinates
    "R_D": "r_D", "R_N": "r_N", "E": "e", "alpha": "alpha", "beta": "beta", "eta": "eta",
    "alpha_N": "alpha_N", "alpha_D": "alpha_D",
}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """Profile of constant `name` at `values` [m].

    objective   [m] minimum over the other constants
    statistic   [m] increase of -2 log likelihood above that of the free fit
    best        value of the constant in the free fit
    low, high   ends of the confidence interval; None where it extends beyond `values`
    words       a sentence with the result
    """

    name: str
    values: np.ndarray
    objective: np.ndarray
    statistic: np.ndarray
    best: float
    low: float | None
    high: float | None
    identified: bool
    words: str

    def as_dict(self) -> dict[str, Any]:
        """Return the content for law.json."""
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in asdict(self).items()
        }


def profile_constant(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    U: ArrayLike | None = None,
    *,
    form: str = "repeated_data",
    name: str = "R_D",
    values: ArrayLike | None = None,
    huber_delta: float = 1e-3,
    fixed: Mapping[str, float] | None = None,
    tied: Mapping[str, str] | None = None,
    run_weights: ArrayLike | None = None,
    residual: str = "log",
) -> Profile:
    """Fix `name` at each of `values` (increasing), fit the other constants, and compare with the free fit.

    By default the values are DECAY_VALUES for R_D* and R_N*, up to the lowest loss for E, and around the best
    value for an exponent. The coefficient of a profiled exponent is free. The other arguments are as in
    `fit_law`. Runs are treated as independent. The grid is refined around the ends of the interval.

    Raises ValueError for a constant that the form lacks or that cannot be fixed alone.
    """
    fixed = dict(fixed or {})
    if name not in FORM[form].constants or name not in PROFILED_COORDINATES:
        available = [constant for constant in FORM[form].constants if constant in PROFILED_COORDINATES]
        expected = f"one of {', '.join(available)} of {form}" if available else f"a form other than {form}"
        raise ValueError(f"profile: got '{name}', expected {expected}")
    N, D, L = (np.asarray(v, dtype=float) for v in (N, D, L))
    unique = None if U is None else np.asarray(U, dtype=float)
    if name in fixed or name in (tied or {}):
        raise ValueError(f"profile: got '{name}', which is fixed or tied, expected a free constant")
    ties = tuple(sorted((tied or {}).items()))
    problem = Problem(form, RunPoints.from_columns(N, D, L, unique), huber_delta, residual == "nats", ties)
    unit_weights = np.ones(len(N)) if run_weights is None else np.asarray(run_weights, dtype=float)
    free = fit_theta(problem, unit_weights, fixed)
    best = float(constants_from_theta(form, free.phi[:1], problem.points)[name][0])
    # with the best value in the grid at least one value is inside the interval
    grid = _default_values(name, best, float(L.min())) if values is None else np.asarray(values, dtype=float)
    values = np.unique(np.append(grid, best))
    residuals = np.abs(problem.evaluate_residuals(free.phi[:1])[0][0])[unit_weights > 0]
    # with the scale profiled out, -2 log likelihood = factor n log(objective) + constant
    weight = _likelihood_factor(residuals, huber_delta) * int((unit_weights > 0).sum())

    def summarize(values: np.ndarray, objective: np.ndarray) -> Profile:
        # a fit at a fixed value may end below the free fit, which then was not at its lowest minimum
        lowest = min(float(free.objective[0]), float(objective.min()))
        return _summarize_profile(name, values, objective, weight * np.log(objective / lowest), best)

    objective = _minimize_profile(problem, free.phi, name, values, fixed, unit_weights)
    result = summarize(values, objective)
    for _ in range(MAX_REFINEMENTS):
        if result.low is None or result.high is None:
            break
        low, high = result.low, result.high
        # the ends are interpolated between distant values: refine the grid around them
        around = min(REFINED_SPAN, (high / low) ** REFINED_SHARE)
        near = np.geomspace(low / around, high * around, N_REFINED_VALUES)
        # stay inside the given grid: the interval must not extend beyond the values that were requested
        near = near[(near >= values.min()) & (near <= values.max())]
        objective = np.concatenate(
            [objective, _minimize_profile(problem, free.phi, name, near, fixed, unit_weights)]
        )
        # sorted union; `first` picks the objective that belongs to each value
        values, first = np.unique(np.concatenate([values, near]), return_index=True)
        objective = objective[first]
        result = summarize(values, objective)
        if result.low is None or result.high is None:
            break
        shift = max(abs(np.log(result.low / low)), abs(np.log(result.high / high)))
        if shift < CONVERGED_SHARE * np.log(result.high / result.low):
            break
    return result


def _default_values(name: str, best: float, lowest_loss: float) -> np.ndarray:
    """Return default values of a constant, within the range that fits search."""
    if name in ("R_D", "R_N"):
        return np.asarray(DECAY_VALUES)
    if name == "E":
        return np.geomspace(MIN_E_SHARE, 0.999, N_EXPONENT_VALUES) * lowest_loss
    return np.clip(best * np.geomspace(1 / EXPONENT_SPAN, EXPONENT_SPAN, N_EXPONENT_VALUES), *EXPONENT)


def _minimize_profile(
    problem: Problem,
    minima: np.ndarray,
    name: str,
    values: np.ndarray,
    fixed: Mapping[str, float],
    weights: np.ndarray,
) -> np.ndarray:
    """Return the least objective [m] with `name` fixed at each of `values` [m].

    Fits start from the `minima` [s, p] of the free fit.
    """
    coordinate = THETA[problem.form].index(PROFILED_COORDINATES[name])
    objective = np.full(len(values), np.inf)
    # Upwards, then downwards, each fit from the solution at the previous value: a valley may be reachable
    # from one side only.
    for order in (range(len(values)), reversed(range(len(values)))):
        # Starts of the first value are three minima of the free fit; later the last solution and two of them.
        theta = minima[:3]
        for i in order:
            box = build_search_box(problem, {**fixed, name: float(values[i])})
            # the profiled coordinate is fixed by a box of width 0; the others start at the previous solution
            starts = theta.copy()
            starts[:, coordinate] = box.low[coordinate]
            fitted = minimize_by_narrowing(
                problem, starts, np.broadcast_to(weights, (len(starts), len(weights))), box
            )
            objective[i] = min(objective[i], fitted.objective.min())
            theta = np.concatenate([fitted.phi[fitted.objective.argsort()[:1]], minima[:2]])
    return objective


def _likelihood_factor(residual: np.ndarray, delta: float) -> float:
    """Return the factor of n log(objective) in -2 log likelihood: 1 for Gaussian, 2 for Laplace errors.

    With the scale profiled out, -2 log likelihood is n log(sum of squares) for Gaussian errors and
    2 n log(sum of absolute values) for Laplace errors, and the objective is proportional to that sum.
    A Huber is between them by the share of residuals beyond its width.
    """
    return 1.0 + float((residual > delta).mean())


def _summarize_profile(
    name: str, values: np.ndarray, objective: np.ndarray, statistic: np.ndarray, best: float
) -> Profile:
    # 3.84 at 95 %: the likelihood ratio of one constant is chi-square with one degree of freedom
    from scipy.special import chdtri  # slow import

    limit = float(chdtri(1, 1 - LEVEL))
    inside = np.flatnonzero(statistic <= limit)
    # One interval from the first to the last value inside, also where values between them are outside.
    low = None if inside[0] == 0 else _interpolate_crossing(values, statistic, inside[0] - 1, limit)
    high = (
        None if inside[-1] == len(values) - 1 else _interpolate_crossing(values, statistic, inside[-1], limit)
    )
    identified = bool(low is not None and high is not None)
    shown = f"{name}*" if name in ("R_D", "R_N") else name
    if identified:
        words = (
            f"{shown} = {best:.3g}, {100 * LEVEL:.0f} % profile confidence interval {low:.3g} to {high:.3g}."
        )
    else:
        ends = {
            (True, True): f"any value from {values[0]:.3g} to {values[-1]:.3g} fits nearly as well",
            (True, False): f"every value up to {high or 0:.3g} fits nearly as well",
            (False, True): f"every value above {low or 0:.3g} fits nearly as well",
        }[(low is None, high is None)]
        words = f"{shown} is not identified: {ends} (best {best:.3g})."
    return Profile(name, values, objective, statistic, best, low, high, identified, words)


def _interpolate_crossing(values: np.ndarray, statistic: np.ndarray, i: int, limit: float) -> float:
    """Return the value between i and i + 1 at which the statistic is `limit`.

    The root of the statistic is nearly linear in the log of the value, so it is interpolated there.
    """
    # Opposite signs: the statistic crosses `limit` between i and i + 1. Near the minimum it is
    # ((log v - log best) / se)^2, so its root is linear.
    left, right = (float(np.sqrt(max(statistic[k], 0.0)) - np.sqrt(limit)) for k in (i, i + 1))
    share = left / (left - right)
    return float(np.exp(np.log(values[i]) * (1 - share) + np.log(values[i + 1]) * share))
