"""Optimal design: the set of runs within a budget with the smallest errors of extrapolated N* and L*.

The information of a run about the constants is the outer product of the slopes
of log Lhat at it, over the variance of the log loss of a run (linear design
theory, at the constants of a prior law). A set is grown run by run, then runs
are exchanged one by one while that improves it (Fedorov's exchange). The
design assumes that the form of the law is true: add a few runs that test it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.laws.fitting.surface import RunPoints, Surface
from megatron.laws.forms import check_fitted_form
from megatron.laws.frontier import optimal_frontier
from megatron.laws.law import Law, optimum_exponents_from

CRITERIA = ("c", "D")
RIDGE = 1e-9  # share of all candidates' information; makes the first few runs comparable
STEP = 1e-4  # step in theta for finite differences of N* and L*
MAX_PASSES = 20
RATIOS = (4.0, 400.0)  # range of D/N of the candidates
SPAN = 300.0  # ratio of the largest and the smallest size of the candidates


@dataclass(frozen=True)
class RunSet:
    """Candidate or chosen runs, each float64 [n]: N parameters, D tokens, U of them unique."""

    N: np.ndarray
    D: np.ndarray
    U: np.ndarray

    @property
    def flops(self) -> np.ndarray:
        """Training FLOPs, 6 N D [n]."""
        return 6 * self.N * self.D

    def select(self, rows: np.ndarray | Sequence[int]) -> "RunSet":
        """Return the runs at indices `rows`."""
        return RunSet(self.N[rows], self.D[rows], self.U[rows])


@dataclass(frozen=True)
class ExpectedErrors:
    """Expected standard errors from a set of runs: of ln N* and ln L* at the target, and of a in N* ~ C^a."""

    n_runs: int
    flops: float
    log_size: float
    log_loss: float
    a_exponent: float


class Designer:
    """Design of runs for the constants of one prior law.

    `noise` is the standard deviation of log loss of a run.
    """

    def __init__(self, law: Law, target_flops: float, noise: float, done: RunSet | None = None) -> None:
        """Set up the design for optima at `target_flops`; runs in `done` add information and cost nothing.

        Raises ValueError for a target or noise that is not above 0.
        """
        for name, value in (("target", target_flops), ("noise", noise)):
            if not 0 < value < np.inf:
                raise ValueError(f"{name}: got {value}, expected a number above 0")
        check_fitted_form(law.form)
        self.law, self.target, self.noise = law, target_flops, noise
        # theta depends on the centre (surface.py): the
        # target is the centre for all sets of runs
        best = optimal_frontier(law, target_flops)
        centre = RunPoints.from_columns(best.N, best.D, best.L)
        self._centre = centre
        self._surface = Surface(law.form)
        self.theta = self._surface.from_constants(law.params, centre)
        self._target_gradients = self._compute_target_gradients()
        self.prior_information = (
            np.zeros((len(self.theta),) * 2) if done is None else self.information(done).sum(axis=0)
        )

    def information(self, runs: RunSet) -> np.ndarray:
        """Return the information matrix [n, p, p] of each run."""
        x, y = np.log(runs.N), np.log(runs.D)
        # the slopes do not depend on log L, for which 0 stands
        u = np.minimum(np.log(runs.U), y)
        points = replace(self._centre, x=x, y=y, u=u, log_loss=np.zeros_like(x))
        # [n, p], then outer products [n, p, p]; information
        # of independent runs adds up
        slopes = self._surface.evaluate(self.theta[None], points)[1][0]
        return slopes[:, :, None] * slopes[:, None, :] / self.noise**2

    def _compute_target_gradients(self) -> np.ndarray:
        """Return derivatives [3, p] of ln N*, ln L* and the exponent a by theta, as central differences."""
        rows = []
        # The step is large against the resolution of log N*
        # in search_frontier, about 2e-7: the last of its
        # five grids has steps of log(1e4) (2.5 / 80)^4 / 40.
        for step in STEP * np.eye(len(self.theta)):
            ends = []
            for sign in (1, -1):
                moved = self._surface.to_constants((self.theta + sign * step)[None], self._centre)
                params = {name: float(value[0]) for name, value in moved.items()}
                law = Law(form=self.law.form, params=params, objective=0.0, huber_delta=1.0, n_runs=0)
                best = optimal_frontier(law, self.target)
                a = float(optimum_exponents_from(params)["a_exponent"])
                ends.append([np.log(best.N[0]), np.log(best.L[0]), a])
            rows.append((np.array(ends[0]) - ends[1]) / (2 * STEP))
        return np.array(rows).T

    def variances(self, information: np.ndarray) -> np.ndarray:
        """Return the variances [..., 3] of ln N*, ln L* and a, for information [..., p, p].

        Inf where a gradient is not in the range of the
        information, which then does not determine the quantity.
        """
        # With S = diag(scale): information = S scaled S, so
        # g' information^-1 g = (g / s)' scaled^-1 (g / s).
        scale = np.sqrt(np.maximum(np.einsum("...ii->...i", information), 1e-300))
        scaled = information / (scale[..., :, None] * scale[..., None, :])
        # scaled to a unit diagonal, so that the condition
        # number does not depend on the units of constants
        inverse = np.linalg.pinv(scaled, rcond=1e-14, hermitian=True)
        gradients = self._target_gradients / scale[..., None, :]
        variances = np.einsum("...kp,...pq,...kq->...k", gradients, inverse, gradients)
        # pinv ignores the null space of the information: a
        # gradient with a part in it has infinite variance
        unreached = gradients - np.einsum("...kp,...pq,...qr->...kr", gradients, inverse, scaled)
        not_determined = np.abs(unreached).max(axis=-1) > 1e-3 * np.abs(gradients).max(axis=-1)
        return np.where(not_determined, np.inf, variances)

    def criterion(self, information: np.ndarray, kind: str) -> np.ndarray:
        """Return the criterion [...] to minimise: "c" ln var N* + ln var L*, "D" -ln det information."""
        if kind == "D":
            return -np.linalg.slogdet(information)[1]
        inverse = np.linalg.inv(information)  # the ridge of `choose` keeps it regular
        variances = np.einsum(
            "kp,...pq,kq->...k", self._target_gradients[:2], inverse, self._target_gradients[:2]
        )
        # a sum of logs: halving either variance counts the
        # same, whatever their sizes
        return np.log(np.maximum(variances, 1e-300)).sum(axis=-1)

    def expect(self, runs: RunSet) -> ExpectedErrors:
        """Return the expected errors from this set together with the runs already done."""
        errors = np.sqrt(self.variances(self.prior_information + self.information(runs).sum(axis=0)))
        return ExpectedErrors(len(runs.N), float(runs.flops.sum()), *map(float, errors))

    def choose(self, candidates: RunSet, budget_flops: float, n_runs: int, kind: str = "c") -> RunSet:
        """Choose at most `n_runs` candidates, each once, within the budget.

        Raises ValueError for an unknown criterion, or a
        budget below the cost of the cheapest candidate.
        """
        if kind not in CRITERIA:
            raise ValueError(f"criterion: got '{kind}', expected one of {', '.join(CRITERIA)}")
        cost, information = candidates.flops, self.information(candidates)
        if not n_runs > 0 or cost.min() > budget_flops:
            raise ValueError(
                f"budget: got {budget_flops:.3g} FLOPs for {n_runs} runs, expected {cost.min():.3g} or more "
                f"for the cheapest of {len(cost)} candidates. Raise the budget or allow smaller sizes."
            )
        # fewer runs than constants have singular information
        ridge = RIDGE * np.einsum("nii->i", information) * np.eye(information.shape[1])
        base = self.prior_information + ridge
        chosen: list[int] = []
        value = np.inf

        def find_addition(others: list[int]) -> tuple[int, float]:
            """Return (index of the best candidate to add to `others`, criterion with it).

            Returns (-1, Inf) if none fits.
            """
            left = budget_flops - cost[others].sum()
            # the next run may cost more than an equal share, but
            # enough must remain for the cheapest of the others
            rest = (n_runs - len(others) - 1) * cost.min()
            # and never more than what is left,
            # also where that is below the cheapest
            allowed = cost <= min(left, max(left - rest, cost.min()))
            allowed[others] = False
            if not allowed.any():
                return -1, np.inf
            rows = np.flatnonzero(allowed)
            # all m candidates at once, [m, p, p]
            values = self.criterion(base + information[others].sum(axis=0) + information[rows], kind)
            i = int(values.argmin())
            return int(rows[i]), float(values[i])

        while len(chosen) < n_runs:
            i, tried = find_addition(chosen)
            if i < 0:
                break
            chosen, value = [*chosen, i], tried
        # Fedorov's exchange: replace each run in turn by
        # the best candidate, until a pass improves nothing
        for _ in range(MAX_PASSES):
            before = value
            for place in range(len(chosen)):
                others = chosen[:place] + chosen[place + 1 :]
                i, tried = find_addition(others)
                # run `place` itself is among the candidates, so the
                # criterion cannot become worse
                if i >= 0 and tried < value - 1e-9:
                    chosen, value = [*others, i], tried
            if value > before - 1e-6:
                break
        order = sorted(chosen, key=lambda i: cost[i])
        return candidates.select(np.array(order))


def generate_candidates(largest_flops: float, unique: float | None = None) -> RunSet:
    """Return candidates: sizes over a factor of SPAN at ten D/N of RATIOS, of at most `largest_flops` each.

    Runs of more than `unique` tokens repeat them.
    """
    # 6 N (r N) = FLOPs: the smallest D/N has the largest N
    top = np.sqrt(largest_flops / (6 * RATIOS[0]))
    N = np.geomspace(top / SPAN, top, 18)
    n, ratio = (v.ravel() for v in np.meshgrid(N, np.geomspace(*RATIOS, 10), indexing="ij"))
    d = n * ratio
    is_affordable = 6 * n * d <= largest_flops * (1 + 1e-9)
    n, d = n[is_affordable], d[is_affordable]
    return RunSet(n, d, d if unique is None else np.minimum(d, unique))


def build_simple_designs(budget_flops: float, n_runs: int, unique: float | None = None) -> dict[str, RunSet]:
    """Build common designs, scaled to the budget: a ladder at D/N = 20, three ladders, isoFLOP slices."""
    ladder = [(c, 20.0) for c in np.geomspace(1 / 100, 1, n_runs)]
    three = [(c, r) for c in np.geomspace(1 / 100, 1, max(2, n_runs // 3)) for r in (5.0, 20.0, 80.0)]
    slices = [(c, r) for c in (1 / 27, 1 / 9, 1 / 3, 1) for r in np.geomspace(2.5, 160, max(3, n_runs // 4))]
    designs = {}
    for name, points in (("ladder, D/N 20", ladder), ("D/N 5, 20, 80", three), ("isoFLOP slices", slices)):
        share, ratio = np.array(points).T
        # the points of a design share the budget in
        # proportion to their C, whose largest is 1
        flops = share * budget_flops / share.sum()
        n = np.sqrt(flops / (6 * ratio))
        d = n * ratio
        designs[name] = RunSet(n, d, d if unique is None else np.minimum(d, unique))
    return designs
