"""The forms of a scaling law, in their own constants.

N parameters, D tokens trained on, U unique tokens among them; L nats a token. Everything broadcasts, so that
constants of shape [R, 1] give the losses of R bootstrap replicates.

chinchilla        E + A/N^alpha + B/D^beta                       Hoffmann et al., arXiv 2203.15556, eq. 2
kaplan            ((Nc/N)^(alpha_N/alpha_D) + Dc/D)^alpha_D      Kaplan et al., arXiv 2001.08361, eq. 1.5
over_training     E + a N^-eta + b 6^(-eta/2) D^-eta             Gadre et al., arXiv 2403.08540, eq. 4
data_constrained  E + A/N'^alpha + B/D'^beta                     Muennighoff et al., arXiv 2305.16264, eq. 5
                  D' = U + U R_D* (1 - exp(-(D/U - 1)/R_D*)), and N' over the size that U makes optimal
repeated_data     the same with N' = N: only repetition decays
excess_params     the same with D' = D: only excess parameters decay
over_repetition   E + A/N^alpha + B/D^beta + K (N/U)^g (D/U - 1)^h, nothing without repetition
bounded           E + (L0 - E) h/(1 + h), h = a/N^alpha + b/D^beta + c N^gamma/U^delta     arXiv 2605.09189
                  never above L0, the loss of a model that knows nothing; h << 1: a sum of powers
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

BASE = ("E", "A", "B", "alpha", "beta")


def chinchilla(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
    """L = E + A/N^alpha + B/D^beta, nats a token; broadcasts. Repetition makes no difference to it."""
    return (
        params["E"]
        + params["A"] * np.asarray(N, dtype=float) ** -np.asarray(params["alpha"])
        + params["B"] * np.asarray(D, dtype=float) ** -np.asarray(params["beta"])
    )


def kaplan(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
    """A law without a floor: the loss falls to 0 as N and D grow."""
    alpha_N, alpha_D = np.asarray(params["alpha_N"]), np.asarray(params["alpha_D"])
    of_n = alpha_N * (np.log(params["Nc"]) - np.log(N)) / alpha_D
    of_d = np.log(params["Dc"]) - np.log(D)
    return np.exp(alpha_D * np.logaddexp(of_n, of_d))


def over_training(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
    """One exponent for N and D: lines of equal D/N are parallel, so over-training shifts a line."""
    eta = np.asarray(params["eta"])
    return (
        params["E"]
        + params["a"] * np.asarray(N, dtype=float) ** -eta
        + params["b"] * 6 ** (-eta / 2) * np.asarray(D, dtype=float) ** -eta
    )


def data_constrained(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike) -> np.ndarray:
    """Repeated tokens and parameters beyond what the unique tokens call for count for less and less.

    Without R_D (`excess_params`) or R_N (`repeated_data`) that decay is left out.
    """
    N, D = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
    unique = np.minimum(U, D)
    enough = np.minimum(N, params_for(params, unique)) if "R_N" in params else N
    return chinchilla(
        params,
        decayed(enough, N, params["R_N"]) if "R_N" in params else N,
        decayed(unique, D, params["R_D"]) if "R_D" in params else D,
    )


def decayed(unique: ArrayLike, total: ArrayLike, at: ArrayLike) -> np.ndarray:
    """What `total` is worth when only `unique` of it is new and repeats lose their worth by about `at`."""
    unique, at = np.asarray(unique, dtype=float), np.asarray(at, dtype=float)
    repeats = np.maximum(np.asarray(total) / unique - 1, 0)
    return unique * (1 - at * np.expm1(-repeats / at))


def params_for(params: Mapping[str, Any], D: ArrayLike) -> np.ndarray:
    """The N for which D tokens, each seen once, are compute-optimal: alpha A / N^alpha = beta B / D^beta."""
    alpha, beta = np.asarray(params["alpha"]), np.asarray(params["beta"])
    return (alpha * params["A"] / (beta * params["B"]) * np.asarray(D, dtype=float) ** beta) ** (1 / alpha)


def over_repetition(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike) -> np.ndarray:
    """Repeats add to the loss, the more so the larger the model is for its unique tokens."""
    N, D = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
    unique = np.minimum(U, D)
    repeats = D / unique - 1
    g, h = np.asarray(params["g"]), np.asarray(params["h"])
    with np.errstate(divide="ignore"):
        penalty = params["K"] * (N / unique) ** g * np.where(repeats > 0, repeats, 1.0) ** h
    return chinchilla(params, N, D) + np.where(repeats > 0, penalty, 0.0)


def bounded(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike) -> np.ndarray:
    """Too few parameters, too short a training and too little text add up, and level off at L0."""
    N, D = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
    power = {name: np.asarray(params[name]) for name in ("alpha", "beta", "gamma", "delta")}
    h = (
        params["a"] * N ** -power["alpha"]
        + params["b"] * D ** -power["beta"]
        + params["c"] * N ** power["gamma"] * np.minimum(U, D) ** -power["delta"]
    )
    return params["E"] + (params["L0"] - params["E"]) * h / (1 + h)


@dataclass(frozen=True)
class Form:
    """One form: its constants in the order of the formula, the formula with $name for each, its function."""

    constants: tuple[str, ...]
    formula: str
    loss: Callable[..., np.ndarray]
    wants_unique: bool = False


_SUM = "L = $E + $A/{N}^$alpha + $B/{D}^$beta"
_D_EFF, _N_EFF = "D' = U + U $R_D (1 - e^(-(D/U - 1)/$R_D))", "N' = Un + Un $R_N (1 - e^(-(N/Un - 1)/$R_N))"

FORM: Mapping[str, Form] = {
    "chinchilla": Form(BASE, _SUM.format(N="N", D="D"), chinchilla),
    "data_constrained": Form(
        (*BASE, "R_D", "R_N"),
        f"{_SUM}, {_D_EFF}, {_N_EFF}".format(N="N'", D="D'"),
        data_constrained,
        True,
    ),
    "repeated_data": Form((*BASE, "R_D"), f"{_SUM}, {_D_EFF}".format(N="N", D="D'"), data_constrained, True),
    "excess_params": Form((*BASE, "R_N"), f"{_SUM}, {_N_EFF}".format(N="N'", D="D"), data_constrained, True),
    "over_repetition": Form(
        (*BASE, "K", "g", "h"),
        f"{_SUM} + $K (N/U)^$g (D/U - 1)^$h".format(N="N", D="D"),
        over_repetition,
        True,
    ),
    "bounded": Form(
        ("E", "L0", "a", "b", "c", "alpha", "beta", "gamma", "delta"),
        "L = $E + ($L0 - $E) h/(1 + h), h = $a/N^$alpha + $b/D^$beta + $c N^$gamma/U^$delta",
        bounded,
        True,
    ),
    "kaplan": Form(
        ("Nc", "Dc", "alpha_N", "alpha_D"), "L = (($Nc/N)^($alpha_N/$alpha_D) + $Dc/D)^$alpha_D", kaplan
    ),
    "over_training": Form(
        ("E", "a", "b", "eta"), "L = $E + $a N^-$eta + $b 6^(-$eta/2) D^-$eta", over_training
    ),
}
