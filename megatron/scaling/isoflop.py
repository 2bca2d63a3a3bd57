"""Chinchilla's second approach: at each compute a parabola through loss against log N, and its minimum.

Hoffmann et al. (arXiv 2203.15556, section 3.2). A parabola is symmetric and a loss surface is not, so the
minimum is biased, the more the further the sizes reach (arXiv 2603.22339). Only sizes within WINDOW of the
minimum are fitted; approaches.py estimates the bias that is left and compares with the parametric fit.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.power_law import PowerLaw, fit_power

SAME_COMPUTE = 0.1  # runs whose log C differ by less are of one budget
LEAST_SIZES = 4
WINDOW = 2.5  # in log N around the minimum: further runs bend the parabola and do not place it
MOST_ROUNDS = 10  # of moving the window with the minimum


@dataclass(frozen=True)
class Parabola:
    """One budget: C FLOPs, the runs' N, D, L [n], and the minimum of L = c0 + c1 x + c2 x^2 in x = log N.

    `log_se` is the standard error of log N_best; `at_edge` says that the minimum is not inside the sizes.
    `used` [n] bool: the runs within WINDOW, which it was fitted to.
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
    used: np.ndarray


@dataclass(frozen=True)
class IsoFlop:
    """N_best = k C^a and D_best = k C^b over the budgets, and what a reader should know."""

    parabolas: list[Parabola]
    size: PowerLaw | None
    tokens: PowerLaw | None
    warnings: list[str]


def fit_isoflop(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    C: ArrayLike,
    loss_se: ArrayLike | None = None,
    window: float = WINDOW,
) -> IsoFlop:
    """Parabolas at each budget of n runs, weighted by 1 / loss_se^2; C FLOPs by any one convention.

    Runs further than `window` in log N from the minimum are not fitted, but LEAST_SIZES sizes always are.
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
        one = fit_window(N[rows], D[rows], L[rows], C[rows], weights[rows], window)
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


def fit_window(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, C: np.ndarray, weights: np.ndarray, window: float
) -> Parabola | None:
    """The parabola of the runs within `window` in log N of its own minimum; None where it has none.

    The window starts at the run of least loss and moves with the minimum until the same runs are in it.
    """
    x = np.log(N)
    centre, used, found = float(x[L.argmin()]), np.zeros(len(N), dtype=bool), None
    for _ in range(MOST_ROUNDS):
        distance = np.abs(x - centre)
        near = np.unique(distance)
        n_sizes = [len(np.unique(N[distance <= reach])) for reach in near]
        least = near[np.searchsorted(n_sizes, LEAST_SIZES)]
        inside = distance <= max(window, least)
        if (inside == used).all():
            break
        used = inside
        found = fit_parabola(N, D, L, C, weights, used)
        if found is None:
            return None
        centre = float(np.clip(np.log(found.N_best), x.min(), x.max()))
    return found


def fit_parabola(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, C: np.ndarray, weights: np.ndarray, used: np.ndarray
) -> Parabola | None:
    """The weighted least-squares parabola of the runs `used` [n] bool; None where it has no minimum."""
    order = np.argsort(N, kind="stable")
    runs = {"N": N[order], "D": D[order], "L": L[order], "used": used[order]}
    N, D, L, C, weights = (v[used] for v in (N, D, L, C, weights))
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
    return Parabola(
        **runs,
        C=compute,
        coefficients=np.array(
            [found[0] - slope * middle + bend * middle**2, slope - 2 * bend * middle, bend]
        ),
        N_best=best,
        D_best=compute / (ratio * best),
        L_best=float(found[0] - slope**2 / (4 * bend)),
        log_se=log_se,
        at_edge=not first < middle + least < last,
    )
