"""Forecasts of published or own ladders by distance: hold out the runs of most compute, predict, and score.

A ladder is points (C, L) of one recipe at growing compute. Its runs beyond 1/factor of
the largest C are held out, the others are fitted, and those that are further than
a third of the factor from the fit are scored. Two plain baselines are scored beside the
trend (compute_trend.py): least squares of E + K C^-g, and a power law without a floor, each
with the interval that their linearised fit gives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.laws.compute_law import MAX_HALF_WIDTH
from megatron.laws.fitting.compute_trend import PRIOR, TrendPrior, fit_trend
from megatron.laws.power_law import interval_quantile

if TYPE_CHECKING:
    from pandas import DataFrame

FACTORS = (3.0, 10.0, 30.0, 100.0)  # of compute that is held out
MIN_POINTS, MIN_SPAN = 4, 3.0  # of the fitted part of a ladder: points, and factor of compute
LEVEL = 0.95
FLOOR_STARTS = [(share, slope) for share in (0.1, 0.5, 0.8) for slope in (0.05, 0.15, 0.4)]

Predicted = tuple[np.ndarray, np.ndarray, np.ndarray]  # log L, low, high, each [m]
# at log C [m] from the points log C [n] and log L [n]
Forecast = Callable[[np.ndarray, np.ndarray, np.ndarray], Predicted]


@dataclass(frozen=True)
class Ladder:
    """Points of one recipe: C FLOPs ascending and L, each [n]. Ladders of one `source` are dependent."""

    source: str
    name: str
    C: np.ndarray
    L: np.ndarray


def lower_envelope(C: np.ndarray, L: np.ndarray, width: float = 1.6) -> tuple[np.ndarray, np.ndarray]:
    """Return the compute-optimal points of runs [n]: the least loss in each bin of a factor `width`.

    Points above one of less compute are omitted.
    """
    order = np.argsort(C, kind="stable")
    C, L = C[order], L[order]
    # C = [1, 1.2, 2, 4] and width 1.6: bins 0, 0, 1, 2
    bins = np.floor(np.log(C / C[0]) / np.log(width)).astype(int)
    best = np.array([rows[L[rows].argmin()] for rows in (np.flatnonzero(bins == b) for b in np.unique(bins))])
    # the first bin is never dropped, and a bin above any before it is not optimal
    falls = np.minimum.accumulate(L[best]) == L[best]
    return C[best][falls], L[best][falls]


def split_ladders(table: "DataFrame") -> list[Ladder]:
    """Return the lower envelope of each source and ladder of a table.

    Columns train_flops, or n_params and train_tokens, loss, and if present source and ladder.
    """
    compute = table.get("train_flops", 6.0 * table.get("n_params", 1) * table.get("train_tokens", 1))
    names = [table.get(name, default) for name, default in (("source", "table"), ("ladder", "all"))]
    points = table[["loss"]].assign(C=compute, source=names[0], ladder=names[1])
    return [
        Ladder(source, ladder, *lower_envelope(rows["C"].to_numpy(float), rows["loss"].to_numpy(float)))
        for (source, ladder), rows in points.groupby(["source", "ladder"])
    ]


def forecast_by_trend(prior: TrendPrior = PRIOR) -> Forecast:
    """Return the forecast of compute_trend.py with this prior."""

    def forecast(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> Predicted:
        trend = fit_trend(x, y, prior=prior)
        ends = np.array([trend.interval(float(point), LEVEL) for point in at])
        return np.array([trend.quantile(float(point), 0.5) for point in at]), ends[:, 0], ends[:, 1]

    return forecast


def forecast_by_power(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> Predicted:
    """Forecast by a straight line of log L against log C."""
    # centred, so that level and slope are nearly independent
    line = np.polyfit(x, y, 1)
    columns, ahead = (np.stack([np.ones_like(v), v - x.mean()], axis=-1) for v in (x, at))
    return _linearised(np.polyval(line, at), y - np.polyval(line, x), columns, ahead)


def forecast_by_floor(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> Predicted:
    """Forecast by least squares of L = E + K C^-g, with E, K and g above 0."""
    from scipy.optimize import least_squares  # slow import

    centre, lowest = x.mean(), float(y.min())

    def log_curve(constants: np.ndarray, points: np.ndarray) -> np.ndarray:
        log_floor, log_scale, log_slope = constants
        return np.logaddexp(log_floor, log_scale - np.exp(log_slope) * (points - centre))

    # E = share e of the lowest loss; the rest is K C^-g at the mean of log C. The search is local, so
    # it starts from several shares and slopes.
    starts = [(np.log(e) + lowest, np.log1p(-e) + np.median(y), np.log(g)) for e, g in FLOOR_STARTS]
    fits = [least_squares(lambda c: np.exp(log_curve(c, x)) - np.exp(y), start) for start in starts]
    best = min(fits, key=lambda fit: fit.cost).x
    # central differences of log L by the three constants
    step = 1e-5 * np.eye(3)
    columns, ahead = (
        np.stack([(log_curve(best + d, v) - log_curve(best - d, v)) / 2e-5 for d in step], axis=-1)
        for v in (x, at)
    )
    return _linearised(log_curve(best, at), y - log_curve(best, x), columns, ahead)


def _linearised(value: np.ndarray, residual: np.ndarray, columns: np.ndarray, ahead: np.ndarray) -> Predicted:
    """Return (value, low, high) by the delta method: derivatives `columns` [n, p] at the fitted points."""
    dof = len(residual) - columns.shape[1]
    variance = float((residual**2).sum()) / dof
    spread = np.einsum("mi,ij,mj->m", ahead, np.linalg.pinv(columns.T @ columns), ahead)
    half = interval_quantile(LEVEL, dof) * np.sqrt(variance * (1 + spread))
    return value, value - half, value + half


BASELINES: dict[str, Forecast] = {"E + K C^-g": forecast_by_floor, "power law": forecast_by_power}


def score_ladders(
    ladders: Sequence[Ladder], methods: dict[str, Forecast], factors: Sequence[float] = FACTORS
) -> "DataFrame":
    """Return a row for each held-out point, factor and method.

    Columns: source, ladder, factor, C, method, error = log(predicted / measured), inside, half_width and
    score of log L. The score is the interval score of Gneiting and Raftery (J. Am. Stat. Assoc. 102, 2007,
    eq. 43): width + 40 times the distance of a point outside of its 95 % interval. Raises ValueError if
    no ladder is long enough.
    """
    from pandas import DataFrame, concat  # slow import

    rows = []
    for ladder in ladders:
        x, y = np.log(ladder.C), np.log(ladder.L)
        for factor in factors:
            # 1e-9: a point exactly at the limit is fitted
            is_fitted = ladder.C[-1] / factor * (1 + 1e-9) >= ladder.C
            if is_fitted.sum() < MIN_POINTS or np.ptp(x[is_fitted]) < np.log(MIN_SPAN):
                continue
            # points just beyond the fit are no test of a far forecast
            is_scored = ~is_fitted & (x - x[is_fitted].max() > np.log(factor / 3))
            measured = y[is_scored]
            for method, forecast in methods.items():
                value, low, high = forecast(x[is_fitted], y[is_fitted], x[is_scored])
                # the distance of a point from its interval; 0 inside
                missed = np.maximum(low - measured, 0) + np.maximum(measured - high, 0)
                columns = {
                    "C": ladder.C[is_scored],
                    "error": value - measured,
                    "inside": missed == 0,
                    "half_width": (high - low) / 2,
                    "score": high - low + 2 / (1 - LEVEL) * missed,
                }
                about = {"source": ladder.source, "ladder": ladder.name, "factor": factor, "method": method}
                rows.append(DataFrame(columns).assign(**about))
    if not rows:
        raise ValueError(
            f"ladders: got none with {MIN_POINTS} points over a factor of {MIN_SPAN:g} of compute below the "
            "held-out part. Give ladders of more compute."
        )
    return concat(rows, ignore_index=True)


def summarise_scores(scores: "DataFrame") -> "DataFrame":
    """Return a row for each factor and method: n points and sources, coverage with its interval, means.

    `signed` and `score` are means of log L, `refused` the share of forecasts wider than MAX_HALF_WIDTH,
    which count in all other columns.
    """
    from pandas import DataFrame  # slow import

    rows = []
    for (factor, method), part in scores.groupby(["factor", "method"], sort=False):
        inside = part["inside"].to_numpy(float)
        low, high = cluster_interval(inside, part["source"].to_numpy())
        rows.append({
            "factor": factor, "method": method, "n": len(part), "sources": part["source"].nunique(),
            "inside": inside.mean(), "low": low, "high": high, "signed": part["error"].mean(),
            "absolute": part["error"].abs().mean(), "half_width": part["half_width"].median(),
            "score": part["score"].mean(), "refused": (part["half_width"] > MAX_HALF_WIDTH).mean(),
        })  # fmt: skip
    return DataFrame(rows)


def draw_priors(n: int, seed: int = 0) -> list[TrendPrior]:
    """Return PRIOR and n - 1 random ones, to choose from."""
    rng = np.random.default_rng(seed)
    random = [
        TrendPrior(
            slope=float(rng.uniform(0.08, 0.22)),
            slope_error=float(rng.uniform(0.03, 0.1)),
            drift=float(np.exp(rng.uniform(*np.log([0.004, 0.04])))),
            noise=float(np.exp(rng.uniform(*np.log([0.001, 0.012])))),
            floor=(float(rng.choice([1.0, 1.5, 2.0])), float(rng.uniform(0.8, 2.5))),
        )
        for _ in range(n - 1)
    ]
    return [PRIOR, *random]


def choose_without_each(
    ladders: Sequence[Ladder], priors: Sequence[TrendPrior], factors: Sequence[float] = FACTORS
) -> tuple["DataFrame", dict[str, TrendPrior]]:
    """Score each source by the prior that is best on the other sources.

    The best has the least mean over sources and factors of the log of the mean interval score.
    Returns the rows of `score_ladders` for the method "trend", and the prior chosen without each source.
    """
    from pandas import concat  # slow import

    tables = [score_ladders(ladders, {"trend": forecast_by_trend(prior)}, factors) for prior in priors]
    # one mean per source and factor: a source with many ladders does not outvote the others
    means = [np.log(table.groupby(["source", "factor"])["score"].mean()) for table in tables]
    chosen, rows = {}, []
    for source in tables[0]["source"].unique():
        best = int(np.argmin([mean.drop(source, level="source").mean() for mean in means]))
        chosen[source] = priors[best]
        rows.append(tables[best][tables[best]["source"] == source])
    return concat(rows, ignore_index=True), chosen


def cluster_interval(inside: np.ndarray, groups: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of a share of 0 and 1 [n] whose values in one group [n] are not independent.

    Wilson's interval with the number of independent values that the variance between groups
    implies: at least the number of groups, at most n.
    """
    share, n = float(inside.mean()), len(inside)
    sums = np.array([(inside[groups == group] - share).sum() for group in np.unique(groups)])
    # the variance of the share if groups are independent and values within one are not
    variance = float((sums**2).sum()) / n**2
    effective = share * (1 - share) / variance if variance > 0 else 0.0
    effective = min(max(effective, len(sums)), n)
    z = interval_quantile(LEVEL, 0)
    middle = (share + z**2 / (2 * effective)) / (1 + z**2 / effective)
    half = z / (1 + z**2 / effective) * np.sqrt(share * (1 - share) / effective + z**2 / (4 * effective**2))
    return float(middle - half), float(middle + half)
