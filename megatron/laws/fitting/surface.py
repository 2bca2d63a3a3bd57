"""log Lhat of every form and its first derivatives, for many sets of constants at once.

A fit searches over theta: logs of what must be positive,
with N and D centred at their geometric means N0 and D0. So
the log of a term and its exponent are nearly independent.

    a, b, e     logs of the terms of N and of D at the centre (A / N0^alpha, B / D0^beta), and of the floor E
    r_D, r_N    logs of R_D* and R_N*
    k, g, h     log of the over-repetition term at its own centre, and its exponents

R sets of constants, n runs, p coordinates of theta.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from megatron.laws.forms import FORM

EXPONENT, LOG_TERM, LOG_R = (0.01, 5.0), (-60.0, 60.0), (-9.2, 20.7)  # R* is in [1e-4, 1e9]
OWN_STEP = 1e-5  # step in theta for central differences: truncation and rounding are both about 1e-10
OWN_LARGEST = 1e6  # largest size of a constant of an own form that may be negative
MAX_LOG_REPEATS = 230.0  # clips N / N_U and D / U of a trial step far outside the plausible range, before exp
# exp(-60) is about 1e-26 nats per token: a term at its lower bound has vanished.
BOX = {
    "a": LOG_TERM, "b": LOG_TERM, "e": LOG_TERM, "k": LOG_TERM,
    "alpha": EXPONENT, "beta": EXPONENT, "eta": EXPONENT,
    "r_D": LOG_R, "r_N": LOG_R, "g": (-5.0, 10.0), "h": (0.0, 10.0),
}  # fmt: skip
# Order of the coordinates of theta. Starts rely on it
# (fit_form._complete_start): over_repetition is chinchilla followed by k, g, h.
THETA = {
    "chinchilla": ("e", "a", "b", "alpha", "beta"),
    "data_constrained": ("e", "a", "b", "alpha", "beta", "r_D", "r_N"),
    "repeated_data": ("e", "a", "b", "alpha", "beta", "r_D"),
    "over_repetition": ("e", "a", "b", "alpha", "beta", "k", "g", "h"),
    "over_training": ("e", "a", "b", "eta"),
}


@dataclass(frozen=True)
class RunPoints:
    """Logs x, y, u of N, D, U and log L of n runs, float64 [n] with U at most D, and the centres of logs."""

    x: np.ndarray
    y: np.ndarray
    u: np.ndarray
    log_loss: np.ndarray
    x0: float
    y0: float
    log_ratio0: float  # means of log(N/U) and log(D/U - 1) over the runs that repeat text
    log_repeats0: float

    @classmethod
    def from_columns(
        cls, N: np.ndarray, D: np.ndarray, L: np.ndarray, U: np.ndarray | None = None
    ) -> "RunPoints":
        """Build from plain values [n]: N parameters, D tokens, L nats/token, U unique tokens (None: D)."""
        x, y = np.log(N), np.log(D)
        u = y if U is None else np.minimum(np.log(U), y)
        # D / U - 1, exact also where D is just above U
        repeats = np.expm1(y - u)
        again = repeats > 0
        wide, often = (x - u)[again], np.log(repeats[again])
        centres = [float(v.mean()) if len(v) else 0.0 for v in (wide, often)]
        return cls(x, y, u, np.log(L), float(x.mean()), float(y.mean()), *centres)


@dataclass(frozen=True)
class Surface:
    """The law of a built-in form as a function of theta."""

    form: str

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the p coordinates of theta."""
        return THETA[self.form]

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of the constants of the form."""
        return FORM[self.form].constants

    def evaluate(self, theta: np.ndarray, at: RunPoints) -> tuple[np.ndarray, np.ndarray]:
        """Return (log Lhat [R, n], its derivatives [R, n, p]) at theta [R, p]."""
        # [R, 1] each, so that a term of x [n] is [R, n]
        value = {name: theta[:, i, None] for i, name in enumerate(self.names)}
        log_loss, slopes = _sum_of_powers(value, at)
        derivatives = np.empty((*log_loss.shape, len(self.names)))
        for i, name in enumerate(self.names):
            derivatives[:, :, i] = slopes[name]
        return log_loss, derivatives

    def to_constants(self, theta: np.ndarray, at: RunPoints) -> dict[str, np.ndarray]:
        """Return the constants of the form in its own units, each [R], from theta [R, p]."""
        value = dict(zip(self.names, theta.T, strict=True))
        # a coefficient far from the runs may be beyond float64;
        # it is then Inf, and diagnostics warn about it
        with np.errstate(over="ignore"):
            alpha, beta = (value[name if name in value else "eta"] for name in ("alpha", "beta"))
            params = {"E": np.exp(value["e"]), "alpha": alpha, "beta": beta, "eta": alpha}
            params |= {"A": np.exp(value["a"] + alpha * at.x0), "B": np.exp(value["b"] + beta * at.y0)}
            # the term of over_training is b 6^(-eta/2) D^-eta, so b = B 6^(eta/2)
            params |= {"a": params["A"], "b": params["B"] * 6 ** (alpha / 2)}
            params |= {f"R_{axis}": np.exp(value[f"r_{axis}"]) for axis in "DN" if f"r_{axis}" in value}
            if "k" in value:
                centre = value["g"] * at.log_ratio0 + value["h"] * at.log_repeats0
                params |= {"K": np.exp(value["k"] - centre), "g": value["g"], "h": value["h"]}
        return {name: params[name] for name in self.constants}

    def from_constants(self, params: Mapping[str, float], at: RunPoints) -> np.ndarray:
        """Return theta [p] of constants in their own units, the inverse of `to_constants`.

        Coefficients of 0 become 1e-300, and theta
        is clipped to the bounds of the search.
        """
        # `in` a string of names with one letter each;
        # log(1e-300) = -690 is then clipped to the bound of -60
        p = {name: max(value, 1e-300) if name in "EABKab" else value for name, value in params.items()}
        value = dict(params)
        alpha, beta = (p[name if name in p else "eta"] for name in ("alpha", "beta"))
        a, b = (p["A"], p["B"]) if "A" in p else (p["a"], p["b"] * 6 ** (-p["eta"] / 2))
        value |= {"e": np.log(p["E"]), "a": np.log(a) - alpha * at.x0, "b": np.log(b) - beta * at.y0}
        value |= {f"r_{axis}": np.log(p[f"R_{axis}"]) for axis in "DN" if f"R_{axis}" in p}
        if "K" in p:
            value["k"] = np.log(p["K"]) + p["g"] * at.log_ratio0 + p["h"] * at.log_repeats0
        return np.clip([value[name] for name in self.names], *self.bounds())

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds (low, high) [p] of the search."""
        low, high = np.array([BOX[name] for name in self.names]).T
        return low, high


@dataclass(frozen=True)
class OwnSurface:
    """The law of a caller's own form, loss(constants, N, D, U) -> L, as a function of theta.

    start   {constant: value near which the fit starts}; where it is above
            0 the constant stays above 0, and its coordinate is its log
    """

    loss: Callable[..., np.ndarray]
    start: Mapping[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the constants, one coordinate each."""
        return tuple(self.start)

    constants = names

    def evaluate(self, theta: np.ndarray, at: RunPoints) -> tuple[np.ndarray, np.ndarray]:
        """Return (log Lhat [R, n], its derivatives [R, n, p]), by central differences."""
        N, D, U = (np.exp(v) for v in (at.x, at.y, at.u))

        def log_loss(theta: np.ndarray) -> np.ndarray:
            params = {name: value[:, None] for name, value in self.to_constants(theta, at).items()}
            return np.log(self.loss(params, N, D, U))

        steps = OWN_STEP * np.eye(len(self.names))
        slopes = [(log_loss(theta + step) - log_loss(theta - step)) / (2 * OWN_STEP) for step in steps]
        return log_loss(theta), np.stack(slopes, axis=2)

    def to_constants(self, theta: np.ndarray, at: RunPoints) -> dict[str, np.ndarray]:
        """Return the constants, each [R], from theta [R, p]."""
        with np.errstate(over="ignore"):
            return {
                name: np.exp(values) if self.start[name] > 0 else values
                for name, values in zip(self.names, theta.T, strict=True)
            }

    def from_constants(self, params: Mapping[str, float], at: RunPoints) -> np.ndarray:
        """Return theta [p] of constants."""
        values = np.array([params[name] for name in self.names], dtype=float)
        has_log = np.array(list(self.start.values())) > 0
        return np.where(has_log, np.log(np.maximum(values, 1e-300)), values)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the bounds (low, high) [p] of the search: far away, so that no power overflows."""
        high = np.array([LOG_TERM[1] if value > 0 else OWN_LARGEST for value in self.start.values()])
        return -high, high


def _sum_of_powers(value: dict[str, np.ndarray], at: RunPoints) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return (log Lhat, {coordinate: derivative}) of the forms that are a sum of exponentials in theta.

    Each term T = exp(linear in theta) has dT/d coordinate = T times
    the coefficient of the coordinate, and d log Lhat = sum of dT / Lhat.
    """
    of_n, of_d = ("alpha", "beta") if "alpha" in value else ("eta", "eta")
    alpha, beta = value[of_n], value[of_d]
    x, of_x = _effective_log_params(value, alpha, beta, at)
    y, of_y = at.y - at.y0, {}
    if "r_D" in value:
        # U is data, so the derivative by log U is not needed
        y, of_r, _ = _decay_logs(at.u, at.y, value["r_D"])
        y, of_y = y - at.y0, {"r_D": of_r}
    # x = log N' - log N0 and y = log D' - log D0: exp(a)
    # and exp(b) are terms at the centre of the runs
    n_term, d_term = np.exp(value["a"] - alpha * x), np.exp(value["b"] - beta * y)
    floor = np.exp(value["e"])
    total = floor + n_term + d_term
    # d exp(a - alpha x) / d alpha = -x exp(...); with
    # one exponent eta both terms add to its slope
    slopes = {"e": floor, "a": n_term, "b": d_term, of_n: -x * n_term}
    slopes[of_d] = slopes.get(of_d, 0.0) - y * d_term
    # chain rule through log N' and log D', which depend
    # on R_N*, R_D* and, through N_U, on a, b, alpha, beta
    for name, slope in of_x.items():
        slopes[name] = slopes.get(name, 0.0) - alpha * slope * n_term
    for name, slope in of_y.items():
        slopes[name] = slopes.get(name, 0.0) - beta * slope * d_term
    if "k" in value:
        repeats = np.expm1(at.y - at.u)
        is_repeated = repeats > 0
        # log(D/U - 1) is -Inf for runs without repetition:
        # log 1 replaces it, and their penalty is set to 0
        log_ratio = at.x - at.u - at.log_ratio0
        log_repeats = np.log(np.where(is_repeated, repeats, 1.0)) - at.log_repeats0
        penalty = np.where(
            is_repeated, np.exp(value["k"] + value["g"] * log_ratio + value["h"] * log_repeats), 0.0
        )
        total = total + penalty
        slopes |= {"k": penalty, "g": log_ratio * penalty, "h": log_repeats * penalty}
    return np.log(total), {name: slope / total for name, slope in slopes.items()}


def _effective_log_params(
    value: dict[str, np.ndarray], alpha: np.ndarray, beta: np.ndarray, at: RunPoints
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return (log N' centred [R, n], {coordinate: derivative}); N' = N unless the form has an R_N*."""
    if "r_N" not in value:
        return at.x - at.x0, {}
    # N_U solves alpha A / N^alpha = beta B / U^beta, so
    # alpha log N_U = log(alpha / beta) + log A - log B + beta log U.
    a, b = value["a"] + alpha * at.x0, value["b"] + beta * at.y0  # logs of A and B
    enough = (np.log(alpha / beta) + a - b + beta * at.u) / alpha  # log of forms.optimal_params_for(U)
    x, of_r, of_enough = _decay_logs(np.minimum(enough, at.x), at.x, value["r_N"])
    # where N is not above that optimum nothing decays, and N' does not depend on it
    of_enough = np.where(enough < at.x, of_enough, 0.0) / alpha
    # alpha times the derivatives of log N_U by the
    # coordinates; the factor 1 / alpha is in of_enough
    by = {
        "a": 1.0,
        "b": -1.0,
        "alpha": 1 / alpha + at.x0 - enough,
        "beta": at.u - 1 / beta - at.y0,
    }
    return x - at.x0, {"r_N": of_r} | {name: of_enough * slope for name, slope in by.items()}


def _decay_logs(
    unique: np.ndarray, total: np.ndarray, log_at: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the log of forms.effective_count, and its derivatives by `log_at` and by `unique`.

    `unique`, `total` and `log_at` are logs. With r = total / unique - 1 repeats
    and R = exp(log_at), log(U + U R (1 - exp(-r / R))) = unique + log1p(R (1 - exp(-r / R))).
    """
    repeats = np.expm1(np.clip(total - unique, 0.0, MAX_LOG_REPEATS))
    # As R grows, R (1 - exp(-r / R)) tends to r, so D' tends
    # to D. At R = 1e9 and r = 1 a plain 1 - exp(-1e-9) has
    # only 7 correct digits, so expm1 is used.
    at = np.exp(log_at)
    left = np.exp(-repeats / at)
    grown = -at * np.expm1(-repeats / at)
    # log1p(grown): d grown / d log R = grown - r exp(-r
    # / R), and d r / d log U = -(1 + r)
    of_at = (grown - repeats * left) / (1 + grown)
    of_unique = 1 - left * (1 + repeats) / (1 + grown)
    return unique + np.log1p(grown), of_at, of_unique
