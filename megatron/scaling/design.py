"""Which runs to train: the set, within a budget, that makes extrapolated N* and L* tightest.

A run's information about the constants is the outer product of the slopes of log Lhat there, over the
variance of a run's log loss (linear design theory, at the constants of a prior law). A set is grown run by
run and then exchanged run by run while that helps (Fedorov's exchange). Nothing here knows that a law may
bend: keep a few runs that test it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.scaling.frontier import optimal
from megatron.scaling.law import Law, exponents_of
from megatron.scaling.surface import Points, constants, log_fitted, theta_of

CRITERIA = ("c", "D")
RIDGE = 1e-9  # of the largest candidate's information, so that the first few runs can be compared
STEP = 1e-4  # of theta, for the slopes of N* and L*
MAX_PASSES = 20


@dataclass(frozen=True)
class Runs:
    """Possible or chosen runs, each float64 [n]: N parameters, D tokens, U of them unique."""

    N: np.ndarray
    D: np.ndarray
    U: np.ndarray

    @property
    def flops(self) -> np.ndarray:
        """6 N D."""
        return 6 * self.N * self.D

    def take(self, rows: np.ndarray | Sequence[int]) -> "Runs":
        """Some of them."""
        return Runs(self.N[rows], self.D[rows], self.U[rows])


@dataclass(frozen=True)
class Expected:
    """Standard errors that a set of runs should leave: ln N*, ln L* at the target, and a in N* ~ C^a."""

    n_runs: int
    flops: float
    log_size: float
    log_loss: float
    a_exponent: float


class Designer:
    """Information about the constants of one prior law, for runs with a spread `noise` of log loss."""

    def __init__(self, law: Law, target_flops: float, noise: float, done: Runs | None = None) -> None:
        """`done` runs are known already: they count and cost nothing.

        Raises ValueError for a target or noise that is not above 0.
        """
        for name, value in (("target", target_flops), ("noise", noise)):
            if not 0 < value < np.inf:
                raise ValueError(f"{name}: found {value}, wanted a number above 0")
        self.law, self.target, self.noise = law, target_flops, noise
        # centred where the target is, whatever the runs: theta must be the same for all of them
        best = optimal(law, target_flops)
        centre = Points.of(best.N, best.D, best.L)
        self._centre = centre
        self.theta = theta_of(law.form, law.params, centre)
        self._to = self._directions()
        self.known = np.zeros((len(self.theta),) * 2) if done is None else self.information(done).sum(axis=0)

    def information(self, runs: Runs) -> np.ndarray:
        """[n, p, p] of each run."""
        x, y = np.log(runs.N), np.log(runs.D)
        at = Points(x, y, np.minimum(np.log(runs.U), y), np.zeros_like(x), *self._origin())
        slopes = log_fitted(self.law.form, self.theta[None], at)[1][0]
        return slopes[:, :, None] * slopes[:, None, :] / self.noise**2

    def _origin(self) -> tuple[float, float, float, float]:
        c = self._centre
        return c.x0, c.y0, c.wide0, c.often0

    def _directions(self) -> np.ndarray:
        """[3, p]: slopes of ln N*, ln L* and the exponent a by theta, as central differences."""
        rows = []
        for step in STEP * np.eye(len(self.theta)):
            ends = []
            for sign in (1, -1):
                moved = constants(self.law.form, (self.theta + sign * step)[None], self._centre)
                params = {name: float(value[0]) for name, value in moved.items()}
                law = Law(form=self.law.form, params=params, objective=0.0, huber_delta=1.0, n_runs=0)
                best = optimal(law, self.target)
                ends.append([np.log(best.N[0]), np.log(best.L[0]), float(exponents_of(params)[0])])
            rows.append((np.array(ends[0]) - ends[1]) / (2 * STEP))
        return np.array(rows).T

    def variances(self, information: np.ndarray) -> np.ndarray:
        """[..., 3] of ln N*, ln L*, a, for informations [..., p, p]; infinite where nothing is known."""
        scale = np.sqrt(np.maximum(np.einsum("...ii->...i", information), 1e-300))
        whole = information / (scale[..., :, None] * scale[..., None, :])
        # in units of each constant's own information, so that the conditioning means something
        inverse = np.linalg.pinv(whole, rcond=1e-14, hermitian=True)
        to = self._to / scale[..., None, :]
        held = np.einsum("...kp,...pq,...kq->...k", to, inverse, to)
        lost = to - np.einsum("...kp,...pq,...qr->...kr", to, inverse, whole)
        unknown = np.abs(lost).max(axis=-1) > 1e-3 * np.abs(to).max(axis=-1)
        return np.where(unknown, np.inf, held)

    def criterion(self, information: np.ndarray, kind: str) -> np.ndarray:
        """[...] to be made small: ln var N* + ln var L* for "c", -ln det for "D"."""
        if kind == "D":
            return -np.linalg.slogdet(information)[1]
        inverse = np.linalg.inv(information)
        held = np.einsum("kp,...pq,kq->...k", self._to[:2], inverse, self._to[:2])
        return np.log(np.maximum(held, 1e-300)).sum(axis=-1)

    def expect(self, runs: Runs) -> Expected:
        """What this set, with the runs done already, should leave open."""
        errors = np.sqrt(self.variances(self.known + self.information(runs).sum(axis=0)))
        return Expected(len(runs.N), float(runs.flops.sum()), *map(float, errors))

    def value_of(self, runs: Runs, kind: str = "c") -> float:
        """The criterion of a set of runs; infinite where it leaves something unknown."""
        information = self.known + self.information(runs).sum(axis=0)
        if kind == "c":
            return float(np.log(self.variances(information)[:2]).sum())
        sign, log_determinant = np.linalg.slogdet(information)
        return -float(log_determinant) if sign > 0 else np.inf

    def propose(
        self,
        candidates: Runs,
        baselines: Sequence[Runs],
        budget_flops: float,
        n_runs: int,
        kind: str = "c",
        repeats: int = 1,
    ) -> Runs:
        """`choose` from the candidates and the runs of the baselines; never worse than a baseline."""
        pool = joined([candidates, *baselines])
        found = [self.choose(pool, budget_flops, n_runs, kind, repeats)]
        found += [
            runs for runs in baselines if 0 < len(runs.N) <= n_runs and runs.flops.sum() <= budget_flops
        ]
        return min(found, key=lambda runs: self.value_of(runs, kind))

    def choose(
        self, candidates: Runs, budget_flops: float, n_runs: int, kind: str = "c", repeats: int = 1
    ) -> Runs:
        """At most n_runs of the candidates, each at most `repeats` times, that cost no more than the budget.

        Raises ValueError for an unknown criterion, or a budget that buys no run.
        """
        if kind not in CRITERIA:
            raise ValueError(f"criterion: '{kind}' is not one of {', '.join(CRITERIA)}")
        cost, each = candidates.flops, self.information(candidates)
        if not n_runs > 0 or cost.min() > budget_flops:
            raise ValueError(
                f"a budget of {budget_flops:.3g} FLOPs and {n_runs} runs buys none of the {len(cost)} "
                f"candidates, of which the cheapest costs {cost.min():.3g}; raise it, or allow smaller sizes"
            )
        ridge = RIDGE * np.einsum("nii->i", each) * np.eye(each.shape[1])
        base = self.known + ridge
        chosen: list[int] = []

        def best(others: list[int]) -> tuple[int, float]:
            """(the candidate to add to the others, the criterion then)"""
            left = budget_flops - cost[others].sum()
            # the next run may take its fair share and more, but leaves enough for the cheapest of the rest
            rest = (n_runs - len(others) - 1) * cost.min()
            allowed = (cost <= left - min(rest, left - cost.min())) & (
                np.bincount(others, minlength=len(cost)) < repeats
            )
            if not allowed.any():
                return -1, np.inf
            rows = np.flatnonzero(allowed)
            found = self.criterion(base + each[others].sum(axis=0) + each[rows], kind)
            i = int(found.argmin())
            return int(rows[i]), float(found[i])

        while len(chosen) < n_runs:
            i, value = best(chosen)
            if i < 0:
                break
            chosen.append(i)
        for _ in range(MAX_PASSES):
            before = value
            for place in range(len(chosen)):
                others = chosen[:place] + chosen[place + 1 :]
                i, tried = best(others)
                if i >= 0 and tried < value - 1e-9:
                    chosen, value = [*others, i], tried
            if value > before - 1e-6:
                break
        order = sorted(chosen, key=lambda i: cost[i])
        return candidates.take(np.array(order))


def candidates(
    largest_flops: float,
    ratios: tuple[float, float] = (4.0, 400.0),
    sizes: Sequence[float] | None = None,
    unique: float | None = None,
    span: float = 300.0,
) -> Runs:
    """Every size by ten D/N of `ratios`, of no more than `largest_flops`.

    N spans a factor of `span` unless `sizes` are given. With `unique` tokens a run repeats them as it must.
    """
    top = np.sqrt(largest_flops / (6 * ratios[0]))
    N = np.geomspace(top / span, top, 18) if sizes is None else np.array(sizes, dtype=float)
    n, ratio = (v.ravel() for v in np.meshgrid(N, np.geomspace(*ratios, 10), indexing="ij"))
    d = n * ratio
    kept = 6 * n * d <= largest_flops * (1 + 1e-9)
    if not kept.any():
        raise ValueError(
            f"no run of {N.min():.3g} parameters and D/N {ratios[0]:g} or more costs no more than "
            f"{largest_flops:.3g} FLOPs; raise the budget or the share of one run"
        )
    n, d = n[kept], d[kept]
    return Runs(n, d, d if unique is None else np.minimum(d, unique))


@dataclass(frozen=True)
class Limits:
    """What every run must keep: FLOPs at most, the range of D/N, and sizes N where only some are possible."""

    largest_flops: float
    ratios: tuple[float, float] = (4.0, 400.0)
    sizes: Sequence[float] | None = None

    def keep(self, runs: Runs) -> Runs:
        """The runs that keep to these limits, at the nearest possible size and their own compute."""
        n, compute = runs.N, runs.flops
        if self.sizes is not None:
            sizes = np.asarray(self.sizes, dtype=float)
            n = sizes[np.abs(np.log(n[:, None] / sizes)).argmin(axis=1)]
        d = compute / (6 * n)
        slack = 1 + 1e-9
        kept = (compute <= self.largest_flops * slack) & (d <= self.ratios[1] * n * slack)
        kept &= d * slack >= self.ratios[0] * n
        share = (runs.U / runs.D)[kept]
        unique = np.where(share < 1, np.minimum(runs.U[kept], d[kept]), d[kept])
        return Runs(n[kept], d[kept], unique)


def joined(parts: Sequence[Runs]) -> Runs:
    """Several sets of runs as one."""
    return Runs(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("N", "D", "U")))


def simple_designs(budget_flops: float, n_runs: int, unique: float | None = None) -> dict[str, Runs]:
    """What people do, scaled to the budget: a ladder at D/N = 20, three ladders, isoFLOP slices."""
    steps = np.geomspace(1 / 100, 1, n_runs)
    ladder = [(c, 20.0) for c in steps]
    three = [(c, r) for c in np.geomspace(1 / 100, 1, max(2, n_runs // 3)) for r in (5.0, 20.0, 80.0)]
    slices = [(c, r) for c in (1 / 27, 1 / 9, 1 / 3, 1) for r in np.geomspace(2.5, 160, max(3, n_runs // 4))]
    found = {}
    for name, points in (("ladder, D/N 20", ladder), ("D/N 5, 20, 80", three), ("isoFLOP slices", slices)):
        share, ratio = np.array(points).T
        flops = share * budget_flops / share.sum()
        n = np.sqrt(flops / (6 * ratio))
        d = n * ratio
        found[name] = Runs(n, d, d if unique is None else np.minimum(d, unique))
    return found
