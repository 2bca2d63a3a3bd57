"""Objective of the general fit: residuals, Huber terms, ties and priors, with exact first derivatives.

First derivatives of the forms are exact (surface.py). Second derivatives are forward differences of these.

Shapes: R problems (starts, or bootstrap replicates), n runs, p coordinates theta, q priors.
"""

from dataclasses import dataclass

import numpy as np

from megatron.laws.fitting.priors import Prior
from megatron.laws.fitting.surface import THETA, RunPoints, evaluate_log_loss

CHUNK = 64  # problems per batch, so that their arrays stay in the CPU cache
DIFFERENCE_STEP = 1e-7  # of theta, for second derivatives


@dataclass(frozen=True)
class Problem:
    """Objective of a fit: sum of weighted Huber_delta(residual), plus a penalty for each prior.

        sum_i w_i Huber_delta(r_i) + prior_scale / 2 sum_j (distance_j - shift_j)^2

    r       residual of log L, or of L itself with `in_nats`
    ties    (follower, leader) pairs of exponents; a follower has the value of its leader
    priors  priors of constants; distance_j is the distance from the mean of prior j in standard deviations
    prior_scale  variance that converts the sum of Huber terms to a log likelihood (priors.py)

    With q priors, weights are [R, n + q]. The last q columns are the shifts of the priors' means in standard
    deviations: 0 in the fit, standard normal draws in bootstrap replicates.
    """

    form: str
    points: RunPoints
    delta: float
    in_nats: bool = False
    ties: tuple[tuple[str, str], ...] = ()
    priors: tuple[Prior, ...] = ()
    prior_scale: float = 0.0

    def apply_ties(self, theta: np.ndarray) -> np.ndarray:
        """Return theta [R, p] with each follower set to the value of its leader."""
        if self.ties:
            theta = theta.copy()
            for follower, leader in self._tied_indices():
                theta[:, follower] = theta[:, leader]
        return theta

    def _tied_indices(self) -> list[tuple[int, int]]:
        """Return (follower, leader) positions in theta."""
        names = THETA[self.form]
        return [(names.index(follower), names.index(leader)) for follower, leader in self.ties]

    def evaluate_log_loss(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (log Lhat [R, n], derivatives [R, n, p]) as surface.evaluate_log_loss, with ties.

        By the chain rule the slope of a follower is added to that of its leader.
        """
        # slopes [R, n, p]; the column of a follower becomes 0, so that no step moves it
        log_loss, slopes = evaluate_log_loss(self.form, self.apply_ties(theta), self.points)
        for follower, leader in self._tied_indices():
            slopes[:, :, leader] += slopes[:, :, follower]
            slopes[:, :, follower] = 0.0
        return log_loss, slopes

    def split_weights(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (weights of the runs [R, n], shifts of the priors' means [R, q])."""
        n = len(self.points.x)
        return weights[:, :n], weights[:, n:]

    def linearize_priors(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (directions [q, p], means [q]) with which the priors are linear in theta.

        Under the priors, directions @ theta is normal around `means` with standard deviation 1.
        """
        directions = np.array([prior.direction(self.form, self.points) / prior.sd for prior in self.priors])
        for follower, leader in self._tied_indices():
            # the same chain rule as in evaluate_log_loss: theta[follower] is theta[leader]
            directions[:, leader] += directions[:, follower]
            directions[:, follower] = 0.0
        return directions, np.array([prior.centre() / prior.sd for prior in self.priors])

    def evaluate_residuals(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (measured minus fitted [R, n], derivatives of the fitted value [R, n, p])."""
        log_loss, slopes = self.evaluate_log_loss(theta)
        if not self.in_nats:
            return self.points.log_loss - log_loss, slopes
        # d Lhat / d theta = Lhat d log Lhat / d theta
        fitted = np.exp(log_loss)
        return np.exp(self.points.log_loss) - fitted, slopes * fitted[:, :, None]

    def objective(self, theta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the objective [R] at theta [R, p] with weights [R, n + q].

        It is Inf where the law has no value.
        """
        with np.errstate(all="ignore"):
            weights, prior_shifts = self.split_weights(weights)
            r = np.abs(self.evaluate_residuals(theta)[0])
            # Huber(r) = r^2 / 2 inside the width and delta (|r| - delta / 2) outside, in one expression
            clipped = np.minimum(r, self.delta)
            total = (weights * clipped * (r - 0.5 * clipped)).sum(axis=1)
            if self.priors:
                directions, means = self.linearize_priors()
                total += (
                    0.5 * self.prior_scale * ((theta @ directions.T - means - prior_shifts) ** 2).sum(axis=1)
                )
        return np.where(np.isfinite(total), total, np.inf)

    def derivatives(
        self, theta: np.ndarray, weights: np.ndarray, free: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (gradient [R, p], Hessian [R, p, p], positive semidefinite majorant [R, p, p]).

        With slopes g = d fitted / d theta and psi = Huber' (the influence of a residual):
            gradient = -sum w psi g
            Hessian  = sum w 1[|r| <= delta] g g^T - sum w psi dg/dtheta
            majorant = sum w min(1, delta / |r|) g g^T, as in iteratively reweighted least squares
        Coordinates that are not `free` [p] have derivatives of 0.
        """
        weights, prior_shifts = self.split_weights(weights)
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
        # a residual at the width itself counts as inside, as in huber.huber_derivatives
        hessian = (transposed * (weights * (size <= self.delta))[:, None, :]) @ slopes
        coordinates = np.flatnonzero(free)
        # The second term of the Hessian, one column per coordinate, by a forward difference of the slopes at
        # fixed influence. A call for few problems costs as much as for many, so coordinates go in batches.
        # 64 problems: one coordinate at a time; one problem: all p coordinates in one call
        batch_size = max(1, CHUNK // len(theta))
        for i in range(0, len(coordinates), batch_size):
            batch = coordinates[i : i + batch_size]
            # The step of 1e-7 is near the root of float64 resolution: the relative error is about 1e-9 from
            # rounding and 1e-7 from truncation.
            shifted = theta[:, None] + DIFFERENCE_STEP * np.eye(theta.shape[1])[batch]  # [R, s, p]
            shifted_slopes = self.evaluate_residuals(shifted.reshape(-1, theta.shape[1]))[1].reshape(
                len(theta), len(batch), *slopes.shape[1:]
            )
            # sum w psi g(theta) is -gradient, so this is sum w psi (g(theta + h) - g(theta)) / h
            shifted_slopes = (
                # [R, p, s]: row p of the Hessian, column s, the coordinate that was shifted
                np.einsum("rn,rsnp->rps", influence, shifted_slopes) + gradient[:, :, None]
            ) / DIFFERENCE_STEP
            # the slopes at the shifted points include coordinates that are not free: their rows are dropped
            # here
            hessian[:, :, batch] -= np.where(free[:, None], shifted_slopes, 0.0)
        hessian = 0.5 * (hessian + np.swapaxes(hessian, 1, 2))  # forward differences are not symmetric
        majorant = (transposed * reweighted[:, None, :]) @ slopes
        if self.priors:
            directions, means = self.linearize_priors()
            prior_residuals = theta @ directions.T - means - prior_shifts
            directions = directions * free
            gradient = gradient + self.prior_scale * prior_residuals @ directions
            # a prior is quadratic: its exact Hessian is also its majorant
            prior_hessian = self.prior_scale * directions.T @ directions
            hessian, majorant = hessian + prior_hessian, majorant + prior_hessian
        return gradient, hessian, majorant
