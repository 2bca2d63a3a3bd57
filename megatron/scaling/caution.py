"""What a careful reader should know before believing a law, a sentence each."""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron.scaling.forms import FORM, chinchilla

EDGES = (0.02, 2.5)  # an exponent outside of these has run away
NOTHING = 1e-6  # share of the loss below which a term says nothing
EXPONENTS = ("alpha", "beta", "eta", "alpha_N", "alpha_D")
COEFFICIENTS = ("A", "B", "a", "b", "c", "K", "Nc", "Dc")
WIDE = {"coefficient": 1e3, "decay": 10.0}  # ratio of the interval's ends from which on nothing is known


def warnings_of(
    form: str,
    N: np.ndarray,
    D: np.ndarray,
    U: np.ndarray | None,
    params: Mapping[str, float],
    replicates: Mapping[str, Sequence[float]],
    n_free: int,
) -> list[str]:
    """Of a design and of what was fitted on it; `n_free` constants were free."""
    told = []
    if len(N) < 3 * n_free:
        told.append(f"{len(N)} runs for {n_free} constants: the intervals rest on few points.")
    if np.ptp(np.log(D / N)) < 0.1:
        told.append("All runs have the same D/N: on a single ray N and D cannot be told apart.")
    for axis, values in (("N", N), ("D", D)):
        if len(np.unique(values)) < 3:
            told.append(f"{len(np.unique(values))} values of {axis}: its exponent needs three or more.")
    if U is not None and FORM[form].wants_unique and (D <= U * 1.001).all():
        told.append("No run repeats any text: what repetition costs is not identified.")
    if "A" in params:
        told += _vanished(N, D, params)
    for name in EXPONENTS:
        if name in params and not _inside(params[name]):
            told.append(
                f"{name} = {params[name]:.3g} lies at the edge of what is searched: the form may not fit."
            )
    return told + _not_identified(params, replicates)


def _inside(exponent: float) -> bool:
    return EDGES[0] < exponent < EDGES[1]


def _vanished(N: np.ndarray, D: np.ndarray, params: Mapping[str, float]) -> list[str]:
    told = []
    loss = chinchilla(params, N, D)
    for name, exponent, x, letter in (("A", "alpha", N, "N"), ("B", "beta", D, "D")):
        if (params[name] * x ** -params[exponent] < NOTHING * loss).all():
            told.append(
                f"{name} is 0 or next to it: in these runs the loss does not fall with {letter}, and "
                f"{exponent} means nothing."
            )
    if params["E"] < NOTHING * loss.min():
        told.append("E = 0: these runs show no floor of the loss, and what lies beyond them is a guess.")
    return told


def _not_identified(params: Mapping[str, float], replicates: Mapping[str, Sequence[float]]) -> list[str]:
    told = []
    for name, values in replicates.items():
        if not len(values) or np.ptp(values) == 0:
            continue
        low, high = np.quantile(values, [0.025, 0.975])
        if name in COEFFICIENTS and low <= 0 < high:
            told.append(f"{name} may be 0 in the bootstrap: it is not identified.")
        elif name in COEFFICIENTS and low > 0 and high / low > WIDE["coefficient"]:
            told.append(
                f"{name} ranges over a factor of {high / low:.0e} in the bootstrap: it is not identified."
            )
        elif name in ("R_D", "R_N") and high / low > WIDE["decay"]:
            told.append(
                f"{name}* ranges from {low:.2g} to {high:.2g} in the bootstrap: it is not identified."
            )
        elif name in EXPONENTS and _inside(params[name]) and not (_inside(low) and _inside(high)):
            told.append(f"{name} ranges from {low:.2g} to {high:.2g} in the bootstrap: it is not identified.")
        elif name == "E" and low <= 0.05 * params["E"]:
            told.append("E may be near 0 in the bootstrap: the floor of the loss is not identified.")
    return told
