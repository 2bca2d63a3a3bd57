"""Weights of domains as written in a mixture file: for combinations of properties, nested, over time.

    weights: inferred                                   proportional to the size
                                                        of the domains
    weights: arbitrary                                  without `by`: all
                                                        documents, in one order
    weights: {Github: 0.7, C4: 0.3}                     values of the first
                                                        property of `by`
    weights: {Github: {weight: 0.7, weights: {Python: 3, Go: 1}}, C4: 0.3}     values
                                                                               of
                                                                               the
                                                                               next
                                                                               one,
                                                                               nested
    weights: [{where: {language: [Go, C], source: Github}, weight: 2}, ...]     any
                                                                                combination

Weights of one level need not sum to 1. An entry that matches several domains
and has no nested weights is divided among them by their size. A domain that no
entry matches has weight 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

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

    Raises ValueError, with the key, for an entry that matches no domain, for a
    domain that two entries match, and for an invalid weight.
    """
    weights = np.zeros(len(domains))
    if written == ARBITRARY:
        if by:
            raise ValueError(
                f"weights: got arbitrary with by: {', '.join(by)}, expected no domains. Remove by, or set "
                f"weights: {INFERRED}."
            )
        written = INFERRED  # of one domain
    _distribute_share(written, 1.0, list(range(len(domains))), by, domains, natural, weights, "weights")
    return weights


def _distribute_share(
    written: Any, share: float, members: list[int], by: Sequence[str], domains: Sequence[tuple[Any, ...]],
    natural: np.ndarray, weights: np.ndarray, where: str,
) -> None:  # fmt: skip
    """Write the weights of the domains `members`, which have `share` together."""
    if written is None or written == INFERRED:
        total = natural[members].sum()
        if not total > 0:
            raise ValueError(
                f"{where}: no text in {len(members)} domains to infer weights from. Set their weight to 0."
            )
        weights[members] = share * natural[members] / total
        return
    # {Github: {weight: 0.7, weights: {Python: 3, Go: 1}}, C4: 0.3}:
    # Github/Python gets 0.7 * 3/4 = 0.525
    parts = _parse_level(written, by, where)
    total = sum(weight for _, weight, _, _ in parts)
    if not 0 < total < float("inf"):
        raise ValueError(f"{where}: weights sum to {total}, expected a finite sum above 0.")
    assigned: dict[int, str] = {}
    for criteria, weight, inner, place in parts:
        matches = [
            k
            for k in members
            if all(domains[k][by.index(name)] in values for name, values in criteria.items())
        ]
        if not matches:
            available = [
                f"{name}={value}"
                for name in criteria
                for value in sorted({str(domains[k][by.index(name)]) for k in members})
            ]
            requested = ", ".join(f"{name}={value}" for name, values in criteria.items() for value in values)
            raise ValueError(f"{place}: no document has {requested}; {suggest_nearest(requested, available)}")
        for k in matches:
            # no order of precedence: an entry that overrides another could be a
            # typing error
            if k in assigned:
                raise ValueError(
                    f"{place}: matches {domains[k]}, which {assigned[k]} matches already. Remove one of them."
                )
            assigned[k] = place
        # a property with a single requested value is fixed and cannot be used
        # by nested weights
        left = [name for name in by if name not in criteria or len(criteria[name]) > 1]
        # entries of a nested list may use all properties, other nested weights
        # only those not used yet
        _distribute_share(
            inner, share * weight / total, matches, by if isinstance(inner, list) else left or by,
            domains if isinstance(inner, list) or not left else _project_domains(domains, by, left),
            natural, weights, place,
        )  # fmt: skip


def _project_domains(
    domains: Sequence[tuple[Any, ...]], by: Sequence[str], left: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Return the values of the properties `left` of each domain."""
    # of all domains, not of the members: the indices in `members` stay valid
    return [tuple(values[by.index(name)] for name in left) for values in domains]


def _parse_level(
    written: Any, by: Sequence[str], where: str
) -> list[tuple[dict[str, list[Any]], float, Any, str]]:
    """Return (values of properties to match, weight, nested weights, key) of each entry of one level."""
    if isinstance(written, Mapping) and by:
        entries = [
            ({by[0]: [value]}, entry if isinstance(entry, Mapping) else {"weight": entry}, f"{where}.{value}")
            for value, entry in written.items()
        ]
    elif isinstance(written, list):
        entries = []
        for i, entry in enumerate(written):
            check_known_keys(entry, ("where", "weight", "weights"), f"{where}[{i}]")
            conditions = entry.get("where") or {}
            if not isinstance(conditions, Mapping):
                raise ValueError(f"{where}[{i}].where: got {conditions!r}, expected {{property: value}}")
            criteria = {
                name: value if isinstance(value, list) else [value] for name, value in conditions.items()
            }
            for name in criteria:
                if name not in by:
                    raise ValueError(
                        f"{where}[{i}].where: '{name}' is not in by; {suggest_nearest(str(name), list(by))}"
                    )
            entries.append((criteria, {key: entry[key] for key in entry if key != "where"}, f"{where}[{i}]"))
    else:
        raise ValueError(f"{where}: got {written!r}, expected '{INFERRED}', values with weights, or a list.")
    parts = []
    for criteria, entry, place in entries:
        check_known_keys(entry, ("weight", "weights"), place)
        weight = entry.get("weight")
        # bool is a subclass of int; NaN fails the comparison
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ValueError(f"{place}: got the weight {weight!r}, expected a number of at least 0.")
        parts.append((criteria, float(weight), entry.get("weights"), place))
    return parts


def find_weighted_values(written: Any, by: Sequence[str]) -> dict[str, set[Any]]:
    """Return the values of each property to which weights, as in a mixture file, give a share above 0.

    Invalid weights are ignored here: `compute_weights` refuses them.
    """
    values_by_name: dict[str, set[Any]] = {}
    entries: list[tuple[dict[str, Any], Any, Sequence[str]]] = []
    if isinstance(written, Mapping) and by:
        entries = [({by[0]: value}, entry, by[1:] or by) for value, entry in written.items()]
    elif isinstance(written, list):
        entries = [
            (entry["where"], entry, by)
            for entry in written
            if isinstance(entry, Mapping) and isinstance(entry.get("where"), Mapping)
        ]
    for criteria, entry, rest in entries:
        if entry == 0 or isinstance(entry, Mapping) and entry.get("weight") == 0:
            continue
        inner = find_weighted_values(entry.get("weights"), rest) if isinstance(entry, Mapping) else {}
        for name, values in [*criteria.items(), *inner.items()]:
            listed = values if isinstance(values, list | set) else [values]
            values_by_name.setdefault(name, set()).update(value for value in listed if isinstance(value, str))
    return values_by_name


class DomainWeights(Protocol):
    """Weights of the domains over the chunks of a run.

    known_to  the first chunk whose weights are not computed yet; None: all are known
    """

    known_to: int | None

    def weights_at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """Return (weights float64 [K] of a chunk, the first later chunk that may have other weights).

        The second value is None if the weights do not change any more.
        """
        ...


class ConstantWeights:
    """The same weights for all chunks."""

    known_to: int | None = None

    def __init__(self, weights: Sequence[float] | np.ndarray) -> None:
        self.weights = np.asarray(weights, dtype=np.float64)

    def weights_at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """Return the weights, as in `DomainWeights`."""
        return self.weights, None


class WeightSchedule:
    """Weights that change at given chunks, at once or linearly from one to the next."""

    known_to: int | None = None

    def __init__(self, chunks: Sequence[int], weights: Sequence[np.ndarray], linear: bool = False) -> None:
        """Raises ValueError unless the chunks begin at 0 and increase."""
        if not chunks or chunks[0] != 0 or any(b <= a for a, b in zip(chunks, chunks[1:], strict=False)):
            raise ValueError(f"schedule.points: got at {list(chunks)}, expected 0 first and rising.")
        self.chunks, self.weights, self.linear = (
            list(chunks),
            [np.asarray(w, np.float64) for w in weights],
            linear,
        )

    def weights_at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """Return the weights of a chunk, as in `DomainWeights`."""
        index = int(np.searchsorted(self.chunks, chunk, side="right")) - 1
        if index + 1 == len(self.chunks):
            return self.weights[index], None
        begin, end = self.chunks[index], self.chunks[index + 1]
        if not self.linear:
            return self.weights[index], end
        # in [0, 1): the weights at `end` itself are those of the next point
        part = (chunk - begin) / (end - begin)
        return (1 - part) * self.weights[index] + part * self.weights[index + 1], chunk + 1
