"""Compute at which one objective is measured to beat another on the same unique text, without a law.

The runs of an objective on U unique tokens are grouped into settings: runs that
differ only in their seed. Settings are selected by their mean loss on one text
(validation) and reported by that on another (test). A second text removes the luck
of the text, not that of the seed: losses of one run on two texts correlate. So the
selected settings are trained again with fresh seeds, which took no part in the
selection, and only these are reported with an interval. C_crit is the compute at
which the selected loss of the second objective comes down to that of the first.
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
    seed_se   its standard error over fresh seeds, by the scatter of settings of similar loss; None without
    is_fresh  the seeds of `loss` took no part in the selection; otherwise it is biased downwards
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
    C               C_crit in FLOPs; None if the second objective was not better at any measured compute
    interval        of C at LEVEL by the noise of seeds, for the settings that were selected; an end is None
                    where draws have no crossing; None without fresh seeds of both objectives.
                    The noise of the test text is not in it: both objectives are scored on the same text
    between         names of the settings of the second objective below and above the crossing
    share_crossed   share of draws with a crossing; None without fresh seeds
    gap, gap_se     first minus second best loss: positive where the second is better at any compute
    draws           [N_DRAWS] C_crit of each draw, inf without a crossing; empty without fresh seeds
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


@dataclass(frozen=True)
class CrossoverLaw:
    """C_crit = coefficient U^exponent through measured crossings, with the interval of the exponent."""

    power: PowerLaw
    U: tuple[float, ...]


def measure_crossover(
    U: float, first: Sequence[Setting], second: Sequence[Setting], seed: int = 0, level: float = LEVEL
) -> MeasuredCrossover:
    """Compare two objectives on U unique tokens, by the settings of `list_reported`.

    The interval redraws the mean losses of the fresh seeds, whose settings
    were selected without them. The variance of a setting is pooled over the
    repeated settings of its objective whose losses are nearest, up to
    MIN_DOF degrees of freedom: where a loss falls steeply with compute,
    seeds differ much more than at its least. Lengths of one setting share
    the first steps of their runs, so all means of an objective move by one
    draw of Student's t: an interval for independent means would be narrower.

    Raises ValueError without settings, or for losses
    or FLOPs that are not finite numbers above 0.
    """
    for name, settings in (("first", first), ("second", second)):
        _check_settings(name, settings)
    reported = [list_reported(settings) for settings in (first, second)]
    losses = [np.array([(s.validation.mean(), s.reported.mean()) for s in settings]) for settings in reported]
    C = [np.array([setting.C for setting in settings]) for settings in reported]
    point, pair = find_crossing(C[0], losses[0], C[1], losses[1])
    noise = [_pool_errors(settings) for settings in reported]
    best = [_select_best(*side) for side in zip(reported, noise, strict=True)]
    draws = np.empty(0)
    if noise[0] is not None and noise[1] is not None:
        draws = _draw_crossings(C, losses, (noise[0], noise[1]), seed)
    errors = [setting.seed_se for setting in best]
    return MeasuredCrossover(
        U=U,
        first=best[0],
        second=best[1],
        C=point,
        interval=_find_interval(draws, level) if len(draws) else None,
        between=None if pair is None else (reported[1][pair[0]].name, reported[1][pair[1]].name),
        share_crossed=float(np.isfinite(draws).mean()) if len(draws) else None,
        gap=best[0].loss - best[1].loss,
        gap_se=None if None in errors else math.hypot(*(error or 0.0 for error in errors)),
        draws=draws,
    )


def list_reported(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings that are compared: those with fresh seeds, if the best of all is one of them.

    The best setting is that of the least mean validation loss.
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


def find_crossing(
    first_C: np.ndarray, first: np.ndarray, second_C: np.ndarray, second: np.ndarray
) -> tuple[float | None, tuple[int, int] | None]:
    """Return (C_crit, indices of the settings of the second objective around it), or (None, None).

    first_C, second_C   [n], [m] FLOPs
    first, second       [n, 2], [m, 2] mean (validation, test) losses

    At each compute of the second objective, both sides have the setting of the
    least validation loss at no more compute. C_crit is interpolated in log C
    between the last such compute at which the test loss of the second is above
    that of the first, and the next one. A crossing at the first compute of the
    second objective is no measured one: it may have happened before.
    """
    points, sides = _find_crossings(first_C, first[None], second_C, second[None])
    if not np.isfinite(points[0]):
        return None, None
    return float(points[0]), (int(sides[0, 0]), int(sides[0, 1]))


def _find_crossings(
    first_C: np.ndarray, first: np.ndarray, second_C: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return `find_crossing` of R draws at once: C_crit [R], inf without one, and indices [R, 2].

    first, second   [R, n, 2], [R, m, 2]
    """
    order = np.argsort(second_C, kind="stable")
    limits = second_C[order]
    second_best, first_best = (
        _select_up_to(C, losses[..., 0], limits) for C, losses in ((second_C, second), (first_C, first))
    )
    rows = np.arange(len(second))[:, None]
    # without a run of the first objective at this
    # compute there is nothing to compare
    usable = limits * TOLERANCE >= first_C.min()
    gaps = np.where(usable, second[rows, second_best, 1] - first[rows, first_best, 1], -math.inf)  # [R, m]
    worse = gaps > 0
    # after the last compute at which the second is
    # worse: a short dip by noise is no crossing
    low = gaps.shape[1] - 1 - np.argmax(worse[:, ::-1], axis=1)
    has_crossing = worse.any(axis=1) & (low < gaps.shape[1] - 1)
    low = np.where(has_crossing, low, 0)
    high = np.minimum(low + 1, gaps.shape[1] - 1)
    rows = rows[:, 0]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # of draws without a crossing
        share = gaps[rows, low] / (gaps[rows, low] - gaps[rows, high])
        log_low, log_high = np.log(limits[low]), np.log(limits[high])
        points = np.where(has_crossing, np.exp(log_low + share * (log_high - log_low)), math.inf)
    return points, np.stack([second_best[rows, low], second_best[rows, high]], axis=1)


def _select_up_to(C: np.ndarray, losses: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Return the index of the least loss [R, n] at no more than each of `limits` [m] FLOPs: [R, m].

    Where no setting is below a limit: the cheapest.
    """
    order = np.argsort(C, kind="stable")
    ordered = losses[:, order]
    least = np.minimum.accumulate(ordered, axis=1)
    # position of the running minimum: that of its last strict decrease
    is_new = np.concatenate([np.ones((len(ordered), 1), bool), least[:, 1:] < least[:, :-1]], axis=1)
    position = np.maximum.accumulate(np.where(is_new, np.arange(ordered.shape[1]), 0), axis=1)
    last = np.maximum(np.searchsorted(C[order], limits * TOLERANCE, side="right") - 1, 0)
    return order[position[:, last]]


def _check_settings(name: str, settings: Sequence[Setting]) -> None:
    if not settings:
        raise ValueError(f"crossover: got no runs of the {name} objective, expected one or more")
    for setting in settings:
        values = np.concatenate([[setting.C], setting.validation, setting.test, setting.fresh])
        if len(setting.validation) != len(setting.test) or not len(setting.test):
            raise ValueError(f"{setting.name}: got losses without seeds, expected one pair of losses a seed")
        if not (np.isfinite(values) & (values > 0)).all():
            raise ValueError(
                f"{setting.name}: got a loss or FLOPs of {values.min()}, expected numbers above 0"
            )


@dataclass(frozen=True)
class _Errors:
    """Standard errors of the mean reported losses [settings], with their degrees of freedom."""

    se: np.ndarray
    dof: int


def _pool_errors(settings: Sequence[Setting]) -> _Errors | None:
    """Return the errors of the means over fresh seeds; None where a setting has none, or none is repeated.

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
    return _Errors(se, int(min(MIN_DOF, dof.sum())))


def _select_best(settings: Sequence[Setting], errors: _Errors | None) -> BestSetting:
    i = int(np.argmin([setting.validation.mean() for setting in settings]))
    best = settings[i]
    error = None if errors is None else float(errors.se[i])
    loss, n_seeds = float(best.reported.mean()), len(best.reported)
    return BestSetting(best.name, best.C, loss, error, n_seeds, len(best.fresh) > 0)


def _draw_crossings(
    C: Sequence[np.ndarray], losses: Sequence[np.ndarray], noise: tuple[_Errors, _Errors], seed: int
) -> np.ndarray:
    """Return C_crit of N_DRAWS redrawn comparisons, inf without a crossing."""
    rng = np.random.default_rng(seed)
    redrawn = []
    for means, errors in zip(losses, noise, strict=True):
        shift = rng.standard_t(errors.dof, (N_DRAWS, 1)) * errors.se  # [draws, settings]
        # the fresh seeds did not select: the validation losses stay
        redrawn.append(np.stack([np.broadcast_to(means[:, 0], shift.shape), means[:, 1] + shift], axis=-1))
    return _find_crossings(C[0], redrawn[0], C[1], redrawn[1])[0]


def _find_interval(draws: np.ndarray, level: float) -> tuple[float | None, float | None]:
    """Return the percentiles of the draws; None for an end among the draws without a crossing."""
    # `nearest`, since interpolation between two Inf gives NaN
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], method="nearest")
    return float(low) if math.isfinite(low) else None, float(high) if math.isfinite(high) else None


def fit_crossover_law(crossovers: Sequence[MeasuredCrossover]) -> CrossoverLaw | None:
    """Fit a power law through the measured crossings; None with fewer than two of them.

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
    return CrossoverLaw(fit_power(U, C, log_se), tuple(float(u) for u in U))
