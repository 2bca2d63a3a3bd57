"""Forms of scaling laws, in their own constants.

N parameters, D training tokens, U unique tokens among them,
L nats per token. All functions broadcast, so constants of
shape [R, 1] give the losses of R bootstrap replicates.

chinchilla        E + A/N^alpha + B/D^beta                       Hoffmann et al., arXiv 2203.15556, eq. 2
kaplan            ((Nc/N)^(alpha_N/alpha_D) + Dc/D)^alpha_D      Kaplan et al., arXiv 2001.08361, eq. 1.5
over_training     E + a N^-eta + b 6^(-eta/2) D^-eta             Gadre et al., arXiv 2403.08540, eq. 4
data_constrained  E + A/N'^alpha + B/D'^beta                     Muennighoff et al., arXiv 2305.16264, eq. 5
                  D' = U + U R_D* (1 - exp(-(D/U - 1)/R_D*)), and N' likewise of N and N_U, the size that is
                  compute-optimal for U tokens
repeated_data     data_constrained with N' = N: only repeated tokens lose value
over_repetition   E + A/N^alpha + B/D^beta + K (N/U)^g (D/U - 1)^h;
                  the last term is 0 without repetition
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

CHINCHILLA_CONSTANTS = ("E", "A", "B", "alpha", "beta")


def chinchilla(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
    """Return L = E + A/N^alpha + B/D^beta, nats per token; broadcasts. U has no effect."""
    return (
        params["E"]
        + params["A"] * np.asarray(N, dtype=float) ** -np.asarray(params["alpha"])
        + params["B"] * np.asarray(D, dtype=float) ** -np.asarray(params["beta"])
    )


def kaplan(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
    """Return the loss of a law without a floor: it falls to 0 as N and D grow. U has no effect."""
    alpha_N, alpha_D = np.asarray(params["alpha_N"]), np.asarray(params["alpha_D"])
    # L = exp(alpha_D log(exp(of_n) + exp(of_d))), by log-sum-exp:
    # for a small alpha_D the power (Nc/N)^(alpha_N/alpha_D) =
    # exp(of_n) overflows, although the loss does not.
    of_n = alpha_N * (np.log(params["Nc"]) - np.log(N)) / alpha_D
    of_d = np.log(params["Dc"]) - np.log(D)
    return np.exp(alpha_D * np.logaddexp(of_n, of_d))


def over_training(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike = np.inf) -> np.ndarray:
    """Return a loss with one exponent for N and D: over-training (a larger D/N) shifts a line in logs."""
    eta = np.asarray(params["eta"])
    return (
        # Gadre et al. write E + (a M^h + b M^-h) C^-h with M = D/N, C = 6 N
        # D and h = eta/2. Both of its terms have a factor 6^(-h); here the
        # factor of the N term is part of a, the D term's is explicit.
        params["E"]
        + params["a"] * np.asarray(N, dtype=float) ** -eta
        + params["b"] * 6 ** (-eta / 2) * np.asarray(D, dtype=float) ** -eta
    )


def data_constrained(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike) -> np.ndarray:
    """Return the loss where repeated tokens, and parameters above the optimum for U, lose value.

    Constants without R_N (`repeated_data`) have no decay of excess parameters.
    """
    N, D = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
    # U above D is text that was not read; U = Inf means that every token is new
    unique = np.minimum(U, D)
    enough = np.minimum(N, optimal_params_for(params, unique)) if "R_N" in params else N
    return chinchilla(
        params,
        effective_count(enough, N, params["R_N"]) if "R_N" in params else N,
        effective_count(unique, D, params["R_D"]),
    )


def effective_count(unique: ArrayLike, total: ArrayLike, decay: ArrayLike) -> np.ndarray:
    """Return U + U R (1 - exp(-(T/U - 1)/R)), the effective count of `total` T with `unique` U of it new.

    R = `decay` repeats is the scale on which repeats
    lose value; at most U (1 + R) is reached.
    """
    unique, decay = np.asarray(unique, dtype=float), np.asarray(decay, dtype=float)
    # U = 1e9, T = 4e9, R = 15: the 3 repeats are worth 15 (1 - exp(-3/15)) = 2.72,
    # so the count is 3.72e9. expm1 keeps the digits of a small repeats / decay.
    repeats = np.maximum(np.asarray(total) / unique - 1, 0)
    return unique * (1 - decay * np.expm1(-repeats / decay))


def optimal_params_for(params: Mapping[str, Any], D: ArrayLike) -> np.ndarray:
    """Return the N for which D unique tokens are compute-optimal: alpha A / N^alpha = beta B / D^beta."""
    alpha, beta = np.asarray(params["alpha"]), np.asarray(params["beta"])
    return (alpha * params["A"] / (beta * params["B"]) * np.asarray(D, dtype=float) ** beta) ** (1 / alpha)


def over_repetition(params: Mapping[str, Any], N: ArrayLike, D: ArrayLike, U: ArrayLike) -> np.ndarray:
    """Return a sum of powers plus a penalty for repetition, which grows with N/U."""
    N, D = np.asarray(N, dtype=float), np.asarray(D, dtype=float)
    unique = np.minimum(U, D)
    repeats = D / unique - 1
    g, h = np.asarray(params["g"]), np.asarray(params["h"])
    # 0^h is 1 for h = 0, a penalty without any repetition: the inner
    # `where` avoids 0^h, and the outer one sets the penalty to 0 there.
    with np.errstate(divide="ignore"):
        penalty = params["K"] * (N / unique) ** g * np.where(repeats > 0, repeats, 1.0) ** h
    return chinchilla(params, N, D) + np.where(repeats > 0, penalty, 0.0)


@dataclass(frozen=True)
class Form:
    """A form: constants in the order of the formula, formula with $name for each constant, loss function.

    `needs_unique`: whether the form depends on the unique tokens U. `is_fitted`: whether `fit_law`
    fits it; otherwise it is the form of a published law.
    """

    constants: tuple[str, ...]
    formula: str
    loss: Callable[..., np.ndarray]
    needs_unique: bool = False
    is_fitted: bool = True


_SUM = "L = $E + $A/{N}^$alpha + $B/{D}^$beta"
_D_EFF, _N_EFF = "D' = U + U $R_D (1 - e^(-(D/U - 1)/$R_D))", "N' = Un + Un $R_N (1 - e^(-(N/Un - 1)/$R_N))"

FORM: Mapping[str, Form] = {
    "chinchilla": Form(CHINCHILLA_CONSTANTS, _SUM.format(N="N", D="D"), chinchilla),
    "data_constrained": Form(
        (*CHINCHILLA_CONSTANTS, "R_D", "R_N"),
        f"{_SUM}, {_D_EFF}, {_N_EFF}".format(N="N'", D="D'"),
        data_constrained,
        True,
    ),
    "repeated_data": Form(
        (*CHINCHILLA_CONSTANTS, "R_D"), f"{_SUM}, {_D_EFF}".format(N="N", D="D'"), data_constrained, True
    ),
    "over_repetition": Form(
        (*CHINCHILLA_CONSTANTS, "K", "g", "h"),
        f"{_SUM} + $K (N/U)^$g (D/U - 1)^$h".format(N="N", D="D"),
        over_repetition,
        True,
    ),
    "kaplan": Form(
        ("Nc", "Dc", "alpha_N", "alpha_D"),
        "L = (($Nc/N)^($alpha_N/$alpha_D) + $Dc/D)^$alpha_D",
        kaplan,
        is_fitted=False,
    ),
    "over_training": Form(
        ("E", "a", "b", "eta"), "L = $E + $a N^-$eta + $b 6^(-$eta/2) D^-$eta", over_training
    ),
}
FITTED_FORMS = tuple(name for name in FORM if FORM[name].is_fitted)

REMOVED_FORMS = {
    "excess_params": "Fit data_constrained with R_D fixed at 1e9 (--fix R_D=1e9)",
    "bounded": "Pass its formula as a function, fit_law(form=your_loss, start={...})",
}


def check_form(name: str) -> None:
    """Raise ValueError for a form that is not in FORM."""
    if name not in FORM:
        fix = REMOVED_FORMS.get(name)
        raise ValueError(
            f"form: got '{name}', expected one of {', '.join(FORM)}" + (f". {fix}." if fix else "")
        )


def check_fitted_form(name: str) -> None:
    """Raise ValueError for a form that is not in FORM, or is not fitted to runs."""
    check_form(name)
    if name not in FITTED_FORMS:
        fitted = ", ".join(FITTED_FORMS)
        raise ValueError(f"form: got '{name}', expected one of {fitted}. '{name}' is of published laws only.")
