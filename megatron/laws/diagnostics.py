"""Diagnostics of a fitted law: which constants the runs identify, and warnings about design and fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron.laws.forms import FORM, chinchilla

EDGES = (0.02, 2.5)  # range of plausible exponents; one outside has diverged
NOTHING = 1e-6  # a term below this share of the loss has no effect
EXPONENTS = ("alpha", "beta", "eta")
COEFFICIENTS_OF = {"alpha": "Aa", "beta": "Bb", "eta": "ab"}
COEFFICIENTS = ("A", "B", "a", "b", "K")
# ratio of the ends of an interval above which a constant is not identified
WIDE = {"coefficient": 1e3, "decay": 10.0}
WIDE_EXPONENT = 0.5  # the same for an exponent: half-width of the interval over the value
WIDE_FLOOR = 0.15  # the same for E: half-width of the interval over the lowest loss
TOO_FEW_GROUPS = (
    "The residuals of rows that share N correlate, and {} N are too few to group them for {} constants: the "
    "intervals are too narrow. Add sizes, or use groups=range(n), --group none, if the runs are independent."
)


@dataclass(frozen=True)
class Diagnosis:
    """Constants that the runs do not identify (constant -> reason), and warnings about design and fit.

    `identified` is None without bootstrap replicates if no other check fails.
    """

    not_identified: dict[str, str]
    warnings: list[str]
    identified: bool | None


def diagnose(
    form: str | Callable[..., np.ndarray],
    columns: Mapping[str, np.ndarray],
    params: Mapping[str, float],
    replicates: Mapping[str, np.ndarray],
    fixed: Mapping[str, float],
    dependent: bool = False,
) -> Diagnosis:
    """Diagnose a law of `form` fitted to columns N, D, L, U [n]; constants in `fixed` are not checked.

    dependent  rows that share N have correlated residuals, and are too few N to be grouped
    """
    N, D, L = (columns[name] for name in "NDL")
    n_free = len(params) - len(fixed)
    reasons, warnings = _check_design(form, columns, params, n_free)
    if dependent:
        reasons = dict.fromkeys(params, TOO_FEW_GROUPS.format(len(np.unique(N)), n_free)) | reasons
    if isinstance(form, str) and "A" in params:
        vanished, more = _find_vanished_terms(N, D, params)
        warnings += more
        # the right operand of | wins: a reason from the
        # design replaces one from the constants
        reasons = vanished | reasons
    for name in EXPONENTS:
        if name in params and not _is_within_edges(params[name]):
            reasons[name] = (
                f"{name} = {params[name]:.3g} is at the edge of the search range: the form may not fit."
            )
    reasons = _check_replicates(params, replicates, float(L.min())) | reasons
    reasons = {name: reason for name, reason in reasons.items() if name not in fixed}
    # the runs determine the term A / N^alpha: at another alpha it has another A
    reasons = {
        coefficient: reasons[name]
        for name, coefficients in COEFFICIENTS_OF.items()
        for coefficient in coefficients
        if name in reasons and coefficient in params and coefficient not in fixed
    } | reasons
    identified = False if reasons else (True if replicates else None)
    return Diagnosis(reasons, warnings + list(dict.fromkeys(reasons.values())), identified)


def _check_design(
    form: str | Callable[..., np.ndarray],
    columns: Mapping[str, np.ndarray],
    params: Mapping[str, float],
    n_free: int,
) -> tuple[dict[str, str], list[str]]:
    N, D, U = columns["N"], columns["D"], columns.get("U")
    reasons: dict[str, str] = {}
    warnings: list[str] = []
    size_constants = [name for name in ("A", "alpha", "a") if name in params]
    token_constants = [name for name in ("B", "beta", "b") if name in params]
    if len(N) < 3 * n_free:
        warnings.append(f"{len(N)} runs for {n_free} constants: too few for reliable intervals.")
    if np.ptp(np.log(D / N)) < 0.1:
        reason = "All runs have the same D/N: on a single ray the effects of N and D cannot be separated."
        reasons |= dict.fromkeys((*size_constants, *token_constants), reason)
    for axis, values, constants in (("N", N, size_constants), ("D", D, token_constants)):
        if len(np.unique(values)) < 3:
            reason = f"{len(np.unique(values))} values of {axis}: its exponent needs three or more."
            reasons |= dict.fromkeys(constants, reason)
    if U is not None and isinstance(form, str) and FORM[form].needs_unique and (D <= U * 1.001).all():
        reason = "No run repeats any text: what repetition costs is not identified."
        reasons |= dict.fromkeys([name for name in ("R_D", "R_N", "K", "g", "h") if name in params], reason)
    return reasons, warnings


def _is_within_edges(exponent: float) -> bool:
    return EDGES[0] < exponent < EDGES[1]


def _find_vanished_terms(
    N: np.ndarray, D: np.ndarray, params: Mapping[str, float]
) -> tuple[dict[str, str], list[str]]:
    reasons: dict[str, str] = {}
    warnings: list[str] = []
    loss = chinchilla(params, N, D)
    for name, exponent, x, letter in (("A", "alpha", N, "N"), ("B", "beta", D, "D")):
        if (params[name] * x ** -params[exponent] < NOTHING * loss).all():
            reason = (
                f"{name} is 0 or nearly 0: in these runs the loss does not fall with {letter}, and "
                f"{exponent} is undetermined."
            )
            reasons |= {name: reason, exponent: reason}
    if params["E"] < NOTHING * loss.min():
        warnings.append(
            "E = 0: these runs show no floor of the loss, so extrapolation beyond them is unreliable."
        )
    return reasons, warnings


def _check_replicates(
    params: Mapping[str, float], replicates: Mapping[str, np.ndarray], lowest_loss: float
) -> dict[str, str]:
    reasons = {}
    for name, values in replicates.items():
        low, high = np.quantile(values, [0.025, 0.975])
        span = f"ranges from {low:.2g} to {high:.2g} in the bootstrap"
        is_wide = False
        # a constant that is fixed has the same value in all replicates
        if np.ptp(values) == 0:
            continue
        if name in COEFFICIENTS:
            is_wide = low <= 0 < high or high / low > WIDE["coefficient"]
            ratio = f"ranges over a factor of {high / low:.0e}" if low > 0 else "may be 0"
            span = f"{ratio} in the bootstrap"
        elif name in ("R_D", "R_N"):
            is_wide, span = high / low > WIDE["decay"], f"* {span}"
        elif name in EXPONENTS:
            is_wide = not (_is_within_edges(low) and _is_within_edges(high))
            is_wide = is_wide or high - low > 2 * WIDE_EXPONENT * params[name]
        elif name == "E":
            is_wide = high - low > 2 * WIDE_FLOOR * lowest_loss
        if is_wide:
            reasons[name] = f"{name} {span}: it is not identified.".replace(" * ", "* ")
    return reasons
