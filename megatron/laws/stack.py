"""Stack of several forms of a law in one prediction, weighted by their errors of extrapolation.

A part of the runs with the most compute is held out, each form is fitted to the others, and its errors on the
held-out runs are measured. This is repeated for several parts. Weights are inverse mean squares of those
errors (Bates and Granger, Operational Research Quarterly 1969). A prediction is the mixture of the predictive
distributions of the forms, so that its interval includes their disagreement. No form is exact beyond the
runs: errors that the spread of the mixture does not explain grow with the distance log(C / C_max). So an
error is added whose standard deviation is proportional to that distance, with the factor measured on the
held-out parts.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.io import replace_nonfinite, write_json
from megatron.laws.columns import takes_data_frame
from megatron.laws.fit import fit_law
from megatron.laws.fitting.noise import NORMAL_DOF
from megatron.laws.forms import FORM, check_form
from megatron.laws.frontier import search_frontier
from megatron.laws.holdout import format_held_out, select_largest
from megatron.laws.law import Law, expanded_level
from megatron.laws.law_file import convert_fields, load_law, require

SHARES = (0.1, 0.2, 0.3, 0.4)  # shares of the runs, those of most compute, that are held out in turn
PLAIN_FORMS = ("chinchilla", "over_training", "kaplan")
REPETITION_FORMS = ("repeated_data", "over_repetition", "data_constrained")
CUT_REPLICATES = 100
N_OPTIMA = 200  # replicates of each form whose optimum is searched
MIN_LEFT_OUT = 2
MIN_DISTANCE = 0.1  # RMS of log(C / C_max) of a part, below which it is not an extrapolation
MIN_ERROR = 1e-4  # of log L: lower limit of the RMS error of a form
N_CENTRES = 201  # quantiles of the replicates that represent a law at a point
N_BISECTIONS = 50
MIN_SCALE = 1e-12
TOOL = "tools/fit_law.py --stack"


@dataclass(frozen=True)
class Component:
    """Distribution of one law at n points: Student's t (`scale`, `dof` [n]) around `centres` [r, n]."""

    weight: float
    centres: np.ndarray
    scale: np.ndarray
    dof: np.ndarray

    def widen(self, scale: np.ndarray, dof: float) -> "Component":
        """Add an independent error of standard deviation `scale` [n]; dof by Welch and Satterthwaite."""
        variance, added_variance = self.scale**2, scale**2
        with np.errstate(divide="ignore", invalid="ignore"):
            # (sum v)^2 / sum(v^2 / dof); 0 / 0 where both scales are 0, and dof has no effect there
            joint = (variance + added_variance) ** 2 / (variance**2 / self.dof + added_variance**2 / dof)
        joint = np.minimum(np.where(np.isnan(joint), self.dof, joint), NORMAL_DOF)
        return replace(self, scale=np.sqrt(variance + added_variance), dof=joint)

    def cdf(self, value: np.ndarray) -> np.ndarray:
        """Return the cumulative distribution function [n] at `value` [n]."""
        from scipy.special import stdtr  # slow import

        scale = np.maximum(self.scale, MIN_SCALE)
        # a mixture of r equal parts: [r, n], then the mean over r
        return stdtr(self.dof, (value - self.centres) / scale).mean(axis=0)


def build_component(
    law: Law, weight: float, N: np.ndarray, D: np.ndarray, U: np.ndarray, kind: str
) -> Component:
    """Return the distribution of log L at N, D, U [n] by one law; `kind` as for Law.predict.

    Replicates are scaled around their median for the number of runs, as expanded percentiles are.
    """
    from scipy.special import ndtri  # slow import

    losses = np.log(law.losses(N, D, U))
    # midpoints of 201 slices of equal probability, from 0.25 % to 99.75 %: [201, n]
    centres = np.quantile(losses, (np.arange(N_CENTRES) + 0.5) / N_CENTRES, axis=0)
    middle = np.median(losses, axis=0)
    # ratio of the normal quantiles of the expanded and the plain level, at 95 %
    level = 0.95
    factor = ndtri((1 + expanded_level(level, law.n_units)) / 2) / ndtri((1 + level) / 2)
    sigma, dof = law.noise_at(N, D)
    scale = sigma if kind == "predictive" else np.zeros(len(N))
    return Component(weight, middle + factor * (centres - middle), scale, dof)


def mixture_quantiles(components: Sequence[Component], shares: Sequence[float]) -> list[np.ndarray]:
    """Return the quantile [n] of the mixture for each of `shares`, by bisection."""
    from scipy.special import stdtrit  # slow import

    quantiles = []
    for share in shares:
        ends = [
            component.centres + stdtrit(component.dof, share) * np.maximum(component.scale, MIN_SCALE)
            for component in components
        ]
        # the quantile of a mixture is between the smallest and the largest quantile of its parts
        low = np.min([end.min(axis=0) for end in ends], axis=0)
        high = np.max([end.max(axis=0) for end in ends], axis=0)
        # cdf increases with the value; 50 halvings leave 1e-15 of the bracket
        for _ in range(N_BISECTIONS):
            middle = 0.5 * (low + high)
            is_below = sum(component.weight * component.cdf(middle) for component in components) < share
            low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
        quantiles.append(0.5 * (low + high))
    return quantiles


@dataclass(frozen=True)
class Cut:
    """Forms fitted without the `n_left_out` runs of most compute, and their errors on those.

    distance  log(C / largest C of the fitted runs) of each held-out run
    error     {form: log(measured / predicted)} of each held-out run
    variance  {form: variance of log L of one run, as estimated by its fit} of each held-out run
    """

    share: float
    n_left_out: int
    distance: np.ndarray
    error: dict[str, np.ndarray]
    variance: dict[str, np.ndarray]

    def rms(self) -> dict[str, float]:
        """Return the root mean square error of each form, in log L."""
        return {form: float(np.sqrt((values**2).mean())) for form, values in self.error.items()}


@dataclass(frozen=True, kw_only=True, repr=False)
class StackedLaw:
    """Laws of several forms and their weights. Saved as stacked_law.json.

    laws            {form: its law, fitted to all runs}
    weights         {form: its share}, whose sum is 1
    growth          standard deviation of log L per unit of log(C / largest_compute) beyond the runs
    growth_dof      degrees of freedom of `growth`: number of held-out parts
    largest_compute largest 6 N D of the runs, FLOPs
    cuts            {"share", "n_left_out", "rms": {form: in log L}} of each held-out part
    refused         {form: reason for which it is not in the stack}
    runs            names of the fitted runs in the table's column `run`; empty if unknown
    """

    laws: dict[str, Law]
    weights: dict[str, float]
    growth: float
    growth_dof: float
    largest_compute: float
    cuts: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    n_runs: int = 0
    ranges: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    filter: dict[str, Any] = field(default_factory=dict)
    table: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    held_out: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<StackedLaw, {self.n_runs} runs: {self.formula()}>"

    def loss(self, N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
        """Return the weighted geometric mean of the losses of the forms, nats per token.

        Arguments broadcast as in Law.loss.
        """
        # the geometric mean, since errors and weights are of log L
        return np.exp(sum(w * np.log(self.laws[form].loss(N, D, U)) for form, w in self.weights.items()))

    def distance(self, N: ArrayLike, D: ArrayLike) -> np.ndarray:
        """Return log(6 N D / largest_compute), or 0 within the range of the runs."""
        compute = 6 * np.asarray(N, dtype=float) * np.asarray(D, dtype=float)
        return np.maximum(np.log(compute / self.largest_compute), 0.0)

    def predict(
        self,
        N: ArrayLike,
        D: ArrayLike,
        U: ArrayLike = np.inf,
        level: float = 0.95,
        kind: str = "predictive",
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (loss, low, high) as Law.predict; low and high are quantiles of the mixture of the forms.

        Both kinds include the error of extrapolation. Raises ValueError as Law.predict.
        """
        N, D, U = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (N, D, U)))
        value = self.loss(N, D, U)
        if not all(law.replicates for law in self.laws.values()):
            return value, np.full_like(value, math.nan), np.full_like(value, math.nan)
        flat = (N.ravel(), D.ravel(), U.ravel())
        # 0 within the range of the runs: the mixture is then not widened
        growth = self.growth * self.distance(*flat[:2])
        components = [
            build_component(self.laws[form], weight, *flat, kind).widen(growth, self.growth_dof)
            for form, weight in self.weights.items()
        ]
        ends = mixture_quantiles(components, [(1 - level) / 2, (1 + level) / 2])
        low, high = (np.exp(end).reshape(value.shape) for end in ends)
        return value, low, high

    def formula(self) -> str:
        """Return the forms with their weights in one line."""
        shares = ", ".join(f"{100 * weight:.0f} % {form}" for form, weight in self.weights.items())
        return f"log L = weighted mean of {shares}"

    def save(self, path: str | Path) -> None:
        """Write stacked_law.json atomically."""
        content = {name: value for name, value in vars(self).items() if name != "laws"}
        laws = {form: law.to_dict() for form, law in self.laws.items()}
        write_json(Path(path), replace_nonfinite({"formula": self.formula()} | content | {"laws": laws}))

    @classmethod
    def load(cls, path: str | Path) -> "StackedLaw":
        """Read a stacked_law.json. Raises FileNotFoundError, or ValueError for another file."""
        return load_law(path, "a stack of laws", TOOL, cls._from_dict)

    @classmethod
    def _from_dict(cls, stored: Any) -> "StackedLaw":
        """Build a stack from the content of stacked_law.json. Raises ValueError for other content."""
        require("laws", isinstance(stored.get("laws"), dict) and bool(stored["laws"]), "laws by form")
        laws = {form: Law.from_dict(law) for form, law in stored["laws"].items()}
        stack = cls(**convert_fields(cls, stored | {"laws": {}}) | {"laws": laws})
        weights = stack.weights.values()
        for form, law in stack.laws.items():
            require("laws", law.form == form, f"form '{form}', got '{law.form}'")
        require("weights", set(stack.weights) == set(stack.laws), "one weight for each of the laws")
        require(
            "weights", min(weights) > 0 and abs(sum(weights) - 1) < 1e-6, "numbers above 0 with a sum of 1"
        )
        require("growth", 0 <= stack.growth < math.inf, "a number of 0 or more")
        require("growth_dof", 0 < stack.growth_dof < math.inf, "a number above 0")
        require("largest_compute", 0 < stack.largest_compute < math.inf, "FLOPs above 0")
        for cut in stack.cuts:
            require("cuts", isinstance(cut.get("rms"), dict), "the errors of each held-out part")
        return stack


def is_stack(path: str | Path) -> bool:
    """Return whether a file is JSON with the keys of stacked_law.json. Values are not checked."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and "laws" in stored and "weights" in stored


def stack_path_of(law_path: str | Path) -> Path:
    """Return the path of the stack beside a law: stacked_law.json for law.json."""
    return Path(law_path).with_name(f"stacked_{Path(law_path).name}")


def load_stack_of(law: Law, law_path: str | Path) -> StackedLaw | None:
    """Return the stack of the same runs beside a law; None without one. Raises ValueError as `load`."""
    path = stack_path_of(law_path)
    if not path.is_file():
        return None
    stack = StackedLaw.load(path)
    shared = ("table", "filter", "columns", "runs", "n_runs", "ranges")
    return stack if all(getattr(stack, name) == getattr(law, name) for name in shared) else None


@takes_data_frame
def stack_laws(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    *,
    U: ArrayLike | None = None,
    forms: Sequence[str] | None = None,
    groups: ArrayLike | None = None,
    loss_se: ArrayLike | None = None,
    huber_delta: float = 1e-3,
    n_bootstrap: int = 1000,
    seed: int = 0,
) -> StackedLaw:
    """Fit `forms` to n runs, weight them by their errors on the runs of most compute, and stack them.

    Arguments are as for fit_law. Default `forms` are chinchilla, over_training and kaplan; with runs that
    repeat text (U below D) also repeated_data, over_repetition and data_constrained. SHARES of the runs are
    held out in turn. A form that cannot be fitted to every part is omitted, and its reason stored in
    `refused`. Raises ValueError where no form or no part remains, and as fit_law.
    """
    given = {"N": N, "D": D, "L": L, "U": U, "groups": groups}
    columns = {name: np.asarray(values).ravel() for name, values in given.items() if values is not None}
    if forms is None:
        repeats = U is not None and bool((columns["U"] < 0.999 * columns["D"]).any())
        forms = PLAIN_FORMS + (REPETITION_FORMS if repeats else ())
    for form in forms:
        check_form(form)
    if not forms or len(set(forms)) < len(forms):
        raise ValueError(f"forms: got {', '.join(forms) or 'none'}, expected each form once, one or more")
    laws, refused = {}, {}
    options = {"huber_delta": huber_delta, "seed": seed}
    for form in forms:
        try:
            laws[form] = _fit_form(columns, form, n_bootstrap=n_bootstrap, loss_se=loss_se, **options)
        except ValueError as error:
            refused[form] = str(error)
    cuts = _fit_without_largest(columns, list(laws), options, refused)
    laws = {form: law for form, law in laws.items() if form not in refused}
    if not laws or not cuts:
        reasons = "; ".join(refused.values()) or "every part leaves too few runs"
        raise ValueError(f"stack: got no form that fits without the largest runs ({reasons}). Add runs.")
    weights = _compute_weights(cuts, list(laws))
    return StackedLaw(
        laws=laws,
        weights=weights,
        growth=_estimate_growth(cuts, weights),
        growth_dof=float(len(cuts)),
        largest_compute=float(6 * (columns["N"] * columns["D"]).max()),
        cuts=[{"share": cut.share, "n_left_out": cut.n_left_out, "rms": cut.rms()} for cut in cuts],
        refused=refused,
        n_runs=len(columns["N"]),
        ranges=next(iter(laws.values())).ranges,
        warnings=[f"{form}: {warning}" for form, law in laws.items() for warning in law.warnings],
    )


def _fit_form(columns: Mapping[str, np.ndarray], form: str, **options: Any) -> Law:
    """Fit a form to the columns of runs; U is omitted unless the form needs it. Raises ValueError."""
    used = {name: v for name, v in columns.items() if name != "U" or FORM[form].needs_unique}
    return fit_law(**used, form=form, **options)


def _fit_without_largest(
    columns: Mapping[str, np.ndarray],
    forms: Sequence[str],
    options: Mapping[str, Any],
    refused: dict[str, str],
) -> list[Cut]:
    """Fit each form without each part of the largest runs, with `options` of fit_law.

    A form that fails for any part is added to `refused`.
    """
    n_runs = len(columns["N"])
    # 12 runs: the shares give 1, 2, 4 and 5 runs, so sizes = [2, 4, 5]; 100 runs: [10, 20, 30, 40]
    sizes = sorted({max(MIN_LEFT_OUT, round(share * n_runs)) for share in SHARES})
    cuts = []
    for size in (size for size in sizes if size < n_runs):
        is_out = select_largest(columns["N"], columns["D"], size)
        inner = {name: values[~is_out] for name, values in columns.items()}
        N, D, L, U = (columns[name][is_out] if name in columns else np.inf for name in "NDLU")
        # 0 or more, since the held-out runs are those of most compute
        distance = np.log(N * D / (inner["N"] * inner["D"]).max())
        errors, variances = {}, {}
        for form in (form for form in forms if form not in refused):
            try:
                law = _fit_form(inner, form, n_bootstrap=CUT_REPLICATES, **options)
            except ValueError as error:
                refused[form] = f"without the {size} largest runs: {error}"
                continue
            errors[form] = np.log(L / law.loss(N, D, U))
            # variance of the law (over replicates) plus variance of a single run
            variances[form] = np.log(law.losses(N, D, U)).var(axis=0) + law.noise_at(N, D)[0] ** 2
        cuts.append(Cut(size / n_runs, size, distance, errors, variances))
    return cuts


def _compute_weights(cuts: Sequence[Cut], forms: Sequence[str]) -> dict[str, float]:
    """Return weights of the forms by inverse mean squared errors, each cut with equal weight.

    The largest weight is first.
    """
    # the floor MIN_ERROR keeps a form with errors of 0 from having all of the weight
    square = {form: np.mean([cut.rms()[form] ** 2 for cut in cuts]) + MIN_ERROR**2 for form in forms}
    whole = sum(1 / value for value in square.values())
    return {form: float(1 / square[form] / whole) for form in sorted(forms, key=lambda form: square[form])}


def _estimate_growth(cuts: Sequence[Cut], weights: Mapping[str, float]) -> float:
    """Return the standard deviation of log L per unit of distance not explained by the mixture's spread.

    sqrt(sum max(mean(e^2) - variance of the mixture, 0) / sum mean(distance^2)), sums over cuts. A part whose
    runs are hardly beyond the others has no information on growth and is skipped.
    """
    # E[error^2] = between + within + growth^2 distance^2, for the error of the mean of the forms. A cut with
    # smaller errors adds 0 to the sum, not a negative value.
    beyond = far = 0.0
    shares = np.array(list(weights.values()))
    for cut in cuts:
        errors, variances = (np.array([v[form] for form in weights]) for v in (cut.error, cut.variance))
        error = shares @ errors
        explained = shares @ ((errors - error) ** 2 + variances)  # between and within the forms
        square = float((cut.distance**2).mean())
        if square > MIN_DISTANCE**2:
            beyond += max(float((error**2 - explained).mean()), 0.0)
            far += square
    return float(np.sqrt(beyond / far)) if far else 0.0


def stacked_bands(
    stack: StackedLaw,
    C: float,
    level: float = 0.95,
    flops_per_param_token: float = 6.0,
    U: float | None = None,
) -> dict[str, tuple[float, float]]:
    """Return confidence intervals (low, high) of the optimal N and D at C: quantiles over all replicates.

    The replicates of a form share its weight. NaN if a law has no replicates.
    """
    values, shares, unique = [], [], np.inf if U is None else U
    for form, weight in stack.weights.items():
        law = stack.laws[form]
        if not law.replicates:
            return dict.fromkeys("ND", (math.nan, math.nan))
        # evenly spaced over the replicates, both ends included: 5 of 1000 are 0, 250, 500, 749 and 999
        rows = np.linspace(0, law.n_replicates() - 1, min(N_OPTIMA, law.n_replicates())).round().astype(int)
        optima = [search_frontier(law.replicate(row), C, unique, flops_per_param_token).N[0] for row in rows]
        values += optima
        shares += [weight / len(rows)] * len(rows)
    # weighted quantiles: cumulative weights of the sorted values
    order = np.argsort(values)
    below = np.cumsum(np.array(shares)[order])
    places = [int(np.searchsorted(below, share)) for share in ((1 - level) / 2, (1 + level) / 2)]
    # the sum of all weights may round to less than a share near 1: `min` keeps the index in range
    low, high = (float(values[order[min(place, len(order) - 1)]]) for place in places)
    product = C / flops_per_param_token  # N D, so the largest N has the smallest D
    return {"N": (low, high), "D": (product / high, product / low)}


def summarize_stack(stack: StackedLaw) -> str:
    """Return text with the weights and errors of the forms, refused forms, held-out runs and warnings."""
    lines = [f"{stack.formula()}  ({stack.n_runs} runs)"]
    sizes = ", ".join(str(cut["n_left_out"]) for cut in stack.cuts)
    lines.append(f"  form              weight  RMS error (%) without the {sizes} largest runs")
    for form, weight in stack.weights.items():
        errors = "".join(f"{100 * cut['rms'][form]:8.2f}" for cut in stack.cuts)
        lines.append(f"  {form:<18}{weight:>6.2f}{errors}")
    lines.append(
        f"  beyond C = {stack.largest_compute:.3g} FLOPs: {100 * stack.growth:.2g} % more deviation for each "
        "factor of e in compute"
    )
    lines += [f"  refused: {form}: {reason}" for form, reason in stack.refused.items()]
    lines += format_held_out(stack.held_out)
    return "\n".join(lines + [f"  warning: {warning}" for warning in stack.warnings])
