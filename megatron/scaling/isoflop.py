"""Chinchilla's second approach: at each compute a parabola through loss against log N, and its minimum.

Hoffmann et al. (arXiv 2203.15556, section 3.2). A parabola is symmetric and a loss surface is not, so the
minimum is biased when the sizes reach far to one side of it: compare with the parametric fit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.power_law import PowerLaw, fit_power

SAME_COMPUTE = 0.1  # runs whose log C differ by less are of one budget
LEAST_SIZES = 4


@dataclass(frozen=True)
class Parabola:
    """One budget: C FLOPs, the runs' N, D, L [n], and the minimum of L = c0 + c1 x + c2 x^2 in x = log N.

    `log_se` is the standard error of log N_best; `at_edge` says that the minimum is not inside the sizes.
    """

    C: float
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray
    coefficients: np.ndarray
    N_best: float
    D_best: float
    L_best: float
    log_se: float
    at_edge: bool


@dataclass(frozen=True)
class IsoFlop:
    """N_best = k C^a and D_best = k C^b over the budgets, and what a reader should know."""

    parabolas: list[Parabola]
    size: PowerLaw | None
    tokens: PowerLaw | None
    warnings: list[str]


def fit_isoflop(
    N: ArrayLike, D: ArrayLike, L: ArrayLike, C: ArrayLike, loss_se: ArrayLike | None = None
) -> IsoFlop:
    """Parabolas at each budget of n runs, weighted by 1 / loss_se^2; C FLOPs by any one convention.

    Budgets with fewer than LEAST_SIZES sizes, and parabolas without a minimum, are told and left out.

    Raises ValueError where no budget is left.
    """
    N, D, L, C = (np.asarray(v, dtype=float) for v in (N, D, L, C))
    weights = np.ones_like(L) if loss_se is None else 1 / np.asarray(loss_se, dtype=float) ** 2
    told: list[str] = []
    parabolas, n_few = [], 0
    for rows in budgets(C):
        name = f"At {np.exp(np.log(C[rows]).mean()):.2e} FLOPs"
        if len(np.unique(N[rows])) < LEAST_SIZES:
            n_few += 1
            continue
        one = _parabola(N[rows], D[rows], L[rows], C[rows], weights[rows])
        if one is None:
            told.append(f"{name} the losses have no minimum in N: left out.")
            continue
        if one.at_edge:
            told.append(
                f"{name} the minimum, N = {one.N_best:.3g}, lies at the edge of the sizes tried or beyond: "
                "add sizes on that side."
            )
        parabolas.append(one)
    if n_few:
        told.append(f"{n_few} of {len(budgets(C))} budgets have fewer than {LEAST_SIZES} sizes: left out.")
    if not parabolas:
        raise ValueError(
            f"isoFLOP: no budget of {len(budgets(C))} has {LEAST_SIZES} sizes and a minimum; train several "
            "sizes at equal FLOPs, or fit the parametric law"
        )
    inside = [one for one in parabolas if not one.at_edge]
    size = tokens = None
    if len(inside) > 1:
        # a parabola through few runs may pass through them by chance: errors are not below the median's half
        errors = np.array([one.log_se for one in inside])
        errors = np.maximum(errors, 0.5 * np.median(errors))
        compute = [one.C for one in inside]
        size = fit_power(compute, [one.N_best for one in inside], errors)
        tokens = fit_power(compute, [one.D_best for one in inside], errors)
    else:
        told.append("Fewer than two budgets have their minimum inside the sizes tried: no power law.")
    return IsoFlop(parabolas, size, tokens, told)


def budgets(C: np.ndarray) -> list[np.ndarray]:
    """Indices of the runs of each budget, cheap to dear: gaps in log C above SAME_COMPUTE part them."""
    order = np.argsort(C, kind="stable")
    cuts = np.flatnonzero(np.diff(np.log(C[order])) > SAME_COMPUTE) + 1
    return np.split(order, cuts)


def _parabola(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, C: np.ndarray, weights: np.ndarray
) -> Parabola | None:
    """The weighted least-squares parabola; None where it has no minimum."""
    x = np.log(N)
    middle = np.average(x, weights=weights)
    basis = np.vander(x - middle, 3, increasing=True)
    root = np.sqrt(weights)[:, None]
    found, *_ = np.linalg.lstsq(basis * root, L * root[:, 0], rcond=None)
    _, slope, bend = found
    if bend <= 0:
        return None
    least = -slope / (2 * bend)
    left = L - basis @ found
    spread = (weights * left**2).sum() / max(len(L) - 3, 1)
    covariance = spread * np.linalg.inv((basis * weights[:, None]).T @ basis)
    towards = np.array([0.0, -1 / (2 * bend), slope / (2 * bend**2)])  # d least / d coefficients
    log_se = float(np.sqrt(towards @ covariance @ towards))
    best, compute = float(np.exp(middle + least)), float(np.exp(np.log(C).mean()))
    ratio = float(np.exp(np.log(C / (N * D)).mean()))  # FLOPs a parameter and token, as these runs count
    first, last = x.min(), x.max()
    order = np.argsort(N, kind="stable")
    return Parabola(
        C=compute,
        N=N[order],
        D=D[order],
        L=L[order],
        coefficients=np.array(
            [found[0] - slope * middle + bend * middle**2, slope - 2 * bend * middle, bend]
        ),
        N_best=best,
        D_best=compute / (ratio * best),
        L_best=float(found[0] - slope**2 / (4 * bend)),
        log_se=log_se,
        at_edge=not first < middle + least < last,
    )
