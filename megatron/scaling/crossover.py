"""From which compute on one objective beats another on the same unique text: C_crit(U), and its power law.

At compute C and U unique tokens each objective takes the N that its own law calls best, with D = C / (k N)
tokens, repeated as they have to be. C_crit is where the two lowest losses meet. Prabhudesai et al. (arXiv
2507.15857) report a power law in U for autoregressive and masked-diffusion models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from megatron.scaling.frontier import least_loss
from megatron.scaling.law import Law, expanded_level
from megatron.scaling.power_law import PowerLaw, fit_power

SEARCHED = (1e-2, 1e6)  # times the compute of one epoch
N_STEPS = 60


@dataclass(frozen=True)
class Crossover:
    """C_crit [n] (FLOPs; NaN where there is none) at U [n] unique tokens, and the power law.

    `ends` are [low, high] of confidence intervals: of where the two laws cross, not of two single runs.
    """

    U: np.ndarray
    C: np.ndarray
    ends: tuple[np.ndarray, np.ndarray] | None
    power: PowerLaw | None
    words: str


def critical_compute(first: Law, second: Law, U: float, flops_per_param_token: float = 6.0) -> float:
    """The least compute at which `second` is as good as `first`, worse below; NaN where there is none.

    Looked for from SEARCHED[0] to SEARCHED[1] times k U^2 / 20, the compute of one epoch at D/N = 20.
    """
    centre = flops_per_param_token * U * U / 20

    def gap(log_c: float | np.ndarray) -> np.ndarray:
        c = np.exp(log_c)
        one, other = (least_loss(law, c, U, flops_per_param_token).L for law in (first, second))
        return one - other

    grid = np.log(np.geomspace(centre * SEARCHED[0], centre * SEARCHED[1], N_STEPS))
    gaps = gap(grid)
    turns = np.flatnonzero((gaps[:-1] < 0) & (gaps[1:] >= 0))
    if not len(turns):
        return float("nan")
    i = turns[0]
    return float(np.exp(brentq(lambda x: float(gap(np.array([x]))[0]), grid[i], grid[i + 1], xtol=1e-6)))


def crossover(
    first: Law,
    second: Law,
    U: Sequence[float],
    n_replicates: int = 50,
    level: float = 0.95,
    flops_per_param_token: float = 6.0,
) -> Crossover:
    """C_crit at each of U, percentiles over pairs of replicates, and the power law through them."""
    U = np.asarray(U, dtype=float)
    k = flops_per_param_token
    C = np.array([critical_compute(first, second, one, k) for one in U])
    ends = None
    n = min(first.n_replicates(), second.n_replicates(), n_replicates)
    if n:
        each = np.array(
            [[critical_compute(first.replicate(i), second.replicate(i), u, k) for u in U] for i in range(n)]
        )
        # a replicate without a crossover has it beyond all that is searched
        each = np.where(np.isnan(each), np.inf, each)
        n_units = [law.n_units for law in (first, second) if law.n_units]
        level = expanded_level(level, min(n_units, default=None))
        low, high = np.quantile(each, [(1 - level) / 2, (1 + level) / 2], axis=0, method="nearest")
        ends = (low, high)
    known = np.isfinite(C)
    power = fit_power(U[known], C[known]) if known.sum() > 1 else None
    return Crossover(U, C, ends, power, _words(known, power))


def _words(known: np.ndarray, power: PowerLaw | None) -> str:
    if not known.any():
        return "The laws do not cross within the computes searched: one objective is the better throughout."
    if power is None:
        return "The laws cross for one amount of unique text only: no power law."
    return f"C_crit = {power.coefficient:.3g} U^{power.exponent:.3g}."
