"""Profile likelihood of one constant: how well the others make up for it being held somewhere else."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import chdtri

from megatron.scaling.fit_form import Problem, fit_theta, limits_of, narrowed
from megatron.scaling.forms import FORM
from megatron.scaling.surface import EXPONENT, THETA, Points, constants

LEVEL = 0.95
VALUES = tuple(np.geomspace(0.3, 3e4, 26))  # of R_D* or R_N*
AROUND, N_AROUND = 6.0, 26  # of exponents: from the best over this to it times this
LEAST_E = 1e-3  # share of the lowest loss from which on E is tried
CLOSE, N_CLOSE = 1.3, 14  # how far around a rough interval at most, and at how many values
MOST_ROUNDS, SHARE_AROUND, SETTLED = 4, 0.25, 0.02  # of closer looks; shares of the interval's log width
HELD = {  # constants that may be held by themselves
    "R_D": "r_D", "R_N": "r_N", "E": "e", "alpha": "alpha", "beta": "beta", "eta": "eta",
    "alpha_N": "alpha_N", "alpha_D": "alpha_D",
}  # fmt: skip


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
    values: ArrayLike | None = None,
    huber_delta: float = 1e-3,
    fixed: Mapping[str, float] | None = None,
    tied: Mapping[str, str] | None = None,
    run_weights: ArrayLike | None = None,
    residual: str = "log",
) -> Profile:
    """Hold `name` at each of `values` (rising), fit the rest, and compare with the fit where it is free.

    By default the values are VALUES for R_D* and R_N*, for E up to the lowest loss, and for an exponent
    around its best. The coefficient of an exponent is free. The other arguments are as in `fit_law`. The runs
    count as independent of each other.

    Raises ValueError for a constant that the form lacks or that cannot be held alone.
    """
    fixed = dict(fixed or {})
    if name not in FORM[form].constants or name not in HELD:
        mine = [one for one in FORM[form].constants if one in HELD]
        known = f"not one of {', '.join(mine)}, which {form} has" if mine else f"and {form} has none to hold"
        raise ValueError(f"profile: '{name}' is {known}")
    N, D, L = (np.asarray(v, dtype=float) for v in (N, D, L))
    unique = None if U is None else np.asarray(U, dtype=float)
    if name in fixed or name in (tied or {}):
        raise ValueError(f"profile: '{name}' is fixed or tied, expected a free constant")
    ties = tuple(sorted((tied or {}).items()))
    problem = Problem(form, Points.of(N, D, L, unique), huber_delta, residual == "nats", ties)
    each = np.ones(len(N)) if run_weights is None else np.asarray(run_weights, dtype=float)
    free = fit_theta(problem, each, fixed)
    best = float(constants(form, free.phi[:1], problem.points)[name][0])
    # with the best among them the interval is never narrower than what is tried
    tried = _values_around(name, best, float(L.min())) if values is None else np.asarray(values, dtype=float)
    values = np.unique(np.append(tried, best))
    off = np.abs(problem.residual(free.phi[:1])[0][0])[each > 0]
    weight = _share(off, huber_delta) * int((each > 0).sum())

    def told(values: np.ndarray, objective: np.ndarray) -> Profile:
        lowest = min(float(free.objective[0]), float(objective.min()))
        return _told(name, values, objective, weight * np.log(objective / lowest), best)

    objective = _held(problem, free.phi, name, values, fixed, each)
    found = told(values, objective)
    for _ in range(MOST_ROUNDS if found.identified else 0):
        # the ends are interpolated between values far apart: look again, closely
        around = min(CLOSE, (found.high / found.low) ** SHARE_AROUND)
        near = np.geomspace(found.low / around, found.high * around, N_CLOSE)
        near = near[(near >= values.min()) & (near <= values.max())]
        objective = np.concatenate([objective, _held(problem, free.phi, name, near, fixed, each)])
        values, first = np.unique(np.concatenate([values, near]), return_index=True)
        objective = objective[first]
        before, found = found, told(values, objective)
        if not found.identified:
            break
        moved = max(abs(np.log(found.low / before.low)), abs(np.log(found.high / before.high)))
        if moved < SETTLED * np.log(found.high / found.low):
            break
    return found


def _values_around(name: str, best: float, lowest_loss: float) -> np.ndarray:
    """Where a constant is held by default, within what the fit searches."""
    if name in ("R_D", "R_N"):
        return np.asarray(VALUES)
    if name == "E":
        return np.geomspace(LEAST_E, 0.999, N_AROUND) * lowest_loss
    return np.clip(best * np.geomspace(1 / AROUND, AROUND, N_AROUND), *EXPONENT)


def _held(
    problem: Problem,
    minima: np.ndarray,
    name: str,
    values: np.ndarray,
    fixed: Mapping[str, float],
    weights: np.ndarray,
) -> np.ndarray:
    """The least objective [m] with `name` held at each of `values` [m], from the free fit's minima [s, p]."""
    at = THETA[problem.form].index(HELD[name])
    objective = np.full(len(values), np.inf)
    # up and down again, each from where the last one ended: a valley may be reached from one side only
    for order in (range(len(values)), reversed(range(len(values)))):
        theta = minima[:3]
        for i in order:
            limits = limits_of(problem, {**fixed, name: float(values[i])})
            starts = theta.copy()
            starts[:, at] = limits.low[at]
            found = narrowed(problem, starts, np.broadcast_to(weights, (len(starts), len(weights))), limits)
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


def _crossing(values: np.ndarray, statistic: np.ndarray, i: int, limit: float) -> float:
    """Where the statistic meets the limit between i and i + 1; its root is nearly straight in log value."""
    left, right = (float(np.sqrt(max(statistic[k], 0.0)) - np.sqrt(limit)) for k in (i, i + 1))
    share = left / (left - right)
    return float(np.exp(np.log(values[i]) * (1 - share) + np.log(values[i + 1]) * share))
