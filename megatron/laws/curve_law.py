"""Law of a whole loss curve under its learning-rate schedule: the Multi-Power Law.

    L(t) = L0 + A S(t)^-alpha - B sum_k (lr_{k-1} - lr_k) (1 - (1 + C lr_k^-gamma S_k(t))^-beta)

S(t) is the sum of learning rates up to step t, S_k(t) the sum from step k on: each
decrease of the rate lowers the loss, the more steps follow it (Luo et al., arXiv
2503.12811, eq. 8). Fitted to curves of some schedules, it predicts the curve of another,
so a run with a constant rate also says what its decay would have reached.

Constant and cosine schedules hardly identify C, beta and gamma, so these have weak
priors around the values of the paper; the residuals are robust (soft L1), because
neighbouring points of a curve are not independent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

NAMES = ("L0", "A", "alpha", "B", "C", "beta", "gamma")
# of C, beta and gamma: mean, and standard deviation of the logarithm
PRIOR_MEAN, PRIOR_WIDTH = np.array([1.0, 0.5, 0.5]), np.array([1.5, 0.4, 0.2])
NOISE = 0.003  # scale of the residuals of log L, beyond which they count linearly
POINTS = 50  # independent points that all curves together count as, against the prior
N_STARTS = 6
MIN_POINTS = 20


@dataclass(frozen=True)
class Schedule:
    """Learning rates at recorded steps [n], ascending, and the sum of rates S [n] up to each.

    decreases [k] are the steps' indices at which the rate is below that of the record before.
    """

    lr: np.ndarray
    area: np.ndarray

    @classmethod
    def from_steps(cls, step: ArrayLike, lr: ArrayLike, warmup_steps: float = 0.0) -> "Schedule":
        """Sum the rates of recorded steps. Before the first one: a linear warm-up, then its rate.

        Raises ValueError for fewer than two steps, or values that are not ascending or not above 0.
        """
        steps, rates = (np.asarray(values, dtype=float) for values in (step, lr))
        if len(steps) < 2 or steps.shape != rates.shape or not (np.diff(steps) > 0).all() or steps[0] < 0:
            raise ValueError("curve: expected two steps or more, ascending, each with a learning rate")
        if not (np.isfinite(rates).all() and (rates > 0).all()):
            raise ValueError("lr: expected numbers above 0 at every step of the curve")
        before = rates[0] * max(steps[0] - warmup_steps / 2, steps[0] / 2)
        area = before + np.concatenate([[0.0], np.cumsum(np.diff(steps) * (rates[1:] + rates[:-1]) / 2)])
        return cls(rates, np.maximum(area, rates[0]))

    def loss(self, params: np.ndarray) -> np.ndarray:
        """Return L [n] for the constants in the order of NAMES."""
        L0, A, alpha, B, C, beta, gamma = params
        k = np.flatnonzero(np.diff(self.lr) != 0) + 1
        drop = self.lr[k - 1] - self.lr[k]
        since = np.maximum(self.area[:, None] - self.area[None, k - 1], 0.0)
        reached = 1 - (1 + C * self.lr[k] ** -gamma * since) ** -beta
        return L0 + A * self.area**-alpha - B * (reached @ drop)


@dataclass(frozen=True)
class CurveLaw:
    """Constants by name, and the mean absolute residual of the fitted curves in nats per token."""

    params: dict[str, float]
    residual: float
    n_curves: int

    def predict(self, step: ArrayLike, lr: ArrayLike, warmup_steps: float = 0.0) -> np.ndarray:
        """Return the loss [n] at recorded steps of a run with these learning rates."""
        return Schedule.from_steps(step, lr, warmup_steps).loss(np.array(list(self.params.values())))


def fit_curve_law(curves: Sequence[Sequence[ArrayLike]], warmup_steps: float = 0.0) -> CurveLaw:
    """Fit curves, each (step, lr, loss) [n] of one model size, with the same warm-up.

    Raises ValueError for fewer than MIN_POINTS points, or losses that are not above 0.
    """
    from scipy.optimize import least_squares  # slow import

    schedules = [Schedule.from_steps(step, lr, warmup_steps) for step, lr, _ in curves]
    logs = np.concatenate([np.log(np.asarray(loss, dtype=float)) for _, _, loss in curves] or [np.empty(0)])
    if len(logs) < MIN_POINTS or not np.isfinite(logs).all():
        raise ValueError(
            f"curves: got {len(logs)} points, expected {MIN_POINTS} or more, with losses above 0"
        )
    scale = NOISE * np.sqrt(len(logs) / POINTS)

    def residuals(logged: np.ndarray) -> np.ndarray:
        params = np.exp(np.clip(logged, -30, 30))
        fitted = np.concatenate([at.loss(params) for at in schedules])
        prior = (logged[4:] - np.log(PRIOR_MEAN)) / PRIOR_WIDTH
        return np.concatenate([(np.log(np.maximum(fitted, 0.1)) - logs) / scale, prior])

    rng, fits = np.random.default_rng(0), []
    lowest = float(np.exp(logs.min()))
    for _ in range(N_STARTS):
        low, high = [0.6 * lowest, 0.3, 0.3, 1e2], [0.95 * lowest, 1.0, 0.7, 1e3]
        start = np.log([*rng.uniform(low, high), *PRIOR_MEAN])
        fits.append(least_squares(residuals, start, loss="soft_l1", max_nfev=200))
    params = np.exp(min(fits, key=lambda fit: fit.cost).x)
    fitted = np.concatenate([at.loss(params) for at in schedules])
    residual = float(np.abs(fitted - np.exp(logs)).mean())
    return CurveLaw(dict(zip(NAMES, params.tolist(), strict=True)), residual, len(schedules))
