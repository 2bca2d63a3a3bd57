"""Weights that follow the model: Adaptive Data Optimization, and rules of the user.

ADO (Jiang, Zhou et al., arXiv 2410.11820) fits a power law to the training loss
of each domain during training. It prefers the domains that learn fastest,
discounted by how much of the learning they were given. For domain k with law
L_k(n) = eps_k + beta_k n^-alpha_k, prior mu, history h and policy pi:

    speed      -dL_k/dn = alpha_k (L_k(n) - eps_k) / n
    preferred  rho_k ~ mu_k h_k^s (-dL_k/dn)
    history    h(t) = g1 observed(t) + (1 - g1) h(t-1)
    policy     pi(t) = g2 rho(t) + (1 - g2) pibar(t-1)
    average    pibar(t) = rho(t) / (t+1) + (1 - 1/(t+1)) pibar(t-1)

As in the authors' code every n grows by the whole batch, h follows the observed
shares, and rho is clipped.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# per fit, evenly spaced, so that the time of a fit does not grow with the run
MAX_FIT_POINTS = 1000
# bounds in place of the authors' penalties
ALPHA_BOUNDS, MAX_LOG_BETA, MIN_LOG_EPS = (0.001, 0.8), 6.5, 0.5
# for residuals in log L: a relative error of 0.1 % of the loss
HUBER_DELTA = 1e-3
# for a fixed alpha the law is linear in eps and beta
ALPHA_STARTS = np.linspace(0.02, 0.78, 9)
MAX_ITERATIONS = 60
MIN_SPEED_ALPHA = 0.05  # the authors' minimum of alpha in the speed


class WeightRule(Protocol):
    """Rule that computes weights from the loss of the model on each domain.

    A custom rule is any class with these three methods; it need not inherit
    from this one.
    """

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the weights float64 [K], of sum 1, after `n` samples in all.

        nats     float64 [K]   loss of the latest batch, summed over tokens; 0
                 for a domain that is not in it
        counts   float64 [K]   tokens of the latest batch
        """
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return the whole state of the rule, ready for JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `as_dict` returned."""
        ...


@dataclass(frozen=True)
class AdoConfig:
    """Constants of ADO, with the authors' values.

    Intervals are counted in observations.
    There is one observation every `every_steps` steps.
    """

    g1: float = 0.1
    g2: float = 0.1
    s: float = 0.5
    min_weight: float = 0.01
    refit_every: int = 100  # the authors' 1000 steps, at one observation in 10 steps
    # first observations, while the loss falls from a random model's
    n_ignored: int = 50
    # observations in the window of the
    # Savitzky-Golay filter; the authors' 101 steps
    smoothing_window: int = 11


@dataclass(frozen=True)
class DomainLaw:
    """Power law of one domain, L(n) = exp(e) + exp(a) n^-alpha, with the value of its Huber objective."""

    a: float
    e: float
    alpha: float
    objective: float

    def loss(self, n: np.ndarray | float) -> np.ndarray:
        """Return the loss in nats after n samples."""
        return np.exp(self.e) + np.exp(self.a) * np.asarray(n, dtype=np.float64) ** -self.alpha

    def speed(self, n: float) -> float:
        """Return -dL/dn, computed with alpha no smaller than the authors' minimum."""
        # L = eps + beta n^-alpha has -dL/dn = alpha beta n^(-alpha - 1) = alpha
        # (L - eps) / n
        return max(self.alpha, MIN_SPEED_ALPHA) * float(self.loss(n) - np.exp(self.e)) / n


def fit_domain_law(n: np.ndarray, losses: np.ndarray) -> DomainLaw:
    """Fit a law to losses [T] (above 0) after n [T] samples, with the authors' objective.

    Damped Gauss-Newton steps minimize sum_t Huber(log L_t - log(exp(e) + exp(a)
    n^-alpha)). They start from a linear fit at each of several alpha. The
    authors penalize parameters beyond their bounds. For fewer than 1 /
    HUBER_DELTA points these penalties are steeper than the objective, so the
    bounds are exact here.
    """
    log_n, log_l = np.log(n), np.log(losses)
    best: DomainLaw | None = None
    # The objective may have local minima in alpha. 9 starts * 60 iterations *
    # 1000 points bound the time.
    for alpha in ALPHA_STARTS:
        powers = n**-alpha
        # Rows divided by the loss: the linear fit minimizes relative errors,
        # like the objective in log L. [T, 2] @ (eps, beta) = ones [T].
        design = np.column_stack([np.ones_like(powers), powers]) / losses[:, None]
        eps, beta = np.linalg.lstsq(design, np.ones_like(losses), rcond=None)[0]
        # the linear fit has no bounds: eps or beta may be negative, where the
        # logarithm is not defined
        start = np.array([np.log(max(beta, 1e-3)), np.log(max(eps, 1e-3)), alpha])
        candidate = _refine_fit(log_n, log_l, start)
        if best is None or candidate.objective < best.objective:
            best = candidate
    assert best is not None, "ALPHA_STARTS is not empty"
    return best


def _refine_fit(log_n: np.ndarray, log_l: np.ndarray, start: np.ndarray) -> DomainLaw:
    """Minimize the objective by Levenberg-Marquardt steps with Huber's weights, within the bounds."""
    # order of the parameters: a, e, alpha
    low = np.array([-np.inf, MIN_LOG_EPS, ALPHA_BOUNDS[0]])
    high = np.array([MAX_LOG_BETA, np.inf, ALPHA_BOUNDS[1]])
    params = np.clip(start, low, high)
    damping, (objective, residuals, share) = 1e-3, _compute_objective(log_n, log_l, params)
    for _ in range(MAX_ITERATIONS):
        # The model is log(exp(e) + exp(a - alpha log n));
        # share is the second term divided by the sum.
        # Derivatives of the model by (a, e, alpha), [T, 3].
        slopes = np.column_stack([share, 1 - share, -share * log_n])
        # Iteratively reweighted least squares: Huber's weight is 1 inside delta
        # and delta / |r| outside. 1e-300 prevents a division by 0; a residual
        # of 0 gets weight 1.
        weights = np.minimum(1, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
        # [3, 3] and [3]; `gradient` is minus the objective's, because
        # residuals are data minus model
        normal = slopes.T @ (slopes * weights[:, None])
        gradient = slopes.T @ (weights * residuals)
        # Damping relative to the diagonal (Marquardt), plus a constant for a
        # column of zeros. `lstsq`, not `solve`: where the share is 0 or 1 at
        # every point the matrix is singular in float64.
        step = np.linalg.lstsq(normal + damping * np.diag(np.diag(normal) + 1e-12), gradient, rcond=None)[0]
        # projection onto the bounds replaces the penalties
        trial = np.clip(params + step, low, high)
        outcome = _compute_objective(log_n, log_l, trial)
        if outcome[0] < objective:
            gain = objective - outcome[0]
            params, (objective, residuals, share), damping = trial, outcome, max(damping / 5, 1e-12)
            if gain < 1e-10 * objective:
                break
        else:
            damping *= 4
            if damping > 1e8:
                break
    return DomainLaw(float(params[0]), float(params[1]), float(params[2]), objective)


def _compute_objective(
    log_n: np.ndarray, log_l: np.ndarray, params: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the Huber objective, the residuals [T], and the share [T] of exp(a) n^-alpha in the loss."""
    a, e, alpha = params
    power = a - alpha * log_n
    # log(exp(power) + exp(e)) without overflow. It is at least `power`, so that
    # the share is at most 1.
    model = np.logaddexp(power, e)
    residuals = log_l - model
    size = np.abs(residuals)
    # quadratic up to delta, then linear with the same value and slope at delta
    huber = np.where(size <= HUBER_DELTA, 0.5 * size**2, HUBER_DELTA * (size - 0.5 * HUBER_DELTA))
    return float(huber.sum()), residuals, np.exp(power - model)


class Ado:
    """Adaptive Data Optimization over K domains."""

    def __init__(self, prior: Sequence[float] | np.ndarray, config: AdoConfig | None = None) -> None:
        """`prior`: the natural shares of the domains, float64 [K]; a domain with prior 0 keeps weight 0."""
        self.config = config or AdoConfig()
        self.prior = np.asarray(prior, dtype=np.float64) / np.sum(prior)
        self.history, self.mean_policy = self.prior.copy(), self.prior.copy()
        self.n_updates = self.n_observed = 0
        # for each domain: n, loss
        self.seen: list[list[list[float]]] = [[[], []] for _ in self.prior]
        self.laws: list[DomainLaw | None] = [None] * len(self.prior)

    def observe(self, n: int, nats: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return the weights, as in `WeightRule`: the prior until every domain has a law."""
        self.n_observed += 1
        # h(t) of the module docstring, from the shares that were trained on,
        # not those requested
        self.history = self.config.g1 * counts / counts.sum() + (1 - self.config.g1) * self.history
        # the first observations, with the steep fall from a random model,
        # follow no power law
        if self.n_observed > self.config.n_ignored:
            for k in np.flatnonzero(counts):
                self.seen[k][0].append(float(n))
                self.seen[k][1].append(float(nats[k] / counts[k]))
            if (self.n_observed - self.config.n_ignored) % self.config.refit_every == 0:
                self.refit()
        # a domain without a law has speed 0,
        # so the others would divide its share
        if any(law is None for law, share in zip(self.laws, self.prior, strict=True) if share > 0):
            return self.prior
        return self._update_policy(float(n))

    def refit(self) -> None:
        """Fit the laws of the domains with enough points again."""
        from scipy.signal import savgol_filter

        for k, (n, losses) in enumerate(self.seen):
            if len(n) >= max(10, self.config.smoothing_window):
                # before the selection of points:
                # the window counts consecutive observations
                smoothed = savgol_filter(losses, self.config.smoothing_window, polyorder=3)
                # all observations up to T = 1000,
                # and 1000 evenly spaced ones of more
                places = np.linspace(0, len(n) - 1, min(len(n), MAX_FIT_POINTS))
                indices = np.unique(places.round().astype(int))
                self.laws[k] = fit_domain_law(np.array(n)[indices], smoothed[indices])

    def _update_policy(self, n: float) -> np.ndarray:
        """Return the policy pi(t) from the current laws, and update the mean policy pibar."""
        config, active = self.config, self.prior > 0
        speeds = np.array([0.0 if law is None else law.speed(n) for law in self.laws])
        # rho_k ~ mu_k h_k^s (-dL_k/dn), eq. in the module docstring
        rho = self.prior * self.history**config.s * speeds
        rho = rho / rho.sum() if rho.sum() > 0 else self.prior
        # a minimum for every domain with a prior, so that none is lost; at most
        # a uniform share
        rho = np.where(active, np.maximum(rho, min(config.min_weight, 1 / active.sum())), 0)
        # the minimum can raise the sum above 1, so that a weight may be
        # slightly below the minimum here
        rho /= rho.sum()
        # pi(t) uses pibar(t-1), hence before the update of the mean below
        policy = config.g2 * rho + (1 - config.g2) * self.mean_policy
        self.n_updates += 1
        # running mean of all rho, including the initial value
        share = 1 / (self.n_updates + 1)
        self.mean_policy = share * rho + (1 - share) * self.mean_policy
        return policy

    def as_dict(self) -> dict[str, Any]:
        """Return the whole state, as in `WeightRule`."""
        return {
            "n_updates": self.n_updates,
            "n_observed": self.n_observed,
            # Python floats: JSON preserves all their bits, so that a resumed
            # run computes the same weights
            "history": self.history.tolist(),
            "mean_policy": self.mean_policy.tolist(),
            "seen": [[list(n), list(losses)] for n, losses in self.seen],
            "laws": [None if law is None else list(vars(law).values()) for law in self.laws],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state, as in `WeightRule`."""
        self.n_updates, self.n_observed = state["n_updates"], state["n_observed"]
        self.history, self.mean_policy = np.array(state["history"]), np.array(state["mean_policy"])
        self.seen = [[list(n), list(losses)] for n, losses in state["seen"]]
        self.laws = [None if law is None else DomainLaw(*law) for law in state["laws"]]


def make_rule(name: str, first: np.ndarray, natural: np.ndarray, where: str) -> WeightRule:
    """Return the rule of that name: ado, or the user's module:Class, which is imported and run.

    first, natural   first weights and sizes of the domains, float64 [K];
                     module:Class gets the first weights

    Raises ValueError, prefixed by `where`, for a class that cannot be imported
    or is not a rule.
    """
    if name == "ado":
        # a domain with weight 0 at the beginning has prior 0 and stays excluded
        return Ado(np.where(first > 0, natural, 0), AdoConfig())
    module, _, class_name = name.partition(":")
    try:
        rule = getattr(importlib.import_module(module), class_name)(first)
    except Exception as error:  # the code of the user may raise anything
        raise ValueError(
            f"{where}: adaptive.rule {name}: got {error!r}, expected ado, or your module:Class. "
            "Add its folder to PYTHONPATH."
        ) from error
    methods = ("observe", "as_dict", "restore")
    missing = [name for name in methods if not callable(getattr(rule, name, None))]
    if missing:
        raise ValueError(f"{where}: adaptive.rule {name}: got no {', '.join(missing)}. Implement them.")
    return rule
