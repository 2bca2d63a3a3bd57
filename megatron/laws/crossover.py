"""Critical compute C_crit(U) above which one objective beats another on U unique tokens.

At compute C and U unique tokens each objective has the N that is optimal by
its own law, and D = C / (6 N) tokens, with repetition where D > U. C_crit is
where the two lowest losses are equal. Prabhudesai et al. (arXiv 2507.15857)
report a power law in U for autoregressive and masked-diffusion models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.laws.frontier import search_frontier
from megatron.laws.law import Law, expanded_level

SEARCH_SPAN = (1e-2, 1e6)  # range of the search, in multiples of the compute of one epoch
N_STEPS = 60
LEVEL = 0.95


@dataclass(frozen=True)
class Crossover:
    """C_crit [n] (FLOPs; NaN without a crossing) at U [n] unique tokens.

    `ends` are (low, high) of confidence intervals of the
    crossing of the two laws, not of two single runs.
    """

    U: np.ndarray
    C: np.ndarray
    ends: tuple[np.ndarray, np.ndarray] | None


def critical_compute(first: Law, second: Law, U: float) -> float:
    """Return the least compute at which `second` becomes as good as `first`; NaN if it never does.

    The search is from SEARCH_SPAN[0] to SEARCH_SPAN[1]
    times 6 U^2 / 20: one epoch at D/N = 20.
    """
    from scipy.optimize import brentq  # slow import

    centre = 6 * U * U / 20

    def loss_gap(log_c: float | np.ndarray) -> np.ndarray:
        c = np.exp(log_c)
        return search_frontier(first, c, U).L - search_frontier(second, c, U).L

    # 60 computes over 8 decades are a factor of 1.37
    # apart: two crossings within one step are missed
    grid = np.log(np.geomspace(centre * SEARCH_SPAN[0], centre * SEARCH_SPAN[1], N_STEPS))
    gaps = loss_gap(grid)
    # first change of sign on the grid brackets the root
    sign_changes = np.flatnonzero((gaps[:-1] < 0) & (gaps[1:] >= 0))
    if not len(sign_changes):
        return float("nan")
    i = sign_changes[0]
    return float(np.exp(brentq(lambda x: float(loss_gap(np.array([x]))[0]), grid[i], grid[i + 1], xtol=1e-6)))


def crossover(first: Law, second: Law, U: Sequence[float], n_replicates: int = 50) -> Crossover:
    """Compute C_crit at each U, and its percentiles over pairs of replicates."""
    unique_tokens = np.asarray(U, dtype=float)
    C = np.array([critical_compute(first, second, u) for u in unique_tokens])
    ends = None
    n = min(first.n_replicates(), second.n_replicates(), n_replicates)
    if n:
        pairs = [(first.replicate(i), second.replicate(i)) for i in range(n)]
        replicate_C = np.array([[critical_compute(*pair, u) for u in unique_tokens] for pair in pairs])
        # a replicate without a crossover counts
        # as one above the range of the search
        replicate_C = np.where(np.isnan(replicate_C), np.inf, replicate_C)
        n_units = [law.n_units for law in (first, second) if law.n_units]
        level = expanded_level(LEVEL, min(n_units, default=None))
        # `nearest`, since interpolation between two Inf gives NaN
        low, high = np.quantile(replicate_C, [(1 - level) / 2, (1 + level) / 2], axis=0, method="nearest")
        ends = (low, high)
    return Crossover(unique_tokens, C, ends)
