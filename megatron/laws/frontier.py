"""Compute-optimal N and D of a law."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import validate_columns
from megatron.laws.law import Law, optimum_exponents

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Frontier:
    """N (parameters) and D (tokens) of least loss L (nats a token) at each compute C (FLOPs), each [n]."""

    C: np.ndarray
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray

    def to_frame(self) -> "DataFrame":
        """Return the columns C, N, D and L, a row for each compute."""
        from pandas import DataFrame  # slow import

        return DataFrame(vars(self))


def optimal_frontier(law: Law, C: ArrayLike) -> Frontier:
    """Return the optimum at C = 6 N D [n] in closed form (Hoffmann et al., eq. 4).

    Where a term has vanished (A = 0 or B = 0) the optimum is its
    limit: N = 0 and D infinite, or the reverse. Every token is unique.
    Forms that are not a sum of two powers are searched numerically.
    """
    (C,) = validate_columns(C=C)
    if not law.has_closed_frontier:
        return search_frontier(law, C, np.inf)
    params = {name: np.float64(value) for name, value in law.params.items()}
    return Frontier(C, *_solve_frontier(params, C / 6))


def search_frontier(law: Law, C: ArrayLike, U: ArrayLike) -> Frontier:
    """Return the optimum at C = 6 N D [n] with U unique tokens ([n] or one), by a search.

    A grid of N within a factor of 1e4 of D/N = 20 is refined around its
    minimum four times; the relative error of the loss is about 1e-9.
    """
    # C, U [n]; below N and loss are [n, 81]
    C, U = np.broadcast_arrays(*validate_columns(C=C), np.asarray(U, dtype=float))
    product = (C / 6)[:, None]
    # N D = product and D = 20 N: N = sqrt(product / 20)
    middle, wide = 0.5 * np.log(product / 20), np.log(1e4)
    steps = np.linspace(-1, 1, 81)
    for _ in range(5):
        N = np.exp(middle + wide * steps)
        loss = law.loss(N, product / N, U[:, None])
        # next grid: 1.25 grid steps to either side of the minimum
        middle = np.log(np.take_along_axis(N, loss.argmin(axis=1)[:, None], axis=1))
        wide *= 2.5 / 80
    N = np.exp(middle)
    return Frontier(C, N[:, 0], (product / N)[:, 0], law.loss(N, product / N, U[:, None])[:, 0])


def frontier_bands(
    law: Law, C: ArrayLike, level: float = 0.95, U: float | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return confidence intervals (low, high) over C of N, D and L, from the frontiers of the replicates.

    `U` unique tokens are repeated where a budget needs more; None: every
    token is unique. Raises ValueError for a law without replicates.
    """
    if not law.replicates:
        raise ValueError("law: got no bootstrap replicates, expected some. Fit it with n_bootstrap > 0.")
    (C,) = validate_columns(C=C)
    if not law.has_closed_frontier or U is not None:
        unique, replicates = np.inf if U is None else U, range(law.n_replicates())
        frontiers = [search_frontier(law.replicate(i), C, unique) for i in replicates]
        replicate_values = {x: np.array([getattr(at, x) for at in frontiers]) for x in "NDL"}
    else:
        # [R, 1] against C [n]: one row of optima for each replicate
        params = {name: np.array(v)[:, None] for name, v in law.replicates.items()}
        replicate_values = dict(zip("NDL", _solve_frontier(params, C / 6), strict=True))
    # a replicate may have N = 0 or Inf, which is an end
    # of the band; interpolation between two Inf gives NaN
    with np.errstate(invalid="ignore"):
        return {name: law.percentiles(values, level) for name, values in replicate_values.items()}


def _solve_frontier(
    params: Mapping[str, np.ndarray | np.float64], product: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (N, D, L) with N D = product and alpha A / N^alpha = beta B / D^beta."""
    alpha, beta = params["alpha"], params["beta"]
    a, b = optimum_exponents(alpha, beta)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # N = G (C/k)^a, D = (C/k)^b / G, G = (alpha A / (beta
        # B))^(1/(alpha + beta)): Hoffmann et al., eq. 4
        ratio = (alpha * params["A"] / (beta * params["B"])) ** (1 / (alpha + beta))
        N, D = ratio * product**a, product**b / ratio
        # a term of 0 stays 0 where N or D is infinite
        of_n = np.where(params["A"] > 0, params["A"] * N**-alpha, 0.0)
        of_d = np.where(params["B"] > 0, params["B"] * D**-beta, 0.0)
    return N, D, params["E"] + of_n + of_d
