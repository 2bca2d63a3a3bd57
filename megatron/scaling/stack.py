"""Several forms of a law as one prediction, weighted by how well each extrapolated.

A part of the runs with the most compute is left out, each form is fitted to the others, and its errors on the
runs left out are counted; this is done for several parts. Weights are inverse mean squares of those errors
(Bates and Granger, Operational Research Quarterly 1969). A prediction is the mixture of the forms' predictive
distributions, so that its interval contains what the forms disagree on. No form is exact beyond the runs: the
errors that the mixture's own spread does not explain grow with the distance log(C / C_max), and a normal term
whose deviation grows in proportion to it, as in the parts left out, is added.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.run_dir import with_null, write_json
from megatron.scaling.fit import fit_law
from megatron.scaling.forms import FORM
from megatron.scaling.frontier import least_loss
from megatron.scaling.holdout import largest, write_held_out
from megatron.scaling.law import Law
from megatron.scaling.law_fields import check_stack
from megatron.scaling.mixed_interval import component_of, mixture_quantiles

SHARES = (0.1, 0.2, 0.3, 0.4)  # of the runs, those of most compute, that are left out in turn
PLAIN = ("chinchilla", "over_training", "kaplan")
REPEATING = ("repeated_data", "over_repetition", "data_constrained")
CUT_REPLICATES = 100
N_OPTIMA = 200  # of each form: replicates whose optimum is searched
FEWEST_LEFT_OUT = 2
NEAR = 0.1  # root mean square of log(C / C_max) below which a part is no extrapolation
SMALLEST_ERROR = 1e-4  # of log L: no form is better than that


@dataclass(frozen=True)
class Cut:
    """Forms fitted without the `n_left_out` runs of most compute, and their errors on those.

    distance  log(C / largest C of the fitted runs) of each run left out
    error     {form: log(measured / predicted)} of each
    variance  {form: variance of log L of one run that its fit states} of each
    """

    share: float
    n_left_out: int
    distance: np.ndarray
    error: dict[str, np.ndarray]
    variance: dict[str, np.ndarray]

    def rms(self) -> dict[str, float]:
        """Root mean square error of each form, in log L."""
        return {form: float(np.sqrt((values**2).mean())) for form, values in self.error.items()}


@dataclass(frozen=True, kw_only=True)
class StackedLaw:
    """Laws of several forms and their weights. Saved as stacked_law.json.

    laws            {form: its law, fitted to all runs}
    weights         {form: its share}, of sum 1
    growth          deviation of log L for each unit of log(C / largest_compute) beyond the runs
    growth_dof      degrees of freedom of `growth`: parts left out
    largest_compute largest 6 N D of the runs, FLOPs
    cuts            {"share", "n_left_out", "rms": {form: in log L}} of each part left out
    refused         {form: why it is not in the stack}
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

    def loss(self, N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
        """The forms' weighted geometric mean of the loss, nats a token; broadcasts as Law.loss."""
        return np.exp(sum(w * np.log(self.laws[form].loss(N, D, U)) for form, w in self.weights.items()))

    def distance(self, N: ArrayLike, D: ArrayLike) -> np.ndarray:
        """log(6 N D / largest_compute), 0 within the range of the runs."""
        compute = 6 * np.asarray(N, dtype=float) * np.asarray(D, dtype=float)
        return np.maximum(np.log(compute / self.largest_compute), 0.0)

    def predict(
        self,
        N: ArrayLike,
        D: ArrayLike,
        U: ArrayLike = np.inf,
        level: float = 0.95,
        kind: str = "predictive",
        text: str = "same",
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(loss, low, high) as Law.predict; ends are quantiles of the mixture of the forms.

        The error of extrapolation is in both kinds. Raises ValueError as Law.predict.
        """
        N, D, U = np.broadcast_arrays(*(np.asarray(v, dtype=float) for v in (N, D, U)))
        value = self.loss(N, D, U)
        if not all(law.replicates for law in self.laws.values()):
            return value, np.full_like(value, math.nan), np.full_like(value, math.nan)
        flat = [values.ravel() for values in (N, D, U)]
        growth = self.growth * self.distance(*flat[:2])
        components = [
            component_of(self.laws[form], weight, *flat, kind, text).widen(growth, self.growth_dof)
            for form, weight in self.weights.items()
        ]
        ends = mixture_quantiles(components, [(1 - level) / 2, (1 + level) / 2])
        low, high = (np.exp(end).reshape(value.shape) for end in ends)
        return value, low, high

    def formula(self) -> str:
        """The forms with their weights, in one line."""
        shares = ", ".join(f"{100 * weight:.0f} % {form}" for form, weight in self.weights.items())
        return f"log L = weighted mean of {shares}"

    def save(self, path: str | Path) -> None:
        """Write stacked_law.json, whole or not at all."""
        content = {name: value for name, value in vars(self).items() if name != "laws"}
        laws = {form: law.to_dict() for form, law in self.laws.items()}
        write_json(Path(path), with_null({"formula": self.formula()} | content | {"laws": laws}))

    @classmethod
    def load(cls, path: str | Path) -> "StackedLaw":
        """Read what `save` wrote. FileNotFoundError, or ValueError for another file."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: got no such file. tools/fit_law.py --stack writes one.")
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            check_stack(stored)
            laws = {form: Law.from_dict(law) for form, law in stored["laws"].items()}
            known = {name: stored[name] for name in cls.__dataclass_fields__ if name in stored}
            for form, law in laws.items():
                if law.form != form:
                    raise ValueError(f"laws: got form '{law.form}' under the name '{form}'")
            return cls(**(known | {"laws": laws}))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            reason = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(
                f"{path}: not a stack of laws ({reason}). Fit it again with tools/fit_law.py --stack."
            ) from error


def is_stack(path: str | Path) -> bool:
    """Whether a file is JSON with the keys of stacked_law.json; what it holds is not checked."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and "laws" in stored and "weights" in stored


def stack_laws(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    *,
    U: ArrayLike | None = None,
    forms: Sequence[str] | None = None,
    shares: Sequence[float] = SHARES,
    groups: ArrayLike | None = None,
    loss_se: ArrayLike | None = None,
    huber_delta: float = 1e-3,
    n_bootstrap: int = 1000,
    seed: int = 0,
) -> StackedLaw:
    """Fit `forms` to n runs, weight them by their errors on the runs of most compute, and stack them.

    Arguments are as of fit_law. `forms` are by default chinchilla, over_training and kaplan, and with runs
    that repeat text (U below D) also repeated_data, over_repetition and data_constrained. `shares` of the
    runs are left out in turn. A form that cannot be fitted to every part is left out, with its reason.
    Raises ValueError where no form or no part is left, and as fit_law.
    """
    N, D, L = (np.asarray(values, dtype=float).ravel() for values in (N, D, L))
    columns = {"N": N, "D": D, "L": L, "U": None if U is None else np.asarray(U, dtype=float).ravel()}
    columns |= {"groups": None if groups is None else np.asarray(groups).ravel()}
    if forms is None:
        repeats = U is not None and bool((np.asarray(U) < 0.999 * D).any())
        forms = PLAIN + (REPEATING if repeats else ())
    _check_forms(forms, shares)
    laws, refused = {}, {}
    for form in forms:
        try:
            laws[form] = fit_law(
                **_of_form(columns, form),
                form=form,
                loss_se=loss_se,
                huber_delta=huber_delta,
                n_bootstrap=n_bootstrap,
                seed=seed,
            )
        except ValueError as error:
            refused[form] = str(error)
    cuts = _leave_out(columns, list(laws), shares, huber_delta, seed, refused)
    laws = {form: law for form, law in laws.items() if form not in refused}
    if not laws or not cuts:
        reasons = "; ".join(refused.values()) or "every part leaves too few runs"
        raise ValueError(f"stack: got no form that fits without the largest runs ({reasons}). Add runs.")
    weights = _weigh(cuts, list(laws))
    return StackedLaw(
        laws=laws,
        weights=weights,
        growth=_growth(cuts, weights),
        growth_dof=float(len(cuts)),
        largest_compute=float(6 * (N * D).max()),
        cuts=[{"share": cut.share, "n_left_out": cut.n_left_out, "rms": cut.rms()} for cut in cuts],
        refused=refused,
        n_runs=len(N),
        ranges=next(iter(laws.values())).ranges,
        warnings=_warn(laws),
    )


def _check_forms(forms: Sequence[str], shares: Sequence[float]) -> None:
    for form in forms:
        if form not in FORM:
            raise ValueError(f"forms: got '{form}', expected some of {', '.join(FORM)}")
    if not forms or len(set(forms)) < len(forms):
        raise ValueError(f"forms: got {', '.join(forms) or 'none'}, expected each form once, one or more")
    if not shares or not all(0 < share < 1 for share in shares):
        raise ValueError(f"shares: got {list(shares)}, expected numbers between 0 and 1")


def _of_form(columns: Mapping[str, np.ndarray | None], form: str) -> dict[str, np.ndarray | None]:
    """The columns that a form is fitted on: U only for a form of repetition."""
    return columns if FORM[form].wants_unique else dict(columns) | {"U": None}


def _leave_out(
    columns: Mapping[str, np.ndarray | None],
    forms: Sequence[str],
    shares: Sequence[float],
    huber_delta: float,
    seed: int,
    refused: dict[str, str],
) -> list[Cut]:
    """Fit each form without each part; one that fails in any of them is added to `refused`."""
    n_runs = len(columns["N"])
    sizes = sorted({max(FEWEST_LEFT_OUT, round(share * n_runs)) for share in shares})
    cuts = []
    for size in (size for size in sizes if size < n_runs):
        is_out = largest(columns["N"], columns["D"], size)
        inner, outer = (
            {name: None if v is None else v[rows] for name, v in columns.items()}
            for rows in (~is_out, is_out)
        )
        compute = inner["N"] * inner["D"]
        distance = np.log(outer["N"] * outer["D"] / compute.max())
        errors, variances = {}, {}
        for form in (form for form in forms if form not in refused):
            try:
                law = fit_law(
                    **_of_form(inner, form),
                    form=form,
                    huber_delta=huber_delta,
                    n_bootstrap=CUT_REPLICATES,
                    seed=seed,
                )
            except ValueError as error:
                refused[form] = f"without the {size} largest runs: {error}"
                continue
            unique = np.inf if outer["U"] is None else outer["U"]
            at = (outer["N"], outer["D"], unique)
            errors[form] = np.log(outer["L"] / law.loss(*at))
            variances[form] = (
                np.log(law.losses(*at)).var(axis=0) + law.noise_at(outer["N"], outer["D"])[0] ** 2
            )
        cuts.append(Cut(size / n_runs, size, distance, errors, variances))
    return cuts


def _weigh(cuts: Sequence[Cut], forms: Sequence[str]) -> dict[str, float]:
    """Inverse mean squared errors, each cut counting once; largest first."""
    square = {form: np.mean([cut.rms()[form] ** 2 for cut in cuts]) + SMALLEST_ERROR**2 for form in forms}
    whole = sum(1 / value for value in square.values())
    return {form: float(1 / square[form] / whole) for form in sorted(forms, key=lambda form: square[form])}


def _growth(cuts: Sequence[Cut], weights: Mapping[str, float]) -> float:
    """Deviation of log L for each unit of distance: what the mixture's spread leaves of its errors.

    Root of sum max(mean of e^2 - variance of the mixture, 0) over sum of mean squared distances, over cuts: a
    part whose runs are hardly beyond the others says nothing of growth, and has no weight.
    """
    beyond = far = 0.0
    for cut in cuts:
        error = sum(weight * cut.error[form] for form, weight in weights.items())
        between = sum(weight * (cut.error[form] - error) ** 2 for form, weight in weights.items())
        within = sum(weight * cut.variance[form] for form, weight in weights.items())
        square = float((cut.distance**2).mean())
        if square > NEAR**2:
            beyond += max(float((error**2 - between - within).mean()), 0.0)
            far += square
    return float(np.sqrt(beyond / far)) if far else 0.0


def _warn(laws: Mapping[str, Law]) -> list[str]:
    """Warnings of the laws with their form in front."""
    return [f"{form}: {warning}" for form, law in laws.items() for warning in law.warnings]


def stacked_bands(
    stack: StackedLaw,
    C: float,
    level: float = 0.95,
    flops_per_param_token: float = 6.0,
    U: float | None = None,
) -> dict[str, tuple[float, float]]:
    """Confidence intervals (low, high) of the optimal N and D at C: quantiles over all forms' replicates.

    Each form's replicates share its weight. NaN where a law has no replicates.
    """
    ends = (math.nan, math.nan)
    if not all(law.replicates for law in stack.laws.values()):
        return {"N": ends, "D": ends}
    values, shares = [], []
    for form, weight in stack.weights.items():
        law = stack.laws[form]
        rows = np.linspace(0, law.n_replicates() - 1, min(N_OPTIMA, law.n_replicates())).round().astype(int)
        for row in rows:
            at = least_loss(law.replicate(row), C, np.inf if U is None else U, flops_per_param_token)
            values.append(math.log(at.N[0]))
            shares.append(weight / len(rows))
    order = np.argsort(values)
    below = np.cumsum(np.array(shares)[order])
    places = [np.searchsorted(below, share) for share in ((1 - level) / 2, (1 + level) / 2)]
    low, high = (float(np.exp(values[order[min(place, len(order) - 1)]])) for place in places)
    product = C / flops_per_param_token
    return {"N": (low, high), "D": (product / high, product / low)}


def summarise_stack(stack: StackedLaw) -> str:
    """The weights and errors of the forms, then what they are where they were tested."""
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
    lines += write_held_out(stack.held_out)
    return "\n".join(lines + [f"  warning: {one}" for one in stack.warnings])
