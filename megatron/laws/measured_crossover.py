"""Compute at which one objective is measured to beat another on the same unique text, without a law.

The runs of an objective on U unique tokens are grouped into settings: runs
that differ only in their seed. Settings are selected by their mean loss on
one text (validation) and reported by the loss on another (test). A second text
removes the luck of the text, not of the seed: losses of one run on two
texts correlate. So the selected settings are trained again with fresh seeds,
which took no part in the selection, and only these are reported with an
interval. C_crit is the compute at which the selected loss of the second
objective comes down to the first's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.laws.power_law import PowerLaw, fit_power

N_DRAWS = 2000
LEVEL = 0.95
ONE_SD = 0.6827  # share of a normal distribution within one standard deviation
TOLERANCE = 1 + 1e-9  # equal budgets may differ by rounding
MIN_DOF = 4  # degrees of freedom of the noise of a setting


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed.

    C           FLOPs of a run
    validation  [seeds] losses that select, nats per token
    test        [seeds] losses of the same runs on the text that is reported
    fresh       [fresh seeds] losses on that text of seeds that took no part in the selection
    """

    name: str
    C: float
    validation: np.ndarray
    test: np.ndarray
    fresh: np.ndarray = field(default_factory=lambda: np.empty(0))

    @property
    def reported(self) -> np.ndarray:
        """Losses that are reported, [seeds]: of fresh seeds where there are any."""
        return self.fresh if len(self.fresh) else self.test


@dataclass(frozen=True)
class BestSetting:
    """The setting of the least mean validation loss.

    loss      mean reported loss, nats per token
    seed_se   its standard error over fresh seeds, by the scatter of settings of similar
              loss; None without
    is_fresh  the seeds of `loss` took no part in the selection;
              otherwise it is biased downwards
    """

    name: str
    C: float
    loss: float
    seed_se: float | None
    n_seeds: int
    is_fresh: bool


@dataclass(frozen=True)
class MeasuredCrossover:
    """The comparison of two objectives on U unique tokens.

    first, second   best settings at any compute
    C               C_crit in FLOPs; None if the second objective
                    was not better at any measured compute
    interval        of C at LEVEL by the noise of seeds, for the settings
                    that were selected; an end is None where draws have no crossing;
                    None without fresh seeds of both objectives. The noise of the test
                    text is not in it: both objectives are scored on the same text
    between         names of the settings of the second objective below and above the crossing
    share_crossed   share of draws with a crossing; None without fresh seeds
    gap, gap_se     first minus second best loss: positive
                    where the second is better at any compute
    draws           [N_DRAWS] C_crit of each draw, inf without
                    a crossing; empty without fresh seeds
    """

    U: float
    first: BestSetting
    second: BestSetting
    C: float | None
    interval: tuple[float | None, float | None] | None
    between: tuple[str, str] | None
    share_crossed: float | None
    gap: float
    gap_se: float | None
    draws: np.ndarray


def measure_crossover(U: float, first: Sequence[Setting], second: Sequence[Setting]) -> MeasuredCrossover:
    """Compare two objectives on U unique tokens, by the settings of `list_reported`.

    The interval redraws the mean losses of the fresh seeds, whose settings
    were selected without them. The variance of a setting is pooled over the
    repeated settings of its objective whose losses are nearest, up to
    MIN_DOF degrees of freedom: where a loss falls steeply with compute,
    seeds differ much more than at its least. Lengths of one setting share
    the first steps of their runs, so all means of an objective move by one
    draw of Student's t: an interval for independent means would be narrower.

    Both objectives have settings, and all losses and
    FLOPs are finite numbers above 0.
    """
    reported = [list_reported(settings) for settings in (first, second)]
    C = [np.array([setting.C for setting in settings]) for settings in reported]
    validation = [np.array([setting.validation.mean() for setting in settings]) for settings in reported]
    test = [np.array([[setting.reported.mean() for setting in settings]]) for settings in reported]
    (point,), (pair,) = find_crossings(C, validation, test)
    noise = [_pool_errors(settings) for settings in reported]
    best = [_select_best(*side) for side in zip(reported, noise, strict=True)]
    rng, draws = np.random.default_rng(0), np.empty(0)
    errors_of = [errors for errors in noise if errors is not None]
    if len(errors_of) == len(noise):
        dof = [min(MIN_DOF, sum(len(s.fresh) - 1 for s in settings)) for settings in reported]
        shifts = [rng.standard_t(n, (N_DRAWS, 1)) * se for n, se in zip(dof, errors_of, strict=True)]
        # the fresh seeds did not select: the validation losses stay
        redrawn = [means + shift for means, shift in zip(test, shifts, strict=True)]
        draws, _ = find_crossings(C, validation, redrawn)
    errors = [setting.seed_se for setting in best]
    has_crossing, around = math.isfinite(point), [reported[1][i].name for i in pair]
    return MeasuredCrossover(
        U=U,
        first=best[0],
        second=best[1],
        C=float(point) if has_crossing else None,
        interval=_find_interval(draws, LEVEL) if len(draws) else None,
        between=(around[0], around[1]) if has_crossing else None,
        share_crossed=float(np.isfinite(draws).mean()) if len(draws) else None,
        gap=best[0].loss - best[1].loss,
        gap_se=None if None in errors else math.hypot(*(error or 0.0 for error in errors)),
        draws=draws,
    )


def list_reported(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings that are compared: those with fresh seeds, if the best of all is one of them.

    The best setting has the least mean validation loss.
    Otherwise all are compared, by the seeds that selected them.
    """
    best = min(settings, key=lambda setting: setting.validation.mean())
    return [setting for setting in settings if len(setting.fresh) or not len(best.fresh)]


def list_selected(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings that are selected at some compute: each the least validation loss so far, by C."""
    chosen: list[Setting] = []
    for setting in sorted(list_reported(settings), key=lambda at: (at.C, at.validation.mean())):
        if not chosen or setting.validation.mean() < chosen[-1].validation.mean():
            chosen.append(setting)
    return chosen


def find_crossings(
    C: Sequence[np.ndarray], validation: Sequence[np.ndarray], test: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return C_crit [R], inf without one, and indices [R, 2] of the second objective's settings around it.

    All three are of the first objective
    with n settings, and of the second with m.

    C           [n] and [m] FLOPs
    validation  [n] and [m] mean losses, which select
    test        [R, n] and [R, m] mean losses of R draws

    At each compute of the second objective, both sides have the setting of the
    least validation loss at no more compute. C_crit is interpolated in log C
    between the last such compute at which the test loss of the second is above
    the first's, and the next one. A crossing at the first compute of the
    second objective is not a measured one: it may have happened before.
    """
    limits = np.sort(C[1])
    # without a run of the first objective at this
    # compute there is nothing to compare
    limits = limits[limits * TOLERANCE >= C[0].min()]
    n_draws, last = len(test[0]), len(limits) - 1
    if last < 1:
        return np.full(n_draws, math.inf), np.zeros((n_draws, 2), int)
    first, second = (
        np.where(at <= TOLERANCE * limits[:, None], losses, math.inf).argmin(axis=1)
        for at, losses in zip(C, validation, strict=True)
    )
    gaps = test[1][:, second] - test[0][:, first]  # [R, limits]
    # after the last compute at which the second is
    # worse: a short dip by noise is not a crossing
    low = last - np.argmax(gaps[:, ::-1] > 0, axis=1)
    has_crossing = (gaps > 0).any(axis=1) & (low < last)
    low = np.where(has_crossing, low, 0)
    below, above = (gaps[np.arange(n_draws), i] for i in (low, low + 1))
    log_low, log_high = np.log(limits[low]), np.log(limits[low + 1])
    with np.errstate(all="ignore"):  # draws without a crossing
        points = np.exp(log_low + below / (below - above) * (log_high - log_low))
    return np.where(has_crossing, points, math.inf), second[np.stack([low, low + 1], axis=1)]


def _pool_errors(settings: Sequence[Setting]) -> np.ndarray | None:
    """Return the errors of the means over fresh seeds [settings].

    None where a setting has no fresh seed, or none is repeated.
    The variance of single seeds is pooled over the repeated
    settings of the nearest mean validation losses.
    """
    repeated = [setting for setting in settings if len(setting.fresh) > 1]
    if not repeated or not all(len(setting.fresh) for setting in settings):
        return None
    levels = np.array([setting.validation.mean() for setting in repeated])
    dof = np.array([len(setting.fresh) - 1 for setting in repeated])
    squares = np.array([((setting.fresh - setting.fresh.mean()) ** 2).sum() for setting in repeated])
    se = np.empty(len(settings))
    for i, setting in enumerate(settings):
        order = np.argsort(np.abs(levels - setting.validation.mean()), kind="stable")
        n_nearest = int(np.searchsorted(np.cumsum(dof[order]), MIN_DOF)) + 1
        nearest = order[:n_nearest]
        se[i] = math.sqrt(squares[nearest].sum() / dof[nearest].sum() / len(setting.fresh))
    return se


def _select_best(settings: Sequence[Setting], errors: np.ndarray | None) -> BestSetting:
    i = int(np.argmin([setting.validation.mean() for setting in settings]))
    best = settings[i]
    error = None if errors is None else float(errors[i])
    loss, n_seeds = float(best.reported.mean()), len(best.reported)
    return BestSetting(best.name, best.C, loss, error, n_seeds, len(best.fresh) > 0)


def _find_interval(draws: np.ndarray, level: float) -> tuple[float | None, float | None]:
    """Return the percentiles of the draws; None for an end among the draws without a crossing."""
    # `nearest`, since interpolation between two Inf gives NaN
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return float(low) if math.isfinite(low) else None, float(high) if math.isfinite(high) else None


def fit_crossover_law(crossovers: Sequence[MeasuredCrossover]) -> PowerLaw | None:
    """Fit C_crit = coefficient U^exponent through the measured crossings; None with fewer than two of them.

    Each crossing has half the distance of the 15.9 and 84.1 % quantiles
    of its draws in log C as its error, where both are crossings: one
    standard deviation, without the few draws that do not cross.
    """
    measured = [(at.U, at.C, at.draws) for at in crossovers if at.C is not None]
    if len({U for U, _, _ in measured}) < 2:
        return None
    U, C = np.array([U for U, _, _ in measured]), np.array([C for _, C, _ in measured])
    log_se = None
    if all(len(draws) for _, _, draws in measured):
        ends = np.array([_find_interval(draws, ONE_SD) for _, _, draws in measured], dtype=float)  # None: nan
        spread = np.log(ends[:, 1] / ends[:, 0]) / 2
        log_se = spread if np.isfinite(spread).all() and (spread > 0).all() else None
    return fit_power(U, C, log_se)
