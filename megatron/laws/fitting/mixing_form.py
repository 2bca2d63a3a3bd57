"""Forms of mixing laws, and their fit to one target.

With w the shares of k domains, the mixture factor is

m(w) = (sum_j exp(t_j) w_j^g)^-b             a domain is worth a power of its tokens, and domains add

and it acts on a law of N and D in one of these places:

reducible    E + m(w) (A N^-alpha + B D^-beta)
whole        m(w) (E + A N^-alpha + B D^-beta)
both         E exp(sum_j s_j w_j) + m(w) (A N^-alpha + B D^-beta)

On the 512 mixtures of arXiv 2407.01492 the factor exp(sum_j t_j w_j) of arXiv 2403.16952 had two to six
times the cross-validated error for each of 13 domains, and regression trees ranked larger models worse, so
neither is here.

What a table does not vary, it cannot show: without N (or D) the term of N (or D) is missing, and without
both the law is E + A m(w). With unique tokens U_j of a domain, its D w_j tokens are worth
`effective_count` of them (Muennighoff et al., arXiv 2305.16264), with one R for all domains; w and D
are then the shares and the sum of effective tokens.

All constants are in coordinates theta with a normal prior (`MixingForm.prior`), which is weak for a
table that determines them. It bounds those that a table leaves open: E of one size, alpha of two sizes,
t_j of a domain that has no share anywhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron.laws.fitting.newton import Box, Derivatives, minimize_newton, solve_symmetric
from megatron.laws.forms import effective_count

PLACES = ("reducible", "whole", "both")
# sizes for "both", whose floors only sizes show, and to hold out the largest; log distance of equal sizes
MIN_SIZES, SAME_SIZE = 3, 0.01
STEP = 1e-6  # of forward differences in theta
HUBER_SIGMAS = 3.0  # residual at which squares become absolute values
MAX_STEPS, TOLERANCE = 30, 1e-8  # of a search; share of the objective
FIRST_SIGMA, MIN_SIGMA = 0.01, 1e-6  # standard deviation of log L, before the first fit, and at least


@dataclass(frozen=True)
class MixtureRuns:
    """Points of a mixing law: shares W [n, k]; N parameters, D tokens, each [n] or None; U [n, k] or None."""

    W: np.ndarray
    N: np.ndarray | None = None
    D: np.ndarray | None = None
    U: np.ndarray | None = None

    def log_compute(self) -> np.ndarray:
        """Return log(N D) [n], without what is unknown."""
        logs = [np.log(sizes) for sizes in (self.N, self.D) if sizes is not None]
        return np.asarray(np.sum([np.zeros(len(self.W)), *logs], axis=0))

    def find_largest(self) -> np.ndarray:
        """Return a mask [n] of the runs of the largest N, or D; no run if neither has MIN_SIZES values."""
        for sizes in (self.N, self.D):
            if sizes is not None and len(np.unique(bins := np.rint(np.log(sizes) / SAME_SIZE))) >= MIN_SIZES:
                return np.asarray(bins == bins.max())
        return np.zeros(len(self.W), dtype=bool)


@dataclass(frozen=True)
class MixingForm:
    """A form for k domains.

    centre  {axis: value}: which of "N" and "D" have a term, and where it is 1
    lowest  a loss above E, nats; E is a share of it, theta the log of the odds of this share
    size    about the loss above E, nats: the prior mean of the terms
    """

    place: str
    k: int
    centre: Mapping[str, float]
    has_unique: bool
    lowest: float
    size: float

    @cached_property
    def prior(self) -> dict[str, tuple[float, float]]:
        """Mean and standard deviation of each coordinate, in the order of theta."""
        prior = {"E": (0.0, 1.0)}
        terms = self.centre or "-"
        # two terms share the reducible loss
        prior |= {f"A_{axis}": (math.log(self.size / len(terms)), 2.0) for axis in terms}
        prior |= {f"exponent_{axis}": (math.log(0.35), 0.4) for axis in self.centre}
        prior |= {"b": (math.log(0.3), 1.0), "g": (math.log(0.7), 0.4)}
        if self.has_unique:
            prior["R"] = (math.log(15.0), 1.0)
        if self.place == "both":
            prior |= {f"s_{j}": (0.0, 0.1) for j in range(self.k)}
        return prior | {f"t_{j}": (0.0, 2.0) for j in range(self.k)}

    @property
    def moments(self) -> np.ndarray:
        """Means and standard deviations of the prior [2, p]."""
        return np.array(list(self.prior.values())).T

    def log_loss(self, theta: np.ndarray, runs: MixtureRuns) -> np.ndarray:
        """Return log L [P, n] of constants theta [P, p]."""
        worth = self._count_effective(theta, runs)
        return self._combine(theta, self._log_factor(theta, worth.W)[0], worth)

    def differentiate(self, theta: np.ndarray, runs: MixtureRuns) -> np.ndarray:
        """Return the slopes of log L [P, n, p] at theta [P, p], by forward differences."""
        worth = self._count_effective(theta, runs)
        factor, slopes = self._log_factor(theta, worth.W)
        # the t_j act through m alone: one difference in log m serves all of them
        at, shifted = (self._combine(theta, factor + step, worth) for step in (0.0, STEP))
        moves = STEP * np.eye(theta.shape[1])[: -self.k]
        others = [(self.log_loss(theta + move, runs) - at) / STEP for move in moves]
        by_factor = (shifted - at)[..., None] / STEP * slopes
        return np.concatenate([np.stack(others, axis=-1), by_factor], axis=-1)

    def _select(self, theta: np.ndarray, name: str) -> np.ndarray:
        return theta[:, list(self.prior).index(name), None]

    def _count_effective(self, theta: np.ndarray, runs: MixtureRuns) -> MixtureRuns:
        """Return W [P or 1, n, k] and D [n] or [P, n] of what repeated tokens are worth."""
        if not self.has_unique or runs.D is None or runs.U is None:
            return replace(runs, W=runs.W[None])
        # tokens of each domain, [n, k]; at most as many are unique
        total = np.maximum(runs.W * runs.D[:, None], 1e-9)
        decay = np.exp(self._select(theta, "R"))[..., None]
        worth = effective_count(np.minimum(runs.U, total), total, decay)
        D = worth.sum(axis=-1)
        return replace(runs, W=worth / D[..., None], D=D)

    def _log_factor(self, theta: np.ndarray, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log m(w) [P, n] at shares W [P or 1, n, k], and its slopes by t [P, n, k]."""
        t = theta[:, None, -self.k :]
        b, g = (np.exp(self._select(theta, name)) for name in "bg")
        # exp(g log w) is 0 for w = 0
        with np.errstate(divide="ignore"):
            parts = np.exp(g[..., None] * np.log(W) + t)
        # d log m / d t_j = -b exp(t_j) w_j^g / sum
        worth = np.maximum(parts.sum(axis=-1), 1e-300)
        return -b * np.log(worth), -b[..., None] * parts / worth[..., None]

    def _combine(self, theta: np.ndarray, factor: np.ndarray, runs: MixtureRuns) -> np.ndarray:
        """Return log L [P, n] from log m [P, n] and effective runs."""
        # log E: a share of `lowest`, whose log odds are theta
        total = math.log(self.lowest) - np.logaddexp(0, -self._select(theta, "E"))
        total = total + factor * (self.place == "whole")
        if self.place == "both":
            total = total + (theta[:, None, -2 * self.k : -self.k] * runs.W).sum(axis=-1)
        for axis in self.centre or "-":
            term = self._select(theta, f"A_{axis}") + factor
            if axis in self.centre:
                ratio = getattr(runs, axis) / self.centre[axis]
                term = term - np.exp(self._select(theta, f"exponent_{axis}")) * np.log(ratio)
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


def list_forms(runs: MixtureRuns, L: np.ndarray) -> list[MixingForm]:
    """Return the forms that a table with losses L [n], nats, can tell apart."""
    centre = {}
    for axis, at in (("N", runs.N), ("D", runs.D)):
        # repetition changes the effective tokens of equal D
        if at is not None and (np.ptp(np.log(at)) > SAME_SIZE or (axis == "D" and runs.U is not None)):
            centre[axis] = float(np.exp(np.log(at).mean()))
    n_places = 3 if runs.find_largest().any() else min(len(centre) + 1, 2)
    lowest = float(L.min())
    settings = (runs.W.shape[1], centre, runs.U is not None, lowest, float(L.mean()) - lowest / 2)
    return [MixingForm(place, *settings) for place in PLACES[:n_places]]


def fit_mixing_form(form: MixingForm, runs: MixtureRuns, L: np.ndarray) -> MixingFit:
    """Fit a form to losses L [n], nats."""
    mean, sd = form.moments
    fit = MixingFit(form, mean, FIRST_SIGMA, 0.0)
    # the weight of the prior depends on sigma
    for _ in range(4):
        theta = minimise(fit, runs, L, fit.theta[None], np.ones((1, len(L))), mean[None])
        slopes = form.differentiate(theta, runs)[0]
        information = slopes.T @ slopes / fit.sigma**2
        n_constants = float(np.trace(np.linalg.solve(information + np.diag(sd**-2.0), information)))
        residual = np.log(L) - form.log_loss(theta, runs)[0]
        sigma = math.sqrt(float(residual @ residual) / max(len(L) - n_constants, 1.0))
        fit = MixingFit(form, theta[0], max(sigma, MIN_SIGMA), n_constants)
    return fit


def refit(
    fit: MixingFit,
    runs: MixtureRuns,
    L: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Return theta [P, p] of fits with `weights` [P, n] of the runs.

    With `rng` the means of the prior move by its standard deviations, so that what only the prior
    determines scatters as the prior ("randomize then optimize", Bardsley et al., SIAM J. Sci. Comput. 2014).
    """
    mean, sd = fit.form.moments
    centres = np.tile(mean, (len(weights), 1))
    if rng is not None:
        centres += sd * rng.normal(size=centres.shape)
    # A full Gauss-Newton step first. What the runs leave open is a curved valley, in which steps that must
    # decrease the objective are short: replicates would end near the fit, and their scatter be too small.
    slopes = fit.form.differentiate(fit.theta[None], runs)[0]
    residual = np.log(L) - fit.form.log_loss(fit.theta[None], runs)[0]
    scaled = weights[:, None] * slopes.T / fit.sigma**2
    gradient = (centres - fit.theta) / sd**2 + scaled @ residual
    first = fit.theta + solve_symmetric(scaled @ slopes + np.diag(sd**-2.0), gradient)
    return minimise(fit, runs, L, first, weights, centres)


def minimise(
    fit: MixingFit,
    runs: MixtureRuns,
    L: np.ndarray,
    first: np.ndarray,
    weights: np.ndarray,
    means: np.ndarray,
) -> np.ndarray:
    """Return theta [P, p] of the lowest sum of Huber terms of log L and of the prior, from `first` [P, p].

    weights  of the runs [P, n]
    means    of the prior [P, p]
    """
    form, log_loss, sd, width = fit.form, np.log(L), fit.form.moments[1], HUBER_SIGMAS * fit.sigma

    def value(theta: np.ndarray, rows: np.ndarray) -> np.ndarray:
        # Huber: squares up to `width`, lines beyond
        size = np.abs(log_loss - form.log_loss(theta, runs))
        clipped = np.minimum(size, width)
        errors = (weights[rows] * clipped * (2 * size - clipped)).sum(axis=1) / fit.sigma**2
        return np.asarray(errors + (((theta - means[rows]) / sd) ** 2).sum(axis=1)) / 2

    def derivatives(theta: np.ndarray, rows: np.ndarray) -> Derivatives:
        residual, slopes = log_loss - form.log_loss(theta, runs), form.differentiate(theta, runs)
        # as weighted least squares: a residual beyond `width` has the weight width / size
        scaled = weights[rows] * np.minimum(1, width / np.maximum(np.abs(residual), 1e-300)) / fit.sigma**2
        weighted = np.swapaxes(slopes * scaled[..., None], 1, 2)
        gradient = (theta - means[rows]) / sd**2 - (weighted @ residual[..., None])[..., 0]
        majorant = weighted @ slopes + np.diag(sd**-2.0)
        return gradient, majorant, majorant

    box = Box(np.full(len(sd), -np.inf), np.full(len(sd), np.inf))
    return minimize_newton(first, value, derivatives, box, MAX_STEPS, TOLERANCE).phi


def log_sum(forms: Sequence[MixingForm], thetas: Sequence[np.ndarray], runs: MixtureRuns) -> np.ndarray:
    """Return the log of the sum of the losses of all targets [P, n], by theta [P, p] of each."""
    terms = [form.log_loss(theta, runs) for form, theta in zip(forms, thetas, strict=True)]
    return np.asarray(np.logaddexp.reduce(terms))
