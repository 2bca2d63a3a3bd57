"""Objective of the general fit: residuals and Huber terms, with their derivatives.

First derivatives come from surface.py. Second
derivatives are forward differences of these.

Shapes: R problems (starts, or bootstrap replicates), n runs, p coordinates theta.
"""

from dataclasses import dataclass

import numpy as np

from megatron.laws.fitting.newton import Derivatives
from megatron.laws.fitting.surface import OwnSurface, RunPoints, Surface

CHUNK = 64  # problems per batch, so that their arrays stay in the CPU cache
DIFFERENCE_STEP = 1e-7  # step in theta for second derivatives


@dataclass(frozen=True)
class Problem:
    """Objective of a fit: the sum of weighted Huber_delta(r), r the residual of log L or, `in_nats`, of L."""

    surface: Surface | OwnSurface
    points: RunPoints
    delta: float
    in_nats: bool = False

    def evaluate_residuals(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (measured minus fitted [R, n], derivatives of the fitted value [R, n, p])."""
        log_loss, slopes = self.surface.evaluate(theta, self.points)
        if not self.in_nats:
            return self.points.log_loss - log_loss, slopes
        # d Lhat / d theta = Lhat d log Lhat / d theta
        fitted = np.exp(log_loss)
        return np.exp(self.points.log_loss) - fitted, slopes * fitted[:, :, None]

    def objective(self, theta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the objective [R] at theta [R, p] with weights [R, n]; Inf where the law has no value."""
        with np.errstate(all="ignore"):
            r = np.abs(self.evaluate_residuals(theta)[0])
            # Huber(r) = r^2 / 2 inside the width and delta (|r|
            # - delta / 2) outside, in one expression
            clipped = np.minimum(r, self.delta)
            total = (weights * clipped * (r - 0.5 * clipped)).sum(axis=1)
        return np.where(np.isfinite(total), total, np.inf)

    def derivatives(self, theta: np.ndarray, weights: np.ndarray, free: np.ndarray) -> Derivatives:
        """Return (gradient [R, p], Hessian [R, p, p], positive semidefinite majorant [R, p, p]).

        With slopes g = d fitted / d theta and psi = Huber' (the influence of a residual):
            gradient = -sum w psi g
            Hessian  = sum w 1[|r| <= delta] g g^T - sum w psi dg/dtheta
            majorant = sum w min(1, delta / |r|) g g^T, as in iteratively reweighted least squares
        Coordinates that are not `free` [p] have derivatives of 0.
        """
        # r [R, n], slopes [R, n, p]
        r, slopes = self.evaluate_residuals(theta)
        slopes[:, :, ~free] = 0
        influence = weights * np.clip(r, -self.delta, self.delta)
        size = np.abs(r)
        finite = np.isfinite(self.delta)
        # psi(r) / r; an infinite width would give Inf / Inf
        reweighted = weights * (self.delta / np.maximum(size, self.delta) if finite else 1.0)
        transposed = np.swapaxes(slopes, 1, 2)
        gradient = -(transposed @ influence[:, :, None])[:, :, 0]
        # a residual at the width itself counts as inside,
        # as in huber.huber_derivatives
        hessian = (transposed * (weights * (size <= self.delta))[:, None, :]) @ slopes
        coordinates = np.flatnonzero(free)
        # The second term of the Hessian, one column per coordinate, by a forward
        # difference of the slopes at fixed influence. A call for few problems
        # costs as much as for many, so coordinates go in batches. 64 problems:
        # one coordinate at a time; one problem: all p coordinates in one call
        batch_size = max(1, CHUNK // len(theta))
        for i in range(0, len(coordinates), batch_size):
            batch = coordinates[i : i + batch_size]
            # The step of 1e-7 is near the root of float64 resolution: the
            # relative error is about 1e-9 from rounding and 1e-7 from truncation.
            shifted = theta[:, None] + DIFFERENCE_STEP * np.eye(theta.shape[1])[batch]  # [R, s, p]
            shifted_slopes = self.evaluate_residuals(shifted.reshape(-1, theta.shape[1]))[1].reshape(
                len(theta), len(batch), *slopes.shape[1:]
            )
            # sum w psi g(theta) is -gradient, so this is sum w
            # psi (g(theta + h) - g(theta)) / h
            shifted_slopes = (
                # [R, p, s]: row p of the Hessian, column s, the
                # coordinate that was shifted
                np.einsum("rn,rsnp->rps", influence, shifted_slopes) + gradient[:, :, None]
            ) / DIFFERENCE_STEP
            # the slopes at the shifted points include coordinates
            # that are not free: their rows are dropped here
            hessian[:, :, batch] -= np.where(free[:, None], shifted_slopes, 0.0)
        hessian = 0.5 * (hessian + np.swapaxes(hessian, 1, 2))  # forward differences are not symmetric
        return gradient, hessian, (transposed * reweighted[:, None, :]) @ slopes
