"""Chinchilla's three approaches to N* ~ C^a side by side, and the known bias of the second.

Approach 2 fits parabolas to slices of a surface that is not symmetric unless alpha = beta. Xu et al. (arXiv
2603.22339) show the bias on noise-free surfaces. Here it is estimated for the runs at hand: the parabolas are
fitted again to what a fitted law says at the same N and D, and compared with that law's own optimum.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from megatron.scaling.envelope import curves_of_runs, fit_envelope
from megatron.scaling.fit import fit_law
from megatron.scaling.frontier import optimal
from megatron.scaling.isoflop import IsoFlop, fit_isoflop, fit_parabola
from megatron.scaling.law import Law
from megatron.scaling.power_law import fit_power

NAMES = {1: "envelope", 2: "isoFLOP parabolas", 3: "parametric law"}


@dataclass(frozen=True)
class IsoFlopBias:
    """What parabolas are off by on a noise-free law: `exponent` in a, and N* by `factor` at C FLOPs."""

    exponent: float
    factor: float
    C: float
    words: str


@dataclass(frozen=True)
class Exponent:
    """a of N* ~ C^a by one approach, with its 95 % confidence interval (None where there is none)."""

    approach: int
    a: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ApproachComparison:
    """Exponents by each approach that these runs allow, why others are missing, and what disagrees."""

    exponents: list[Exponent]
    missing: dict[int, str]
    bias: IsoFlopBias | None
    disagreements: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def estimate_bias(found: IsoFlop, law: Law) -> IsoFlopBias | None:
    """The bias of the parabolas `found` if `law` were true; None with fewer than two usable budgets."""
    computes, fitted, true = [], [], []
    for one in found.parabolas:
        if one.at_edge:
            continue
        C = np.full(len(one.N), one.C)
        again = fit_parabola(one.N, one.D, law.loss(one.N, one.D), C, np.ones(len(one.N)), one.used)
        per_token = float(np.exp(np.log(C / (one.N * one.D)).mean()))
        best = float(optimal(law, one.C, per_token).N[0])
        if again is not None and 0 < best < np.inf:
            computes.append(one.C)
            fitted.append(again.N_best)
            true.append(best)
    if len(set(computes)) < 2:
        return None
    slopes = [fit_power(computes, sizes).exponent for sizes in (fitted, true)]
    last = int(np.argmax(computes))
    exponent, factor = slopes[0] - slopes[1], fitted[last] / true[last]
    words = (
        "Parabolas are biased where alpha and beta differ (arXiv 2603.22339): on a noise-free surface of "
        f"the fitted law these sizes give an exponent {exponent:+.3f} off and an N* {factor:.2f} times the "
        f"true one at {computes[last]:.2e} FLOPs."
    )
    return IsoFlopBias(exponent, factor, computes[last], words)


def compare_approaches(
    N: ArrayLike, D: ArrayLike, L: ArrayLike, C: ArrayLike, n_bootstrap: int = 200, seed: int = 0
) -> ApproachComparison:
    """All approaches that n runs allow: N parameters, D tokens, L nats a token, C FLOPs, each [n].

    Two approaches disagree where neither exponent is in the other's interval. Approach 3 is the form
    chinchilla, whose exponent is beta / (alpha + beta).
    """
    N, D, L, C = (np.asarray(v, dtype=float) for v in (N, D, L, C))
    exponents, missing = [], {}
    isoflop = law = None
    try:
        size = fit_envelope(curves_of_runs(N, C, L), float(np.median(C / (N * D)))).size
        missing |= {} if size else {1: "no power law through the envelope"}
        exponents += [Exponent(1, size.exponent, _known(size.interval))] if size else []
    except ValueError as error:
        missing[1] = str(error)
    try:
        isoflop = fit_isoflop(N, D, L, C)
        size = isoflop.size
        missing |= {} if size else {2: "fewer than two budgets with a minimum inside"}
        exponents += [Exponent(2, size.exponent, _known(size.interval))] if size else []
    except ValueError as error:
        missing[2] = str(error)
    try:
        law = fit_law(N, D, L, n_bootstrap=n_bootstrap, seed=seed)
        ends = law.interval["derived"]["a_exponent"] if law.interval else None
        exponents.append(Exponent(3, law.derived["a_exponent"], None if ends is None else tuple(ends)))
    except ValueError as error:
        missing[3] = str(error)
    bias = estimate_bias(isoflop, law) if isoflop is not None and law is not None else None
    return ApproachComparison(exponents, missing, bias, find_disagreements(exponents))


def find_disagreements(exponents: Sequence[Exponent]) -> list[str]:
    """A sentence for each two approaches of which neither exponent is in the other's interval."""
    apart = [_disagreement(one, other) for one, other in combinations(exponents, 2)]
    return [words for words in apart if words]


def _known(interval: tuple[float, float]) -> tuple[float, float] | None:
    return None if np.isnan(interval).any() else interval


def _disagreement(one: Exponent, other: Exponent) -> str:
    if one.interval is None or other.interval is None:
        return ""
    if _is_inside(one.a, other.interval) or _is_inside(other.a, one.interval):
        return ""
    parts = [
        f"approach {each.approach} ({NAMES[each.approach]}) gives N* ~ C^{each.a:.3f} "
        f"[{each.interval[0]:.3f}, {each.interval[1]:.3f}]"
        for each in (one, other)
    ]
    return f"Approaches disagree: {parts[0]}, {parts[1]} (95 % confidence)."


def _is_inside(value: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= value <= interval[1]
