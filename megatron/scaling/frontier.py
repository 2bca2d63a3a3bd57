"""The compute-optimal N and D of a law."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.law import Law, chinchilla, exponents


@dataclass(frozen=True)
class Frontier:
    """For each compute C (FLOPs): the N (parameters) and D (tokens) of the least loss L (nats a token)."""

    C: np.ndarray
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray


def optimal(law: Law, C: ArrayLike, flops_per_param_token: float = 6.0) -> Frontier:
    """Least loss at C = k N D, k = `flops_per_param_token`, in closed form (Hoffmann et al., eq. 4)."""
    C = np.atleast_1d(np.asarray(C, dtype=float))
    N, D = _split({name: np.float64(v) for name, v in law.params.items()}, C / flops_per_param_token)
    return Frontier(C, N, D, chinchilla(law.params, N, D))


def bands(
    law: Law, C: ArrayLike, level: float = 0.95, flops_per_param_token: float = 6.0
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(low, high) over C of N, D and L: percentiles of the frontiers of the bootstrap replicates.

    Raises ValueError for a law without replicates.
    """
    if not law.replicates:
        raise ValueError("law: has no bootstrap replicates; fit it with n_bootstrap > 0")
    C = np.atleast_1d(np.asarray(C, dtype=float))
    params = {name: np.array(v)[:, None] for name, v in law.replicates.items()}
    tails = [(1 - level) / 2, (1 + level) / 2]
    # a replicate in which one term has vanished has its optimum at N = 0 or D = 0, an end of the band
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        N, D = _split(params, C / flops_per_param_token)
        found = {"N": N, "D": D, "L": chinchilla(params, N, D)}
    return {name: tuple(np.quantile(values, tails, axis=0)) for name, values in found.items()}


def _split(params: dict[str, np.ndarray], product: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(N, D) with N D = product, where alpha A / N^alpha = beta B / D^beta."""
    alpha, beta = params["alpha"], params["beta"]
    a, b = exponents(alpha, beta)
    ratio = (alpha * params["A"] / (beta * params["B"])) ** (1 / (alpha + beta))
    return ratio * product**a, product**b / ratio
