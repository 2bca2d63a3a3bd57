"""Critical compute C_crit(U) above which one objective beats another on U unique tokens, and its power law.

At compute C and U unique tokens each objective has the N that is optimal by
its own law, and D = C / (k N) tokens, with repetition where D > U. C_crit is
where the two lowest losses are equal. Prabhudesai et al. (arXiv 2507.15857)
report a power law in U for autoregressive and masked-diffusion models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.laws.frontier import search_frontier
from megatron.laws.law import Law, expanded_level
from megatron.laws.power_law import PowerLaw, fit_power

SEARCH_SPAN = (1e-2, 1e6)  # range of the search, in multiples of the compute of one epoch
N_STEPS = 60


@dataclass(frozen=True)
class Crossover:
    """C_crit [n] (FLOPs; NaN if there is none) at U [n] unique tokens, and its power law.

    `ends` are (low, high) of confidence intervals of the
    crossing of the two laws, not of two single runs.
    """

    U: np.ndarray
    C: np.ndarray
    ends: tuple[np.ndarray, np.ndarray] | None
    power: PowerLaw | None
    words: str


def critical_compute(first: Law, second: Law, U: float, flops_per_param_token: float = 6.0) -> float:
    """Return the least compute at which `second` becomes as good as `first`; NaN if there is none.

    The search is from SEARCH_SPAN[0] to SEARCH_SPAN[1]
    times k U^2 / 20: one epoch at D/N = 20.
    """
    from scipy.optimize import brentq  # slow import

    centre = flops_per_param_token * U * U / 20

    def loss_gap(log_c: float | np.ndarray) -> np.ndarray:
        c = np.exp(log_c)
        first_loss, second_loss = (
            search_frontier(law, c, U, flops_per_param_token).L for law in (first, second)
        )
        return first_loss - second_loss

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


def crossover(
    first: Law,
    second: Law,
    U: Sequence[float],
    n_replicates: int = 50,
    level: float = 0.95,
    flops_per_param_token: float = 6.0,
) -> Crossover:
    """Compute C_crit at each U, its percentiles over pairs of replicates, and the power law through them."""
    unique_tokens = np.asarray(U, dtype=float)
    k = flops_per_param_token
    C = np.array([critical_compute(first, second, u, k) for u in unique_tokens])
    ends = None
    n = min(first.n_replicates(), second.n_replicates(), n_replicates)
    if n:
        replicate_C = np.array(
            [
                [critical_compute(first.replicate(i), second.replicate(i), u, k) for u in unique_tokens]
                for i in range(n)
            ]
        )
        # a replicate without a crossover counts as one above the range of the search
        replicate_C = np.where(np.isnan(replicate_C), np.inf, replicate_C)
        n_units = [law.n_units for law in (first, second) if law.n_units]
        level = expanded_level(level, min(n_units, default=None))
        # `nearest`, since interpolation between two Inf gives NaN
        low, high = np.quantile(replicate_C, [(1 - level) / 2, (1 + level) / 2], axis=0, method="nearest")
        ends = (low, high)
    has_crossover = np.isfinite(C)
    power = fit_power(unique_tokens[has_crossover], C[has_crossover]) if has_crossover.sum() > 1 else None
    return Crossover(unique_tokens, C, ends, power, _describe_crossover(has_crossover, power))


def _describe_crossover(has_crossover: np.ndarray, power: PowerLaw | None) -> str:
    if not has_crossover.any():
        return "The laws do not cross within the range of the search: one objective is better throughout."
    if power is None:
        return "The laws cross for only one amount of unique text: no power law."
    return f"C_crit = {power.coefficient:.3g} U^{power.exponent:.3g}."
