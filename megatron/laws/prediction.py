"""Predictions of a law for one run or at one compute, with confidence and predictive intervals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.laws.frontier import frontier_bands, optimal_frontier, search_frontier
from megatron.laws.law import Law

LEVEL = 0.95
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Prediction:
    """Predicted loss of N parameters after D tokens, U of them unique (None: all), in nats per token.

    confidence  interval of the value of the law, the mean of many such runs
    predictive  interval of the measured loss of one new run
    outside     {name: "below" or "above"} of values outside the range of the fitted runs
    Both intervals are None for a law without bootstrap replicates.
    """

    N: float
    D: float
    U: float | None
    loss: float
    level: float
    confidence: Interval
    predictive: Interval
    outside: dict[str, str]


@dataclass(frozen=True)
class OptimumPrediction:
    """N parameters and D tokens of the least loss L at C = k N D FLOPs, k = flops_per_param_token.

    N_confidence, D_confidence and L_confidence are intervals of the
    optimum of the law; L_predictive is the interval of the measured
    loss of one run there. All are None without bootstrap replicates.
    """

    C: float
    flops_per_param_token: float
    U: float | None
    N: float
    D: float
    L: float
    level: float
    N_confidence: Interval
    D_confidence: Interval
    L_confidence: Interval
    L_predictive: Interval
    outside: dict[str, str]


def predict_run(law: Law, N: float, D: float, U: float | None = None, level: float = LEVEL) -> Prediction:
    """Predict one run.

    Raises ValueError for N, D or U that is not one
    number above 0, or a level not between 0 and 1.
    """
    point = _check_point(level, N=N, D=D, **({} if U is None else {"U": U}))
    unique = np.inf if U is None else U
    value, *inner = law.predict(N, D, unique, level, "confidence")
    outer = law.predict(N, D, unique, level, "predictive")[1:]
    ends = (_to_interval(*inner), _to_interval(*outer))
    return Prediction(N, D, U, float(value), level, *ends, find_outside(law, point))


def predict_optimum(
    law: Law,
    C: float,
    U: float | None = None,
    flops_per_param_token: float = 6.0,
    level: float = LEVEL,
) -> OptimumPrediction:
    """Predict the compute-optimal N, D and L at C FLOPs with U unique tokens.

    Raises ValueError as `predict_run`.
    """
    k, unique = flops_per_param_token, np.inf if U is None else U
    given = _check_point(level, C=C, flops_per_param_token=k, **({} if U is None else {"U": U}))
    # only without repetition there is a closed form
    frontier = optimal_frontier(law, C, k) if U is None else search_frontier(law, C, unique, k)
    N, D, L = (float(v[0]) for v in (frontier.N, frontier.D, frontier.L))
    inner: dict[str, Interval] = dict.fromkeys("NDL")
    predictive: Interval = None
    if law.replicates:
        bands = frontier_bands(law, C, level, k, U)  # each end is [1], as the frontier
        loss = (frontier.L, *bands["L"], N, D, level)
        low, high = law.add_noise(*loss)
        predictive = _to_interval(low[0], high[0])
        bands["L"] = law.add_noise(*loss, "confidence")
        inner = {name: _to_interval(low[0], high[0]) for name, (low, high) in bands.items()}
    # a run reads at most D tokens: U above D is compared with the ranges as D
    point = {"N": N, "D": D} | ({"U": min(given["U"], D)} if "U" in given else {})
    confidences = (inner["N"], inner["D"], inner["L"])
    return OptimumPrediction(C, k, U, N, D, L, level, *confidences, predictive, find_outside(law, point))


def find_outside(law: Law, point: Mapping[str, float]) -> dict[str, str]:
    """Return {name: "below" or "above"} of the values of `point` outside the ranges of the fitted runs."""
    outside = {}
    for name, value in point.items():
        low, high = law.ranges.get(name, (0.0, np.inf))
        if not low <= value <= high:
            outside[name] = "below" if value < low else "above"
    return outside


def check_positive(**values: float) -> None:
    """Raise ValueError unless each value is one finite number above 0."""
    for name, value in values.items():
        if np.ndim(value):
            raise ValueError(f"{name}: got an array, expected one number. Use law.predict for arrays.")
        if not 0 < value < np.inf:
            raise ValueError(f"{name}: got {value}, expected a number above 0")


def _check_point(level: float, **values: float) -> dict[str, float]:
    """Return values above 0 with U at most D. Raises ValueError for others, or another level."""
    check_positive(**values)
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1, such as 0.95")
    # a run reads at most D tokens: U above D is compared with the ranges as D
    return values | ({"U": min(values["U"], values["D"])} if {"U", "D"} <= set(values) else {})


def _to_interval(low: Any, high: Any) -> Interval:
    return None if np.isnan(low) or np.isnan(high) else (float(low), float(high))
