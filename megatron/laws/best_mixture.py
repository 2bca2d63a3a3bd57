"""The mixture of the lowest loss at a budget, and its gain over others with an interval that knows of the search.

The lowest point of a fitted surface is lower than the surface there: the search selects errors. So each
replicate repeats the search, and its optimum is evaluated by the fitted law. What the replicate
promises beyond that is the error of a promise; its percentiles give the interval (a basic bootstrap).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.fitting.mixing_form import MixtureRuns
from megatron.laws.mixing_law import MixingLaw, MixturePrediction, validate_shares

BETTER, NOT_SHOWN = "better", "no better mixture is shown"
MIN_SHARE = 1e-5  # of the search; the slope of w^g is infinite at 0
STEP = 1e-7
TRAINED = "best trained"
MAX_STEPS = 60


@dataclass(frozen=True)
class MixtureGain:
    """Share of the loss that the best mixture saves over another one, with a 95 % confidence interval."""

    over: str
    loss: float
    value: float
    interval: tuple[float, float]

    @property
    def verdict(self) -> str:
        return BETTER if self.interval[0] > 0 else NOT_SHOWN


@dataclass(frozen=True)
class BestMixture:
    """The mixture of the lowest predicted loss.

    weights     share of each domain
    epochs      of each domain with unique tokens, at D
    at_bound    domains whose share is a bound of the search, so that a wider search may find a lower loss
    prediction  of its loss
    gains       over the best trained mixture, and over others by name
    """

    weights: dict[str, float]
    epochs: dict[str, float]
    at_bound: list[str]
    prediction: MixturePrediction
    gains: list[MixtureGain]


@dataclass(frozen=True)
class _Search:
    """Shares within [low, high], each [k], at N, D and U [k]."""

    law: MixingLaw
    low: np.ndarray
    high: np.ndarray
    N: float
    D: float
    U: np.ndarray

    def points(self, W: np.ndarray) -> MixtureRuns:
        """Return runs of shares [n, k], which need not sum to 1: slopes are of single shares."""
        n, has_unique = len(W), self.law.fits[0].form.has_unique
        unique = np.broadcast_to(self.U, W.shape) if has_unique else None
        return MixtureRuns(W, np.full(n, self.N), np.full(n, self.D), unique)

    def minimise(self, thetas: Sequence[np.ndarray], first: np.ndarray) -> np.ndarray:
        """Return the shares [k] of the lowest loss. The loss of one target is convex, so one start is enough."""
        from scipy.optimize import minimize  # slow import

        moves = np.vstack([np.zeros(len(first)), STEP * np.eye(len(first))])

        def evaluate(w: np.ndarray) -> tuple[float, np.ndarray]:
            values = self.law.log_loss(thetas, self.points(np.maximum(w, MIN_SHARE) + moves))[0]
            # SLSQP ends at a change of 1e-9: losses are scaled so that this is no difference of losses
            return 1e3 * float(values[0]), 1e3 * (values[1:] - values[0]) / STEP

        total = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
        bounds = list(zip(self.low, self.high, strict=True))
        options = {"maxiter": MAX_STEPS, "ftol": 1e-5}
        found = minimize(
            evaluate, first, jac=True, bounds=bounds, constraints=total, method="SLSQP", options=options
        ).x
        shares = np.clip(found, self.low, self.high)
        # a search that failed returns its start, and rounding is moved to the largest share
        shares[shares.argmax()] += 1 - shares.sum()
        both = self.law.log_loss(thetas, self.points(np.maximum([shares, first], MIN_SHARE)))[0]
        return np.asarray(shares if both[0] <= both[1] else first)


def find_best_mixture(
    law: MixingLaw,
    *,
    N: float = 1.0,
    D: float = 1.0,
    U: ArrayLike | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    max_epochs: float = math.inf,
    compared: Mapping[str, ArrayLike] | None = None,
) -> BestMixture:
    """Find the mixture of the lowest loss of N parameters and D tokens.

    U           unique tokens of each domain [k], for `max_epochs` and the repetition of the answer
    bounds      {domain: (low, high)}; default: the shares of the trained mixtures, beyond which no run is
    compared    {name: shares [k]}, such as the natural mixture

    Raises ValueError for an unknown domain, or bounds that no mixture satisfies.
    """
    k = len(law.domains)
    unique = np.broadcast_to(np.asarray(math.inf if U is None else U, dtype=float), k)
    low, high = _find_bounds(law, bounds or {}, max_epochs * unique / D)
    search = _Search(law, low, high, N, D, unique)
    law.place_runs(np.full((1, k), 1 / k), N, D, unique)
    others = {TRAINED: _best_trained(law)}
    others |= {name: validate_shares(np.asarray(w), k)[0] for name, w in (compared or {}).items()}
    start = low + (high - low) * (1 - low.sum()) / max((high - low).sum(), 1e-12)
    best = search.minimise(law.thetas, start)
    gains = _compute_gains(search, best, others)
    used = np.minimum(high - best, best - low) < 1e-4
    named = list(zip(law.domains, best, used, unique, strict=True))
    return BestMixture(
        {name: float(w) for name, w, *_ in named},
        {name: float(D * w / u) for name, w, _, u in named if math.isfinite(u)},
        [name for name, _, at_bound, _ in named if at_bound],
        law.predict(best, N, D, unique),
        gains,
    )


def _compute_gains(search: _Search, best: np.ndarray, others: Mapping[str, np.ndarray]) -> list[MixtureGain]:
    law = search.law
    points = search.points(np.array([best, *others.values()]))
    fitted = law.log_loss(law.thetas, points)[0]
    errors = []
    for r in range(len(law.replicates[0])):
        thetas = [theta[r : r + 1] for theta in law.replicates]
        optimum = search.minimise(thetas, best)
        there = search.points(np.array([optimum, *others.values()]))
        claimed, actual = (law.log_loss(at, there)[0] for at in (thetas, law.thetas))
        errors.append((claimed - claimed[0]) - (actual - actual[0]))
    tails = (1 - law.level) / 2
    promise = fitted - fitted[0]
    middle, low, high = np.quantile(np.array(errors), [0.5, 1 - tails, tails], axis=0)
    return [
        # of the loss of the other mixture: 1 - exp(-log ratio)
        MixtureGain(name, math.exp(fitted[i]), *_share(promise[i], (middle[i], low[i], high[i])))
        for i, name in enumerate(others, 1)
    ]


def _share(promise: float, errors: tuple[float, float, float]) -> tuple[float, tuple[float, float]]:
    value, low, high = (-math.expm1(error - promise) for error in errors)
    return value, (low, high)


def _best_trained(law: MixingLaw) -> np.ndarray:
    """Return the shares [k] of the trained mixture with the lowest loss, beside what N and D explain.

    That is the lowest mean over its runs of the law's loss at the largest run plus the residual.
    """
    sizes = [None if at is None else np.full(len(law.L), at.max()) for at in (law.runs.N, law.runs.D)]
    largest = MixtureRuns(law.runs.W, sizes[0], sizes[1], law.runs.U)
    fitted, there = (law.log_loss(law.thetas, runs)[0] for runs in (law.runs, largest))
    level = np.bincount(law.labels, np.log(law.L) - fitted + there) / np.bincount(law.labels)
    return np.asarray(law.runs.W[int(np.argmax(law.labels == level.argmin()))])


def _find_bounds(
    law: MixingLaw, bounds: Mapping[str, tuple[float, float]], most: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    low, high = law.runs.W.min(axis=0), law.runs.W.max(axis=0)
    for name, (least, largest) in bounds.items():
        if name not in law.domains:
            raise ValueError(f"bounds: got domain '{name}', expected one of {', '.join(law.domains)}")
        at = law.domains.index(name)
        low[at], high[at] = least, largest
    high = np.minimum(high, most)
    wrong = np.flatnonzero((low < 0) | (low > high))
    if len(wrong):
        at = int(wrong[0])
        raise ValueError(
            f"bounds of {law.domains[at]}: got {low[at]:.3g} to {high[at]:.3g}, expected 0 or more and "
            "not decreasing. Allow more epochs, or a lower share."
        )
    if not low.sum() <= 1 <= high.sum():
        raise ValueError(
            f"bounds: got sums {low.sum():.3g} and {high.sum():.3g}, expected 1 between them. Allow more epochs."
        )
    return low, high
