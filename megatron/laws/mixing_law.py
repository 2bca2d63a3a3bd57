"""Mixing law: the loss of a mixture of domains, at N parameters and D tokens, from runs of many mixtures.

The forms are those of mixing_form.py. Cross-validation over mixtures chooses among them. It does not show
which place of the mixture factor holds beyond the runs: with three sizes or more the place is that of the
lowest error of the largest size, outside the fit. With losses of several
domains each has constants of its own, and the target is their weighted mean: the law of a mean is no
mean of laws.

A law is not exact. What it misses of a mixture is common to its runs at all sizes: an effect, with the
variance `between` over mixtures. The prediction of a trained mixture contains the expected effect, given its
residuals (best linear unbiased prediction, Henderson, Biometrics 1975), and that of another mixture its
variance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.laws.columns import validate_columns
from megatron.laws.fitting.mixing_form import (
    MIN_SIGMA,
    MixingFit,
    MixingForm,
    MixtureRuns,
    fit_mixing_form,
    list_forms,
    log_target,
    refit,
)
from megatron.laws.fitting.noise import Noise
from megatron.laws.law import expanded_level

if TYPE_CHECKING:
    from pandas import DataFrame

LEVEL = 0.95
N_FOLDS = 10
SUM_TOLERANCE, SAME_SHARE = 0.01, 1e-4  # of the sum of shares; difference of shares of one mixture
SIZES = ("n_params", "train_tokens")
MIN_SPARE = 2  # mixtures beyond the number of domains
WEIGHT, EPOCHS, LOSS = "weight_", "epochs_", "loss_of_"  # prefixes of columns


@dataclass(frozen=True, kw_only=True, repr=False)
class MixingLaw:
    """A fitted mixing law.

    form            the chosen form, "power, reducible" for instance
    errors          {form: root mean square error of log L of mixtures outside the fit}, the lowest first
    far_errors      {form: such an error of the largest size outside the fit}; empty below MIN_SIZES sizes
    targets         {column: weight in the target}
    fits            of each target
    replicates      theta [R, p] of each target; replicate r of all targets weights the mixtures equally
    runs, L         the runs and their target [n], nats per token
    labels          mixture [n] of each run, 0, 1, ...
    effects         of each mixture on log L, and `spared`, the share of their variance that they explain
    noise           of log L: `between` mixtures, and `within`, of runs of one mixture
    not_identified  {domain: reason} of domains whose constants the runs leave open
    """

    form: str
    errors: dict[str, float]
    far_errors: dict[str, float]
    domains: list[str]
    targets: dict[str, float]
    fits: list[MixingFit]
    replicates: list[np.ndarray]
    runs: MixtureRuns
    L: np.ndarray
    labels: np.ndarray
    effects: np.ndarray
    spared: np.ndarray
    noise: Noise
    not_identified: dict[str, str]

    def __repr__(self) -> str:
        mark = f", NOT IDENTIFIED: {', '.join(self.not_identified)}" if self.not_identified else ""
        return f"<MixingLaw {self.form}, {len(self.effects)} mixtures, {len(self.L)} runs{mark}>"

    def log_loss(self, runs: MixtureRuns, r: int | slice | None = None) -> np.ndarray:
        """Return log L of the target [P, n] by replicates `r`; None: by the fit, [1, n]."""
        thetas = None if r is None else [at[r] for at in self.replicates]
        return log_target(self.fits, list(self.targets.values()), runs, thetas)

    @property
    def trained_shares(self) -> np.ndarray:
        """Shares of each mixture [n_mixtures, k]."""
        return self.runs.W[np.unique(self.labels, return_index=True)[1]]

    def match_mixtures(self, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (effect on log L, variance that it leaves), each [n], of mixtures with shares W [n, k]."""
        distance = np.abs(W[:, None] - self.trained_shares).max(axis=-1)
        nearest, is_trained = distance.argmin(axis=1), distance.min(axis=1) < SAME_SHARE
        effect = np.where(is_trained, self.effects[nearest], 0.0)
        return effect, self.noise.between**2 * (1 - np.where(is_trained, self.spared[nearest], 0.0))

    def predict(self, points: "DataFrame | MixtureRuns", level: float = LEVEL) -> "DataFrame":
        """Return loss, confidence_low, confidence_high, predictive_low and predictive_high of each point.

        points  a table with the columns of the fit, without losses

        Both intervals contain what the form misses; the predictive one is of one new run.
        """
        from pandas import DataFrame  # slow import
        from scipy.special import stdtrit

        runs = points if isinstance(points, MixtureRuns) else read_runs(points, self.domains)
        effect, variance = self.match_mixtures(runs.W)
        fitted = self.log_loss(runs)[0]
        wide = expanded_level(level, len(self.effects))
        ends = np.quantile(self.log_loss(runs, slice(None)), [(1 - wide) / 2, (1 + wide) / 2], axis=0)
        columns = {"loss": np.exp(fitted + effect)}
        for name, noise in (("confidence", 0.0), ("predictive", self.noise.within)):
            half = stdtrit(self.noise.dof, (1 + level) / 2) * np.sqrt(variance + noise**2)
            for end, sign, side in zip(ends, (-1, 1), ("low", "high"), strict=True):
                step = sign * np.hypot(np.maximum(sign * (end - fitted), 0.0), half)
                columns[f"{name}_{side}"] = np.exp(fitted + effect + step)
        return DataFrame(columns)


def fit_mixing_law(
    table: "DataFrame",
    *,
    targets: Mapping[str, float] | None = None,
    n_bootstrap: int = 200,
    seed: int = 0,
) -> MixingLaw:
    """Fit a table with a row for each run.

    Its columns are weight_DOMAIN, n_params and train_tokens if they vary, epochs_DOMAIN of repeated domains,
    and loss or loss_of_DOMAIN, nats per token.

    targets  {column of losses: weight in the target}; default: equal weights of all loss_of_DOMAIN, or loss

    Raises ValueError for missing columns, one mixture only, shares that do not sum to 1, or values that are not
    positive numbers.
    """
    domains = [name.removeprefix(WEIGHT) for name in table.columns if name.startswith(WEIGHT)]
    runs = read_runs(table, domains)
    names = [name for name in table.columns if name.startswith(LOSS)] or ["loss"]
    weights = {name: 1 / len(names) for name in names} if targets is None else dict(targets)
    losses = np.stack(validate_columns(**dict(zip(weights, _columns(table, list(weights)).T))), axis=1)
    labels = np.unique(np.round(runs.W / SAME_SHARE), axis=0, return_inverse=True)[1].ravel()
    n_mixtures = int(labels.max()) + 1
    if n_mixtures < 2:
        raise ValueError("mixtures: got 1, expected several. Train other shares of the domains.")
    rng = np.random.default_rng(seed)
    folds = rng.permutation(np.arange(n_mixtures) % N_FOLDS)[labels]
    forms = zip(*(list_forms(runs, L) for L in losses.T), strict=True)
    share = list(weights.values())
    trials = sorted(
        (_try_form(form, share, runs, losses, labels, folds) for form in forms), key=lambda at: at.error
    )
    place = min(trials, key=lambda at: at.far_error).fits[0].form.place
    best = next(trial for trial in trials if trial.fits[0].form.place == place or math.isnan(trial.far_error))
    noise = _estimate_noise(best, labels)
    counts = np.bincount(labels)
    spared = noise.between**2 / np.maximum(noise.between**2 + noise.within**2 / counts, 1e-300)
    units = n_mixtures * rng.dirichlet(np.ones(n_mixtures), n_bootstrap)[:, labels]
    return MixingLaw(
        form=best.name,
        errors={trial.name: trial.error for trial in trials},
        far_errors={trial.name: trial.far_error for trial in trials if not math.isnan(trial.far_error)},
        domains=domains,
        targets=weights,
        fits=best.fits,
        replicates=[refit(fit, runs, L, units, rng) for fit, L in zip(best.fits, losses.T, strict=True)],
        runs=runs,
        L=losses @ share,
        labels=labels,
        effects=spared * np.bincount(labels, best.inside) / counts,
        spared=spared,
        noise=noise,
        not_identified=_find_open(domains, runs.W, n_mixtures),
    )


@dataclass(frozen=True)
class _Trial:
    """A form with the fits of all targets, and the residuals of log L of the target [n].

    inside, outside  of fits with the run, and without its mixture
    far_error        root mean square error of runs of the largest size by a fit without that size, to which the
                     effects of the mixtures are added; NaN with fewer than MIN_SIZES sizes
    """

    name: str
    fits: list[MixingFit]
    inside: np.ndarray
    outside: np.ndarray
    far_error: float

    @property
    def error(self) -> float:
        return float(np.sqrt((self.outside**2).mean()))


def _try_form(
    forms: Sequence[MixingForm],
    weights: Sequence[float],
    runs: MixtureRuns,
    losses: np.ndarray,
    labels: np.ndarray,
    folds: np.ndarray,
) -> _Trial:
    fits = [fit_mixing_form(form, runs, L) for form, L in zip(forms, losses.T, strict=True)]
    log_loss = np.log(losses @ weights)
    is_far = runs.find_largest()
    # the last row is without the largest size
    is_used = np.vstack([folds != np.arange(int(folds.max()) + 1)[:, None], ~is_far])
    thetas = [refit(fit, runs, L, is_used) for fit, L in zip(fits, losses.T, strict=True)]
    residual = log_loss - log_target(fits, weights, runs, thetas)
    outside = residual[folds, np.arange(len(folds))]
    far_error = math.nan
    if is_far.any():
        n_near = np.maximum(np.bincount(labels, ~is_far), 1)
        effects = np.bincount(labels, residual[-1] * ~is_far) / n_near
        far_error = float(np.sqrt(((residual[-1] - effects[labels])[is_far] ** 2).mean()))
    inside = log_loss - log_target(fits, weights, runs)[0]
    return _Trial(forms[0].name, fits, inside, outside, far_error)


def _estimate_noise(trial: _Trial, labels: np.ndarray) -> Noise:
    """Estimate the noise without bias from residuals inside and outside of the fit.

    For least squares without the rows g, the outside residual is (I - H_gg)^-1 times the inside one, whose
    covariance is sigma^2 (I - H_gg): so E[inside outside'] is sigma^2 I, whatever the leverage. Products of
    two runs of one mixture have the expectation of `between`^2.
    """
    products = trial.inside * trial.outside
    n, counts = len(labels), np.bincount(labels)
    sums = np.bincount(labels, trial.inside) * np.bincount(labels, trial.outside)
    n_pairs = float((counts**2).sum() - n)
    total = max(float(products.mean()), MIN_SIGMA**2)
    between = min(max(float(sums.sum() - products.sum()) / max(n_pairs, 1.0), 0.0), total)
    # Satterthwaite
    share = 1 - np.mean([fit.n_constants for fit in trial.fits]) / n
    dof = share * total**2 / (between**2 / len(counts) + (total - between) ** 2 / n)
    return Noise(math.sqrt(total), max(dof, 1.0), math.sqrt(between), math.sqrt(total - between), len(counts))


def read_runs(table: "DataFrame", domains: Sequence[str]) -> MixtureRuns:
    """Return the runs of a table. Raises ValueError as `fit_mixing_law`."""
    W = normalise_shares(_columns(table, [WEIGHT + name for name in domains]))
    N, D = (validate_columns(**{name: table[name]})[0] if name in table else None for name in SIZES)
    names = [EPOCHS + name for name in domains]
    if not any(name in table for name in names):
        return MixtureRuns(W, N, D)
    if D is None:
        raise ValueError(f"{SIZES[1]}: got no column, expected the tokens of each run beside {EPOCHS}...")
    epochs = np.stack([table[name] if name in table else np.zeros(len(W)) for name in names], axis=1)
    # 0 epochs, or none given, are of text that is not repeated
    with np.errstate(divide="ignore", invalid="ignore"):
        return MixtureRuns(W, N, D, np.where(epochs > 0, W * D[:, None] / epochs, np.inf))


def normalise_shares(W: np.ndarray) -> np.ndarray:
    """Return shares [n, k] that sum to 1 exactly. Raises ValueError where the sum is not 1 within 1 %."""
    total = W.sum(axis=1)
    wrong = np.flatnonzero(~(W >= 0).all(axis=1) | ~(np.abs(total - 1) <= SUM_TOLERANCE))
    if len(wrong):
        raise ValueError(
            f"weights, run {wrong[0] + 1}: got {W[wrong[0]].min():.3g} as the lowest and {total[wrong[0]]:.4g} as the "
            "sum, expected 0 or more and 1. Divide the weights of a run by their sum."
        )
    return W / total[:, None]


def _columns(table: "DataFrame", names: Sequence[str]) -> np.ndarray:
    """Return columns [n, len(names)]. Raises ValueError for a missing one, or none."""
    missing = [name for name in names if name not in table] or [WEIGHT + "DOMAIN"] * (not names)
    if missing:
        raise ValueError(
            f"{missing[0]}: got no such column, expected one of {', '.join(map(str, table.columns))}"
        )
    return table[list(names)].to_numpy(dtype=float)


def _find_open(domains: Sequence[str], W: np.ndarray, n_mixtures: int) -> dict[str, str]:
    if n_mixtures < len(domains) + MIN_SPARE:
        reason = (
            f"{n_mixtures} mixtures, expected {len(domains) + MIN_SPARE} or more for {len(domains)} domains"
        )
        return dict.fromkeys(domains, reason)
    return {
        name: "no different shares"
        for name, low, high in zip(domains, W.min(axis=0), W.max(axis=0), strict=True)
        if high - low < SAME_SHARE
    }
