"""Comparison of Chinchilla's three approaches to N* ~ C^a, and the known bias of the second.

Approach 2 fits parabolas to slices of a surface that is not symmetric unless alpha = beta. Xu et al. (arXiv
2603.22339) show the bias on noise-free surfaces. Here it is estimated for the given runs: parabolas are
fitted to the losses that a fitted law predicts at the same N and D, and compared with the optimum of that
law.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.laws.envelope import curves_from_runs, fit_envelope
from megatron.laws.fit import fit_law
from megatron.laws.frontier import optimal_frontier
from megatron.laws.isoflop import IsoFlop, fit_isoflop, fit_parabola
from megatron.laws.law import Law
from megatron.laws.power_law import fit_power

APPROACH_NAMES = {1: "envelope", 2: "isoFLOP parabolas", 3: "parametric law"}


@dataclass(frozen=True)
class IsoFlopBias:
    """Bias of parabolas on a noise-free law: `exponent` is the error of a, `factor` that of N* at C FLOPs."""

    exponent: float
    factor: float
    C: float
    words: str


@dataclass(frozen=True)
class Exponent:
    """a of N* ~ C^a by one approach, with its 95 % confidence interval (None if unavailable)."""

    approach: int
    a: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ApproachComparison:
    """Exponents by each approach that the runs allow, reasons for missing ones, bias and disagreements."""

    exponents: list[Exponent]
    missing: dict[int, str]
    bias: IsoFlopBias | None
    disagreements: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the content for JSON."""
        return asdict(self)


def estimate_bias(isoflop: IsoFlop, law: Law) -> IsoFlopBias | None:
    """Estimate the bias of the parabolas of `isoflop` if `law` were true.

    Returns None with fewer than two usable budgets.
    """
    computes, fitted, true = [], [], []
    for parabola in isoflop.parabolas:
        if parabola.at_edge:
            continue
        C = np.full(len(parabola.N), parabola.C)
        # The rows of the measured fit, not a new window: the only difference is that the losses have no
        # noise.
        refit = fit_parabola(
            parabola.N,
            parabola.D,
            law.loss(parabola.N, parabola.D),
            C,
            np.ones(len(parabola.N)),
            parabola.used,
        )
        # FLOPs may be counted by another convention than 6 N D: the optimum is taken at the ratio of these
        # runs
        per_token = float(np.exp(np.log(C / (parabola.N * parabola.D)).mean()))
        best = float(optimal_frontier(law, parabola.C, per_token).N[0])
        if refit is not None and 0 < best < np.inf:
            computes.append(parabola.C)
            fitted.append(refit.N_best)
            true.append(best)
    if len(set(computes)) < 2:
        return None
    slopes = [fit_power(computes, sizes).exponent for sizes in (fitted, true)]
    last = int(np.argmax(computes))
    exponent, factor = slopes[0] - slopes[1], fitted[last] / true[last]
    words = (
        "Parabolas are biased where alpha and beta differ (arXiv 2603.22339): on a noise-free surface of "
        f"the fitted law these sizes give an error of {exponent:+.3f} in the exponent and an N* {factor:.2f} "
        f"times the true one at {computes[last]:.2e} FLOPs."
    )
    return IsoFlopBias(exponent, factor, computes[last], words)


def compare_approaches(
    N: ArrayLike,
    D: ArrayLike,
    L: ArrayLike,
    C: ArrayLike,
    n_bootstrap: int = 200,
    seed: int = 0,
    groups: ArrayLike | None = None,
) -> ApproachComparison:
    """Apply all approaches that n runs allow: N parameters, D tokens, L nats per token, C FLOPs, each [n].

    `groups` [n] as in fit_law, for approaches 2 and 3.
    Two approaches disagree where neither exponent is in the interval of the other. Approach 3 is the form
    chinchilla, whose exponent is beta / (alpha + beta).
    """
    N, D, L, C = (np.asarray(v, dtype=float) for v in (N, D, L, C))
    exponents: list[Exponent] = []
    missing: dict[int, str] = {}
    isoflop = law = None
    try:
        envelope = fit_envelope(curves_from_runs(N, C, L), float(np.median(C / (N * D))))
        exponents.append(Exponent(1, envelope.size.exponent, _finite_or_none(envelope.size.interval)))
    except ValueError as error:
        missing[1] = str(error)
    try:
        isoflop = fit_isoflop(N, D, L, C, groups=groups)
        size = isoflop.size
        missing |= {} if size else {2: "fewer than two budgets with a minimum inside the sizes"}
        exponents += [Exponent(2, size.exponent, _finite_or_none(size.interval))] if size else []
    except ValueError as error:
        missing[2] = str(error)
    try:
        law = fit_law(N, D, L, n_bootstrap=n_bootstrap, seed=seed, groups=groups)
        ends = law.interval["derived"]["a_exponent"] if law.interval else None
        exponents.append(Exponent(3, law.derived["a_exponent"], None if ends is None else tuple(ends)))
    except ValueError as error:
        missing[3] = str(error)
    bias = estimate_bias(isoflop, law) if isoflop is not None and law is not None else None
    return ApproachComparison(exponents, missing, bias, find_disagreements(exponents))


def find_disagreements(exponents: Sequence[Exponent]) -> list[str]:
    """Return a sentence for each two approaches whose exponents are outside each other's interval."""
    sentences = [_describe_disagreement(first, second) for first, second in combinations(exponents, 2)]
    return [sentence for sentence in sentences if sentence]


def _finite_or_none(interval: tuple[float, float]) -> tuple[float, float] | None:
    return None if np.isnan(interval).any() else interval


def _describe_disagreement(first: Exponent, second: Exponent) -> str:
    if first.interval is None or second.interval is None:
        return ""
    if _is_inside(first.a, second.interval) or _is_inside(second.a, first.interval):
        return ""
    parts = [
        f"approach {exponent.approach} ({APPROACH_NAMES[exponent.approach]}) gives N* ~ C^{exponent.a:.3f} "
        f"[{low:.3f}, {high:.3f}]"
        for exponent, (low, high) in ((first, first.interval), (second, second.interval))
    ]
    return f"Approaches disagree: {parts[0]}, {parts[1]} (95 % confidence)."


def _is_inside(exponent: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= exponent <= interval[1]
