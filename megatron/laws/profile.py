"""Profile likelihood of one constant: the best fit of the others with it fixed at each of many values."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.laws.fit import fit_law
from megatron.laws.law import Law

LEVEL = 0.95
DECAYS = np.geomspace(0.3, 3e4, 26)  # values of R_D* or R_N*
FACTORS = np.geomspace(1 / 6, 6, 26)  # values of other constants over the best one
N_BISECTIONS = 11  # between two of the values
PROFILED = (
    "R_D",
    "R_N",
    "E",
    "alpha",
    "beta",
    "eta",
    "alpha_N",
    "alpha_D",
)  # a coefficient needs its exponent


@dataclass(frozen=True)
class Profile:
    """Profile of constant `name` at `values` [m], increasing; its fields are those in law.json.

    objective   [m] minimum over the other constants
    statistic   [m] increase of -2 log likelihood above that of the free fit
    best        value of the constant in the free fit
    low, high   ends of the confidence interval; None where it extends beyond `values`
    words       a sentence with the result
    """

    name: str
    values: list[float]
    objective: list[float]
    statistic: list[float]
    best: float
    low: float | None
    high: float | None
    identified: bool
    words: str


def profile_constant(N: np.ndarray, D: np.ndarray, L: np.ndarray, *, name: str, **options: Any) -> Profile:
    """Fix `name` at many values, fit the other constants, and compare with the free fit.

    N, D, L [n] and `options` are as for fit_law. Runs are treated as independent.

    Raises ValueError for a constant that the form lacks or that cannot be fixed alone.
    """
    from scipy.special import chdtri  # slow import

    fixed = dict(options.pop("fixed", None) or {})

    def fit(**constants: float) -> Law:
        return fit_law(N, D, L, fixed={**fixed, **constants}, n_bootstrap=0, **options)

    free = fit()
    available = [constant for constant in free.params if constant in PROFILED and constant not in fixed]
    if name not in available:
        raise ValueError(f"profile: got '{name}', expected one of {', '.join(available)} of {free.form}")
    best = free.params[name]
    values = DECAYS if name in ("R_D", "R_N") else FACTORS * best
    if name == "E":
        values = np.geomspace(1e-3, 0.999, len(FACTORS)) * L.min()
    values = np.unique(np.append(values, best))
    objective = np.array([fit(**{name: float(value)}).objective for value in values])
    U = options.get("U")
    residual = np.log(L / free.loss(N, D, np.inf if U is None else U))
    # With the scale profiled out, -2 log likelihood is n log(sum of squares) for normal errors and
    # 2 n log(sum of sizes) for Laplace errors; a Huber is between them by its share of large residuals.
    factor = len(L) * (1.0 + float((np.abs(residual) > free.huber_delta).mean()))
    # a fit at a fixed value may end below the free fit, which then was not at its lowest minimum
    lowest = min(free.objective, objective.min())
    statistic = factor * np.log(objective / lowest)
    # 3.84 at 95 %: the likelihood ratio of one constant is chi-square with one degree of freedom. One
    # interval from the first to the last value inside, also where values between them are outside.
    limit = float(chdtri(1, 1 - LEVEL))
    inside = np.flatnonzero(statistic <= limit)

    def find_end(i: int, outside: int) -> float | None:
        """Return the end of the interval between values i and `outside`, by bisection of logs."""
        if not 0 <= outside < len(values):
            return None
        low, high = np.log(values[[i, outside]])
        for _ in range(N_BISECTIONS):
            middle = 0.5 * (low + high)
            increase = factor * np.log(fit(**{name: float(np.exp(middle))}).objective / lowest)
            low, high = (middle, high) if increase <= limit else (low, middle)
        return float(np.exp(0.5 * (low + high)))

    low, high = find_end(inside[0], inside[0] - 1), find_end(inside[-1], inside[-1] + 1)
    a, b, c = (array.tolist() for array in (values, objective, statistic))
    is_identified = low is not None and high is not None
    return Profile(name, a, b, c, best, low, high, is_identified, _describe(name, best, low, high))


def _describe(name: str, best: float, low: float | None, high: float | None) -> str:
    shown = f"{name}*" if name in ("R_D", "R_N") else name
    if low is not None and high is not None:
        return f"{shown} = {best:.3g}, 95 % profile confidence interval {low:.3g} to {high:.3g}."
    above = "any value" if low is None else f"every value above {low:.3g}"
    reach = above if high is None else f"every value up to {high:.3g}"
    return f"{shown} is not identified: {reach} fits nearly as well (best {best:.3g})."
