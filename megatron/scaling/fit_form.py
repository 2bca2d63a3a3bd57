"""Fit any form of law to runs: many starts, a damped Newton iteration, the lowest objective.

A form with R_D* is a plain sum of powers once R_D* is fixed, so variable projection gives the other starts on
a grid of it. Second derivatives are differences of the exact first ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.scaling.forms import FORM, decayed
from megatron.scaling.huber import Runs
from megatron.scaling.newton import Box, Fitted, newton, widths
from megatron.scaling.priors import Prior
from megatron.scaling.surface import LOG_R, THETA, Points, box, constants, log_fitted, theta_of
from megatron.scaling.varpro import starts

GRID_R_D = (0.5, 2.0, 6.0, 15.0, 45.0, 100.0, 300.0)
GRID_R_N = (0.3, 0.8, 1.7, 2.5, 5.0, 20.0, 1000.0)
GRID_K = (0.003, 0.03, 0.3)  # share of the loss that the over-repetition term starts with
GRID_SPAN, GRID_C, GRID_WIDE = (1.0, 2.0, 3.5), (-5.0, -3.0, -1.5), (0.0, 0.4, 0.8)  # of `bounded`
GRID_G, GRID_H = (0.0, 0.7, 2.0), (0.5, 1.2)
FEW_ITERATIONS, CULL_ITERATIONS, ROUGH_ITERATIONS, MAX_ITERATIONS = 6, 15, 20, 300
BOOTSTRAP_ITERATIONS = 50  # between two looks at what a replicate still gains
SOON = 25  # iterations after which most rest
N_POLISHED = 8
FEW_FREE = 3  # up to so many free constants every start is polished
WIDE = 0.03
N_MINIMA = 3  # from which every bootstrap replicate starts
N_SETTLING = 40
IMMATERIAL = 1e-3  # share of the objective: n times it is a difference in -2 log likelihood
CHUNK = 64  # problems at a time: their arrays stay in the cache
DIFFERENCE = 1e-7


@dataclass(frozen=True)
class Problem:
    """What is minimised: sum of Huber_delta over residuals of log L, or of L itself if `in_nats`.

    ties    (follower, leader) exponents: the first has the value of the second
    priors  what is known of constants beforehand; each adds half the square of its distance in standard
            deviations, times `prior_scale`, the variance that the objective's sum stands for (priors.py)
    With q priors, weights are [R, n + q]: the last q columns are by how many standard deviations the mean of
    each prior is moved, 0 but in resamplings.
    """

    form: str
    points: Points
    delta: float
    in_nats: bool = False
    ties: tuple[tuple[str, str], ...] = ()
    priors: tuple[Prior, ...] = ()
    prior_scale: float = 0.0

    def expand(self, theta: np.ndarray) -> np.ndarray:
        """theta [R, p] with each tied coordinate at its leader's value."""
        if self.ties:
            theta = theta.copy()
            for follower, leader in self._tied():
                theta[:, follower] = theta[:, leader]
        return theta

    def _tied(self) -> list[tuple[int, int]]:
        names = THETA[self.form]
        return [(names.index(follower), names.index(leader)) for follower, leader in self.ties]

    def log_fitted(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """surface.log_fitted with ties: a leader's slope has its follower's added."""
        log_loss, slopes = log_fitted(self.form, self.expand(theta), self.points)
        for follower, leader in self._tied():
            slopes[:, :, leader] += slopes[:, :, follower]
            slopes[:, :, follower] = 0.0
        return log_loss, slopes

    def split(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(weights of the runs [R, n], moved means of the priors [R, q])."""
        n = len(self.points.x)
        return weights[:, :n], weights[:, n:]

    def prior_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(directions [q, p], means [q]): directions @ theta is normal around means with deviation 1."""
        directions = np.array([one.direction(self.form, self.points) / one.sd for one in self.priors])
        for follower, leader in self._tied():
            directions[:, leader] += directions[:, follower]
            directions[:, follower] = 0.0
        return directions, np.array([prior.centre() / prior.sd for prior in self.priors])

    def residual(self, theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(measured minus fitted [R, n], derivatives of the fitted value [R, n, p])."""
        log_loss, slopes = self.log_fitted(theta)
        if not self.in_nats:
            return self.points.log_loss - log_loss, slopes
        fitted = np.exp(log_loss)
        return np.exp(self.points.log_loss) - fitted, slopes * fitted[:, :, None]

    def objective(self, theta: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """[R] for theta [R, p], weights [R, n]; infinity where the law has no value."""
        with np.errstate(all="ignore"):
            weights, moved = self.split(weights)
            r = np.abs(self.residual(theta)[0])
            inside = np.minimum(r, self.delta)
            total = (weights * inside * (r - 0.5 * inside)).sum(axis=1)
            if self.priors:
                directions, means = self.prior_rows()
                total += 0.5 * self.prior_scale * ((theta @ directions.T - means - moved) ** 2).sum(axis=1)
        return np.where(np.isfinite(total), total, np.inf)

    def derivatives(
        self, theta: np.ndarray, weights: np.ndarray, free: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(gradient, Hessian, semidefinite majorant), as huber.derivatives; 0 where not `free` [p]."""
        weights, moved_means = self.split(weights)
        r, slopes = self.residual(theta)
        slopes[:, :, ~free] = 0
        pull = weights * np.clip(r, -self.delta, self.delta)
        size = np.abs(r)
        finite = np.isfinite(self.delta)
        reweighted = weights * (self.delta / np.maximum(size, self.delta) if finite else 1.0)
        turned = np.swapaxes(slopes, 1, 2)
        gradient = -(turned @ pull[:, :, None])[:, :, 0]
        hessian = (turned * (weights * (size <= self.delta))[:, None, :]) @ slopes
        coordinates = np.flatnonzero(free)
        n_together = max(1, CHUNK // len(theta))  # a call of few problems costs as much as one of many
        for i in range(0, len(coordinates), n_together):
            some = coordinates[i : i + n_together]
            moved = theta[:, None] + DIFFERENCE * np.eye(theta.shape[1])[some]  # [R, s, p]
            bent = self.residual(moved.reshape(-1, theta.shape[1]))[1].reshape(
                len(theta), len(some), *slopes.shape[1:]
            )
            bent = (np.einsum("rn,rsnp->rps", pull, bent) + gradient[:, :, None]) / DIFFERENCE
            hessian[:, :, some] -= np.where(free[:, None], bent, 0.0)
        hessian = 0.5 * (hessian + np.swapaxes(hessian, 1, 2))
        majorant = (turned * reweighted[:, None, :]) @ slopes
        if self.priors:
            directions, means = self.prior_rows()
            off = theta @ directions.T - means - moved_means
            directions = directions * free
            gradient = gradient + self.prior_scale * off @ directions
            square = self.prior_scale * directions.T @ directions
            hessian, majorant = hessian + square, majorant + square
        return gradient, hessian, majorant


def minimise(problem: Problem, theta: np.ndarray, weights: np.ndarray, limits: Box, n: int) -> Fitted:
    """The minima near theta [R, p] after at most n iterations, a few problems at a time.

    The few that take long go on all together: alone, each step of theirs would cost as much as one of many.
    """
    free = limits.low < limits.high

    def some(at: np.ndarray, w: np.ndarray, most: int) -> Fitted:
        return newton(
            at,
            lambda phi, rows: problem.objective(phi, w[rows]),
            lambda phi, rows: problem.derivatives(phi, w[rows], free),
            limits,
            most,
        )

    chunks = [slice(i, i + CHUNK) for i in range(0, len(theta), CHUNK)]
    found = joined([some(theta[chunk], weights[chunk], min(n, SOON)) for chunk in chunks])
    late = np.flatnonzero(~found.at_rest)
    if n > SOON and len(late):
        rest = some(found.phi[late], weights[late], n - SOON)
        found.phi[late], found.objective[late], found.at_rest[late] = rest.phi, rest.objective, rest.at_rest
    return found


def joined(parts: Sequence[Fitted]) -> Fitted:
    """Several sets of problems as one."""
    return Fitted(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("phi", "objective", "at_rest"))
    )


def narrowed(
    problem: Problem,
    theta: np.ndarray,
    weights: np.ndarray,
    limits: Box,
    n_rough: int = ROUGH_ITERATIONS,
    n_last: int = MAX_ITERATIONS,
) -> Fitted:
    """The minima near theta [R, p], by way of wider Hubers with `n_rough` iterations each."""
    least_squares = replace(problem, delta=np.inf, priors=())
    counts = np.maximum(problem.split(weights)[0].sum(axis=1), 1)
    mean_square = 2 * least_squares.objective(theta, weights) / counts
    for width in widths(mean_square, problem.delta):
        wider = replace(problem, delta=width)
        theta = minimise(wider, theta, weights, limits, n_rough).phi
    return minimise(problem, theta, weights, limits, n_last)


def fit_theta(problem: Problem, weights: np.ndarray, fixed: Mapping[str, float] | None = None) -> Fitted:
    """The lowest minima found for one weighting [n], best first, each of them once.

    Raises ValueError where a coefficient is held and its exponent is not: A without alpha.
    """
    limits = limits_of(problem, fixed or {})
    theta = np.unique(limits.inside(starts_of(problem, weights)).round(12), axis=0)
    each = np.broadcast_to(weights, (len(theta), len(weights)))
    if (limits.low < limits.high).sum() > FEW_FREE:
        # so many starts meet at a Huber as wide as the residuals, where the iteration is quick
        wide = replace(problem, delta=max(problem.delta, WIDE))
        culled = minimise(wide, theta, each, limits, CULL_ITERATIONS)
        theta = culled.phi[_distinct(culled.objective, 1e-6)[:N_POLISHED]]
        if problem.form == "data_constrained":
            theta = np.concatenate([theta, _without_one_decay(problem, weights, fixed or {})])
    each = np.broadcast_to(weights, (len(theta), len(weights)))
    found = narrowed(problem, theta, each, limits)
    # wider Hubers lead most starts into one valley, and the lowest of a few others may be narrow
    straight = minimise(problem, theta, each, limits, MAX_ITERATIONS)
    found = joined([found, straight])
    kept = _distinct(found.objective, 1e-7)
    return Fitted(problem.expand(found.phi[kept]), found.objective[kept], found.at_rest[kept])


def _distinct(objective: np.ndarray, apart: float) -> list[int]:
    """Which of these are minima of their own, lowest first: further than a share `apart` above the last."""
    kept: list[int] = []
    for i in np.argsort(objective, kind="stable"):
        if np.isfinite(objective[i]) and (not kept or objective[i] > objective[kept[-1]] * (1 + apart)):
            kept.append(int(i))
    return kept


def _without_one_decay(problem: Problem, weights: np.ndarray, fixed: Mapping[str, float]) -> np.ndarray:
    """theta [s, p] of the minima without decay of data or of parameters: a law with both is never worse."""
    found = []
    for smaller, lacking in (("repeated_data", "R_N"), ("excess_params", "R_D")):
        if lacking in fixed:
            continue
        held = {name: value for name, value in fixed.items() if name in FORM[smaller].constants}
        priors = tuple(one for one in problem.priors if one.name in FORM[smaller].constants)
        inner = replace(problem, form=smaller, priors=priors)
        kept = [one in priors for one in problem.priors]
        weights_of = np.concatenate(
            [weights[: len(problem.points.x)], weights[len(problem.points.x) :][kept]]
        )
        best = fit_theta(inner, weights_of, held).phi[:1]
        params = {name: float(v[0]) for name, v in constants(smaller, best, problem.points).items()}
        found.append(theta_of(problem.form, params | {lacking: np.exp(LOG_R[1])}, problem.points))
    return np.array(found).reshape(-1, len(THETA[problem.form]))


def _settle(found: Fitted, problem: Problem, weights: np.ndarray, limits: Box) -> None:
    """Go on with what did not come to rest, until nothing that matters is gained."""
    for _ in range(N_SETTLING):
        rows = np.flatnonzero(~found.at_rest)
        if not len(rows):
            return
        before = found.objective[rows]
        again = minimise(problem, found.phi[rows], weights[rows], limits, BOOTSTRAP_ITERATIONS)
        found.phi[rows], found.objective[rows] = again.phi, again.objective
        found.at_rest[rows] = again.at_rest | (again.objective > before * (1 - IMMATERIAL))


def bootstrap_theta(
    problem: Problem, minima: np.ndarray, weights: np.ndarray, fixed: Mapping[str, float] | None = None
) -> Fitted:
    """Refit every weighting [R, n] from the best few minima [m, p]; the lowest of each counts."""
    limits = limits_of(problem, fixed or {})
    minima = minima[:N_MINIMA]
    n = len(minima)
    # a few steps tell which minimum is the lowest for a replicate; only that one is followed to its end
    near = minimise(
        problem, np.tile(minima, (len(weights), 1)), np.repeat(weights, n, axis=0), limits, FEW_ITERATIONS
    )
    best = near.objective.reshape(-1, n).argmin(axis=1) + n * np.arange(len(weights))
    found = narrowed(problem, near.phi[best], weights, limits, FEW_ITERATIONS, BOOTSTRAP_ITERATIONS)
    worse = np.flatnonzero(found.objective > near.objective[best])
    if len(worse):
        again = minimise(problem, near.phi[best[worse]], weights[worse], limits, BOOTSTRAP_ITERATIONS)
        found.phi[worse], found.objective[worse] = again.phi, again.objective
        found.at_rest[worse] = again.at_rest
    _settle(found, problem, weights, limits)
    return Fitted(problem.expand(found.phi), found.objective, found.at_rest)


def limits_of(problem: Problem, fixed: Mapping[str, float]) -> Box:
    """The box of the search, no wider than a point where a constant is `fixed`."""
    low, high = box(problem.form)
    names = THETA[problem.form]
    for follower, _ in problem.ties:  # its value is the leader's wherever it counts
        low[names.index(follower)] = high[names.index(follower)] = 1.0
    held = {
        "E": "e", "A": "a", "B": "b", "K": "k", "R_D": "r_D", "R_N": "r_N", "Nc": "s", "Dc": "t", "L0": "l",
    }  # fmt: skip
    partner = {
        "A": ("alpha",), "B": ("beta",), "K": ("g", "h"), "Nc": ("alpha_N",), "Dc": ("alpha_D",),
        "a": ("alpha", "eta"), "b": ("beta", "eta"), "c": ("gamma", "delta"), "L0": ("E",),
    }  # fmt: skip
    if fixed:
        any_theta = constants(problem.form, np.clip(np.ones((1, len(names))), low, high), problem.points)
        unknown = sorted(set(fixed) - set(any_theta))
        if unknown:
            raise ValueError(
                f"fixed: {problem.form} has no constant '{unknown[0]}'; it has {', '.join(any_theta)}"
            )
        for name in fixed:
            loose = [one for one in partner.get(name, ()) if one in any_theta and one not in fixed]
            if loose:
                raise ValueError(f"fixed: {name} cannot be held while {loose[0]} is free; hold both")
        whole = {name: float(value[0]) for name, value in any_theta.items()} | dict(fixed)
        at = theta_of(problem.form, whole, problem.points)
        for name in fixed:
            i = names.index(held.get(name, name))
            low[i] = high[i] = at[i]
    return Box(low, high)


def starts_of(problem: Problem, weights: np.ndarray) -> np.ndarray:
    """theta [S, p]: where a minimum may be near."""
    form, at = problem.form, problem.points
    weights = weights[: len(at.x)]
    N, D, U, L = (np.exp(v) for v in (at.x, at.y, at.u, at.log_loss))
    if form == "kaplan":
        middle = at.log_loss.mean()
        shares = (0.1, 0.5, 0.9)
        exponents = [(a, b) for a in (0.05, 0.1, 0.3) for b in (0.05, 0.1, 0.3)]
        return np.array(
            [[middle + b * np.log(s), middle + b * np.log(1 - s), a, b] for s in shares for a, b in exponents]
        )
    found = []
    free = THETA[form]
    for r_D in GRID_R_D if "r_D" in free else (np.inf,):
        worth = decayed(U, D, r_D) if "r_D" in free else D
        # a term for over-repetition explains what few repeats leave, so those runs place the rest
        trust = weights / (D / U) if "k" in free else weights
        runs = Runs.of(N, worth, L)
        for phi in starts(runs, trust)[:3]:
            base = {name: float(v) for name, v in runs.constants(phi).items()}
            base = {name: max(v, 1e-6 * L.min()) if name == "E" else v for name, v in base.items()}
            found += _completed(form, base, r_D, at)
    return np.array(found)


def _completed(form: str, base: dict[str, float], r_D: float, at: Points) -> list[np.ndarray]:
    """theta of a sum of powers with what else the form has, over its grid."""
    free = THETA[form]
    if form == "over_training":
        eta = 0.5 * (base["alpha"] + base["beta"])
        terms = (base["A"] * np.exp(-base["alpha"] * at.x0), base["B"] * np.exp(-base["beta"] * at.y0))
        a, b = (t * np.exp(eta * c) for t, c in zip(terms, (at.x0, at.y0), strict=True))
        return [theta_of(form, {"E": base["E"], "a": a, "b": b * 6 ** (eta / 2), "eta": eta}, at)]
    if form == "bounded":
        sum_of = dict(zip(THETA["chinchilla"], theta_of("chinchilla", base, at), strict=True))
        return [
            np.array([sum_of["e"], span, sum_of["a"] - span, sum_of["b"] - span, share, sum_of["alpha"],
                      sum_of["beta"], wide, wide + 0.1])
            for span in GRID_SPAN for share in GRID_C for wide in GRID_WIDE
        ]  # fmt: skip
    if "k" in free:
        first = theta_of("chinchilla", base, at)
        loss = at.log_loss.mean()
        return [
            np.concatenate([first, [loss + np.log(k), g, h]]) for k in GRID_K for g in GRID_G for h in GRID_H
        ]
    more = {"R_D": r_D} if "r_D" in free else {}
    grid = [{"R_N": r} for r in GRID_R_N] if "r_N" in free else [{}]
    return [theta_of(form, base | more | one, at) for one in grid]
