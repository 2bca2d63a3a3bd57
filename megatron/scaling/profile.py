"""Profile likelihood of one constant: how well the others make up for it being held somewhere else."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri

from megatron.scaling.fit_form import Problem, fit_theta, limits_of, narrowed
from megatron.scaling.forms import FORM
from megatron.scaling.surface import THETA, Points, constants

LEVEL = 0.95
VALUES = tuple(np.geomspace(0.3, 3e4, 26))  # of R_D* or R_N*
CLOSE, N_CLOSE = 1.3, 14  # how far around a rough interval, and at how many values
HELD = {"R_D": "r_D", "R_N": "r_N", "E": "e"}  # constants that may be held by themselves


@dataclass(frozen=True)
class Profile:
    """`statistic` [m]: by how much each of `values` [m] is worse than `best`, in -2 log likelihood.

    low and high are the ends of the interval; None where it does not end within `values`.
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
        """For law.json."""
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in asdict(self).items()
        }


def profile(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    U: ArrayLike | None = None,
    *,
    form: str = "repeated_data",
    name: str = "R_D",
    values: ArrayLike = VALUES,
    huber_delta: float = 1e-3,
    fixed: Mapping[str, float] | None = None,
) -> Profile:
    """Hold `name` at each of `values` (rising), fit the rest, and compare with the fit where it is free.

    Raises ValueError for a constant that the form lacks or that cannot be held alone.
    """
    fixed = dict(fixed or {})
    if name not in FORM[form].constants or name not in HELD:
        mine = [one for one in FORM[form].constants if one in HELD]
        known = f"not one of {', '.join(mine)}, which {form} has" if mine else f"and {form} has none to hold"
        raise ValueError(f"profile: '{name}' is {known}")
    N, D, L = (np.asarray(v, dtype=float) for v in (N, D, L))
    unique = None if U is None else np.asarray(U, dtype=float)
    problem = Problem(form, Points.of(N, D, L, unique), huber_delta)
    free = fit_theta(problem, np.ones(len(N)), fixed)
    best = float(constants(form, free.phi[:1], problem.points)[name][0])
    # with the best among them the interval is never narrower than what is tried
    values = np.unique(np.append(np.asarray(values, dtype=float), best))
    weight = _share(np.abs(problem.residual(free.phi[:1])[0][0]), huber_delta) * len(N)

    def told(values: np.ndarray, objective: np.ndarray) -> Profile:
        lowest = min(float(free.objective[0]), float(objective.min()))
        return _told(name, values, objective, weight * np.log(objective / lowest), best)

    objective = _held(problem, free.phi, name, values, fixed)
    rough = told(values, objective)
    if not rough.identified:
        return rough
    # the rough interval is between values far apart: look again, closely
    near = np.geomspace(rough.low / CLOSE, rough.high * CLOSE, N_CLOSE)
    objective = np.concatenate([objective, _held(problem, free.phi, name, near, fixed)])
    values, first = np.unique(np.concatenate([values, near]), return_index=True)
    return told(values, objective[first])


def _held(
    problem: Problem, minima: np.ndarray, name: str, values: np.ndarray, fixed: Mapping[str, float]
) -> np.ndarray:
    """The least objective [m] with `name` held at each of `values` [m], from the free fit's minima [s, p]."""
    at = THETA[problem.form].index(HELD[name])
    ones = np.ones(len(problem.points.x))
    objective = np.full(len(values), np.inf)
    # up and down again, each from where the last one ended: a valley may be reached from one side only
    for order in (range(len(values)), reversed(range(len(values)))):
        theta = minima[:3]
        for i in order:
            limits = limits_of(problem, {**fixed, name: float(values[i])})
            starts = theta.copy()
            starts[:, at] = limits.low[at]
            found = narrowed(problem, starts, np.broadcast_to(ones, (len(starts), len(ones))), limits)
            objective[i] = min(objective[i], found.objective.min())
            theta = np.concatenate([found.phi[found.objective.argsort()[:1]], minima[:2]])
    return objective


def _share(residual: np.ndarray, delta: float) -> float:
    """1 for Gaussian errors, 2 for Laplace's: in between by how many residuals lie beyond the Huber's width.

    With the scale profiled out, -2 log likelihood is n log(sum of squares) for the one and 2 n log(sum of
    absolute values) for the other, and the objective is in proportion to that sum.
    """
    return 1.0 + float((residual > delta).mean())


def _told(
    name: str, values: np.ndarray, objective: np.ndarray, statistic: np.ndarray, best: float
) -> Profile:
    limit = float(chdtri(1, 1 - LEVEL))
    inside = np.flatnonzero(statistic <= limit)
    low = None if inside[0] == 0 else _crossing(values, statistic, inside[0] - 1, limit)
    high = None if inside[-1] == len(values) - 1 else _crossing(values, statistic, inside[-1], limit)
    identified = bool(low is not None and high is not None)
    if identified:
        words = f"{name}* = {best:.3g}, {100 * LEVEL:.0f} % profile interval {low:.3g} to {high:.3g}."
    else:
        ends = {
            (True, True): f"any value from {values[0]:.3g} to {values[-1]:.3g} fits nearly as well",
            (True, False): f"every value up to {high or 0:.3g} fits nearly as well",
            (False, True): f"every value above {low or 0:.3g} fits nearly as well",
        }[(low is None, high is None)]
        words = f"{name}* is not identified: {ends} (best {best:.3g})."
    return Profile(name, values, objective, statistic, best, low, high, identified, words)


def _crossing(values: np.ndarray, statistic: np.ndarray, i: int, limit: float) -> float:
    """Where the statistic meets the limit between i and i + 1; its root is nearly straight in log value."""
    left, right = (float(np.sqrt(max(statistic[k], 0.0)) - np.sqrt(limit)) for k in (i, i + 1))
    share = left / (left - right)
    return float(np.exp(np.log(values[i]) * (1 - share) + np.log(values[i + 1]) * share))
