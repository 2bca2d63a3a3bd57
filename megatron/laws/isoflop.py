"""Chinchilla's second approach: the minimum of a parabola of loss against log N at each compute.

Hoffmann et al. (arXiv 2203.15556, section 3.2). A parabola is symmetric and
a loss surface is not, so the minimum is biased, more so for a wider range of
sizes (arXiv 2603.22339). Only sizes within WINDOW of the minimum are fitted.
compute_law.py fits the same runs by a form that need not be symmetric.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.columns import takes_data_frame, validate_columns
from megatron.laws.fitting.noise import GROUPED, estimate_noise, is_dependent, validate_labels
from megatron.laws.power_law import PowerLaw, fit_power

SAME_COMPUTE = 0.1  # runs whose log C differ by less belong to one budget
MIN_SIZES = 4
WINDOW = 2.5  # in log N around the minimum; runs further away bias the parabola
MAX_ROUNDS = 10  # rounds of moving the window with the minimum


@dataclass(frozen=True)
class Parabola:
    """Parabola of one budget: C FLOPs, N, D, L [n] of its runs, minimum of L = c0 + c1 x + c2 x^2, x = log N.

    log_se   standard error of log N_best
    at_edge  whether the minimum is outside the range of sizes
    used     [n] bool: runs within WINDOW, to which the parabola was fitted
    slopes   derivatives of log N_best by the losses of the used runs
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
    slopes: np.ndarray


@dataclass(frozen=True)
class IsoFlop:
    """Parabolas of all budgets, power laws N_best = k C^a (size), D_best = k C^b (tokens), and warnings."""

    parabolas: list[Parabola]
    size: PowerLaw | None
    tokens: PowerLaw | None
    warnings: list[str]


@takes_data_frame
def fit_isoflop(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    C: ArrayLike,
    loss_se: ArrayLike | None = None,
    groups: ArrayLike | None = None,
) -> IsoFlop:
    """Fit a parabola to each budget of n runs, weighted by 1 / loss_se^2; C FLOPs by any one convention.

    Runs further than WINDOW in log N from the minimum are not fitted, but at
    least MIN_SIZES sizes are. Budgets with fewer than MIN_SIZES sizes, and those
    without a minimum, are omitted with a warning. `groups` [n] as in fit_law:
    with None, rows that share N are grouped if their residuals correlate.

    Raises ValueError where no budget remains,
    or for values that are not positive numbers.
    """
    N, D, L, C = validate_columns(N=N, D=D, L=L, C=C)
    weights = np.ones_like(L) if loss_se is None else 1 / np.asarray(loss_se, dtype=float) ** 2
    warnings: list[str] = []
    parabolas, n_few = [], 0
    labels = N if groups is None else validate_labels(groups, len(N))
    used_labels = []  # for the runs of each inner parabola
    for rows in split_budgets(C):
        rows = rows[np.argsort(N[rows], kind="stable")]
        name = f"At {np.exp(np.log(C[rows]).mean()):.2e} FLOPs"
        if len(np.unique(N[rows])) < MIN_SIZES:
            n_few += 1
            continue
        parabola = fit_window(N[rows], D[rows], L[rows], C[rows], weights[rows])
        if parabola is None:
            warnings.append(f"{name} the losses have no minimum in N: the budget is omitted.")
            continue
        if parabola.at_edge:
            warnings.append(
                f"{name} the minimum, N = {parabola.N_best:.3g}, is at the edge of the sizes or beyond: "
                "add sizes on that side."
            )
        else:
            used_labels.append(labels[rows][parabola.used])
        parabolas.append(parabola)
    if n_few:
        warnings.append(
            f"{n_few} of {len(split_budgets(C))} budgets have fewer than {MIN_SIZES} sizes and are omitted."
        )
    if not parabolas:
        raise ValueError(
            f"isoFLOP: got no budget of {len(split_budgets(C))} with {MIN_SIZES} sizes and a minimum, "
            "expected one. Train several sizes at equal FLOPs, or fit the parametric law."
        )
    inner = [parabola for parabola in parabolas if not parabola.at_edge]
    size = tokens = None
    if len(inner) > 1:
        # A parabola may pass through few runs by chance and have
        # an error near 0: the floor is half the median error.
        errors = np.array([parabola.log_se for parabola in inner])
        errors = np.maximum(errors, max(0.5 * np.median(errors), 1e-9))
        compute = [parabola.C for parabola in inner]
        size = fit_power(compute, [parabola.N_best for parabola in inner], errors)
        tokens = fit_power(compute, [parabola.D_best for parabola in inner], errors)
        dependent, factor = _compare_groups(inner, errors, np.concatenate(used_labels))
        if dependent or groups is not None:
            size, tokens = size.widen(factor), tokens.widen(factor)
        warnings += [GROUPED] if dependent and groups is None else []
    else:
        warnings.append("Fewer than two budgets have their minimum inside the range of sizes: no power law.")
    return IsoFlop(parabolas, size, tokens, warnings)


def _compare_groups(
    parabolas: Sequence[Parabola], errors: np.ndarray, labels: np.ndarray
) -> tuple[bool, float]:
    """Return whether residuals within groups correlate, and by what factor that widens the intervals of a.

    errors [budgets] belong to log N_best, and labels
    to the used runs of all parabolas in turn.
    """
    from scipy.linalg import block_diag  # slow import

    log_n = [np.log(parabola.N[parabola.used]) for parabola in parabolas]
    basis = block_diag(*(np.vander(x - x.mean(), 3) for x in log_n))
    L = np.concatenate([parabola.L[parabola.used] for parabola in parabolas])
    residual = L - basis @ np.linalg.lstsq(basis, L)[0]
    noise = estimate_noise(residual, basis, labels)
    log_c, weights = np.log([parabola.C for parabola in parabolas]), 1 / errors**2
    shares = weights * (log_c - np.average(log_c, weights=weights))  # times log N_best: sum is a / variance
    slopes = np.concatenate([share * p.slopes for share, p in zip(shares, parabolas, strict=True)])
    variance = noise.sigma**2 * slopes @ noise.correlate(labels) @ slopes
    ratio = float(variance / (shares**2 / weights).sum()) if noise.n_groups else 1.0
    return is_dependent(residual, basis, labels), max(ratio, 1.0) ** 0.5


def split_budgets(C: np.ndarray) -> list[np.ndarray]:
    """Return indices of the runs of each budget, in increasing C.

    Gaps in log C above SAME_COMPUTE separate them.
    """
    # C = [1e15, 3e15, 1.02e15]: order = [0, 2, 1], cut
    # at 2, budgets [0, 2] and [1]
    order = np.argsort(C, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(np.log(C[order])) > SAME_COMPUTE) + 1)


def fit_window(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, C: np.ndarray, weights: np.ndarray
) -> Parabola | None:
    """Fit a parabola to the runs, sorted by N, within WINDOW of its minimum; None where it has no minimum.

    The window starts at the run of least loss and moves
    with the minimum until its runs do not change.
    """
    x = np.log(N)
    centre, used, parabola = float(x[L.argmin()]), np.zeros(len(N), dtype=bool), None
    # a window may alternate between two sets of runs; MAX_ROUNDS ends that
    for _ in range(MAX_ROUNDS):
        distance = np.abs(x - centre)
        # the smallest distance that includes MIN_SIZES different sizes
        nearest = np.sort([distance[size == N].min() for size in np.unique(N)])
        inside = distance <= max(WINDOW, nearest[MIN_SIZES - 1])
        if (inside == used).all():
            break
        used = inside
        parabola = fit_parabola(N, D, L, C, weights, used)
        if parabola is None:
            return None
        centre = float(np.clip(np.log(parabola.N_best), x.min(), x.max()))
    return parabola


def fit_parabola(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, C: np.ndarray, weights: np.ndarray, used: np.ndarray
) -> Parabola | None:
    """Fit a weighted least-squares parabola to the runs `used` [n] bool; None where it has no minimum."""
    runs = {"N": N, "D": D, "L": L, "used": used}
    N, D, L, C, weights = (v[used] for v in (N, D, L, C, weights))
    x, root = np.log(N), np.sqrt(weights)
    middle = np.average(x, weights=weights)
    # x is centred for conditioning; rows times the root of
    # their weight: plain least squares are the weighted
    basis = np.vander(x - middle, 3, increasing=True)
    solver = np.linalg.pinv(basis * root[:, None]) * root  # [3, n], coefficients by losses
    level, slope, bend = coefficients = solver @ L
    if bend <= 0:
        return None
    vertex = -slope / (2 * bend)
    # residual variance of a run of weight 1: the
    # weights need to be right only up to a factor
    spread = (weights * (L - basis @ coefficients) ** 2).sum() / max(len(L) - 3, 1)
    # delta method for the vertex -slope / (2 bend)
    slopes = np.array([0.0, -1 / (2 * bend), slope / (2 * bend**2)]) @ solver
    best, compute = float(np.exp(middle + vertex)), float(np.exp(np.log(C).mean()))
    ratio = float(np.exp(np.log(C / (N * D)).mean()))  # FLOPs per parameter and token of these runs
    uncentred = np.array([level - slope * middle + bend * middle**2, slope - 2 * bend * middle, bend])
    return Parabola(
        **runs,
        C=compute,
        coefficients=uncentred,
        N_best=best,
        D_best=compute / (ratio * best),
        L_best=float(level - slope**2 / (4 * bend)),
        log_se=float(np.sqrt(spread * (slopes**2 / weights).sum())),
        at_edge=not x.min() < middle + vertex < x.max(),
        slopes=slopes,
    )
