"""Mixtures to train: n points of the simplex of weights within bounds, spread evenly or optimal for a law.

Candidates are uniform on the simplex above the lower bounds, and those above the upper bounds are
dropped. `spread` takes the candidate that is furthest from those chosen, again and again
(Kennard and Stone, Technometrics 11, 1969). `optimal` exchanges candidates until the determinant of the
information on the exponents of the exponential law log(L - c) = log k + sum_j t_j w_j no longer grows
(Fedorov's exchange), which is the same for every c and k and for small t.
"""

import math

import numpy as np

N_CANDIDATES = 4096
DECIMALS = 3  # of a weight
MAX_ROUNDS = 20


def design_mixtures(n: int, low: np.ndarray, high: np.ndarray, kind: str = "spread") -> np.ndarray:
    """Return weights [n, k] between `low` and `high` [k] that sum to 1, with DECIMALS decimals.

    Raises ValueError for bounds that no mixture meets, or too few mixtures for k domains.
    """
    k = len(low)
    if not (low <= high).all() or not low.sum() <= 1 <= high.sum():
        raise ValueError("design: got bounds that no mixture meets, expected low <= high and sums around 1.")
    if n < k:
        raise ValueError(f"design: got {n} mixtures of {k} domains, expected {k} or more.")
    candidates = _draw_candidates(low, high)
    if len(candidates) < n:
        raise ValueError(
            f"design: got {len(candidates)} mixtures within the bounds, expected {n}. Widen them."
        )
    chosen = _spread(candidates, n)
    return candidates[chosen if kind == "spread" else _exchange(candidates, chosen)]


def _draw_candidates(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return different mixtures [m, k] within the bounds, rounded to DECIMALS."""
    scale = 10**DECIMALS
    # shares are of what is left above `low`: all candidates are within the lower bounds
    shares = np.random.default_rng(0).dirichlet(np.ones(len(low)), N_CANDIDATES)
    units = np.rint((low + (1 - low.sum()) * shares) * scale).astype(int)
    # the largest weight takes the rounding of the others, so that the sum is exactly 1
    units[np.arange(len(units)), units.argmax(axis=1)] += scale - units.sum(axis=1)
    units = np.unique(units, axis=0)
    is_inside = (units >= np.ceil(low * scale - 1e-9)) & (units <= np.floor(high * scale + 1e-9))
    return np.asarray(units[is_inside.all(axis=1)] / scale)


def _spread(candidates: np.ndarray, n: int) -> list[int]:
    """Return n rows far from each other; the first is the nearest to the mean."""
    first = int(np.square(candidates - candidates.mean(axis=0)).sum(axis=1).argmin())
    chosen, distance = [first], np.full(len(candidates), math.inf)
    while len(chosen) < n:
        distance = np.minimum(distance, np.square(candidates - candidates[chosen[-1]]).sum(axis=1))
        chosen.append(int(distance.argmax()))
    return chosen


def _exchange(candidates: np.ndarray, chosen: list[int]) -> list[int]:
    """Return the rows after exchanges that each raise the determinant of the information most."""
    chosen = list(chosen)
    for _ in range(MAX_ROUNDS):
        before = list(chosen)
        for i in range(len(chosen)):
            rest = candidates[chosen[:i] + chosen[i + 1 :]]
            # det(M + w w') = det(M) (1 + w' M^-1 w): the best row has the largest variance
            inverse = np.linalg.pinv(rest.T @ rest + 1e-9 * np.eye(candidates.shape[1]))
            variance = np.einsum("mi,ij,mj->m", candidates, inverse, candidates)
            variance[chosen[:i] + chosen[i + 1 :]] = -math.inf  # each mixture once
            chosen[i] = int(variance.argmax())
        if chosen == before:
            break
    return chosen
