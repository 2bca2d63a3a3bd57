"""log Lhat of every form and its exact first derivatives, for many sets of constants at once.

A fit moves in theta: logarithms of what must be positive, with N and D centred at their geometric means, so
that a coefficient and its exponent are nearly independent:

    a, b, e     logs of the terms of N and of D at the centre, and of the floor
    r_D, r_N    logs of R_D* and R_N*
    k, g, h     log of the over-repetition term at its own centre, and its exponents
    l, c        of `bounded`: logs of L0 - E, and of its third term at the centre; a and b are of its h

R sets of constants, n runs, p coordinates of theta.
"""

from dataclasses import dataclass

import numpy as np

from megatron.scaling.forms import FORM

EXPONENT, LOG_TERM, LOG_R = (0.01, 5.0), (-60.0, 60.0), (-9.2, 20.7)  # R* between 1e-4 and 1e9
MOST = 230.0  # log of the most repeats, which a step far out of the way may ask for
BOX = {
    "a": LOG_TERM, "b": LOG_TERM, "e": LOG_TERM, "k": LOG_TERM, "s": LOG_TERM, "t": LOG_TERM,
    "alpha": EXPONENT, "beta": EXPONENT, "eta": EXPONENT, "alpha_N": EXPONENT, "alpha_D": EXPONENT,
    "r_D": LOG_R, "r_N": LOG_R, "g": (-5.0, 10.0), "h": (0.0, 10.0),
    "l": (-9.0, 9.0), "c": LOG_TERM, "gamma": (-5.0, 5.0), "delta": (-5.0, 5.0),
}  # fmt: skip
THETA = {
    "chinchilla": ("e", "a", "b", "alpha", "beta"),
    "data_constrained": ("e", "a", "b", "alpha", "beta", "r_D", "r_N"),
    "repeated_data": ("e", "a", "b", "alpha", "beta", "r_D"),
    "excess_params": ("e", "a", "b", "alpha", "beta", "r_N"),
    "over_repetition": ("e", "a", "b", "alpha", "beta", "k", "g", "h"),
    "bounded": ("e", "l", "a", "b", "c", "alpha", "beta", "gamma", "delta"),
    "kaplan": ("s", "t", "alpha_N", "alpha_D"),
    "over_training": ("e", "a", "b", "eta"),
}


@dataclass(frozen=True)
class Points:
    """Logs of N, D, U and L of n runs, float64 [n]; U is at most D. The rest are the centres."""

    x: np.ndarray
    y: np.ndarray
    u: np.ndarray
    log_loss: np.ndarray
    x0: float
    y0: float
    wide0: float  # mean log N/U and log repeats of the runs that repeat
    often0: float

    @classmethod
    def of(cls, N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None = None) -> "Points":
        """From plain values: N parameters, D tokens, L nats a token, U unique tokens (without it D)."""
        x, y = np.log(N), np.log(D)
        u = y if U is None else np.minimum(np.log(U), y)
        repeats = np.expm1(y - u)
        again = repeats > 0
        wide, often = (x - u)[again], np.log(repeats[again])
        centres = [float(v.mean()) if len(v) else 0.0 for v in (wide, often)]
        return cls(x, y, u, np.log(L), float(x.mean()), float(y.mean()), *centres)


def log_fitted(form: str, theta: np.ndarray, at: Points) -> tuple[np.ndarray, np.ndarray]:
    """(log Lhat [R, n], its derivatives [R, n, p]) for theta [R, p]."""
    value = {name: theta[:, i, None] for i, name in enumerate(THETA[form])}
    log_loss, slopes = {"kaplan": _kaplan, "bounded": _bounded}.get(form, _sum)(value, at)
    found = np.empty((*log_loss.shape, len(THETA[form])))
    for i, name in enumerate(THETA[form]):
        found[:, :, i] = slopes[name]
    return log_loss, found


def _sum(value: dict[str, np.ndarray], at: Points) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The forms that are a sum of terms, each the exponential of something."""
    alpha = value.get("alpha", value.get("eta"))
    beta = value.get("beta", value.get("eta"))
    x, of_x = _effective_params(value, alpha, beta, at)
    y, of_y = at.y - at.y0, {}
    if "r_D" in value:
        y, of_r, _ = _decayed(at.u, at.y, value["r_D"])
        y, of_y = y - at.y0, {"r_D": of_r}
    n_term, d_term = np.exp(value["a"] - alpha * x), np.exp(value["b"] - beta * y)
    floor = np.exp(value["e"])
    total = floor + n_term + d_term
    of_n, of_d = ("alpha", "beta") if "alpha" in value else ("eta", "eta")
    slopes = {"e": floor, "a": n_term, "b": d_term, of_n: -x * n_term}
    slopes[of_d] = slopes.get(of_d, 0.0) - y * d_term
    for name, slope in of_x.items():
        slopes[name] = slopes.get(name, 0.0) - alpha * slope * n_term
    for name, slope in of_y.items():
        slopes[name] = slopes.get(name, 0.0) - beta * slope * d_term
    if "k" in value:
        repeats = np.expm1(at.y - at.u)
        again = repeats > 0
        wide = at.x - at.u - at.wide0
        often = np.log(np.where(again, repeats, 1.0)) - at.often0
        more = np.where(again, np.exp(value["k"] + value["g"] * wide + value["h"] * often), 0.0)
        total = total + more
        slopes |= {"k": more, "g": wide * more, "h": often * more}
    return np.log(total), {name: slope / total for name, slope in slopes.items()}


def _effective_params(
    value: dict[str, np.ndarray], alpha: np.ndarray, beta: np.ndarray, at: Points
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(log N' centred [R, n], its derivatives by name); N' = N unless the form has an R_N*."""
    if "r_N" not in value:
        return at.x - at.x0, {}
    a, b = value["a"] + alpha * at.x0, value["b"] + beta * at.y0  # logs of A and B
    enough = (np.log(alpha / beta) + a - b + beta * at.u) / alpha  # log of the N that U tokens call for
    x, of_r, of_enough = _decayed(np.minimum(enough, at.x), at.x, value["r_N"])
    of_enough = np.where(enough < at.x, of_enough, 0.0) / alpha
    by = {
        "a": 1.0,
        "b": -1.0,
        "alpha": 1 / alpha + at.x0 - enough,
        "beta": at.u - 1 / beta - at.y0,
    }
    return x - at.x0, {"r_N": of_r} | {name: of_enough * slope for name, slope in by.items()}


def _decayed(
    unique: np.ndarray, total: np.ndarray, log_at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """forms.decayed in logs, and its derivatives by `log_at` and by `unique`."""
    repeats = np.expm1(np.clip(total - unique, 0.0, MOST))
    at = np.exp(log_at)
    left = np.exp(-repeats / at)
    grown = -at * np.expm1(-repeats / at)
    of_at = (grown - repeats * left) / (1 + grown)
    of_unique = 1 - left * (1 + repeats) / (1 + grown)
    return unique + np.log1p(grown), of_at, of_unique


def _kaplan(value: dict[str, np.ndarray], at: Points) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    x, y = at.x - at.x0, at.y - at.y0
    alpha = value["alpha_D"]
    of_n, of_d = value["s"] - value["alpha_N"] * x, value["t"] - alpha * y
    both = np.logaddexp(of_n / alpha, of_d / alpha)
    share = np.exp(of_n / alpha - both)
    slopes = {
        "s": share,
        "t": 1 - share,
        "alpha_N": -x * share,
        "alpha_D": both - (share * of_n + (1 - share) * of_d) / alpha - y * (1 - share),
    }
    return alpha * both, slopes


def _bounded(value: dict[str, np.ndarray], at: Points) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    x, y, u = at.x - at.x0, at.y - at.y0, at.u - at.y0
    with np.errstate(over="ignore", invalid="ignore"):
        of_n, of_d = np.exp(value["a"] - value["alpha"] * x), np.exp(value["b"] - value["beta"] * y)
        of_u = np.exp(value["c"] + value["gamma"] * x - value["delta"] * u)
        above = 1 + of_n + of_d + of_u
        floor, span = np.exp(value["e"]), np.exp(value["l"])
        total = floor + span * (1 - 1 / above)
        steep = span / above**2
    slopes = {"e": floor, "l": total - floor, "a": steep * of_n, "b": steep * of_d, "c": steep * of_u}
    slopes |= {"alpha": -x * slopes["a"], "beta": -y * slopes["b"]}
    slopes |= {"gamma": x * slopes["c"], "delta": -u * slopes["c"]}
    return np.log(total), {name: slope / total for name, slope in slopes.items()}


def constants(form: str, theta: np.ndarray, at: Points) -> dict[str, np.ndarray]:
    """The constants of the form in its own units, each [R], from theta [R, p]."""
    value = dict(zip(THETA[form], theta.T, strict=True))
    if form == "kaplan":
        return {
            "Nc": np.exp(value["s"] / value["alpha_N"] + at.x0),
            "Dc": np.exp(value["t"] / value["alpha_D"] + at.y0),
            "alpha_N": value["alpha_N"],
            "alpha_D": value["alpha_D"],
        }
    alpha, beta = (value.get(name, value.get("eta")) for name in ("alpha", "beta"))
    # a coefficient far from the runs may be beyond any number; it is then infinite, as the warnings say
    with np.errstate(over="ignore"):
        found = {
            "E": np.exp(value["e"]),
            "A": np.exp(value["a"] + alpha * at.x0),
            "B": np.exp(value["b"] + beta * at.y0),
            "alpha": alpha,
            "beta": beta,
        }
        if form == "bounded":
            third = np.exp(value["c"] - value["gamma"] * at.x0 + value["delta"] * at.y0)
            found |= {"a": found["A"], "b": found["B"], "c": third, "L0": found["E"] + np.exp(value["l"])}
            found |= {name: value[name] for name in ("gamma", "delta")}
            return {name: found[name] for name in FORM[form].constants}
        if "eta" in value:
            return {"E": found["E"], "a": found["A"], "b": found["B"] * 6 ** (alpha / 2), "eta": alpha}
        found |= {f"R_{axis}": np.exp(value[f"r_{axis}"]) for axis in "DN" if f"r_{axis}" in value}
        if "k" in value:
            centre = value["g"] * at.wide0 + value["h"] * at.often0
            found |= {"K": np.exp(value["k"] - centre), "g": value["g"], "h": value["h"]}
    return {name: found[name] for name in FORM[form].constants}


def theta_of(form: str, params: dict[str, float], at: Points) -> np.ndarray:
    """theta [p] of constants in their own units: the inverse of `constants`. Zero becomes as good as zero."""
    p = {name: max(value, 1e-300) if name in "EABKabc" else value for name, value in params.items()}
    if form == "kaplan":
        s, t = p["alpha_N"] * (np.log(p["Nc"]) - at.x0), p["alpha_D"] * (np.log(p["Dc"]) - at.y0)
        value = {"s": s, "t": t, "alpha_N": p["alpha_N"], "alpha_D": p["alpha_D"]}
    else:
        if form == "over_training":
            a, b, alpha, beta = p["a"], p["b"] * 6 ** (-p["eta"] / 2), p["eta"], p["eta"]
        else:
            a, b, alpha, beta = p.get("A", p.get("a")), p.get("B", p.get("b")), p["alpha"], p["beta"]
        value = {"e": np.log(p["E"]), "a": np.log(a) - alpha * at.x0, "b": np.log(b) - beta * at.y0}
        value |= {"alpha": alpha, "beta": beta, "eta": alpha}
        value |= {f"r_{axis}": np.log(p[f"R_{axis}"]) for axis in "DN" if f"R_{axis}" in p}
        if "K" in p:
            centre = p["g"] * at.wide0 + p["h"] * at.often0
            value |= {"k": np.log(p["K"]) + centre, "g": p["g"], "h": p["h"]}
        if form == "bounded":
            centre = p["gamma"] * at.x0 - p["delta"] * at.y0
            value |= {"c": np.log(p["c"]) + centre, "gamma": p["gamma"], "delta": p["delta"]}
            value["l"] = np.log(max(p["L0"] - p["E"], 1e-300))
    low, high = box(form)
    return np.clip([value[name] for name in THETA[form]], low, high)


def box(form: str) -> tuple[np.ndarray, np.ndarray]:
    """(low, high) [p] of what is searched."""
    low, high = np.array([BOX[name] for name in THETA[form]]).T
    return low, high
