"""A fitted scaling law: constants, their uncertainty, and predictions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.io import replace_nonfinite, write_json
from megatron.laws.fitting.extrapolation import Extrapolation
from megatron.laws.fitting.noise import NORMAL_DOF, Noise, Trend
from megatron.laws.forms import FORM, check_form
from megatron.laws.law_file import convert_fields, convert_value, load_law, require

if TYPE_CHECKING:
    from pandas import DataFrame

ZERO_FLOOR_SHARE = 1e-9  # share of the replicates' largest E: an E below counts as 0
MIN_REPLICATES = 8  # fewest replicates with E = 0 that have percentiles of their own
TOOL = "tools/fit_law.py"


@dataclass(frozen=True, kw_only=True, repr=False)
class Law:
    """A fitted scaling law. Saved as law.json.

    params          constants of the form, in nats per token, N in parameters, D in tokens
    objective       sum over runs of Huber(log L - log Lhat, huber_delta)
    standard_error  standard deviation of each constant over bootstrap replicates
    interval        {"level", "method", "n_units": runs or groups that the bootstrap weighted,
                    "n_bootstrap", "seed", "params": {name: [low, high]}, "derived": ...}
    derived         a_exponent: N_opt grows as C^a, b_exponent: D_opt as C^b
    replicates      constants of each bootstrap replicate,
                    for intervals of any function of them
    residual        "log": the objective is of log L, as above; "nats": of L
    fixed           constants that were given, not fitted
    spread          standard deviation of log L of single
                    runs around the law, unbiased (noise.py)
    text_error      {"loss_se": nats, "relative": of log L, "n_runs"}: error
                    that all losses share because they were scored on one text,
                    and that no interval contains; empty where it is unknown
    noise           estimate of `spread` with its degrees of freedom: fields of noise.Noise;
                    its `trend` describes how the scatter changes with compute
    lack_of_fit     test of the form against runs that differ only in their seed: fields of
                    lack_of_fit.LackOfFit; empty without such runs
    identified      whether the runs identify every constant
                    (diagnostics.py); None without replicates
    not_identified  {constant: reason}
    held_out        runs excluded from the fit, and the errors
                    of their predictions (holdout.py)
    extrapolation   error beyond the runs: fields of extrapolation.Extrapolation; empty
                    if not measured
    runs            names of the fitted runs in the table's column `run`; empty if unknown
    own_loss        loss function of a caller's own form; not saved, see `load`
    """

    form: str
    params: dict[str, float]
    objective: float
    huber_delta: float
    n_runs: int
    columns: dict[str, str] = field(default_factory=dict)
    filter: dict[str, Any] = field(default_factory=dict)
    ranges: dict[str, list[float]] = field(default_factory=dict)
    interval: dict[str, Any] = field(default_factory=dict)
    standard_error: dict[str, float] = field(default_factory=dict)
    derived: dict[str, float] = field(default_factory=dict)
    replicates: dict[str, list[float]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    table: dict[str, str] = field(default_factory=dict)
    residual: str = "log"
    fixed: list[str] = field(default_factory=list)
    spread: float = 0.0
    text_error: dict[str, float] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    lack_of_fit: dict[str, Any] = field(default_factory=dict)
    identified: bool | None = None
    not_identified: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, Any] = field(default_factory=dict)
    extrapolation: dict[str, float] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    own_loss: Callable[..., np.ndarray] | None = None

    def __repr__(self) -> str:
        mark = ", NOT IDENTIFIED" if self.identified is False else ""
        return f"<Law {self.form}, {self.n_runs} runs{mark}: {self.formula()}>"

    @property
    def has_closed_frontier(self) -> bool:
        """Whether alpha A / N^alpha = beta B / D^beta holds at the optimum, so that it is not searched."""
        return self.own_loss is None and "A" in self.params

    def loss(self, N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
        """Return the loss, nats per token, of N parameters after D tokens, U of them unique; broadcasts."""
        return self._evaluate(self.params, N, D, U)

    def predict(
        self,
        N: ArrayLike,
        D: ArrayLike,
        U: ArrayLike = np.inf,
        level: float = 0.95,
        kind: str = "predictive",
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (loss, low, high), each of the shape of N and D broadcast.

        kind  "predictive": interval for the measured loss of one new run: the uncertainty
              of the law and the scatter of single runs, added in quadrature in log L.
              "confidence": interval for the value of the law, the mean of many such runs.
        Beyond the runs both include `extrapolation`, where it was measured.
        low and high are NaN without replicates. Raises ValueError for another kind.
        """
        if kind not in ("predictive", "confidence"):
            raise ValueError(f"kind: got '{kind}', expected predictive or confidence")
        N, D, U = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (N, D, U)))
        value = self.loss(N, D, U)
        if not self.replicates:  # an interval without the uncertainty of the law would be too narrow
            return value, np.full_like(value, math.nan), np.full_like(value, math.nan)
        low, high = self.percentiles(self.losses(N, D, U), level)
        return value, *self.add_noise(value, low, high, N, D, level, kind)

    def add_noise(
        self,
        value: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        N: ArrayLike,
        D: ArrayLike,
        level: float = 0.95,
        kind: str = "predictive",
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the interval of `kind` at N, D, from a value and percentiles of the law.

        The noise of a run widens a predictive interval.
        The error of extrapolation widens both.
        """
        from scipy.special import stdtrit  # slow import

        half = np.zeros_like(value)
        if kind == "predictive":
            sigma, dof = self.noise_at(N, D)
            # sigma is an estimate: Student's t instead of the normal quantile
            half = stdtrit(dof, (1 + level) / 2) * sigma
        if self.extrapolation:
            half = np.hypot(half, Extrapolation(**self.extrapolation).half_width(N, D, level))
        # a percentile interval may exclude `value`: then that side has a width of 0
        down, up = np.maximum(np.log(value / low), 0.0), np.maximum(np.log(high / value), 0.0)
        # in quadrature: 0.03 and 0.04 give 0.05
        ends = value * np.exp(-np.hypot(down, half)), value * np.exp(np.hypot(up, half))
        if kind == "confidence":  # without an error to add, the percentiles stay as they are
            return np.where(half > 0, ends[0], low), np.where(half > 0, ends[1], high)
        return ends

    def noise_at(self, N: ArrayLike, D: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return (standard deviation of log L of one run at N, D, its degrees of freedom)."""
        # log(N D) without the factor 6, the x of noise.Trend
        log_compute = np.log(np.asarray(N, dtype=float)) + np.log(np.asarray(D, dtype=float))
        if self.noise.get("trend"):
            return Trend(**self.noise["trend"]).evaluate(log_compute)
        dof = float(self.noise.get("dof", NORMAL_DOF))
        return np.full_like(log_compute, self.spread), np.full_like(log_compute, dof)

    def losses(self, N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
        """Return `loss` by every bootstrap replicate, [replicates, ...]."""
        N, D, U = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (N, D, U)))
        # replicates [R] become [R, 1, ...], which broadcast against N of any shape
        axes = tuple(range(1, N.ndim + 1))
        params = {name: np.expand_dims(self.replicates[name], axes) for name in self.params}
        return self._evaluate(params, N, D, U)

    @property
    def n_units(self) -> int | None:
        """Number of runs or groups that the bootstrap weighted, for `expanded_level`; None if unknown."""
        return self.interval.get("n_units") or self.noise.get("n_groups")

    def percentiles(self, values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the percentile interval of `values` [replicates, ...].

        The level is expanded for the number of runs or groups (`expanded_level`).

        Where the replicates do not exclude E = 0, the union with the interval
        over those with E = 0 is returned: a percentile interval is too short at
        a bound (Andrews, Econometrica 2000). A law without E is nearly linear in
        its other k constants, so the inner level is expanded for k constants.
        """
        wide = expanded_level(level, self.n_units)
        tails = [(1 - wide) / 2, (1 + wide) / 2]
        low, high = np.quantile(values, tails, axis=0)
        # replicates at the bound E = 0
        # a form without E has no floors, and an empty mask
        floor = np.asarray(self.replicates.get("E", ()))
        is_without = floor <= ZERO_FLOOR_SHARE * floor.max(initial=0.0)
        # Fewer of them than one tail (25 of 1000 at 95 %)
        # do not reach the end of the interval.
        if is_without.sum() >= max(MIN_REPLICATES, tails[0] * len(floor)) and not is_without.all():
            # free constants of a law without E
            n_free = len(self.params) - len(self.fixed) - 1
            inner = expanded_level(level, self.n_units, n_free)
            ends = [(1 - inner) / 2, (1 + inner) / 2]
            inner_low, inner_high = np.quantile(values[is_without], ends, axis=0)
            low, high = np.minimum(low, inner_low), np.maximum(high, inner_high)
        return low, high

    def n_replicates(self) -> int:
        """Return the number of bootstrap replicates."""
        return len(next(iter(self.replicates.values()), ()))

    def replicate(self, i: int) -> "Law":
        """Return the law of bootstrap replicate `i`."""
        params = {name: float(values[i]) for name, values in self.replicates.items()}
        return replace(self, params=params, replicates={}, interval={}, standard_error={})

    def formula(self) -> str:
        """Return the formula with its constants in one line, to five digits."""
        shown = {name: f"{value:.5g}" for name, value in self.params.items()}
        if self.form in FORM and self.own_loss is None:
            return Template(FORM[self.form].formula).substitute(shown)
        return f"L = {self.form}({', '.join(f'{name} = {value}' for name, value in shown.items())})"

    def to_frame(self) -> "DataFrame":
        """Return a row for each constant: value, low, high, standard_error, identified."""
        from pandas import DataFrame  # slow import

        intervals = {**self.interval.get("params", {}), **self.interval.get("derived", {})}
        frame = DataFrame({"value": {**self.params, **self.derived}})
        ends = np.array([intervals.get(name, (math.nan, math.nan)) for name in frame.index])
        errors = [self.standard_error.get(name, math.nan) for name in frame.index]
        identified = [name not in self.not_identified for name in frame.index]
        return frame.assign(low=ends[:, 0], high=ends[:, 1], standard_error=errors, identified=identified)

    def plot(self, N: ArrayLike | None = None, D: ArrayLike | None = None, L: ArrayLike | None = None) -> Any:
        """Return a plotly figure of the loss against compute, with runs N, D, L [n] if given."""
        from megatron.laws.plots import plot_law

        return plot_law(self, N, D, L)

    def save(self, path: str | Path) -> None:
        """Write law.json atomically. Floats keep every digit."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path, own_loss: Callable[..., np.ndarray] | None = None) -> "Law":
        """Read a law.json; `own_loss` is the function of a law of an own form.

        Raises FileNotFoundError, or ValueError
        for another file or an unknown form.
        """
        return load_law(path, "a law", TOOL, lambda stored: cls.from_dict(stored, own_loss))

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], own_loss: Callable[..., np.ndarray] | None = None) -> "Law":
        """Build a law from the content of law.json. Raises ValueError or TypeError for other content."""
        law = cls(**convert_fields(cls, stored, skipped=("own_loss",)), own_loss=own_loss)
        _check_values(law)
        return law

    def to_dict(self) -> dict[str, Any]:
        """Return the content of law.json; null stands for NaN and Inf."""
        content = asdict(replace(self, own_loss=None))
        del content["own_loss"]
        return replace_nonfinite({"form": self.form, "formula": self.formula()} | content)

    def _evaluate(self, params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike) -> np.ndarray:
        if self.own_loss is None:
            return FORM[self.form].loss(params, N, D, U)
        return np.asarray(self.own_loss(params, *(np.asarray(v, dtype=float) for v in (N, D, U))))


def _check_values(law: Law) -> None:
    """Raise ValueError for values that no fit writes."""
    if law.own_loss is None:
        check_form(law.form)
        names = set(FORM[law.form].constants)
        require("params", set(law.params) == names, f"the constants of {law.form}")
    lengths = {len(values) for values in law.replicates.values()}
    is_complete = not law.replicates or (set(law.replicates) == set(law.params) and len(lengths) == 1)
    require("replicates", is_complete, "equally many values of each constant of params")
    require("residual", law.residual in ("log", "nats"), "log or nats")
    require("spread", not law.spread < 0, "a number of 0 or more")
    for part in ("params", "derived"):
        convert_value("interval", law.interval.get(part, {}), dict[str, tuple[float, float]])
    level, n_units = law.interval.get("level", 0.95), law.interval.get("n_units", 1)
    is_level = isinstance(level, float) and 0 < level < 1 and isinstance(n_units, int) and n_units > 0
    require("interval", is_level, "a level between 0 and 1 and a number of units")
    require("ranges", all(len(ends) == 2 for ends in law.ranges.values()), "low and high by letter")
    for name, kind in (("noise", Noise), ("extrapolation", Extrapolation)):
        if getattr(law, name):
            part = convert_value(name, getattr(law, name), kind)
            trend = getattr(part, "trend", None)
            positive = (part.dof,) if trend is None else (part.dof, trend.sigma, trend.dof_centre)
            require(name, min(positive) > 0, "scatter and degrees of freedom above 0")


def expanded_level(level: float, n_units: int | None, n_constants: int = 1) -> float:
    """Return the level of percentiles that covers `level` with few units (runs or groups).

    Expanded percentiles (Hesterberg, arXiv 1411.5279, section 5.2): around a
    mean, the variance of a bootstrap of n units is (n - 1)/n of the true
    variance, and its tails are normal where t's are wider. Both are
    corrected by the level 2 Phi(sqrt(n / (n - k)) t) - 1 with t the quantile
    at n - k degrees of freedom and k = 1. For k constants of a linear law the
    variance of residuals has the factor (n - k)/n. With None or fewer than k
    + 2 units `level` is returned unchanged.
    """
    from scipy.special import ndtr, stdtrit  # slow import

    if n_units is None or n_units < n_constants + 2:
        return level
    # 15 runs: 0.95 becomes 0.974, with t = 2.14 at 14
    # degrees of freedom; 100 runs: 0.954
    dof = n_units - n_constants
    wide = math.sqrt(n_units / dof) * stdtrit(dof, (1 + level) / 2)
    return float(2 * ndtr(wide) - 1)


def optimum_exponents(alpha: ArrayLike, beta: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return (a, b) of N_opt ~ C^a and D_opt ~ C^b at C = k N D (Hoffmann et al., eq. 4)."""
    alpha, beta = np.asarray(alpha, dtype=float), np.asarray(beta, dtype=float)
    # alpha = 0.34, beta = 0.28: a = 0.28 / 0.62 = 0.45 and b = 0.55
    return beta / (alpha + beta), alpha / (alpha + beta)


def optimum_exponents_from(params: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
    """Return a_exponent and b_exponent of any form, for text without repetition."""
    # kaplan: L^(1/alpha_D) is a sum of powers alpha_N /
    # alpha_D and 1 of N and D, so the same formula holds
    names = [
        pair for pair in (("alpha", "beta"), ("eta", "eta"), ("alpha_N", "alpha_D")) if pair[0] in params
    ]
    a, b = optimum_exponents(*(params[name] for name in names[0]))
    return {"a_exponent": a, "b_exponent": b}
