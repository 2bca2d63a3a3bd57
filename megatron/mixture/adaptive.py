"""Weights that follow the model: Adaptive Data Optimization, and shares in proportion to the losses.

ADO (Jiang, Zhou et al., arXiv 2410.11820) fits a power law to the training loss of each domain while it
trains, and prefers the domains that learn fastest, discounted by how much of the learning they were given.
For domain k with law L_k(n) = eps_k + beta_k n^-alpha_k, prior mu, history h and policy pi:

    speed   -dL_k/dn = alpha_k (L_k(n) - eps_k) / n          rho_k ~ mu_k h_k^s (-dL_k/dn)
    h(t) = g1 observed(t) + (1 - g1) h(t-1)                  pi(t) = g2 rho(t) + (1 - g2) pibar(t-1)
    pibar(t) = rho(t) / (t+1) + (1 - 1/(t+1)) pibar(t-1)

As in the authors' code every n grows by the whole batch, h follows the observed shares, and rho is clipped.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

MOST_POINTS = 1000  # of a fit, evenly spread: a long run has no longer re-fits
ALPHA, LOG_BETA_MOST, LOG_EPS_LEAST = (0.001, 0.8), 6.5, 0.5  # the authors' penalties, as bounds
HUBER = 1e-3
STARTS = np.linspace(0.02, 0.78, 9)  # of alpha; for each, the law is linear in eps and beta
ROUNDS = 60
SLOWEST_ALPHA = 0.05  # in the speed


class Adaptive(Protocol):
    """Finds weights from what the model has lost on each domain. One's own only has to look like this."""

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Weights float64 [K] that sum to 1, after `n` samples in all; `nats` and `counts` (tokens) float64
        [K] are of the batch just seen, 0 for a domain that was not in it."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """All that is needed to go on, for JSON."""
        ...

    def restore(self, told: dict[str, Any]) -> None:
        """Undo `as_dict`."""
        ...


@dataclass(frozen=True)
class AdoConfig:
    """The constants, with the authors' values. Counted in observations: one every `every_steps` steps."""

    g1: float = 0.1
    g2: float = 0.1
    s: float = 0.5
    least: float = 0.01
    refit_every: int = 100  # at one observation in 10 steps, the authors' 1000 steps
    ignored: int = 50  # the first, while the loss falls from that of a random model
    smoothed: int = 11  # observations under the Savitzky-Golay filter; the authors' 101 steps


@dataclass(frozen=True)
class Law:
    """L(n) = exp(e) + exp(a) n^-alpha, with its Huber objective."""

    a: float
    e: float
    alpha: float
    objective: float

    def loss(self, n: np.ndarray | float) -> np.ndarray:
        """In nats."""
        return np.exp(self.e) + np.exp(self.a) * np.asarray(n, dtype=np.float64) ** -self.alpha

    def speed(self, n: float) -> float:
        """-dL/dn, with alpha no slower than the authors' least."""
        return max(self.alpha, SLOWEST_ALPHA) * float(self.loss(n) - np.exp(self.e)) / n


def fit_law(n: np.ndarray, losses: np.ndarray) -> Law:
    """The law that fits losses [T] (above 0) after n [T] samples best, by the authors' objective.

    sum_t Huber(log L_t - log(exp(e) + exp(a) n^-alpha)) is brought down by damped Gauss-Newton steps, from a
    linear fit at each of several alpha. The penalties of the authors on parameters beyond their bounds are
    steeper than the objective for fewer than 1 / HUBER points; here the bounds are kept exactly.
    """
    log_n, log_l = np.log(n), np.log(losses)
    best: Law | None = None
    for alpha in STARTS:
        powers = n**-alpha
        design = np.column_stack([np.ones_like(powers), powers]) / losses[:, None]
        eps, beta = np.linalg.lstsq(design, np.ones_like(losses), rcond=None)[0]
        start = np.array([np.log(max(beta, 1e-3)), np.log(max(eps, 1e-3)), alpha])
        found = _polish(log_n, log_l, start)
        if best is None or found.objective < best.objective:
            best = found
    assert best is not None, "there are starts"
    return best


def _polish(log_n: np.ndarray, log_l: np.ndarray, start: np.ndarray) -> Law:
    """Levenberg-Marquardt with Huber's weights, inside the bounds."""
    low = np.array([-np.inf, LOG_EPS_LEAST, ALPHA[0]])
    high = np.array([LOG_BETA_MOST, np.inf, ALPHA[1]])
    at = np.clip(start, low, high)
    damping, (objective, residuals, share) = 1e-3, _objective(log_n, log_l, at)
    for _ in range(ROUNDS):
        # the model is log(exp(e) + exp(a - alpha log n)); share is the second part of the sum
        slopes = np.column_stack([share, 1 - share, -share * log_n])
        weights = np.minimum(1, HUBER / np.maximum(np.abs(residuals), 1e-300))
        normal = slopes.T @ (slopes * weights[:, None])
        gradient = slopes.T @ (weights * residuals)
        step = np.linalg.lstsq(normal + damping * np.diag(np.diag(normal) + 1e-12), gradient, rcond=None)[0]
        there = np.clip(at + step, low, high)
        tried = _objective(log_n, log_l, there)
        if tried[0] < objective:
            gain = objective - tried[0]
            at, (objective, residuals, share), damping = there, tried, max(damping / 5, 1e-12)
            if gain < 1e-10 * objective:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return Law(float(at[0]), float(at[1]), float(at[2]), objective)


def _objective(log_n: np.ndarray, log_l: np.ndarray, at: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    a, e, alpha = at
    power = a - alpha * log_n
    model = np.logaddexp(power, e)
    residuals = log_l - model
    size = np.abs(residuals)
    huber = np.where(size <= HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
    return float(huber.sum()), residuals, np.exp(power - model)


def smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Savitzky and Golay's filter of third order: the middle of a cubic fitted to each window (odd)."""
    half = window // 2
    if len(values) < window:
        return values
    places = np.arange(-half, half + 1)
    fit = np.linalg.pinv(np.vander(places, 4, increasing=True))
    inside = np.convolve(values, fit[0][::-1], mode="valid")
    first, last = fit @ values[:window], fit @ values[-window:]
    powers = np.vander(places, 4, increasing=True)
    return np.concatenate([(powers @ first)[:half], inside, (powers @ last)[half + 1 :]])


class Ado:
    """Adaptive Data Optimization over K domains."""

    def __init__(self, prior: Sequence[float], config: AdoConfig | None = None) -> None:
        """`prior`: the natural shares of the domains, float64 [K]; a domain of 0 stays at 0."""
        self.config = config or AdoConfig()
        self.prior = np.asarray(prior, dtype=np.float64) / np.sum(prior)
        self.history, self.mean_policy = self.prior.copy(), self.prior.copy()
        self.n_updates = self.n_observed = 0
        self.seen: list[list[list[float]]] = [[[], []] for _ in self.prior]  # of each domain: n, loss
        self.laws: list[Law | None] = [None] * len(self.prior)

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """As in `Adaptive`. The prior, until every domain has a law."""
        self.n_observed += 1
        self.history = self.config.g1 * counts / counts.sum() + (1 - self.config.g1) * self.history
        if self.n_observed > self.config.ignored:
            for k in np.flatnonzero(counts):
                self.seen[k][0].append(float(n))
                self.seen[k][1].append(float(nats[k] / counts[k]))
            if (self.n_observed - self.config.ignored) % self.config.refit_every == 0:
                self.refit()
        if any(law is None for law, share in zip(self.laws, self.prior, strict=True) if share > 0):
            return self.prior
        return self._update(float(n))

    def refit(self) -> None:
        """Fit the laws of the domains with enough points anew."""
        for k, (n, losses) in enumerate(self.seen):
            if len(n) >= max(10, self.config.smoothed):
                told = smoothed(np.array(losses), self.config.smoothed)
                kept = np.unique(np.linspace(0, len(n) - 1, min(len(n), MOST_POINTS)).round().astype(int))
                self.laws[k] = fit_law(np.array(n)[kept], told[kept])

    def _update(self, n: float) -> np.ndarray:
        config, live = self.config, self.prior > 0
        speeds = np.array([0.0 if law is None else law.speed(n) for law in self.laws])
        rho = self.prior * self.history**config.s * speeds
        rho = rho / rho.sum() if rho.sum() > 0 else self.prior
        rho = np.where(live, np.maximum(rho, min(config.least, 1 / live.sum())), 0)
        rho /= rho.sum()
        policy = config.g2 * rho + (1 - config.g2) * self.mean_policy
        self.n_updates += 1
        share = 1 / (self.n_updates + 1)
        self.mean_policy = share * rho + (1 - share) * self.mean_policy
        return policy

    def as_dict(self) -> dict[str, Any]:
        """As in `Adaptive`."""
        return {
            "n_updates": self.n_updates,
            "n_observed": self.n_observed,
            "history": self.history.tolist(),
            "mean_policy": self.mean_policy.tolist(),
            "seen": [[list(n), list(losses)] for n, losses in self.seen],
            "laws": [None if law is None else list(vars(law).values()) for law in self.laws],
        }

    def restore(self, told: dict[str, Any]) -> None:
        """As in `Adaptive`."""
        self.n_updates, self.n_observed = told["n_updates"], told["n_observed"]
        self.history, self.mean_policy = np.array(told["history"]), np.array(told["mean_policy"])
        self.seen = [[list(n), list(losses)] for n, losses in told["seen"]]
        self.laws = [None if law is None else Law(*law) for law in told["laws"]]


class LossProportional:
    """Weights in proportion to prior times the smoothed loss of each domain."""

    def __init__(self, prior: Sequence[float], smoothing: float = 0.1) -> None:
        self.prior = np.asarray(prior, dtype=np.float64) / np.sum(prior)
        self.smoothing = smoothing
        self.losses = np.full(len(self.prior), np.nan)

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """As in `Adaptive`. A domain not seen yet is taken to lose what the others do."""
        new = np.divide(nats, counts, out=self.losses.copy(), where=counts > 0)
        smooth = self.smoothing * new + (1 - self.smoothing) * self.losses
        self.losses = np.where(np.isnan(self.losses), new, smooth)
        weights = self.prior * np.where(np.isnan(self.losses), np.nanmean(self.losses), self.losses)
        return weights / weights.sum()

    def as_dict(self) -> dict[str, Any]:
        """As in `Adaptive`."""
        return {"losses": [None if np.isnan(loss) else loss for loss in self.losses.tolist()]}

    def restore(self, told: dict[str, Any]) -> None:
        """As in `Adaptive`."""
        self.losses = np.array([np.nan if loss is None else loss for loss in told["losses"]])


class NotYetError(ValueError):
    """Weights that nobody has found yet are asked for."""


class Log:
    """Weights as they were found: entries (from which chunk, weights), in order. The mixture log."""

    def __init__(self, first: np.ndarray, known_to: int | None) -> None:
        self.entries: list[tuple[int, np.ndarray]] = [(0, np.asarray(first, dtype=np.float64))]
        self.known_to = known_to
        self.coming: Callable[[], None] | None = None  # waits for weights that are being found

    def append(self, chunk: int, weights: np.ndarray, known_to: int) -> None:
        """Weights from a chunk on. Nobody may have asked for that chunk before."""
        assert self.known_to is not None and chunk >= self.known_to, "weights of chunks that are known stay"
        self.entries.append((chunk, weights))
        self.known_to = known_to

    def at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """(weights, the first later chunk with others). NotYetError where they are not found yet."""
        if self.coming is not None and self.known_to is not None and chunk >= self.known_to:
            self.coming()
        known_to, entries = self.known_to, self.entries  # in this order: another thread may be adding
        if known_to is not None and chunk >= known_to:
            raise NotYetError(
                f"weights of chunk {chunk} are not known yet, only those before {known_to}; "
                "make fewer batches ahead (dataset.num_workers) or raise adaptive.delay_steps"
            )
        here = bisect_right(entries, chunk, key=lambda entry: entry[0]) - 1
        assert here >= 0, "a restored log begins where its checkpoint was"
        later = entries[here + 1][0] if here + 1 < len(entries) else known_to
        return entries[here][1], later

    def as_dict(self, chunk: int) -> dict[str, Any]:
        """What is needed from a chunk on, for JSON."""
        here = bisect_right(self.entries, chunk, key=lambda entry: entry[0]) - 1
        kept = [[begin, weights.tolist()] for begin, weights in self.entries[here:]]
        return {"entries": kept, "known_to": self.known_to}

    def restore(self, told: dict[str, Any]) -> None:
        """Undo `as_dict`."""
        self.entries = [(begin, np.array(weights)) for begin, weights in told["entries"]]
        self.known_to = told["known_to"]
