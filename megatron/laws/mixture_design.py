"""Mixtures to train: n points of the simplex of weights within bounds, spread evenly or optimal for a law.

Candidates are uniform on the simplex above the lower bounds, and those above the upper bounds are
dropped. `spread` takes the candidate that is furthest from those chosen, again and again
(Kennard and Stone, Technometrics 11, 1969). `optimal` takes the one that adds most to the determinant of the
information on the constants t_j of the mixing law, which to first order are slopes of log L by the weights.
"""

import numpy as np

N_CANDIDATES = 4096
DECIMALS = 3  # of a weight
RIDGE = 1e-6  # of the information, before there are k mixtures


def design_mixtures(n: int, low: np.ndarray, high: np.ndarray, kind: str = "spread") -> np.ndarray:
    """Return weights [n, k] between `low` and `high` [k] that sum to 1, with DECIMALS decimals.

    Raises ValueError for bounds that no mixture meets, or too few mixtures for k domains.
    """
    if not (low <= high).all() or not low.sum() <= 1 <= high.sum():
        raise ValueError("design: got bounds that no mixture meets, expected low <= high and sums around 1.")
    if n < len(low):
        raise ValueError(f"design: got {n} mixtures of {len(low)} domains, expected as many or more.")
    candidates = _draw_candidates(low, high)
    if len(candidates) < n:
        raise ValueError(
            f"design: got {len(candidates)} mixtures within the bounds, expected {n}. Widen them."
        )
    return np.asarray(candidates[_choose(candidates, n, kind)])


def _draw_candidates(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return different mixtures [m, k] within the bounds, rounded to DECIMALS."""
    scale = 10**DECIMALS
    # shares are of what is left above `low`: all candidates are within the lower bounds
    shares = np.random.default_rng(0).dirichlet(np.ones(len(low)), N_CANDIDATES)
    units = np.rint((low + (1 - low.sum()) * shares) * scale).astype(int)
    # the largest weight takes the rounding of the others, so that the sum is exactly 1
    units[np.arange(len(units)), units.argmax(axis=1)] += scale - units.sum(axis=1)
    # equal mixtures would be one run
    units = np.unique(units, axis=0)
    is_inside = (units >= np.ceil(low * scale - 1e-9)) & (units <= np.floor(high * scale + 1e-9))
    return np.asarray(units[is_inside.all(axis=1)] / scale)


def _choose(candidates: np.ndarray, n: int, kind: str) -> list[int]:
    """Return n rows, each the best beside those before it."""
    chosen: list[int] = []
    for _ in range(n):
        others = candidates[chosen]
        if kind == "optimal":
            # det(M + w w') = det(M) (1 + w' M^-1 w): the best row has the largest variance
            inverse = np.linalg.inv(others.T @ others + RIDGE * np.eye(candidates.shape[1]))
            gain = np.einsum("mi,ij,mj->m", candidates, inverse, candidates)
            gain[chosen] = -np.inf  # each mixture once
        elif chosen:
            gain = np.square(candidates[:, None] - others).sum(axis=-1).min(axis=1)
        else:
            gain = -np.square(candidates - candidates.mean(axis=0)).sum(axis=1)
        chosen.append(int(gain.argmax()))
    return chosen
