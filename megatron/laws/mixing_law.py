"""Mixing law: the loss of a mixture of domains, at N parameters and D tokens, from runs of many mixtures.

The forms are those of mixing_form.py. Cross-validation over mixtures chooses among them. It does not show
which place of the mixture factor holds beyond the runs: with three sizes or more the errors of the largest
one, predicted by a fit to the others, count as much, and the lowest product of both errors is chosen.
With losses of several domains each has constants of its
own, and the target is their weighted sum: the law of a mean is no mean of laws.

A law is not exact. What it misses of a mixture is common to its runs at all sizes: an effect, with the
variance `between` over mixtures. The prediction of a trained mixture contains the expected effect, given its
residuals (best linear unbiased prediction, Henderson, Biometrics 1975), and that of another mixture its
variance. With one run of each mixture an effect cannot be told from noise: all of it may be an effect,
and none is predicted. Beyond the largest run the slope by compute drifts, for each mixture on its own, as
in compute_trend.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np

from megatron.laws.columns import validate_columns
from megatron.laws.fitting import mixing_form
from megatron.laws.fitting.compute_trend import PRIOR
from megatron.laws.fitting.mixing_form import SAME_SIZE, MixingFit, MixingForm, MixtureRuns
from megatron.laws.fitting.noise import Noise
from megatron.laws.law import expanded_level

LEVEL = 0.95
N_FOLDS = 10
FIT, REPLICATES = slice(1), slice(1, None)  # rows of thetas
SUM_TOLERANCE, SAME_SHARE = 0.01, 1e-4  # of the sum of shares; difference of shares of one mixture
SIZES = ("n_params", "train_tokens")
MIN_SPARE = 2  # mixtures beyond the number of domains
WEIGHT, EPOCHS, LOSS = "weight_", "epochs_", "loss_of_"  # prefixes of columns
DECAY = "weight_decay"  # a column of other tables, and no domain


@dataclass(frozen=True, kw_only=True, repr=False)
class MixingLaw:
    """A fitted mixing law.

    form            the chosen place of the mixture factor, "reducible" for instance
    errors          {form: root mean square errors of log L of mixtures outside the fit, and of the largest
                    size outside the fit; Inf for the latter below MIN_SIZES sizes}
    targets         {column: weight in the target}
    forms, thetas   of each target: theta [1 + R, p] of the fit and its replicates. Replicate r of all targets
                    weights the mixtures equally
    runs            the fitted runs
    mixtures        shares [n_mixtures, k]
    effects         of each mixture on log L, and `spared`, the share of their variance that they explain
    drift           scale of the drift of the slope of log(L - E) beyond the largest run, as of TrendPrior
    noise           of log L: `between` mixtures, and `within`, of runs of one mixture, 0 without two of one
    not_identified  domains whose constants the runs leave open: those of equal shares in all mixtures, and
                    all with fewer mixtures than domains and MIN_SPARE
    """

    form: str
    errors: dict[str, tuple[float, float]]
    domains: list[str]
    targets: dict[str, float]
    forms: list[MixingForm]
    thetas: list[np.ndarray]
    runs: MixtureRuns
    mixtures: np.ndarray
    effects: np.ndarray
    spared: np.ndarray
    noise: Noise
    not_identified: list[str]
    drift: float = PRIOR.drift

    def __repr__(self) -> str:
        mark = f", NOT IDENTIFIED: {', '.join(self.not_identified)}" if self.not_identified else ""
        return f"<MixingLaw {self.form}, {len(self.effects)} mixtures, {len(self.runs.W)} runs{mark}>"

    def log_loss(self, runs: MixtureRuns, rows: slice = FIT) -> np.ndarray:
        """Return log L of the target [P, n] by the fit, [1, n], or by rows of `thetas`."""
        return mixing_form.log_sum(self.forms, [theta[rows] for theta in self.thetas], runs)

    def match_mixtures(self, W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (effect on log L, variance that it leaves), each [n], of mixtures with shares W [n, k]."""
        # [n, n_mixtures]: the largest difference of a share
        distance = np.abs(W[:, None] - self.mixtures).max(axis=-1)
        nearest, is_trained = distance.argmin(axis=1), distance.min(axis=1) < SAME_SHARE
        effect = np.where(is_trained, self.effects[nearest], 0.0)
        return effect, self.noise.between**2 * (1 - np.where(is_trained, self.spared[nearest], 0.0))

    def drift_variance(self, runs: MixtureRuns) -> np.ndarray:
        """Return the variance of log L [n] by the drift of the slope beyond the largest N D.

        The slope is known between the two largest sizes, a distance `behind`: an integrated Wiener process
        that is known at both has at a distance d the variance d^2 (behind + d) / 3.
        """
        trained, at = self.runs.log_compute(), runs.log_compute()
        # between the two largest sizes; 0 for one
        behind = trained.max() - trained[trained < trained.max() - SAME_SIZE].max(initial=trained.min())
        ahead = np.maximum(at - trained.max(), 0.0)
        endless = replace(runs, U=None, **dict.fromkeys(self.forms[0].centre, np.full(len(at), np.inf)))
        reducible = 1 - np.exp(self.log_loss(endless)[0] - self.log_loss(runs)[0])
        return np.asarray((self.drift * reducible * ahead) ** 2 * (behind + ahead) / 3)

    def predict(self, points: Any, level: float = LEVEL) -> Any:
        """Return a data frame: loss, and low and high ends of the confidence and predictive intervals.

        Columns loss, confidence_low, confidence_high, predictive_low, predictive_high, a row for each point.

        points  MixtureRuns, or a data frame with the columns of the fit, without losses

        Both intervals contain what the form misses; the predictive one is of one new run.
        """
        from pandas import DataFrame  # slow import
        from scipy.special import stdtrit

        runs = points if isinstance(points, MixtureRuns) else read_runs(points, self.domains)
        effect, variance = self.match_mixtures(runs.W)
        variance = variance + self.drift_variance(runs)
        fitted = self.log_loss(runs)[0]
        # percentiles of a bootstrap of few mixtures are too narrow: a higher level makes up for it
        wide = expanded_level(level, len(self.effects))
        ends = np.quantile(self.log_loss(runs, REPLICATES), [(1 - wide) / 2, (1 + wide) / 2], axis=0)
        columns = {"loss": np.exp(fitted + effect)}
        for name, noise in (("confidence", 0.0), ("predictive", self.noise.within)):
            # what no fit explains: errors of the form, and for one run its noise
            half = stdtrit(self.noise.dof, (1 + level) / 2) * np.sqrt(variance + noise**2)
            for end, sign, side in zip(ends, (-1, 1), ("low", "high"), strict=True):
                # each side adds in quadrature; an end on the wrong side of the fit counts as 0
                step = sign * np.hypot(np.maximum(sign * (end - fitted), 0.0), half)
                columns[f"{name}_{side}"] = np.exp(fitted + effect + step)
        return DataFrame(columns)


def fit_mixing_law(
    table: Any, *, targets: Mapping[str, float] | None = None, n_bootstrap: int = 200, seed: int = 0
) -> MixingLaw:
    """Fit a data frame with a row for each run.

    Its columns are weight_DOMAIN (weight_decay is none), n_params and train_tokens if they vary,
    epochs_DOMAIN of repeated domains, and loss or loss_of_DOMAIN, nats per token.

    targets  {column of losses: weight in the target}; default: equal weights of all loss_of_DOMAIN, or loss

    Raises ValueError for missing columns, one mixture only, shares that do not sum to 1, epochs of an unknown
    domain or without tokens, or values that are not positive numbers.
    """
    domains = [at.removeprefix(WEIGHT) for at in table.columns if at.startswith(WEIGHT) and at != DECAY]
    runs = read_runs(table, domains)
    names = [name for name in table.columns if name.startswith(LOSS)] or ["loss"]
    targets = dict(targets or dict.fromkeys(names, 1 / len(names)))
    # the target is the sum of the weighted losses
    weighted = _read_columns(table, list(targets)) * list(targets.values())
    losses = np.array(validate_columns(**dict(zip(targets, weighted.T, strict=True))))
    rounded = np.round(runs.W / SAME_SHARE)
    _, first, labels = np.unique(rounded, axis=0, return_index=True, return_inverse=True)
    counts = np.bincount(labels)
    n_mixtures = len(counts)
    if n_mixtures < 2:
        raise ValueError(f"mixtures: got {n_mixtures}, expected several. Train other shares of the domains.")
    rng = np.random.default_rng(seed)
    # all runs of a mixture are in one fold: a law must predict mixtures that it has not seen
    folds = rng.permutation(np.arange(n_mixtures) % N_FOLDS)[labels]
    # a form has other scales for each target
    every = zip(*(mixing_form.list_forms(runs, L) for L in losses), strict=True)
    trials = [_try_form(forms, runs, losses, labels, folds) for forms in every]
    # without a second error, which is Inf, the first one decides
    best = min(trials, key=lambda at: at.errors[0] * min(at.errors[1], 1.0))
    noise = _estimate_noise(best, labels)
    # best linear unbiased prediction: the mean residual of n runs of a mixture, shrunk by its reliability
    spared = noise.between**2 / np.maximum(noise.between**2 + noise.within**2 / counts, 1e-300)
    spared *= len(labels) > n_mixtures
    # the Bayesian bootstrap (Rubin, Ann. Stat. 9, 1981), with a weight for each mixture
    units = n_mixtures * rng.dirichlet(np.ones(n_mixtures), n_bootstrap)[:, labels]
    is_open = (np.ptp(runs.W, axis=0) < SAME_SHARE) | (n_mixtures < len(domains) + MIN_SPARE)
    pairs = list(zip(best.fits, losses, strict=True))
    return MixingLaw(
        form=best.fits[0].form.place,
        errors={trial.fits[0].form.place: trial.errors for trial in trials},
        domains=domains,
        targets=targets,
        forms=[fit.form for fit in best.fits],
        thetas=[np.vstack([fit.theta, mixing_form.refit(fit, runs, L, units, rng)]) for fit, L in pairs],
        runs=runs,
        mixtures=runs.W[first],
        effects=spared * np.bincount(labels, best.inside) / counts,
        spared=spared,
        noise=noise,
        not_identified=list(compress(domains, is_open)),
    )


@dataclass(frozen=True)
class _Trial:
    """Fits of all targets by one form.

    inside, outside  residuals of log L of the target [n], of fits with the run and without its mixture
    errors           as in MixingLaw
    """

    fits: list[MixingFit]
    inside: np.ndarray
    outside: np.ndarray
    errors: tuple[float, float]


def _try_form(
    forms: Sequence[MixingForm], runs: MixtureRuns, losses: np.ndarray, labels: np.ndarray, folds: np.ndarray
) -> _Trial:
    fits = [mixing_form.fit_mixing_form(form, runs, L) for form, L in zip(forms, losses, strict=True)]
    is_far = runs.find_largest()
    # fits without each fold, without the largest size, and with all runs
    weights = np.vstack([folds != np.arange(N_FOLDS)[:, None], ~is_far, np.ones(len(folds))])
    thetas = [mixing_form.refit(fit, runs, L, weights) for fit, L in zip(fits, losses, strict=True)]
    residual = np.log(losses.sum(axis=0)) - mixing_form.log_sum(forms, thetas, runs)
    outside = residual[folds, np.arange(len(folds))]
    # a mixture of the largest size is predicted with its effect on smaller ones
    effects = np.bincount(labels, residual[-2] * ~is_far) / np.maximum(np.bincount(labels, ~is_far), 1)
    far = (residual[-2] - effects[labels])[is_far]
    far_error = math.sqrt((far**2).mean()) if len(far) else math.inf
    return _Trial(fits, residual[-1], outside, (math.sqrt((outside**2).mean()), far_error))


def _estimate_noise(trial: _Trial, labels: np.ndarray) -> Noise:
    """Estimate the noise without bias from residuals inside and outside of the fit.

    For least squares without the rows g, the outside residual is (I - H_gg)^-1 times the inside one, whose
    covariance is sigma^2 (I - H_gg): so E[inside outside'] is sigma^2 I, whatever the leverage.
    """
    n, counts = len(labels), np.bincount(labels)
    total = max(float((trial.inside * trial.outside).mean()), mixing_form.MIN_SIGMA**2)
    # products of what differs from the mean of the mixture
    parts = [at - (np.bincount(labels, at) / counts)[labels] for at in (trial.inside, trial.outside)]
    within = float(parts[0] @ parts[1]) / (n - len(counts)) if n > len(counts) else 0.0
    within = min(max(within, 0.0), total)
    between = total - within
    # Satterthwaite
    share = 1 - sum(fit.n_constants for fit in trial.fits) / len(trial.fits) / n
    dof = share * total**2 / (between**2 / len(counts) + within**2 / n)
    return Noise(math.sqrt(total), max(dof, 1.0), math.sqrt(between), math.sqrt(within), len(counts))


def read_runs(table: Any, domains: Sequence[str]) -> MixtureRuns:
    """Return the runs of a table. Raises ValueError as `fit_mixing_law`."""
    W = normalise_shares(_read_columns(table, [WEIGHT + name for name in domains]), domains)
    N, D = (validate_columns(**{name: table[name]})[0] if name in table else None for name in SIZES)
    for name in table.columns:
        if name.startswith(EPOCHS) and (D is None or name.removeprefix(EPOCHS) not in domains):
            raise ValueError(f"{name}: got no {SIZES[1]}, or no weight of this domain. Add or rename it.")
    # text without a column, or of 0 epochs, is not repeated
    epochs = np.stack([table.get(EPOCHS + name, np.zeros(len(W))) for name in domains], axis=1).astype(float)
    if D is None or not epochs.any():
        return MixtureRuns(W, N, D)
    unique = W * D[:, None] / np.where(epochs > 0, epochs, np.nan)
    return MixtureRuns(W, N, D, np.where(unique > 0, unique, np.inf))


def normalise_shares(W: np.ndarray, domains: Sequence[str]) -> np.ndarray:
    """Return shares [n, k] that sum to 1 exactly. Raises ValueError where the sum is not 1 within 1 %."""
    total = W.sum(axis=1)
    is_valid = (W >= 0).all(axis=1) & (np.abs(total - 1) <= SUM_TOLERANCE)
    if not is_valid.all():
        row = int(is_valid.argmin())
        raise ValueError(
            f"weights of {', '.join(domains)}, row {row + 1}: got {W[row].round(4).tolist()} with a sum of "
            f"{total[row]:.4g}, expected 0 or more and 1. Divide the weights of each run by their sum."
        )
    return W / total[:, None]


def _read_columns(table: Any, names: Sequence[str]) -> np.ndarray:
    """Return columns [n, len(names)]. Raises ValueError for a missing one, or none."""
    missing = [name for name in names or [WEIGHT + "DOMAIN"] if name not in table]
    if missing:
        columns = ", ".join(map(str, table.columns))
        raise ValueError(f"{missing[0]}: got no such column, expected one of {columns}")
    return table[list(names)].to_numpy(dtype=float)
