"""Chinchilla's first approach: which size has the lowest loss at each compute, along whole training curves.

Hoffmann et al. (arXiv 2203.15556, section 3.1). Each curve is loss against FLOPs of one size: the finished
runs of several budgets, or one run on its way, whose points are not annealed and lie above the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.scaling.power_law import PowerLaw, fit_power

N_COMPUTES = 1500  # as the paper has it
EDGE_SHARE = 0.5  # of the computes, won by the smallest or the largest size


@dataclass(frozen=True)
class Curve:
    """Loss [n] (nats a token) of N parameters at C [n] FLOPs, rising; `annealed` if each is a run's end."""

    N: float
    C: np.ndarray
    L: np.ndarray
    annealed: bool = True


@dataclass(frozen=True)
class Envelope:
    """For each compute C [m]: the size N that is best there, and its loss; then N = k C^a, D = k C^b."""

    C: np.ndarray
    N: np.ndarray
    L: np.ndarray
    size: PowerLaw
    tokens: PowerLaw
    warnings: list[str]


def curves_of_runs(N: np.ndarray, C: np.ndarray, L: np.ndarray) -> list[Curve]:
    """One curve a size, from finished runs [n] at several budgets."""
    found = []
    for size in np.unique(N):
        rows = np.flatnonzero(size == N)
        rows = rows[np.argsort(C[rows], kind="stable")]
        if len(np.unique(C[rows])) == len(rows):
            found.append(Curve(float(size), C[rows], L[rows]))
            continue
        each = np.unique(C[rows])  # seeds of one budget count as their mean
        found.append(Curve(float(size), each, np.array([L[rows][C[rows] == c].mean() for c in each])))
    return found


def fit_envelope(curves: Sequence[Curve], flops_per_param_token: float = 6.0) -> Envelope:
    """The best size at N_COMPUTES computes, interpolated in logs, where two sizes or more can be compared.

    D = C / (k N), k = `flops_per_param_token`.

    Raises ValueError where fewer than two sizes are ever the best.
    """
    usable = [curve for curve in curves if len(curve.C) > 1]
    told = []
    if len(usable) < len(curves):
        told.append(f"{len(curves) - len(usable)} sizes have one budget only and no curve: left out.")
    if sum(not curve.annealed for curve in usable):
        told.append(
            "Points on a run's way are not annealed: they lie above the law, the longer the run the more."
        )
    if len(usable) < 2:
        raise ValueError(f"envelope: found {len(usable)} sizes with two budgets or more, wanted two or more")
    # between the cheapest two and the dearest two there is a comparison
    low = np.sort([curve.C[0] for curve in usable])[1]
    high = np.sort([curve.C[-1] for curve in usable])[-2]
    if low >= high:
        raise ValueError("envelope: no compute at which two sizes can be compared; add budgets between them")
    C = np.geomspace(low, high, N_COMPUTES)
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
            f"envelope: N = {N[0]:.3g} is the best at every compute; add sizes on both sides of it"
        )
    for end, name in ((sizes.min(), "smallest"), (sizes.max(), "largest")):
        share = float((end == N).mean())
        if share > EDGE_SHARE:
            told.append(f"The {name} size wins at {share:.0%} of the computes: the envelope is cut there.")
    # a point for each size that wins, at the middle of where it does: its neighbours share its N
    winners = np.unique(N)
    whole = [size for size in winners if sizes.min() < size < sizes.max()]
    if len(whole) > 1:  # where an end wins is cut by the ladder, and its middle says nothing
        winners = whole
    middles = [(float(np.exp(np.log(C[size == N]).mean())), float(size)) for size in winners]
    compute, winner = (np.array(v) for v in zip(*middles, strict=True))
    tokens = compute / (flops_per_param_token * winner)
    return Envelope(C, N, L, fit_power(compute, winner), fit_power(compute, tokens), told)
