"""Weights of domains as written in a mixture file: nested values of properties, and over time.

    weights: inferred                proportional to the size of the domains
    weights: arbitrary               without `by`: all documents, in one order
    weights: {Github: 0.7, C4: 0.3}  values of the first property of `by`
    weights: {Github: {weight: 0.7, weights: {Python: 3, Go: 1}}, C4: 0.3}
                                     values of the next property, nested

Weights of one level need not sum to 1. A value that several domains have and that
has no nested weights is divided among them by their size. A domain that no value
matches has weight 0.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.config.section import check_known_keys

INFERRED = "inferred"
ARBITRARY = "arbitrary"


def compute_weights(
    written: Any, by: Sequence[str], domains: Sequence[tuple[Any, ...]], natural: np.ndarray
) -> np.ndarray:
    """Return weights float64 [K], of sum 1, of domains with the values `domains` of the properties `by`.

    natural [K]   size of the domains, in tokens or documents

    Raises ValueError, with the key, for a value
    that no domain has, and for an invalid weight.
    """
    if written == ARBITRARY and by:
        raise ValueError(
            f"weights: got arbitrary with by: {', '.join(by)}, expected no domains. Remove by, or set "
            f"weights: {INFERRED}."
        )
    weights = np.zeros(len(domains))
    written = INFERRED if written == ARBITRARY else written  # with one domain
    _distribute_share(written, 1.0, range(len(domains)), by, domains, natural, weights, "weights")
    return weights


def _distribute_share(
    written: Any, share: float, members: Sequence[int], by: Sequence[str],
    domains: Sequence[tuple[Any, ...]], natural: np.ndarray, weights: np.ndarray, where: str,
) -> None:  # fmt: skip
    """Write the weights of the domains `members`, which have `share` together.

    by   the properties of this level and the nested ones, which are the last values
         of a domain
    """
    if written in (None, INFERRED):
        total = natural[members].sum()
        if not total > 0:
            raise ValueError(
                f"{where}: no text in {len(members)} domains to infer weights from. Set their weight to 0."
            )
        weights[members] = share * natural[members] / total
        return
    if not isinstance(written, Mapping) or not by:
        raise ValueError(f"{where}: got {written!r}, expected '{INFERRED}', or values with weights, nested.")
    # {Github: {weight: 0.7, weights: {Python: 3, Go: 1}}, C4: 0.3}:
    # Github/Python gets 0.7 * 3/4 = 0.525
    parts = [(value, *_read_entry(entry, f"{where}.{value}")) for value, entry in written.items()]
    total = sum(weight for _, weight, _ in parts)
    if not 0 < total < float("inf"):
        raise ValueError(f"{where}: weights sum to {total}, expected a finite sum above 0.")
    for value, weight, nested in parts:
        matches = [k for k in members if domains[k][-len(by)] == value]
        if not matches:
            hint = suggest_nearest(str(value), sorted({str(domains[k][-len(by)]) for k in members}))
            raise ValueError(f"{where}.{value}: no document has {by[0]}={value}; {hint}")
        share_of_value = share * weight / total
        place = f"{where}.{value}"
        _distribute_share(nested, share_of_value, matches, by[1:], domains, natural, weights, place)


def _read_entry(entry: Any, where: str) -> tuple[float, Any]:
    """Return the weight and the nested weights of a value."""
    entry = entry if isinstance(entry, Mapping) else {"weight": entry}
    check_known_keys(entry, ("weight", "weights"), where)
    weight = entry.get("weight")
    # bool is a subclass of int; NaN fails the comparison
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
        raise ValueError(f"{where}: got the weight {weight!r}, expected a number of at least 0.")
    return float(weight), entry.get("weights")


class NotReadyError(ValueError):
    """The requested weights are not computed yet."""


class DomainWeights:
    """Weights of the domains over the chunks of a run: points of a schedule, then what a rule computed.

    points    (first chunk, weights float64 [K]); constant weights are one point
    computed  the same, of a rule, which hold from the last point on
    known_to  the first chunk whose weights are not computed yet; None: all are known
    """

    def __init__(
        self, points: Sequence[tuple[int, np.ndarray]], linear: bool = False, known_to: int | None = None
    ) -> None:
        """points: from 0 on, rising. linear: from one point to the next."""
        self.points = [(chunk, np.asarray(weights, dtype=np.float64)) for chunk, weights in points]
        # Weights of chunks before `known_to` are final. With every = 10 and
        # delay = 8, weights from chunk 0 apply from chunk 8 on with known_to
        # 18, and those from chunk 10 apply from chunk 18 on with 28.
        self.linear, self.known_to = linear, known_to
        self.computed = [(0, self.points[-1][1])]

    def append(self, chunk: int, weights: np.ndarray, known_to: int) -> None:
        """Add weights from a chunk on.

        No process may have requested the chunk before.
        """
        assert self.known_to is not None and chunk >= self.known_to, "known weights must not change"
        # weights first: a reader that gets the new known_to must also get them
        self.computed.append((chunk, weights))
        self.known_to = known_to

    def weights_at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """Return (weights of a chunk, the first later chunk that may have other weights).

        The second value is None if the weights do not change any more. Raises
        NotReadyError if the weights of the chunk are not computed yet.
        """
        # Read in this order, because `append` of another thread writes in the
        # opposite order. Weights that arrive in between begin at the old
        # known_to: `until` is the same.
        known_to, entries = (self.known_to, self.computed)
        if known_to is not None and chunk >= known_to:
            raise NotReadyError(
                f"weights of chunk {chunk} are not known yet, only those before {known_to}. "
                "Prefetch fewer batches (dataset.num_workers) or raise adaptive.delay_steps."
            )
        is_scheduled = chunk < self.points[-1][0]
        if is_scheduled:
            entries = self.points
        index = _find_entry(entries, chunk)
        begin, weights = entries[index]
        until = entries[index + 1][0] if index + 1 < len(entries) else known_to
        if is_scheduled and self.linear and until is not None:
            # in [0, 1): at `until` itself the weights of the next point apply
            part = (chunk - begin) / (until - begin)
            weights, until = (1 - part) * weights + part * entries[index + 1][1], chunk + 1
        return weights, until if known_to is None or until is None else min(until, known_to)

    def as_dict(self, chunk: int) -> dict[str, Any]:
        """Return the computed weights that are needed from a chunk on, ready for JSON."""
        first = _find_entry(self.computed, chunk)
        entries = [[begin, weights.tolist()] for begin, weights in self.computed[first:]]
        return {"entries": entries, "known_to": self.known_to}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state that `as_dict` returned."""
        self.computed = [(begin, np.array(weights)) for begin, weights in state["entries"]]
        self.known_to = state["known_to"]


def _find_entry(entries: Sequence[tuple[int, np.ndarray]], chunk: int) -> int:
    """Return the index of the weights in force at a chunk."""
    index = bisect_right(entries, chunk, key=lambda entry: entry[0]) - 1
    assert index >= 0, "a restored state begins at its checkpoint"
    return index
