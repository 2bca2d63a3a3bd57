"""Chinchilla's first approach: the size of lowest loss at each compute, from training curves.

Hoffmann et al. (arXiv 2203.15556, section 3.1). Each curve is the loss of one size against FLOPs: finished
runs of several budgets, or intermediate points of one run, which are not annealed and are above the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.laws.power_law import PowerLaw, fit_power

N_COMPUTES = 1500  # as in the paper
EDGE_SHARE = (
    0.5  # share of the computes at which the smallest or the largest size is best; above it a warning
)


@dataclass(frozen=True)
class Curve:
    """Loss [n] (nats a token) of N parameters at increasing C [n] FLOPs.

    `annealed`: each point is the end of a run.
    """

    N: float
    C: np.ndarray
    L: np.ndarray
    annealed: bool = True


@dataclass(frozen=True)
class Envelope:
    """Best N and its loss L at each compute C [m], and power laws N = k C^a (size), D = k C^b (tokens)."""

    C: np.ndarray
    N: np.ndarray
    L: np.ndarray
    size: PowerLaw
    tokens: PowerLaw
    warnings: list[str]


def curves_from_runs(N: np.ndarray, C: np.ndarray, L: np.ndarray) -> list[Curve]:
    """Return one curve per size from finished runs [n] at several budgets."""
    curves = []
    for size in np.unique(N):
        rows = np.flatnonzero(size == N)
        rows = rows[np.argsort(C[rows], kind="stable")]
        if len(np.unique(C[rows])) == len(rows):
            curves.append(Curve(float(size), C[rows], L[rows]))
            continue
        computes = np.unique(C[rows])  # seeds of one budget are averaged
        curves.append(
            Curve(float(size), computes, np.array([L[rows][C[rows] == c].mean() for c in computes]))
        )
    return curves


def fit_envelope(curves: Sequence[Curve], flops_per_param_token: float = 6.0) -> Envelope:
    """Fit the envelope: the best size at N_COMPUTES computes at which two or more curves exist.

    Losses are interpolated linearly in logs. D = C / (k N), k = `flops_per_param_token`.

    Raises ValueError where fewer than two sizes are ever the best.
    """
    usable = [curve for curve in curves if len(curve.C) > 1]
    warnings = []
    if len(usable) < len(curves):
        warnings.append(f"{len(curves) - len(usable)} sizes have one budget only and are omitted.")
    if sum(not curve.annealed for curve in usable):
        warnings.append(
            "Intermediate points of a run are not annealed: they are above the law, more so for longer runs."
        )
    if len(usable) < 2:
        raise ValueError(f"envelope: got {len(usable)} sizes with two budgets or more, expected two or more")
    # from the second lowest start to the second highest end of a curve, at least two curves exist
    low = np.sort([curve.C[0] for curve in usable])[1]
    high = np.sort([curve.C[-1] for curve in usable])[-2]
    if low >= high:
        raise ValueError(
            "envelope: got no compute common to two sizes, expected one. Add budgets between them."
        )
    C = np.geomspace(low, high, N_COMPUTES)
    # [sizes, 1500]; Inf outside the computes of a curve: it is not extrapolated, and never the best there
    losses = np.array(
        [
            np.interp(np.log(C), np.log(curve.C), np.log(curve.L), left=np.inf, right=np.inf)
            for curve in usable
        ]
    )
    best = losses.argmin(axis=0)
    sizes = np.array([curve.N for curve in usable])
    N, L = sizes[best], np.exp(losses.min(axis=0))
    if len(np.unique(N)) < 2:
        raise ValueError(
            f"envelope: got N = {N[0]:.3g} as the best at every compute, expected two sizes. Add sizes on "
            "both sides of it."
        )
    for end, name in ((sizes.min(), "smallest"), (sizes.max(), "largest")):
        share = float((end == N).mean())
        if share > EDGE_SHARE:
            warnings.append(
                f"The {name} size is the best at {share:.0%} of the computes: the envelope is truncated "
                "there."
            )
    # One point per size, at the mean log C of the computes where it is best: the others there have the same N
    # and would only weight the fit by the width of the interval.
    winners = np.unique(N)
    whole = winners[(sizes.min() < winners) & (winners < sizes.max())]
    # the intervals of the smallest and largest sizes are truncated by the ladder: their middles are biased
    if len(whole) > 1:
        winners = whole
    middles = [(float(np.exp(np.log(C[size == N]).mean())), float(size)) for size in winners]
    compute, winner = (np.array(v) for v in zip(*middles, strict=True))
    tokens = compute / (flops_per_param_token * winner)
    return Envelope(C, N, L, fit_power(compute, winner), fit_power(compute, tokens), warnings)
