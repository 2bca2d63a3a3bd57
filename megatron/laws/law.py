"""A fitted scaling law: constants, their uncertainty, and predictions."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.io import replace_nonfinite, write_json
from megatron.laws.fitting.noise import NORMAL_DOF, Trend
from megatron.laws.forms import FORM
from megatron.laws.law_fields import check_fields

# Constants of published laws of the form chinchilla: nats, N, D; each on the text of its authors
PUBLISHED = {
    "Hoffmann et al. 2022": {
        "E": math.exp(0.5267228), "A": math.exp(6.0073404), "B": math.exp(6.0179186),
        "alpha": 0.33917084, "beta": 0.2849083,
    },
    "Besiroglu et al. 2024": {"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658},
}  # fmt: skip


ZERO_FLOOR_SHARE = 1e-9  # of the largest E of the replicates: an E below counts as 0
MIN_REPLICATES = 8  # fewest replicates with E = 0 that have percentiles of their own
# fields of law.json that hold only numbers, so that null stands for NaN
NUMERIC_FIELDS = ("params", "objective", "standard_error", "derived", "replicates", "spread")


@dataclass(frozen=True, kw_only=True)
class Law:
    """A fitted scaling law. Saved as law.json.

    params          constants of the form, in nats per token, N in parameters, D in tokens
    objective       sum over runs of Huber(log L - log Lhat, huber_delta)
    standard_error  standard deviation of each constant over bootstrap replicates
    interval        {"level", "method", "n_units": runs or groups that the bootstrap weighted, "n_bootstrap",
                    "seed", "params": {name: [low, high]}, "derived": ...}
    derived         a_exponent: N_opt grows as C^a, b_exponent: D_opt as C^b
    replicates      constants of each bootstrap replicate, for intervals of any function of them
    residual        "log": the objective is of log L, as above; "nats": of L
    fixed           constants that were given, not fitted
    tied            {follower: leader} of exponents that were fitted as one
    priors          {"name", "mean", "spread"} of each prior (priors.py)
    spread          standard deviation of log L of single runs around the law, unbiased (noise.py)
    text_error      {"loss_se": nats, "relative": of log L, "n_runs"}: error that all losses share because
                    they were scored on one text; empty where it is unknown
    noise           estimate of `spread` with its degrees of freedom: fields of noise.Noise; its `trend`
                    describes how the scatter changes with compute
    lack_of_fit     test of the form against runs that differ only in their seed: fields of
                    lack_of_fit.LackOfFit; empty without such runs
    identified      whether the runs identify every constant (diagnostics.py); None without replicates
    not_identified  {constant: reason}
    held_out        runs excluded from the fit, and the errors of their predictions (holdout.py)
    profile         profile likelihood of one constant (profile.py)
    runs            names of the fitted runs in the table's column `run`; empty if unknown
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
    tied: dict[str, str] = field(default_factory=dict)
    priors: list[dict[str, Any]] = field(default_factory=list)
    spread: float = 0.0
    text_error: dict[str, Any] = field(default_factory=dict)
    noise: dict[str, Any] = field(default_factory=dict)
    lack_of_fit: dict[str, Any] = field(default_factory=dict)
    identified: bool | None = None
    not_identified: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)

    def loss(self, N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
        """Return the loss, nats per token, of N parameters after D tokens, U of them unique; broadcasts."""
        return FORM[self.form].loss(self.params, N, D, U)

    def predict(
        self,
        N: ArrayLike,
        D: ArrayLike,
        U: ArrayLike = np.inf,
        level: float = 0.95,
        kind: str = "predictive",
        text: str = "same",
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (loss, low, high), each of the shape of N and D broadcast.

        kind  "predictive": interval for the measured loss of one new run: the uncertainty of the law and the
              scatter of single runs, added in quadrature in log L.
              "confidence": interval for the value of the law, the mean of many such runs.
        text  "same": scored on the text of the fitted runs. "new": on another text of the same distribution,
              see `text_deviation`.
        low and high are NaN without replicates.
        Raises ValueError for another kind or text, and for a new text where `text_error` is empty.
        """
        if kind not in ("predictive", "confidence"):
            raise ValueError(f"kind: got '{kind}', expected predictive or confidence")
        self.text_deviation(kind, text)  # raises for an invalid text
        N, D, U = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (N, D, U)))
        value = self.loss(N, D, U)
        if not self.replicates:  # an interval without the uncertainty of the law would be too narrow
            return value, np.full_like(value, math.nan), np.full_like(value, math.nan)
        low, high = self.percentiles(self.losses(N, D, U), level)
        if kind == "predictive":
            low, high = self.add_noise(value, low, high, N, D, level)
        return value, *self.widen_for_text(value, low, high, level, kind, text)

    def widen_for_text(
        self, value: np.ndarray, low: np.ndarray, high: np.ndarray, level: float, kind: str, text: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of an interval of a loss on `text` from those for the text of the fitted runs."""
        from scipy.special import ndtri  # slow import

        half = float(ndtri((1 + level) / 2)) * self.text_deviation(kind, text)
        return (low, high) if half == 0 else _widen_interval(value, low, high, half)

    def text_deviation(self, kind: str, text: str) -> float:
        """Return the standard deviation of log L that `text` adds to an interval of a loss measured on it.

        All fitted runs were scored on one text, whose sampling error is a common factor of their losses. A
        run scored on the same text has the same factor, so nothing is added. The mean loss over the
        distribution of texts differs from the law by that error (confidence). A loss measured on a new text
        of the same size differs by the errors of both texts (predictive). Raises ValueError as `predict`.
        """
        if text not in ("same", "new"):
            raise ValueError(f"text: got '{text}', expected same or new")
        if text == "same":
            return 0.0
        if not self.text_error:
            raise ValueError(
                "text: got new for a law without text_error, expected a law of runs with standard errors. "
                "Fit it again on a table with a column loss_se."
            )
        return float(self.text_error["relative"]) * (math.sqrt(2) if kind == "predictive" else 1.0)

    def floor_interval(self, level: float = 0.95, text: str = "same") -> tuple[float, float]:
        """Return the confidence interval of E; on a new text, with the error that all losses and so E share.

        NaN without replicates. Raises ValueError for a form without E, and as `predict`.
        """
        from scipy.special import ndtri  # slow import

        if "E" not in self.params:
            raise ValueError(f"floor: got form {self.form}, expected one with a constant E")
        is_wider = self.text_deviation("confidence", text) > 0
        if not self.replicates:
            return math.nan, math.nan
        floor = self.params["E"]
        low, high = (float(end) for end in self.percentiles(np.asarray(self.replicates["E"]), level))
        # in nats and not in log L: an error that all losses share shifts E by the same number of nats
        half = float(ndtri((1 + level) / 2)) * self.text_error["loss_se"] if is_wider else 0.0
        down, up = math.hypot(max(floor - low, 0.0), half), math.hypot(max(high - floor, 0.0), half)
        return (low, high) if half == 0 else (max(floor - down, 0.0), floor + up)

    def add_noise(
        self,
        value: np.ndarray,
        low: np.ndarray,
        high: np.ndarray,
        N: ArrayLike,
        D: ArrayLike,
        level: float = 0.95,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of a predictive interval at N, D from a value and its confidence interval."""
        from scipy.special import stdtrit  # slow import

        sigma, dof = self.noise_at(N, D)
        # sigma is an estimate: Student's t instead of the normal quantile
        return _widen_interval(value, low, high, stdtrit(dof, (1 + level) / 2) * sigma)

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
        return FORM[self.form].loss(params, N, D, U)

    @property
    def n_units(self) -> int | None:
        """Number of runs or groups that the bootstrap weighted, for `expanded_level`; None if unknown."""
        return self.interval.get("n_units") or self.noise.get("n_groups")

    def percentiles(self, values: np.ndarray, level: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends of the percentile interval of `values` [replicates, ...], one value per replicate.

        The level is expanded for the number of runs or groups (`expanded_level`).

        Where the replicates do not exclude E = 0, the interval over those with E = 0 is computed too, and the
        union of both is returned. A percentile interval is too short at a bound (Andrews, Econometrica 2000):
        the replicates with E > 0 are all on one side, so over all replicates one end excludes twice its share
        or more. A law without E is nearly linear in its other k constants, and residuals of n units have
        n - k degrees of freedom, so the level of the inner interval is expanded for k constants.
        """
        wide = expanded_level(level, self.n_units)
        tails = [(1 - wide) / 2, (1 + wide) / 2]
        low, high = np.quantile(values, tails, axis=0)
        # replicates at the bound E = 0
        # A form without E has no floors: the mask is empty, its sum is 0, and the percentiles stay as they
        # are.
        floor = np.asarray(self.replicates.get("E", ()))
        is_without = floor <= ZERO_FLOOR_SHARE * floor.max(initial=0.0)
        # Fewer of them than one tail (25 of 1000 at 95 %) do not reach the end of the interval.
        if is_without.sum() >= max(MIN_REPLICATES, tails[0] * len(floor)) and not is_without.all():
            # free constants of a law without E
            n_free = len(self.params) - len(self.fixed) - len(self.tied) - 1
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
        return Template(FORM[self.form].formula).substitute({k: f"{v:.5g}" for k, v in self.params.items()})

    def save(self, path: str | Path) -> None:
        """Write law.json atomically. Floats keep every digit."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> "Law":
        """Read a law.json. Raises FileNotFoundError, or ValueError for another file or an unknown form."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such law. Write one with tools/fit_law.py.")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(stored, dict) and "laws" in stored:
                raise ValueError("got a stack of laws, expected one law; tools/predict.py reads stacks")
            return cls.from_dict(stored)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"{path}: not a law ({reason}). Fit it again with tools/fit_law.py.") from error

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "Law":
        """Build a law from the content of law.json.

        Raises ValueError, KeyError or TypeError for other content.
        """
        content = {f.name: stored[f.name] for f in fields(cls) if f.name in stored}
        content |= {key: _with_nan(content[key]) for key in NUMERIC_FIELDS if key in content}
        check_fields(content)
        # JSON may hold an integer above 2^64, of which numpy has no logarithm
        content["params"] = {name: float(value) for name, value in content["params"].items()}
        if "replicates" in content:
            content["replicates"] = {
                name: [float(value) for value in values] for name, values in content["replicates"].items()
            }
        law = cls(**content)
        if law.form not in FORM or set(law.params) != set(FORM[law.form].constants):
            raise ValueError(
                f"form: got '{law.form}' with constants {', '.join(law.params)}, expected one of "
                f"{', '.join(FORM)} with all of its constants"
            )
        return law

    def to_dict(self) -> dict[str, Any]:
        """Return the content of law.json; null stands for NaN and Inf."""
        return replace_nonfinite({"form": self.form, "formula": self.formula()} | asdict(self))


def _widen_interval(
    value: np.ndarray, low: np.ndarray, high: np.ndarray, half: np.ndarray | float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of an interval around `value`, widened by half-width `half` in log L in quadrature."""
    # a percentile interval may exclude `value`: then that side has a width of 0
    down, up = np.maximum(np.log(value / low), 0.0), np.maximum(np.log(high / value), 0.0)
    # in quadrature: 0.03 and 0.04 give 0.05
    return value * np.exp(-np.hypot(down, half)), value * np.exp(np.hypot(up, half))


def expanded_level(level: float, n_units: int | None, n_constants: int = 1) -> float:
    """Return the level of percentiles that covers `level` with few units (runs or groups).

    Expanded percentiles (Hesterberg, arXiv 1411.5279, section 5.2): around a mean, the variance of a
    bootstrap of n units is (n - 1)/n of the true variance, and its tails are normal where those of t are
    wider. Both are corrected by the level 2 Phi(sqrt(n / (n - k)) t) - 1 with t the quantile at n - k degrees
    of freedom and k = 1. For k constants of a linear law the variance of residuals has the factor (n - k)/n.
    With None or fewer than k + 2 units `level` is returned unchanged.
    """
    from scipy.special import ndtr, stdtrit  # slow import

    if n_units is None or n_units < n_constants + 2:
        return level
    # 15 runs: 0.95 becomes 0.974, with t = 2.14 at 14 degrees of freedom; 100 runs: 0.954
    dof = n_units - n_constants
    wide = math.sqrt(n_units / dof) * stdtrit(dof, (1 + level) / 2)
    return float(2 * ndtr(wide) - 1)


def _with_nan(content: Any) -> Any:
    """Replace null by NaN in content that holds only numbers, the inverse of `replace_nonfinite`."""
    if isinstance(content, dict):
        return {key: _with_nan(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_with_nan(value) for value in content]
    return math.nan if content is None else content


def optimum_exponents(alpha: ArrayLike, beta: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return (a, b) of N_opt ~ C^a and D_opt ~ C^b at C = k N D (Hoffmann et al., eq. 4)."""
    alpha, beta = np.asarray(alpha, dtype=float), np.asarray(beta, dtype=float)
    # alpha = 0.34, beta = 0.28: a = 0.28 / 0.62 = 0.45 and b = 0.55
    return beta / (alpha + beta), alpha / (alpha + beta)


def optimum_exponents_from(params: Mapping[str, ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Return `optimum_exponents` from the constants of any form, for text without repetition."""
    # kaplan: L^(1/alpha_D) is a sum of powers alpha_N / alpha_D and 1 of N and D, so the same formula holds
    for alpha, beta in (("alpha", "beta"), ("eta", "eta"), ("alpha_N", "alpha_D")):
        if alpha in params:
            return optimum_exponents(params[alpha], params[beta])
    raise ValueError(f"params: got {', '.join(params)}, expected alpha and beta, eta, or alpha_N and alpha_D")
