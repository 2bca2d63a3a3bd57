"""The compute-optimal N and D of a law."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.law import Law, exponents


@dataclass(frozen=True)
class Frontier:
    """For each compute C (FLOPs): the N (parameters) and D (tokens) of the least loss L (nats a token)."""

    C: np.ndarray
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray


def optimal(law: Law, C: ArrayLike, flops_per_param_token: float = 6.0) -> Frontier:
    """Least loss at C = k N D, k = `flops_per_param_token`, in closed form (Hoffmann et al., eq. 4).

    Where a term has vanished (A = 0 or B = 0) the optimum is its limit: N = 0 and D infinite, or the reverse.
    Every token is seen once. Forms that are not a sum of two powers are searched.
    """
    C = _compute(C, flops_per_param_token)
    if "A" not in law.params:
        return least_loss(law, C, np.inf, flops_per_param_token)
    return Frontier(
        C, *_best({name: np.float64(v) for name, v in law.params.items()}, C / flops_per_param_token)
    )


def least_loss(law: Law, C: ArrayLike, U: ArrayLike, flops_per_param_token: float = 6.0) -> Frontier:
    """Least loss at C [n] FLOPs, C = k N D, with U unique tokens ([n] or one): by search, for any form.

    N is looked for within a factor of 1e4 of where D/N = 20, then closed in on; the loss is to 1e-9.
    """
    C, U = np.broadcast_arrays(_compute(C, flops_per_param_token), np.asarray(U, dtype=float))
    product = (C / flops_per_param_token)[:, None]
    middle, wide = 0.5 * np.log(product / 20), np.log(1e4)
    steps = np.linspace(-1, 1, 81)
    for _ in range(5):
        N = np.exp(middle + wide * steps)
        loss = law.loss(N, product / N, U[:, None])
        middle = np.log(np.take_along_axis(N, loss.argmin(axis=1)[:, None], axis=1))
        wide *= 2.5 / 80
    N = np.exp(middle)
    return Frontier(C, N[:, 0], (product / N)[:, 0], law.loss(N, product / N, U[:, None])[:, 0])


def bands(
    law: Law,
    C: ArrayLike,
    level: float = 0.95,
    flops_per_param_token: float = 6.0,
    U: float | None = None,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Confidence intervals (low, high) over C of N, D and L, from the frontiers of the bootstrap replicates.

    `U` unique tokens are repeated where a budget needs more; None: every token is seen once. Raises
    ValueError for a law without replicates.
    """
    if not law.replicates:
        raise ValueError("law: has no bootstrap replicates; fit it with n_bootstrap > 0")
    C = _compute(C, flops_per_param_token)
    if "A" not in law.params or U is not None:
        each = [
            least_loss(law.replicate(i), C, np.inf if U is None else U, flops_per_param_token)
            for i in range(law.n_replicates())
        ]
        return {x: law.percentiles(np.array([getattr(one, x) for one in each]), level) for x in "NDL"}
    params = {name: np.array(v)[:, None] for name, v in law.replicates.items()}
    found = dict(zip("NDL", _best(params, C / flops_per_param_token), strict=True))
    # a replicate whose N is 0 or infinite is an end of the band; between two such ends the line is no number
    with np.errstate(invalid="ignore"):
        return {name: law.percentiles(values, level) for name, values in found.items()}


def _compute(C: ArrayLike, flops_per_param_token: float) -> np.ndarray:
    C = np.atleast_1d(np.asarray(C, dtype=float))
    wrong = C[~(np.isfinite(C) & (C > 0))]
    if len(wrong):
        raise ValueError(f"C: found {wrong[0]}, wanted FLOPs above 0")
    if not 0 < flops_per_param_token < np.inf:
        raise ValueError(
            f"flops_per_param_token: found {flops_per_param_token}, wanted a number above 0, as 6"
        )
    return C


def _best(params: dict[str, np.ndarray], product: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(N, D, L) with N D = product, where alpha A / N^alpha = beta B / D^beta."""
    alpha, beta = params["alpha"], params["beta"]
    a, b = exponents(alpha, beta)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = (alpha * params["A"] / (beta * params["B"])) ** (1 / (alpha + beta))
        N, D = ratio * product**a, product**b / ratio
        of_n = np.where(params["A"] > 0, params["A"] * N**-alpha, 0.0)
        of_d = np.where(params["B"] > 0, params["B"] * D**-beta, 0.0)
    return N, D, params["E"] + of_n + of_d
