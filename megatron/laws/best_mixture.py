"""The mixture of the lowest loss at a budget, and its gain over others, with intervals of the whole search.

The lowest point of a fitted surface is lower than the surface there: the search selects errors. So each
replicate repeats the search, and its optimum is evaluated by the fitted law. What the replicate
promises beyond that is the error of a promise: its median is subtracted, and its upper percentile gives the
width. The lower percentile is too near, since a search never promises less than its start.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.fitting.mixing_form import MixtureRuns
from megatron.laws.law import expanded_level
from megatron.laws.mixing_law import FIT, LEVEL, MixingLaw, normalise_shares

BETTER, NOT_SHOWN = "better", "no better mixture is shown"
TRAINED = "best trained"
MIN_SHARE = 1e-5  # of the search; the slope of w^g is infinite at 0
STEP, AT_BOUND = 1e-7, 1e-4  # of slopes; distance from a bound
MAX_STEPS = 60


@dataclass(frozen=True)
class BestMixture:
    """The mixture of the lowest predicted loss.

    domains     data frame, a row for each: weight; epochs, NaN without unique tokens; at_bound, whether the
                weight is a bound of the search, so that a wider search may find a lower loss; then the
                weights of each mixture of `gains`
    prediction  of its loss: the row of MixingLaw.predict; and N and D, 1 where the table has none
    gains       data frame, a row for each mixture that it is compared with: loss; gain, the share of this
                loss that the best mixture saves, with its 95 % confidence interval low, high; and verdict:
                BETTER if the interval is above 0, otherwise NOT_SHOWN
    """

    domains: Any
    prediction: dict[str, float]
    gains: Any


@dataclass(frozen=True)
class _Search:
    """Shares within [low, high], each [k], at N, D and unique tokens U [k]."""

    law: MixingLaw
    low: np.ndarray
    high: np.ndarray
    N: float
    D: float
    U: np.ndarray

    def place(self, W: np.ndarray) -> MixtureRuns:
        """Return points of shares [n, k], which need not sum to 1: slopes are of single shares."""
        n = len(W)
        return MixtureRuns(W, np.full(n, self.N), np.full(n, self.D), np.tile(self.U, (n, 1)))

    def minimise(self, first: np.ndarray, row: slice = FIT) -> np.ndarray:
        """Return the shares [k] of the lowest loss by one row of the law's thetas, from `first` [k].

        The loss of one target is convex in the shares, so one start is enough.
        """
        from scipy.optimize import minimize  # slow import

        moves = np.vstack([np.zeros(len(first)), STEP * np.eye(len(first))])

        def evaluate(w: np.ndarray) -> tuple[float, np.ndarray]:
            values = self.law.log_loss(self.place(np.maximum(w, MIN_SHARE) + moves), row)[0]
            # SLSQP ends at a change of `ftol`: losses are scaled so that this is no difference of losses
            return 1e3 * float(values[0]), 1e3 * (values[1:] - values[0]) / STEP

        total = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
        bounds = list(zip(self.low, self.high, strict=True))
        options = {"maxiter": MAX_STEPS, "ftol": 1e-4}
        settings = {"bounds": bounds, "constraints": total, "method": "SLSQP", "options": options}
        shares = np.clip(minimize(evaluate, first, jac=True, **settings).x, self.low, self.high)
        # a search that failed returns its start
        is_valid = abs(shares.sum() - 1) < AT_BOUND and evaluate(shares)[0] <= evaluate(first)[0]
        return np.asarray(shares / shares.sum() if is_valid else first)


def find_best_mixture(
    law: MixingLaw,
    *,
    N: float | None = None,
    D: float | None = None,
    unique: Mapping[str, float] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    max_epochs: float = math.inf,
    compared: Mapping[str, Mapping[str, float]] | None = None,
) -> BestMixture:
    """Find the mixture of the lowest loss of N parameters and D tokens; default: of the largest run.

    unique      {domain: unique tokens}, for `max_epochs` and the repetition of the answer; default: those
                that the runs had
    bounds      {domain: (low, high)}; default: the shares of the trained mixtures, beyond which no run is
    compared    {name: {domain: share}}, such as the natural mixture

    Raises ValueError for an unknown domain, or bounds that no mixture satisfies.
    """
    from pandas import DataFrame  # slow import

    sizes = [np.ones(len(law.runs.W)) if at is None else at for at in (law.runs.N, law.runs.D)]
    largest = np.lexsort(sizes[::-1])[-1]  # of the largest N, the most tokens
    N, D = (float(at[largest] if given is None else given) for given, at in zip((N, D), sizes, strict=True))
    # a run without a domain has Inf
    U = _list_values(law, "unique", unique or {}, math.inf if law.runs.U is None else law.runs.U.min(axis=0))
    if max_epochs < math.inf and np.isinf(U).all():
        raise ValueError("max_epochs: got no domain with unique tokens. Add columns epochs_DOMAIN.")
    # a domain may have at most max_epochs U tokens of D
    search = _Search(law, *_find_bounds(law, bounds or {}, max_epochs * U / D), N, D, U)
    room = search.high - search.low
    # the first point is within the bounds: all shares at the same fraction of their range
    best = search.minimise(search.low + room * (1 - search.low.sum()) / max(float(room.sum()), 1e-300))
    trained = law.mixtures
    others = {TRAINED: trained[(law.log_loss(search.place(trained))[0] + law.effects).argmin()]}
    for name, shares in (compared or {}).items():
        others[name] = normalise_shares(_list_values(law, name, shares, 0.0)[None], law.domains)[0]
    at_bound = np.minimum(search.high - best, best - search.low) < AT_BOUND
    epochs = np.where(np.isfinite(U), best * D / U, math.nan)
    return BestMixture(
        DataFrame({"weight": best, "epochs": epochs, "at_bound": at_bound} | others, index=law.domains),
        law.predict(search.place(best[None])).iloc[0].to_dict() | {"N": N, "D": D},
        DataFrame(_compute_gains(search, best, others), index=[*others]),
    )


def _compute_gains(search: _Search, best: np.ndarray, others: Mapping[str, np.ndarray]) -> dict[str, Any]:
    from scipy.special import stdtrit  # slow import

    law, W = search.law, np.array([best, *others.values()])
    errors = []
    for r in range(1, len(law.thetas[0])):
        row = slice(r, r + 1)
        points = search.place(np.array([search.minimise(best, row), *others.values()]))
        # by the replicate, which chose the optimum, and by the fit, which stands for the truth
        claimed, actual = (law.log_loss(points, at)[0] for at in (row, FIT))
        errors.append((claimed - claimed[0]) - (actual - actual[0]))
    middle, top = np.quantile(errors, [0.5, (1 + expanded_level(LEVEL, len(law.effects))) / 2], axis=0)
    effect, variance = law.match_mixtures(W)
    log_loss = law.log_loss(search.place(W))[0] + effect
    # beside these errors, what the law misses of both mixtures, and how their slopes drift apart
    variance = variance + law.drift_variance(search.place(W))
    missed = stdtrit(law.noise.dof, (1 + LEVEL) / 2) * np.sqrt(variance + variance[0])
    half = np.hypot(top - middle, missed)
    gain = log_loss - log_loss[0] - middle
    low, high = gain - half, gain + half
    # of the loss of the other mixture: 1 - exp(-log ratio)
    gains = dict(zip(("gain", "low", "high"), -np.expm1([-gain, -low, -high]), strict=True))
    columns = {"loss": np.exp(log_loss)} | gains | {"verdict": np.where(low > 0, BETTER, NOT_SHOWN)}
    # the first one is the best mixture itself
    return {name: values[1:] for name, values in columns.items()}


def _list_values(law: MixingLaw, name: str, values: Mapping[str, float], default: ArrayLike) -> np.ndarray:
    """Return the values [k] of all domains. Raises ValueError for another domain."""
    listed = np.full(len(law.domains), default, dtype=float)
    for domain, value in values.items():
        if domain not in law.domains:
            raise ValueError(f"{name}: got domain '{domain}', expected one of {', '.join(law.domains)}")
        listed[law.domains.index(domain)] = value
    return listed


def _find_bounds(
    law: MixingLaw, bounds: Mapping[str, tuple[float, float]], most: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    trained = (law.mixtures.min(axis=0), law.mixtures.max(axis=0))
    given = ({name: ends[i] for name, ends in bounds.items()} for i in range(2))
    low, high = (_list_values(law, "bounds", *at) for at in zip(given, trained, strict=True))
    high = np.minimum(high, most)
    if not (low >= 0).all() or not (low <= high).all() or not low.sum() - 1 < AT_BOUND > 1 - high.sum():
        raise ValueError(
            f"bounds: got {low.round(3)} to {high.round(3)}, expected 0 <= low <= high around sums of 1. "
            "Widen them, or allow more epochs."
        )
    return low, high
