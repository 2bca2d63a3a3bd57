"""Priors of the constants of a law, and their weight in a Huber fit.

An exponent has a normal prior. A positive constant (E, A, B, R_D, ...) has a log-normal one: its logarithm is
normal around log(mean) with standard deviation sd / mean. Both are normal in a linear combination of the
coordinates of the fit, so a prior is one more squared residual.

The objective is a sum of Huber terms, not a log likelihood. For normal noise of standard deviation sigma the
estimate has the variance V = b / a^2 (X'X)^-1, with a = P(|r| < delta) and b = E[min(r^2, delta^2)], while
the objective has the curvature a X'X. Divided by b / a, the objective has the weight of a log likelihood
whose estimate has the variance V. So the squared distance of a prior, in standard deviations, is multiplied
by b / a, which is sigma^2 for least squares.
"""

import re
from dataclasses import dataclass

import numpy as np

from megatron.laws.fitting.surface import THETA, RunPoints

EXPONENTS = ("alpha", "beta", "eta", "alpha_N", "alpha_D", "g", "h", "gamma", "delta")
POSITIVE = ("E", "A", "B", "a", "b", "c", "K", "R_D", "R_N")
# `\S+?` is lazy: the mean ends at the first +-, so 0.34+-0.05 is not one word
PRIOR_PATTERN = re.compile(r"\s*(\w+)\s*=\s*(\S+?)\s*(?:\+-|\+/-|±)\s*(\S+)\s*")


@dataclass(frozen=True)
class Prior:
    """Prior of constant `name`: `mean` and standard deviation `spread`, in the units of the constant."""

    name: str
    mean: float
    spread: float

    def __post_init__(self) -> None:
        """Raise ValueError for a constant that cannot have a prior, or values that are no distribution."""
        if self.name not in EXPONENTS + POSITIVE:
            raise ValueError(
                f"prior: got constant '{self.name}', expected one that can have a prior: "
                f"{', '.join(EXPONENTS + POSITIVE)}"
            )
        if not (np.isfinite(self.mean) and 0 < self.spread < np.inf):
            raise ValueError(
                f"prior of {self.name}: got {self.mean} +- {self.spread}, expected a number and a standard "
                "deviation above 0. Use --fix for an exact value."
            )
        if self.name in POSITIVE and self.mean <= 0:
            raise ValueError(f"prior of {self.name}: got {self.mean}, expected a mean above 0")

    @property
    def sd(self) -> float:
        """Standard deviation of the normal distribution of the constant, or of its log if it is positive."""
        return self.spread / self.mean if self.name in POSITIVE else self.spread

    def centre(self) -> float:
        """Return the mean of the normal distribution of the constant, or of its log."""
        return float(np.log(self.mean)) if self.name in POSITIVE else self.mean

    def direction(self, form: str, at: RunPoints) -> np.ndarray:
        """Return c [p] such that c @ theta is the constant, or its log (surface.constants_from_theta).

        For example log A = a + alpha x0, with x0 the mean of log N.
        """
        alpha, beta = ("eta", "eta") if form == "over_training" else ("alpha", "beta")
        # log A = a + alpha x0 and log B = b + beta y0; over_training: log b = theta_b + eta (y0 + log(6) / 2)
        terms = {
            "E": {"e": 1.0},
            "A": {"a": 1.0, alpha: at.x0},
            "B": {"b": 1.0, beta: at.y0},
            "a": {"a": 1.0, alpha: at.x0},
            "b": {"b": 1.0, beta: at.y0 + (0.5 * np.log(6) if form == "over_training" else 0.0)},
            "c": {"c": 1.0, "gamma": -at.x0, "delta": at.y0},
            "K": {"k": 1.0, "g": -at.log_ratio0, "h": -at.log_repeats0},
            "R_D": {"r_D": 1.0},
            "R_N": {"r_N": 1.0},
        }.get(self.name, {self.name: 1.0})
        return np.array([terms.get(name, 0.0) for name in THETA[form]])


def parse_prior(text: str) -> Prior:
    """Parse a prior written as NAME=MEAN+-SD. Raises ValueError for other text."""
    parts = PRIOR_PATTERN.fullmatch(text)
    message = f"--prior {text}: expected NAME=MEAN+-SD, such as alpha=0.34+-0.05"
    if parts is None:
        raise ValueError(message)
    try:
        return Prior(parts[1], float(parts[2]), float(parts[3]))
    except ValueError as error:
        # the message of Prior itself is more precise
        if "could not convert" not in str(error):
            raise
        raise ValueError(message) from None


def prior_scale(sigma: float, delta: float) -> float:
    """Return b / a of a Huber of width `delta` under normal noise of standard deviation `sigma`.

    a and b are defined in the docstring of the module.

    With z = delta / sigma: a = P(|r| < delta) = erf(z / sqrt 2), and b = E[min(r^2, delta^2)]
    = sigma^2 (a - 2 z phi(z)) + delta^2 (1 - a), phi the normal density.
    """
    from scipy.special import erf  # slow import

    if not np.isfinite(delta) or sigma == 0:
        return sigma**2
    # For delta << sigma the ratio tends to sqrt(pi / 2) sigma delta: as for absolute residuals, it shrinks
    # with delta, since the objective does.
    z = delta / sigma
    inside = float(erf(z / np.sqrt(2)))
    density = float(np.exp(-0.5 * z * z) / np.sqrt(2 * np.pi))
    square = sigma**2 * (inside - 2 * z * density) + delta**2 * (1 - inside)
    return square / inside
