"""The mixture of the lowest loss at a budget, and its gain over others with an interval that knows of the search.

The lowest point of a fitted surface is lower than the surface there: the search selects errors. So each
replicate repeats the search, and its optimum is evaluated by the fitted law. What the replicate
promises beyond that is the error of a promise; its percentiles give the interval (a basic bootstrap).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron.laws.fitting.mixing_form import MixtureRuns
from megatron.laws.law import expanded_level
from megatron.laws.mixing_law import LEVEL, MixingLaw, normalise_shares

BETTER, NOT_SHOWN = "better", "no better mixture is shown"
TRAINED = "best trained"
MIN_SHARE = 1e-5  # of the search; the slope of w^g is infinite at 0
STEP, AT_BOUND = 1e-7, 1e-4  # of slopes; distance from a bound
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
        """BETTER if the interval is above 0, otherwise NOT_SHOWN."""
        return BETTER if self.interval[0] > 0 else NOT_SHOWN


@dataclass(frozen=True)
class BestMixture:
    """The mixture of the lowest predicted loss at N parameters and D tokens.

    weights     share of each domain
    epochs      of each domain with given unique tokens
    at_bound    domains whose share is a bound of the search: a wider search may find a lower loss
    prediction  of its loss: the row of MixingLaw.predict
    gains       over the best trained mixture, and over others by name
    """

    N: float
    D: float
    weights: dict[str, float]
    epochs: dict[str, float]
    at_bound: list[str]
    prediction: dict[str, float]
    gains: list[MixtureGain]


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
        W = np.maximum(W, MIN_SHARE)
        return MixtureRuns(W, np.full(len(W), self.N), np.full(len(W), self.D), np.tile(self.U, (len(W), 1)))

    def minimise(self, first: np.ndarray, r: int | None = None) -> np.ndarray:
        """Return the shares [k] of the lowest loss by replicate `r`, or by the fit, from `first` [k].

        The loss of one target is convex in the shares, so one start is enough.
        """
        from scipy.optimize import minimize  # slow import

        rows = None if r is None else slice(r, r + 1)
        moves = np.vstack([np.zeros(len(first)), STEP * np.eye(len(first))])

        def evaluate(w: np.ndarray) -> tuple[float, np.ndarray]:
            values = self.law.log_loss(self.place(np.maximum(w, MIN_SHARE) + moves), rows)[0]
            # SLSQP ends at a change of `ftol`: losses are scaled so that this is no difference of losses
            return 1e3 * float(values[0]), 1e3 * (values[1:] - values[0]) / STEP

        total = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
        bounds = list(zip(self.low, self.high, strict=True))
        options = {"maxiter": MAX_STEPS, "ftol": 1e-4}
        search = minimize(
            evaluate, first, jac=True, bounds=bounds, constraints=total, method="SLSQP", options=options
        )
        shares = np.clip(search.x, self.low, self.high)
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

    unique      {domain: unique tokens}, for `max_epochs` and the repetition of the answer
    bounds      {domain: (low, high)}; default: the shares of the trained mixtures, beyond which no run is
    compared    {name: {domain: share}}, such as the natural mixture

    Raises ValueError for an unknown domain, or bounds that no mixture satisfies.
    """
    N, D = (
        float(given if given is not None else 1.0 if runs is None else runs.max())
        for given, runs in ((N, law.runs.N), (D, law.runs.D))
    )
    U = _list_values(law, "unique", unique or {}, math.inf)
    low, high = _find_bounds(law, bounds or {}, max_epochs * U / D)
    search = _Search(law, low, high, N, D, U)
    start = low + (high - low) * (1 - low.sum()) / max(float((high - low).sum()), 1e-300)
    best = search.minimise(start)
    others = {TRAINED: _best_trained(search)}
    for name, shares in (compared or {}).items():
        others[name] = normalise_shares(_list_values(law, name, shares, 0.0)[None])[0]
    is_used = np.minimum(high - best, best - low) < AT_BOUND
    epochs = best * D / U
    return BestMixture(
        N,
        D,
        weights=dict(zip(law.domains, best.tolist(), strict=True)),
        epochs={name: float(epochs[law.domains.index(name)]) for name in unique or {}},
        at_bound=[name for name, at_bound in zip(law.domains, is_used, strict=True) if at_bound],
        prediction=law.predict(search.place(best[None])).iloc[0].to_dict(),
        gains=_compute_gains(search, best, others),
    )


def _compute_gains(search: _Search, best: np.ndarray, others: Mapping[str, np.ndarray]) -> list[MixtureGain]:
    from scipy.special import stdtrit  # slow import

    law, W = search.law, np.array([best, *others.values()])
    errors = []
    for r in range(len(law.replicates[0])):
        points = search.place(np.array([search.minimise(best, r), *others.values()]))
        claimed, actual = (law.log_loss(points, rows)[0] for rows in (slice(r, r + 1), None))
        errors.append((claimed - claimed[0]) - (actual - actual[0]))
    tail = (1 - expanded_level(LEVEL, len(law.effects))) / 2
    middle, most, least = np.quantile(errors, [0.5, 1 - tail, tail], axis=0)
    effect, variance = law.match_mixtures(W)
    log_loss = law.log_loss(search.place(W))[0] + effect
    # what the law misses of both mixtures
    half = stdtrit(law.noise.dof, (1 + LEVEL) / 2) * np.sqrt(variance + variance[0])
    gain = log_loss - log_loss[0] - middle
    low, high = gain - np.hypot(most - middle, half), gain + np.hypot(middle - least, half)
    # of the loss of the other mixture: 1 - exp(-log ratio)
    return [
        MixtureGain(name, math.exp(log_loss[i]), *_to_share(gain[i], low[i], high[i]))
        for i, name in enumerate(others, 1)
    ]


def _to_share(gain: float, low: float, high: float) -> tuple[float, tuple[float, float]]:
    return -math.expm1(-gain), (-math.expm1(-low), -math.expm1(-high))


def _best_trained(search: _Search) -> np.ndarray:
    """Return the shares [k] of the trained mixture with the lowest expected loss."""
    W = search.law.trained_shares
    log_loss = search.law.log_loss(search.place(W))[0] + search.law.effects
    return np.asarray(W[log_loss.argmin()])


def _list_values(law: MixingLaw, name: str, values: Mapping[str, float], default: float) -> np.ndarray:
    """Return the values [k] of all domains. Raises ValueError for another domain."""
    for domain in values:
        if domain not in law.domains:
            raise ValueError(f"{name}: got domain '{domain}', expected one of {', '.join(law.domains)}")
    return np.array([values.get(domain, default) for domain in law.domains], dtype=float)


def _find_bounds(
    law: MixingLaw, bounds: Mapping[str, tuple[float, float]], most: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    trained = law.trained_shares
    sides = zip((trained.min(axis=0), trained.max(axis=0)), (0, 1), strict=True)
    low, high = (
        np.where(np.isnan(given), default, given)
        for default, side in sides
        for given in [_list_values(law, "bounds", {at: ends[side] for at, ends in bounds.items()}, math.nan)]
    )
    high = np.minimum(high, most)
    for name, least, largest in zip(law.domains, low, high, strict=True):
        if not 0 <= least <= largest:
            raise ValueError(
                f"bounds of {name}: got {least:.3g} to {largest:.3g}, expected 0 or more and not decreasing. "
                "Allow more epochs, or a lower share."
            )
    if not low.sum() <= 1 + AT_BOUND or not high.sum() >= 1 - AT_BOUND:
        raise ValueError(
            f"bounds: got sums {low.sum():.3g} and {high.sum():.3g}, expected 1 between them. "
            "Widen them, or allow more epochs."
        )
    return low, high
