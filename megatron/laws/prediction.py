"""Predictions of a law for one run or at one compute, with confidence and predictive intervals."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from megatron.laws.frontier import frontier_bands, optimal_frontier, search_frontier
from megatron.laws.law import Law
from megatron.laws.stack import StackedLaw, stacked_bands

LEVEL = 0.95
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Prediction:
    """Predicted loss of N parameters after D tokens, U of them unique (None: all), in nats per token.

    confidence  interval of the value of the law, the mean of many such runs
    predictive  interval of the measured loss of one new run
    outside     {name: "below" or "above"} of values outside the range of the fitted runs
    text        "same" as that of the fitted runs, or "new": see Law.text_deviation
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
    text: str = "same"

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class OptimumPrediction:
    """N parameters and D tokens of the least loss L at C = k N D FLOPs, k = flops_per_param_token.

    N_confidence, D_confidence and L_confidence are intervals of the optimum of the law; L_predictive is the
    interval of the measured loss of one run there. All are None without bootstrap replicates.
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
    text: str = "same"

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self)


def predict_run(
    law: Law | StackedLaw,
    N: float,
    D: float,
    U: float | None = None,
    level: float = LEVEL,
    text: str = "same",
) -> Prediction:
    """Predict one run, scored on the `text` of the fitted runs ("same") or on a new one ("new").

    Raises ValueError for N, D or U not above 0, a level not between 0 and 1, and as Law.predict for a text.
    """
    check_positive(N=N, D=D, **({} if U is None else {"U": U}))
    _check_level(level)
    unique = np.inf if U is None else U
    value, *inner = law.predict(N, D, unique, level, "confidence", text)
    outer = law.predict(N, D, unique, level, "predictive", text)[1:]
    # a run reads at most D tokens: U above D is compared with the ranges as D
    point = {"N": N, "D": D} | ({} if U is None else {"U": min(U, D)})
    return Prediction(
        N,
        D,
        U,
        float(value),
        level,
        _to_interval(*inner),
        _to_interval(*outer),
        find_outside(law, point),
        text,
    )


def predict_optimum(
    law: Law | StackedLaw,
    C: float,
    U: float | None = None,
    flops_per_param_token: float = 6.0,
    level: float = LEVEL,
    text: str = "same",
) -> OptimumPrediction:
    """Predict the compute-optimal N, D and L at C FLOPs with U unique tokens.

    Raises ValueError as `predict_run`.

    For a stack, the intervals of L are those of its prediction at N and D.
    """
    check_positive(C=C, flops_per_param_token=flops_per_param_token, **({} if U is None else {"U": U}))
    _check_level(level)
    k = flops_per_param_token
    # only one law with unique text has a closed form; repetition and stacks are searched
    frontier = (
        optimal_frontier(law, C, k)
        if U is None and isinstance(law, Law)
        else search_frontier(law, C, np.inf if U is None else U, k)
    )
    N, D, L = (float(v[0]) for v in (frontier.N, frontier.D, frontier.L))
    inner: dict[str, Interval] = dict.fromkeys("NDL")
    predictive: Interval = None
    if isinstance(law, StackedLaw):
        inner, predictive = _predict_stack_intervals(law, C, U, k, level, text, (N, D))
    elif law.replicates:
        law.text_deviation("confidence", text)  # raises for a new text of unknown error
        bands = frontier_bands(law, C, level, k, U)  # each end is [1], as the frontier
        # noise and error of the text are added in quadrature in log L, so their order has no effect
        noisy = law.add_noise(frontier.L, *bands["L"], N, D, level)
        low, high = law.widen_for_text(frontier.L, *noisy, level, "predictive", text)
        predictive = _to_interval(low[0], high[0])
        bands["L"] = law.widen_for_text(frontier.L, *bands["L"], level, "confidence", text)
        inner = {name: _to_interval(low[0], high[0]) for name, (low, high) in bands.items()}
    point = {"N": N, "D": D} | ({} if U is None else {"U": min(U, D)})
    return OptimumPrediction(
        C,
        k,
        U,
        N,
        D,
        L,
        level,
        inner["N"],
        inner["D"],
        inner["L"],
        predictive,
        find_outside(law, point),
        text,
    )


def _predict_stack_intervals(
    law: StackedLaw,
    C: float,
    U: float | None,
    flops_per_param_token: float,
    level: float,
    text: str,
    optimum: tuple[float, float],
) -> tuple[dict[str, Interval], Interval]:
    """Return (confidence intervals of N, D and L, predictive interval of L) at the optimum of a stack."""
    unique = np.inf if U is None else U
    inner, outer = (
        law.predict(*optimum, unique, level, kind, text)[1:] for kind in ("confidence", "predictive")
    )
    bands = stacked_bands(law, C, level, flops_per_param_token, U)
    ends = {name: _to_interval(*band) for name, band in bands.items()}
    return ends | {"L": _to_interval(*inner)}, _to_interval(*outer)


def find_outside(law: Law | StackedLaw, point: Mapping[str, float]) -> dict[str, str]:
    """Return {name: "below" or "above"} of the values of `point` outside the ranges of the fitted runs."""
    outside = {}
    for name, value in point.items():
        low, high = law.ranges.get(name, (0.0, np.inf))
        if not low <= value <= high:
            outside[name] = "below" if value < low else "above"
    return outside


def check_positive(**values: float) -> None:
    """Raise ValueError unless each value is a finite number above 0."""
    for name, value in values.items():
        if not 0 < value < np.inf:
            raise ValueError(f"{name}: got {value}, expected a number above 0")


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1, such as 0.95")


def _to_interval(low: Any, high: Any) -> Interval:
    return None if np.isnan(low) or np.isnan(high) else (float(low), float(high))
