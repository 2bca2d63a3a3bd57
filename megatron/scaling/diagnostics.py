"""Which constants of a fitted law the runs identify, and what else a careful reader should know."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.scaling.forms import FORM, chinchilla

EDGES = (0.02, 2.5)  # an exponent outside of these has run away
NOTHING = 1e-6  # share of the loss below which a term has no effect
EXPONENTS = ("alpha", "beta", "eta", "alpha_N", "alpha_D")
COEFFICIENTS = ("A", "B", "a", "b", "c", "K", "Nc", "Dc")
WIDE = {"coefficient": 1e3, "decay": 10.0}  # ratio of the interval's ends from which on nothing is known
WIDE_EXPONENT = 0.5  # half-width of an exponent's interval over its value, above which it is not identified
WIDE_FLOOR = 0.15  # half-width of E's interval over the lowest loss, above which E is not identified


@dataclass(frozen=True)
class Diagnosis:
    """What the runs do not hold: constant -> reason, and warnings about the design and the fit.

    `identified` is None where there are no bootstrap replicates to judge by and nothing else speaks against.
    """

    not_identified: dict[str, str]
    warnings: list[str]
    identified: bool | None


def diagnose(
    form: str,
    N: np.ndarray,
    D: np.ndarray,
    U: np.ndarray | None,
    params: Mapping[str, float],
    replicates: Mapping[str, Sequence[float]],
    fixed: Mapping[str, float],
    lowest_loss: float,
    n_free: int | None = None,
) -> Diagnosis:
    """Judge a law of `form` fitted to N, D, U [n]; constants in `fixed` were given and are not judged.

    `n_free` constants were fitted, by default all that are not in `fixed`.
    """
    reasons, warnings = _of_design(form, N, D, U, len(params) - len(fixed) if n_free is None else n_free)
    if "A" in params:
        vanished, more = _vanished(N, D, params)
        warnings += more
        reasons = vanished | reasons
    for name in EXPONENTS:
        if name in params and not _is_inside(params[name]):
            reasons[name] = (
                f"{name} = {params[name]:.3g} is at the edge of what is searched: the form may not fit."
            )
    reasons = _of_replicates(params, replicates, lowest_loss) | reasons
    reasons = {name: reason for name, reason in reasons.items() if name not in fixed}
    identified = False if reasons else (True if replicates else None)
    return Diagnosis(reasons, warnings + list(dict.fromkeys(reasons.values())), identified)


def _of_design(
    form: str, N: np.ndarray, D: np.ndarray, U: np.ndarray | None, n_free: int
) -> tuple[dict[str, str], list[str]]:
    reasons, warnings = {}, []
    names = FORM[form].constants
    of_size = [name for name in ("A", "alpha", "a", "alpha_N", "Nc") if name in names]
    of_tokens = [name for name in ("B", "beta", "b", "alpha_D", "Dc") if name in names]
    if len(N) < 3 * n_free:
        warnings.append(f"{len(N)} runs for {n_free} constants: the intervals rest on few points.")
    if np.ptp(np.log(D / N)) < 0.1:
        reason = "All runs have the same D/N: on a single ray N and D cannot be told apart."
        reasons |= dict.fromkeys((*of_size, *of_tokens), reason)
    for axis, values, constants in (("N", N, of_size), ("D", D, of_tokens)):
        if len(np.unique(values)) < 3:
            reason = f"{len(np.unique(values))} values of {axis}: its exponent needs three or more."
            reasons |= dict.fromkeys(constants, reason)
    if U is not None and FORM[form].wants_unique and (D <= U * 1.001).all():
        reason = "No run repeats any text: what repetition costs is not identified."
        reasons |= dict.fromkeys(
            [name for name in ("R_D", "R_N", "K", "g", "h", "c", "gamma", "delta") if name in names], reason
        )
    return reasons, warnings


def _is_inside(exponent: float) -> bool:
    return EDGES[0] < exponent < EDGES[1]


def _vanished(N: np.ndarray, D: np.ndarray, params: Mapping[str, float]) -> tuple[dict[str, str], list[str]]:
    reasons, warnings = {}, []
    loss = chinchilla(params, N, D)
    for name, exponent, x, letter in (("A", "alpha", N, "N"), ("B", "beta", D, "D")):
        if (params[name] * x ** -params[exponent] < NOTHING * loss).all():
            reason = (
                f"{name} is 0 or next to it: in these runs the loss does not fall with {letter}, and "
                f"{exponent} means nothing."
            )
            reasons |= {name: reason, exponent: reason}
    if params["E"] < NOTHING * loss.min():
        warnings.append("E = 0: these runs show no floor of the loss, and what lies beyond them is a guess.")
    return reasons, warnings


def _of_replicates(
    params: Mapping[str, float], replicates: Mapping[str, Sequence[float]], lowest_loss: float
) -> dict[str, str]:
    reasons = {}
    for name, values in replicates.items():
        if not len(values) or np.ptp(values) == 0:
            continue
        low, high = np.quantile(values, [0.025, 0.975])
        span = f"ranges from {low:.2g} to {high:.2g} in the bootstrap: it is not identified."
        if name in COEFFICIENTS and low <= 0 < high:
            reasons[name] = f"{name} may be 0 in the bootstrap: it is not identified."
        elif name in COEFFICIENTS and low > 0 and high / low > WIDE["coefficient"]:
            reasons[name] = (
                f"{name} ranges over a factor of {high / low:.0e} in the bootstrap: it is not identified."
            )
        elif name in ("R_D", "R_N") and high / low > WIDE["decay"]:
            reasons[name] = f"{name}* {span}"
        elif name in EXPONENTS and (
            not (_is_inside(low) and _is_inside(high)) or high - low > 2 * WIDE_EXPONENT * params[name]
        ):
            reasons[name] = f"{name} {span}"
        elif name == "E" and high - low > 2 * WIDE_FLOOR * lowest_loss:
            reasons[name] = f"E {span}"
    return reasons
