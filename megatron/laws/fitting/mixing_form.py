"""Forms of mixing laws, and their fit to one target.

With w the shares of k domains, the mixture factor m(w) is one of

exponential  exp(sum_j t_j w_j)                    Ye et al., arXiv 2403.16952, eq. 6
power        (sum_j exp(t_j) w_j^g)^-b             a domain is worth a power of its tokens, and domains add

and it acts on a law of N and D in one of these places:

reducible    E + m(w) (A N^-alpha + B D^-beta)
whole        m(w) (E + A N^-alpha + B D^-beta)
data         E + A N^-alpha + B D^-beta m(w)
both         E exp(sum_j s_j w_j) + m(w) (A N^-alpha + B D^-beta)

What a table does not vary, it cannot show: without N (or D) the term of N (or D) is missing, and without
both the law is E + A m(w). With unique tokens U_j of a domain, its D w_j tokens are worth
`effective_count` of them (Muennighoff et al., arXiv 2305.16264), with one R for all domains; w and D
are then the shares and the sum of effective tokens.

All constants are in coordinates theta with a normal prior (`Coordinate`), which is weak for a
table that determines them. It bounds those that a table leaves open: E of one size, alpha of two sizes,
t_j of a domain that has no share anywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron.laws.fitting.newton import Box, minimize_newton, solve_symmetric
from megatron.laws.forms import effective_count

KINDS, PLACES = ("exponential", "power"), ("reducible", "whole", "data", "both")
MIN_SIZES = 3  # for "both", whose floors only sizes show, and to hold out the largest
STEP = 1e-6  # of forward differences in theta
HUBER_SIGMAS = 3.0  # residual at which squares become absolute values
MAX_STEPS, REFIT_STEPS, TOLERANCE = 100, 30, 1e-8  # of a fit and of a replicate; share of the objective
FIRST_SIGMA, MIN_SIGMA = 0.01, 1e-6  # standard deviation of log L, before the first fit, and at least


@dataclass(frozen=True)
class MixtureRuns:
    """Points of a mixing law: shares W [n, k]; N parameters, D tokens, each [n] or None; U [n, k] or None."""

    W: np.ndarray
    N: np.ndarray | None = None
    D: np.ndarray | None = None
    U: np.ndarray | None = None

    def find_largest(self) -> np.ndarray:
        """Return a mask [n] of the runs of the largest N (D, if that has more values), empty below MIN_SIZES."""
        columns = [at for at in (self.N, self.D) if at is not None and len(np.unique(at)) >= MIN_SIZES]
        sizes = max(columns, key=lambda at: len(np.unique(at)), default=np.zeros(len(self.W)))
        return np.asarray((sizes > 0) & (sizes == sizes.max()))

    def select(self, rows: np.ndarray) -> "MixtureRuns":
        """Return the points of a mask or of indices."""
        columns = (self.W, self.N, self.D, self.U)
        return MixtureRuns(*(None if values is None else values[rows] for values in columns))


@dataclass(frozen=True)
class Coordinate:
    """A constant with its prior: mean and standard deviation of its coordinate."""

    name: str
    mean: float
    sd: float


@dataclass(frozen=True)
class MixingForm:
    """A form for k domains.

    axes    which of "N" and "D" have a term
    centre  N and D at which these terms are 1
    lowest  a loss above E, nats; E is a share of it, theta the log of the odds of this share
    size    about the loss above E, nats: the prior mean of the terms
    """

    kind: str
    place: str
    k: int
    axes: str
    centre: tuple[float, float]
    has_unique: bool
    lowest: float = 1.0
    size: float = 1.0

    @property
    def name(self) -> str:
        """Its kind and place."""
        return f"{self.kind}, {self.place}"

    @cached_property
    def coordinates(self) -> list[Coordinate]:
        """The constants in the order of theta."""
        terms = self.axes or "-"
        names = [Coordinate("E", 0.0, 1.0)]
        # two terms share the reducible loss
        names += [Coordinate(f"A_{axis}", math.log(self.size / len(terms)), 2.0) for axis in terms]
        names += [Coordinate(f"exponent_{axis}", math.log(0.35), 0.4) for axis in self.axes]
        if self.kind == "power":
            names += [Coordinate("b", math.log(0.3), 1.0), Coordinate("g", math.log(0.7), 0.4)]
        if self.has_unique:
            names.append(Coordinate("R", math.log(15.0), 1.0))
        if self.place == "both":
            names += [Coordinate(f"s_{j}", 0.0, 0.1) for j in range(self.k)]
        return names + [Coordinate(f"t_{j}", 0.0, 2.0) for j in range(self.k)]

    @property
    def prior(self) -> np.ndarray:
        """Means and standard deviations [2, p]."""
        return np.array([(at.mean, at.sd) for at in self.coordinates]).T

    def log_loss(self, theta: np.ndarray, runs: MixtureRuns) -> np.ndarray:
        """Return log L [P, n] of constants theta [P, p]."""
        W, D = self._count_effective(theta, runs)
        return self._combine(theta, self._log_factor(theta, W)[0], W, runs.N, D)

    def differentiate(self, theta: np.ndarray, runs: MixtureRuns) -> np.ndarray:
        """Return the slopes of log L [P, n, p] at theta [P, p], by forward differences."""
        W, D = self._count_effective(theta, runs)
        factor, slopes = self._log_factor(theta, W)
        # the t_j act through m alone: one difference in log m serves all of them
        at, shifted = (self._combine(theta, factor + step, W, runs.N, D) for step in (0.0, STEP))
        moves = STEP * np.eye(theta.shape[1])[: -self.k]
        others = [(self.log_loss(theta + move, runs) - at) / STEP for move in moves]
        by_factor = (shifted - at)[..., None] / STEP * slopes
        return np.concatenate([np.stack(others, axis=-1), by_factor], axis=-1)

    def _select(self, theta: np.ndarray, name: str) -> np.ndarray:
        index = [at.name for at in self.coordinates].index(name)
        return theta[:, index, None]

    def _count_effective(self, theta: np.ndarray, runs: MixtureRuns) -> tuple[np.ndarray, np.ndarray | None]:
        """Return shares [P or 1, n, k] and tokens [P or 1, n], of what repeated tokens are worth."""
        if not self.has_unique or runs.D is None or runs.U is None:
            return runs.W[None], runs.D
        total = np.maximum(runs.W * runs.D[:, None], 1e-9)
        decay = np.exp(self._select(theta, "R"))[..., None]
        worth = effective_count(np.minimum(runs.U, total), total, decay)
        D = worth.sum(axis=-1)
        return worth / D[..., None], D

    def _log_factor(self, theta: np.ndarray, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log m(w) [P, n] at shares W [P or 1, n, k], and its slopes by t [P, n, k]."""
        t = theta[:, None, -self.k :]
        if self.kind == "exponential":
            return (W * t).sum(axis=-1), np.broadcast_to(W, (len(theta), *W.shape[1:]))
        b, g = (np.exp(self._select(theta, name)) for name in "bg")
        # exp(g log w) is 0 for w = 0
        with np.errstate(divide="ignore"):
            parts = np.exp(g[..., None] * np.log(W) + t)
        worth = np.maximum(parts.sum(axis=-1), 1e-300)
        return -b * np.log(worth), -b[..., None] * parts / worth[..., None]

    def _combine(
        self,
        theta: np.ndarray,
        factor: np.ndarray,
        W: np.ndarray,
        N: np.ndarray | None,
        D: np.ndarray | None,
    ) -> np.ndarray:
        """Return log L [P, n] from log m [P, n]."""
        total = math.log(self.lowest) - np.logaddexp(0, -self._select(theta, "E"))
        total = total + factor * (self.place == "whole")
        if self.place == "both":
            total = total + (theta[:, None, -2 * self.k : -self.k] * W).sum(axis=-1)
        for axis in self.axes or "-":
            term = self._select(theta, f"A_{axis}") + factor * (self.place != "data" or axis == "D")
            for name, at, centre in zip("ND", (N, D), self.centre, strict=True):
                if name == axis and at is not None:
                    term = term - np.exp(self._select(theta, f"exponent_{axis}")) * np.log(at / centre)
            total = np.logaddexp(total, term)
        return np.asarray(total)


@dataclass(frozen=True)
class MixingFit:
    """Constants theta [p] of one target.

    sigma        standard deviation of log L of one run
    n_constants  how many constants the runs determine: the trace of the hat matrix, below p by the prior
    """

    form: MixingForm
    theta: np.ndarray
    sigma: float
    n_constants: float

    def residual(self, runs: MixtureRuns, L: np.ndarray) -> np.ndarray:
        """Return log L minus its fit [n]."""
        return np.asarray(np.log(L) - self.form.log_loss(self.theta[None], runs)[0])


def list_forms(runs: MixtureRuns, L: np.ndarray) -> list[MixingForm]:
    """Return the forms that a table with losses L [n], nats, can tell apart."""
    varied = [at is not None and np.ptp(np.log(at)) > 0.01 for at in (runs.N, runs.D)]
    # repetition changes the effective tokens of equal D
    varied[1] = varied[1] or runs.U is not None
    axes = "".join(axis for axis, is_varied in zip("ND", varied, strict=True) if is_varied)
    n_places = len(PLACES) if runs.find_largest().any() else len(axes) + 1
    centres = [1.0 if at is None else float(np.exp(np.log(at).mean())) for at in (runs.N, runs.D)]
    lowest = float(L.min())
    size = max(float(L.mean()) - lowest / 2, 1e-9)
    base = MixingForm(
        "", "", runs.W.shape[1], axes, (centres[0], centres[1]), runs.U is not None, lowest, size
    )
    forms = [replace(base, kind=kind, place=place) for place in PLACES[:n_places] for kind in KINDS]
    # without a term of D there is nothing for m to act on
    return [form for form in forms if form.place != "data" or "D" in axes]


def fit_mixing_form(form: MixingForm, runs: MixtureRuns, L: np.ndarray) -> MixingFit:
    """Fit a form to losses L [n], nats."""
    prior = form.prior
    sigma, theta, weights = FIRST_SIGMA, prior[:1], np.ones((1, len(L)))
    # the weight of the prior depends on sigma
    for _ in range(3):
        theta = minimise(form, runs, L, theta, sigma, weights, prior[:1])
        slopes = form.differentiate(theta, runs)[0]
        information = slopes.T @ slopes / sigma**2
        covariance = np.linalg.inv(information + np.diag(prior[1] ** -2.0))
        n_constants = float(np.trace(covariance @ information))
        residual = np.log(L) - form.log_loss(theta, runs)[0]
        sigma = max(math.sqrt(float(residual @ residual) / max(len(L) - n_constants, 1.0)), MIN_SIGMA)
    return MixingFit(form, theta[0], sigma, n_constants)


def refit(
    fit: MixingFit,
    runs: MixtureRuns,
    L: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Return theta [R, p] of fits with `weights` [R, n] of the runs.

    With `rng` the means of the prior move by its standard deviations, so that what only the prior
    determines scatters as the prior ("randomize then optimize", Bardsley et al., SIAM J. Sci. Comput. 2014).
    """
    mean, sd = fit.form.prior
    shift = (
        np.zeros((len(weights), len(sd))) if rng is None else rng.normal(size=(len(weights), len(sd))) / sd
    )
    slopes, residual = fit.form.differentiate(fit.theta[None], runs)[0], fit.residual(runs, L)
    # A full Gauss-Newton step first. What the runs leave open is a curved valley, in which steps that must
    # decrease the objective are short: replicates would end near the fit, and their scatter be too small.
    scaled = weights[:, None] * slopes.T / fit.sigma**2
    gradient = (mean - fit.theta) / sd**2 + shift + scaled @ residual
    first = fit.theta + solve_symmetric(scaled @ slopes + np.diag(sd**-2.0), gradient)
    return minimise(fit.form, runs, L, first, fit.sigma, weights, mean + sd**2 * shift, REFIT_STEPS)


def minimise(
    form: MixingForm,
    runs: MixtureRuns,
    L: np.ndarray,
    first: np.ndarray,
    sigma: float,
    weights: np.ndarray,
    centres: np.ndarray,
    n_steps: int = MAX_STEPS,
) -> np.ndarray:
    """Return theta [P, p] of the lowest sum of Huber terms of log L and of the prior, from `first` [P, p].

    weights  of the runs [P, n]
    centres  means of the prior [P, p]
    """
    log_loss, sd, width = np.log(L), form.prior[1], HUBER_SIGMAS * sigma

    def value(theta: np.ndarray, rows: np.ndarray) -> np.ndarray:
        size = np.abs(log_loss - form.log_loss(theta, runs))
        clipped = np.minimum(size, width)
        errors = (weights[rows] * clipped * (2 * size - clipped)).sum(axis=1) / sigma**2
        return np.asarray(errors + (((theta - centres[rows]) / sd) ** 2).sum(axis=1)) / 2

    def derivatives(theta: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        residual, slopes = log_loss - form.log_loss(theta, runs), form.differentiate(theta, runs)
        scaled = weights[rows] * np.minimum(1, width / np.maximum(np.abs(residual), 1e-300)) / sigma**2
        weighted = np.swapaxes(slopes * scaled[..., None], 1, 2)
        gradient = (theta - centres[rows]) / sd**2 - (weighted @ residual[..., None])[..., 0]
        majorant = weighted @ slopes + np.diag(sd**-2.0)
        return gradient, majorant, majorant

    box = Box(np.full(len(sd), -np.inf), np.full(len(sd), np.inf))
    return minimize_newton(first, value, derivatives, box, n_steps, TOLERANCE).phi


def log_target(
    fits: Sequence[MixingFit],
    weights: Sequence[float],
    runs: MixtureRuns,
    thetas: Sequence[np.ndarray] | None = None,
) -> np.ndarray:
    """Return log of the weighted mean of losses [P, n], by the fits of its targets or by thetas [P, p] of each."""
    thetas = [fit.theta[None] for fit in fits] if thetas is None else thetas
    terms = zip(fits, weights, thetas, strict=True)
    return np.log(sum(weight * np.exp(fit.form.log_loss(theta, runs)) for fit, weight, theta in terms))
