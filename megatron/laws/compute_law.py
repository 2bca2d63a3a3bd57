"""Law of the compute-optimal frontier from isoFLOP runs: the best N at C FLOPs, and its loss.

A sum of powers in N and D is a claim about the whole plane. To choose a
model for the next budget, less is needed: how the loss depends on N around
the best N of each budget, and how the best N and its loss change with C.
Runs of several sizes at several budgets are fitted with the form of
frontier_form.py by least squares of log L. Beyond the largest budget the level
of the frontier follows a trend with a floor and a drifting slope
(compute_trend.py), at any distance.

Intervals are Student's t from the linearised fit, and of the trend's
mixture beyond it. A misfit of the form is part of the scatter. Rows of one group, such
as checkpoints of a model, share a part of it (noise.py).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.io import replace_nonfinite, write_json
from megatron.laws.columns import takes_data_frame, validate_columns
from megatron.laws.fitting.compute_trend import PRIOR, ComputeTrend, fit_trend
from megatron.laws.fitting.frontier_form import (
    CONSTANTS,
    is_at_edge,
    log_loss,
    log_loss_slopes,
    search_constants,
)
from megatron.laws.fitting.lack_of_fit import LackOfFit, check_lack_of_fit
from megatron.laws.fitting.noise import GROUPED, estimate_noise, find_groups, orthonormal_basis
from megatron.laws.isoflop import split_budgets
from megatron.laws.law_file import convert_fields, convert_value, load_law, require
from megatron.laws.power_law import interval_quantile

if TYPE_CHECKING:
    from pandas import DataFrame

MIN_RUNS, MIN_BUDGETS, MIN_SIZES = len(CONSTANTS) + 3, 4, 3
MAX_HALF_WIDTH = 0.1  # of the 95 % interval of a new run's log loss; a wider one is no forecast
FURTHEST = 1e5  # times the largest budget, of the search for the furthest forecast
LEVEL = 0.95
SLOPE_STEP = 0.05  # in log C, of the frontier's slope
EDGE_TOLERANCE = 1e-6  # in log C, within which a budget counts as the largest fitted one

Levels = tuple[np.ndarray, np.ndarray, np.ndarray]  # log C, log L [b], relative covariance of log L [b, b]


@dataclass(frozen=True)
class Optimum:
    """Compute-optimal use of C FLOPs: N parameters, D tokens and the loss in nats per token, with intervals.

    N_interval, D_interval and confidence are intervals of the optimum;
    predictive is the interval of the measured loss of one new run there.
    """

    C: float
    N: float
    D: float
    loss: float
    level: float
    N_interval: tuple[float, float]
    D_interval: tuple[float, float]
    confidence: tuple[float, float]
    predictive: tuple[float, float]

    @property
    def half_width(self) -> float:
        """Half-width of log L of one new run; above MAX_HALF_WIDTH this is no forecast."""
        return log_half_width(self.predictive)


@dataclass(frozen=True)
class RunPrediction:
    """Predicted loss, nats per token, of one new run of N parameters at C FLOPs."""

    C: float
    N: float
    loss: float
    level: float
    predictive: tuple[float, float]


@dataclass(frozen=True, kw_only=True, repr=False)
class ComputeLaw:
    """A fitted frontier. Saved as compute_law.json.

    params          values of frontier_form.CONSTANTS, at C0 = `centre` FLOPs
    covariance      [7, 7] of params in that order
    spread          standard deviation of log L of single runs around the fit, dof
                    degrees of freedom
    tokens          (intercept, slope) of log(C / (N D)) against log N: FLOPs a
                    parameter and token
    not_identified  {constant: reason}; empty where the runs identify every constant
    lack_of_fit     test against runs that differ only in their seed
                    (lack_of_fit.LackOfFit); {} without them
    C, N            ranges of the runs
    beyond          trend of the frontier beyond the largest budget: fields of ComputeTrend
    warnings        that rows are grouped because their residuals correlate
    """

    params: dict[str, float]
    covariance: list[list[float]]
    centre: float
    spread: float
    dof: int
    n_runs: int
    n_budgets: int
    C: tuple[float, float]
    N: tuple[float, float]
    tokens: tuple[float, float]
    runs: list[str] = field(default_factory=list)
    lack_of_fit: dict[str, Any] = field(default_factory=dict)
    not_identified: dict[str, str] = field(default_factory=dict)
    table: dict[str, str] = field(default_factory=dict)
    beyond: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        mark = "" if self.identified else ", NOT IDENTIFIED"
        exponent, (low, high) = self.params["size_exponent"], self.interval("size_exponent")
        size = f"N* grows as C^{exponent:.2f} [{low:.2f}, {high:.2f}]"
        return f"<ComputeLaw, {self.n_runs} runs at {self.n_budgets} budgets{mark}: {size}>"

    @property
    def identified(self) -> bool:
        """True if the runs identify every constant."""
        return not self.not_identified

    def loss(self, N: ArrayLike, C: ArrayLike) -> np.ndarray:
        """Return the fitted loss, nats per token, of N parameters trained with C FLOPs; broadcasts."""
        theta, x = self._theta_vector(), self._centred_log_compute(C)
        value = log_loss(theta, x, np.log(np.asarray(N, dtype=float)))
        # the trend changes the level of the frontier,
        # and the shape around it in log N stays
        beyond = np.unique(x[x > self._trend.edge + EDGE_TOLERANCE])
        if not len(beyond):
            return np.exp(value)
        form = log_loss(theta, beyond, theta[3] + theta[4] * beyond)
        levels = [self._edge_step + self._trend.quantile(at, 0.5, noisy=False) for at in beyond]
        step = np.interp(x, beyond, levels - form)
        return np.exp(value + np.where(x > self._trend.edge + EDGE_TOLERANCE, step, 0.0))

    def interval(self, name: str, level: float = LEVEL) -> tuple[float, float]:
        """Return the confidence interval of constant `name`."""
        i = CONSTANTS.index(name)
        half = interval_quantile(level, self.dof) * math.sqrt(max(self.covariance[i][i], 0.0))
        return self.params[name] - half, self.params[name] + half

    def predict_run(self, N: float, C: float, level: float = LEVEL) -> RunPrediction:
        """Predict one run. Raises ValueError for C that is not a positive number."""
        _check_compute(C)
        return RunPrediction(C, N, float(self.loss(N, C)), level, self._loss_interval(N, C, level, True))

    def optimum(self, C: float, level: float = LEVEL) -> Optimum:
        """Predict the best N and D at C FLOPs and the loss there. Raises ValueError as `predict_run`."""
        _check_compute(C)
        x = float(self._centred_log_compute(C))
        log_n = self.params["log_size"] + self.params["size_exponent"] * x
        # gradient of log N* = log_size + size_exponent x by the 7 constants
        half_n = self._half_width(np.array([0, 0, 0, 1, x, 0, 0]), level)
        N, loss = math.exp(log_n), float(self.loss(math.exp(log_n), C))
        ends = (math.exp(log_n - half_n), math.exp(log_n + half_n))
        # the ends of D are swapped: at fixed C the largest N has the fewest tokens
        return Optimum(
            C, N, self.tokens_of(N, C), loss, level, ends,
            (self.tokens_of(ends[1], C), self.tokens_of(ends[0], C)),
            *(self._loss_interval(N, C, level, noisy) for noisy in (False, True)),
        )  # fmt: skip

    def slope(self, C: float) -> tuple[float, float]:
        """Return d log L* / d log C at C FLOPs, clipped to the fitted budgets, and its standard error."""
        x = float(self._centred_log_compute(np.clip(C, *self.C)))
        theta, ends = self._theta_vector(), np.array([x - SLOPE_STEP, x + SLOPE_STEP])
        best = theta[3] + theta[4] * ends
        low, high = log_loss(theta, ends, best)
        # the loss is flat in log N at the best size, so the shift of that size with theta[3:5] has no part
        gradient = np.diff(log_loss_slopes(theta, ends, best), axis=0)[0] / (2 * SLOPE_STEP)
        variance = float(gradient @ np.array(self.covariance, dtype=float) @ gradient)
        return float(high - low) / (2 * SLOPE_STEP), math.sqrt(max(variance, 0.0))

    def furthest_forecast(self, half_width: float = MAX_HALF_WIDTH) -> float:
        """Return the largest C, FLOPs, whose interval of one new run has no larger half-width in log L."""
        return find_furthest(self.C[1], lambda C: self.optimum(C).half_width <= half_width)

    def tokens_of(self, N: float, C: float) -> float:
        """Return D of N parameters at C FLOPs, by the FLOP count of the fitted runs."""
        # FLOPs per parameter and token depend on the size:
        # attention and embeddings have different shares
        return C / (N * math.exp(self.tokens[0] + self.tokens[1] * math.log(N)))

    def save(self, path: str | Path) -> None:
        """Write compute_law.json atomically; null stands for NaN."""
        write_json(Path(path), replace_nonfinite(asdict(self) | {"identified": self.identified}))

    @classmethod
    def load(cls, path: str | Path) -> "ComputeLaw":
        """Read a compute_law.json. Raises FileNotFoundError, or ValueError for any other file."""
        return load_law(path, "a compute law", "scaling frontier", cls._from_dict)

    @classmethod
    def _from_dict(cls, stored: Any) -> "ComputeLaw":
        """Build a law from the content of compute_law.json. Raises ValueError for other content."""
        law = cls(**convert_fields(cls, stored))
        is_finite = set(law.params) == set(CONSTANTS) and all(map(math.isfinite, law.params.values()))
        require("params", is_finite and min(law.params["alpha"], law.params["beta"]) > 0, "finite constants")
        is_square = np.shape(law.covariance) == (len(CONSTANTS),) * 2
        require("covariance", is_square and bool(np.isfinite(law.covariance).all()), "a finite matrix")
        positive = (law.centre, *law.C, *law.N)
        require("C, N and centre", all(0 < value < math.inf for value in positive), "numbers above 0")
        require("spread and dof", 0 <= law.spread < math.inf and 0 <= law.dof < 10**9, "numbers of 0 or more")
        if law.lack_of_fit:
            convert_value("lack_of_fit", law.lack_of_fit, LackOfFit)
        convert_value("beyond", law.beyond, ComputeTrend)
        return law

    def to_frame(self, C: ArrayLike | None = None, level: float = LEVEL) -> "DataFrame":
        """Return the optimum of each compute `C` [n] (default: smallest to `furthest_forecast`).

        Columns C, N, D and loss, each of the last three
        with its interval, and `predictive` of a new run.
        """
        from pandas import DataFrame  # slow import

        ends = (self.C[0], self.furthest_forecast())
        optima = [self.optimum(float(c), level) for c in np.ravel(np.geomspace(*ends, 9) if C is None else C)]
        frame = DataFrame([vars(at) for at in optima]).drop(columns="level")
        for name in ("N_interval", "D_interval", "confidence", "predictive"):
            stem = name.removesuffix("_interval")
            frame[[f"{stem}_low", f"{stem}_high"]] = frame.pop(name).tolist()
        return frame

    def plot(self, C: ArrayLike | None = None) -> Any:
        """Return a plotly figure of the best N and its loss against C, with intervals."""
        from megatron.laws.plots import plot_optima

        return plot_optima(self.to_frame(C))

    def _theta_vector(self) -> np.ndarray:
        return np.array([self.params[name] for name in CONSTANTS])

    def _centred_log_compute(self, C: ArrayLike) -> np.ndarray:
        return np.log(np.asarray(C, dtype=float) / self.centre)

    def _half_width(self, gradient: np.ndarray, level: float, extra: float = 0.0) -> float:
        # delta method, g' V g; rounding may leave a variance of 0 slightly negative
        variance = float(gradient @ np.array(self.covariance, dtype=float) @ gradient)
        return interval_quantile(level, self.dof) * math.sqrt(max(variance, 0.0) + extra)

    def _loss_interval(self, N: float, C: float, level: float, noisy: bool) -> tuple[float, float]:
        """Return the interval of the loss of N parameters at C FLOPs; `noisy`: of one new run."""
        x, value = float(self._centred_log_compute(C)), float(self.loss(N, C))
        gradient = log_loss_slopes(self._theta_vector(), np.array([x]), np.log([N]))[0]
        if x <= self._trend.edge + EDGE_TOLERANCE:
            half = self._half_width(gradient, level, self.spread**2 if noisy else 0.0)
            return value * math.exp(-half), value * math.exp(half)
        # beyond the largest budget the trend replaces level, slope and curvature of the frontier
        gradient[:3] = 0.0
        half, middle = self._half_width(gradient, level), self._trend.quantile(x, 0.5, noisy=False)
        below, above = (math.hypot(end - middle, half) for end in self._trend.interval(x, level, noisy))
        return value * math.exp(-below), value * math.exp(above)

    @cached_property
    def _trend(self) -> ComputeTrend:
        return ComputeTrend(**self.beyond)

    @cached_property
    def _edge_step(self) -> float:
        """Difference of log L* at the largest budget between form and trend, so that the law has no step."""
        edge = self._trend.edge
        theta = self._theta_vector()
        form = log_loss(theta, np.array([edge]), theta[3] + theta[4] * np.array([edge]))
        return float(form[0]) - self._trend.quantile(edge, 0.5, noisy=False)


def log_half_width(ends: tuple[float, float]) -> float:
    """Return half the width of an interval of a loss, in log L."""
    return math.log(ends[1] / ends[0]) / 2


def find_furthest(largest: float, is_forecast: Callable[[float], bool]) -> float:
    """Return the C, FLOPs, up to which a condition holds: 1 to FURTHEST times the largest fitted one."""
    low, high = 0.0, math.log(FURTHEST)
    for _ in range(12):  # to 0.3 %
        ahead = (low + high) / 2
        low, high = (ahead, high) if is_forecast(largest * math.exp(ahead)) else (low, ahead)
    return largest * math.exp(low)


def _check_compute(C: float) -> None:
    if not 0 < C < math.inf:
        raise ValueError(f"C: got {C:.3g} FLOPs, expected a positive number")


@takes_data_frame
def fit_compute_law(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    C: ArrayLike,
    runs: Sequence[str] = (),
    groups: ArrayLike | None = None,
    drift: float = PRIOR.drift,
) -> ComputeLaw:
    """Fit n runs by least squares of log L: N parameters, D tokens, L nats per token, C FLOPs, each [n].

    `groups` [n] as in fit_law: None groups rows
    that share N if their residuals correlate. `drift`: scale of the drift of the
    slope beyond the runs, as of TrendPrior.

    Raises ValueError for fewer than MIN_RUNS runs, or
    fewer than MIN_BUDGETS budgets of MIN_SIZES sizes.
    """
    N, D, L, C = validate_columns(N=N, D=D, L=L, C=C)
    _check_budgets(N, C, L)
    centre = float(np.exp(np.log(C).mean()))
    x, log_n, y = np.log(C / centre), np.log(N), np.log(L)
    theta, basis = search_constants(x, log_n, y)
    residual = y - log_loss(theta, x, log_n)
    # [n, 7] @ [7, p]: the slopes by the p free directions
    jacobian = log_loss_slopes(theta, x, log_n) @ basis
    dof = len(y) - basis.shape[1]
    spread, correlation = float(np.sqrt((residual**2).sum() / dof)), None
    labels, dependent = find_groups(residual, jacobian, groups, N)
    if len(np.unique(labels)) < len(y):
        noise = estimate_noise(residual, jacobian, labels)
        # noise.sigma is clipped, but outliers move least
        # squares: without them intervals cover .85
        spread, dof, correlation = max(spread, noise.sigma), int(noise.dof), noise.correlate(labels)
    # least squares in the free directions;
    # rows of constants that are not free are 0
    errors = basis @ np.linalg.pinv(jacobian, 3e-8)  # [7, n], of the constants by the noise
    covariance = spread**2 * errors @ (errors.T if correlation is None else correlation @ errors.T)
    test = check_lack_of_fit(residual, orthonormal_basis(jacobian), np.stack([N, D], axis=-1))
    # polyfit returns the highest power first
    slope, intercept = np.polyfit(log_n, np.log(C / (N * D)), 1) if len(np.unique(N)) > 1 else (0.0, 0.0)
    return ComputeLaw(
        params=dict(zip(CONSTANTS, map(float, theta), strict=True)),
        covariance=covariance.tolist(),
        centre=centre,
        spread=spread,
        dof=dof,
        n_runs=len(y),
        n_budgets=len(split_budgets(C)),
        C=(float(C.min()), float(C.max())),
        N=(float(N.min()), float(N.max())),
        tokens=(float(intercept), float(slope)),
        runs=list(runs),
        lack_of_fit=asdict(test) if test else {},
        not_identified=_find_not_identified(theta, covariance, dof, N, C, centre),
        beyond=asdict(_fit_beyond(theta, covariance, x, log_n, y, (spread, dof), correlation, drift)),
        warnings=[GROUPED] if dependent else [],
    )


def _fit_beyond(
    theta: np.ndarray,
    covariance: np.ndarray,
    x: np.ndarray,
    log_n: np.ndarray,
    y: np.ndarray,
    noise: tuple[float, int],
    correlation: np.ndarray | None,
    drift: float,
) -> ComputeTrend:
    """Fit the trend of the frontier at the budgets: means of their runs, less the form's distance of each.

    noise        standard deviation of log L of one run, and its degrees of freedom
    correlation  [n, n] of the noise; None: it is independent
    """
    unit = covariance / max(noise[0], 1e-300) ** 2
    at, level, relative = _average_budgets(theta, unit, x, log_n, y, correlation)
    return fit_trend(at, level, relative, (noise[0], float(noise[1])), replace(PRIOR, drift=drift))


def frontier_levels(law: ComputeLaw, N: ArrayLike, C: ArrayLike, L: ArrayLike) -> Levels:
    """Return log C and log L of the best size at each budget [b], from the n runs that the law was fitted to.

    The third array [b, b] is the covariance of log L in units of the variance of one run.
    """
    theta = np.array([law.params[name] for name in CONSTANTS])
    N, C, L = validate_columns(N=N, C=C, L=L)
    x, covariance = np.log(C / law.centre), np.array(law.covariance) / max(law.spread, 1e-300) ** 2
    at, level, relative = _average_budgets(theta, covariance, x, np.log(N), np.log(L), None)
    return at + math.log(law.centre), level, relative


def _average_budgets(
    theta: np.ndarray,
    covariance: np.ndarray,
    x: np.ndarray,
    log_n: np.ndarray,
    y: np.ndarray,
    correlation: np.ndarray | None,
) -> Levels:
    """Return centred log C, log L at the best size and its relative covariance, for each budget."""
    best = theta[3] + theta[4] * x
    level = y - log_loss(theta, x, log_n) + log_loss(theta, x, best)
    budgets = split_budgets(np.exp(x))
    average = np.zeros((len(budgets), len(x)))
    for row, runs in zip(average, budgets, strict=True):
        row[runs] = 1 / len(runs)
    # an error of the shape around the best size moves the levels, unless sizes are on both sides of it
    shape = average @ (log_loss_slopes(theta, x, log_n) - log_loss_slopes(theta, x, best))[:, 3:]
    spread = average @ (np.eye(len(x)) if correlation is None else correlation) @ average.T
    return average @ x, average @ level, spread + shape @ covariance[3:, 3:] @ shape.T


def _find_not_identified(
    theta: np.ndarray, covariance: np.ndarray, dof: int, N: np.ndarray, C: np.ndarray, centre: float
) -> dict[str, str]:
    """Return {constant: reason} for constants that these runs do not identify."""
    from scipy.special import stdtrit  # slow import

    reasons = {}
    # CONSTANTS[5:] are alpha and beta
    for name, value, edge_reached in zip(CONSTANTS[5:], theta[5:], is_at_edge(theta), strict=True):
        if edge_reached:
            reasons[name] = f"{name} is at the edge of its search range, {value:.3g}."
    error = np.sqrt(np.maximum(np.diag(covariance), 0.0))
    reach = float(stdtrit(dof, (1 + LEVEL) / 2))
    if reach * error[4] > 0.5:
        reasons["size_exponent"] = f"size_exponent has a 95 % interval of +-{reach * error[4]:.2f}."
    outside = []
    for rows in split_budgets(C):
        # log N* at the geometric mean of the budget
        best = theta[3] + theta[4] * math.log(float(np.exp(np.log(C[rows]).mean())) / centre)
        if not math.log(N[rows].min()) <= best <= math.log(N[rows].max()):
            outside.append(f"{C[rows].mean():.2g}")
    # fewer than MIN_BUDGETS - 1 = 3 budgets have their
    # best N among the trained sizes
    if len(outside) > len(split_budgets(C)) - MIN_BUDGETS + 1:
        reasons["log_size"] = f"The best N is outside the range of sizes at {', '.join(outside)} FLOPs."
    return reasons


def _check_budgets(N: np.ndarray, C: np.ndarray, L: np.ndarray) -> None:
    usable = [rows for rows in split_budgets(C) if len(np.unique(N[rows])) >= MIN_SIZES] if len(C) else []
    if len(N) < MIN_RUNS or len(usable) < MIN_BUDGETS:
        raise ValueError(
            f"frontier: got {len(N)} runs and {len(usable)} budgets of {MIN_SIZES} sizes or more, expected "
            f"{MIN_RUNS} runs and {MIN_BUDGETS} budgets. Train several sizes at equal FLOPs, or for one size "
            "at each budget give a table without N and D."
        )
    if L[usable[-1]].min() >= L[usable[0]].min():
        raise ValueError("frontier: the losses do not fall with compute. Give tuned runs of one recipe.")
