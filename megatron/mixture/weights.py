"""Weights as people write them: for any combination of properties, within one another, over time.

    weights: inferred                                   as the domains are
    weights: {Github: 0.7, C4: 0.3}                     values of the first property of `by`
    weights: {Github: {weight: 0.7, weights: {Python: 3, Go: 1}}, C4: 0.3}     values of the next, within one
    weights: [{where: {language: [Go, C], source: Github}, weight: 2}, ...]     any combination

Weights of one level need not sum to 1. A part that holds several domains and says no more is shared out among
them as they are. A domain that no part names has no weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megatron.config.presets import nearest
from megatron.config.read import refuse_unknown

INFERRED = "inferred"


def weights_of(
    written: Any, by: Sequence[str], domains: Sequence[tuple[Any, ...]], natural: np.ndarray
) -> np.ndarray:
    """Weights float64 [K] that sum to 1, of domains with the values `domains` of the properties `by`.

    natural [K]   what the domains hold, tokens or documents
    ValueError, with the place, for what names nothing, one domain twice, or is no weight.
    """
    weights = np.zeros(len(domains))
    _share_out(written, 1.0, list(range(len(domains))), by, domains, natural, weights, "weights")
    return weights


def _share_out(
    written: Any, share: float, here: list[int], by: Sequence[str], domains: Sequence[tuple[Any, ...]],
    natural: np.ndarray, weights: np.ndarray, where: str,
) -> None:  # fmt: skip
    """Write the weights of the domains `here`, which have `share` together."""
    if written is None or written == INFERRED:
        total = natural[here].sum()
        if not total > 0:
            raise ValueError(
                f"{where}: no text in {len(here)} domains to infer weights from; give them no weight"
            )
        weights[here] = share * natural[here] / total
        return
    parts = _parts(written, by, where)
    total = sum(weight for _, weight, _, _ in parts)
    if not 0 < total < float("inf"):
        raise ValueError(f"{where}: sum to {total}, wanted more than 0 and no infinity")
    taken: dict[int, str] = {}
    for wanted, weight, inner, place in parts:
        found = [
            k for k in here if all(domains[k][by.index(name)] in values for name, values in wanted.items())
        ]
        if not found:
            known = [
                f"{name}={value}"
                for name in wanted
                for value in sorted({str(domains[k][by.index(name)]) for k in here})
            ]
            asked = ", ".join(f"{name}={value}" for name, values in wanted.items() for value in values)
            raise ValueError(f"{place}: no document has {asked}; {nearest(asked, known)}")
        for k in found:
            if k in taken:
                raise ValueError(f"{place}: holds {domains[k]}, which {taken[k]} holds already")
            taken[k] = place
        left = [name for name in by if name not in wanted or len(wanted[name]) > 1]
        _share_out(inner, share * weight / total, found, by if isinstance(inner, list) else left or by,
                   domains if isinstance(inner, list) or not left else _narrowed(domains, by, left),
                   natural, weights, place)  # fmt: skip


def _narrowed(
    domains: Sequence[tuple[Any, ...]], by: Sequence[str], left: Sequence[str]
) -> list[tuple[Any, ...]]:
    return [tuple(values[by.index(name)] for name in left) for values in domains]


def _parts(written: Any, by: Sequence[str], where: str) -> list[tuple[dict[str, list[Any]], float, Any, str]]:
    """(values wanted of properties, weight, what is within, where that is written) of one level."""
    if isinstance(written, Mapping) and by:
        listed = [
            ({by[0]: [value]}, told if isinstance(told, Mapping) else {"weight": told}, f"{where}.{value}")
            for value, told in written.items()
        ]
    elif isinstance(written, list):
        listed = []
        for i, told in enumerate(written):
            refuse_unknown(told, ("where", "weight", "weights"), f"{where}[{i}]")
            conditions = told.get("where") or {}
            if not isinstance(conditions, Mapping):
                raise ValueError(f"{where}[{i}].where: got {conditions!r}, expected {{property: value}}")
            wanted = {
                name: value if isinstance(value, list) else [value] for name, value in conditions.items()
            }
            for name in wanted:
                if name not in by:
                    raise ValueError(
                        f"{where}[{i}].where: '{name}' is not in by; {nearest(str(name), list(by))}"
                    )
            listed.append((wanted, {key: told[key] for key in told if key != "where"}, f"{where}[{i}]"))
    else:
        raise ValueError(f"{where}: found {written!r}, wanted '{INFERRED}', values with weights, or a list")
    parts = []
    for wanted, told, place in listed:
        refuse_unknown(told, ("weight", "weights"), place)
        weight = told.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ValueError(f"{place}: weight {weight!r}, wanted a number from 0")
        parts.append((wanted, float(weight), told.get("weights"), place))
    return parts


class Schedule:
    """Weights that change at given chunks, at once or evenly from one to the next."""

    known_to = None

    def __init__(self, chunks: Sequence[int], weights: Sequence[np.ndarray], linear: bool = False) -> None:
        """ValueError where the chunks do not begin at 0 and rise."""
        if not chunks or chunks[0] != 0 or any(b <= a for a, b in zip(chunks, chunks[1:], strict=False)):
            raise ValueError(f"schedule: begins at {list(chunks)}, wanted 0 first and then later and later")
        self.chunks, self.weights, self.linear = (
            list(chunks),
            [np.asarray(w, np.float64) for w in weights],
            linear,
        )

    def at(self, chunk: int) -> tuple[np.ndarray, int | None]:
        """As in distributor.DomainWeights."""
        here = int(np.searchsorted(self.chunks, chunk, side="right")) - 1
        if here + 1 == len(self.chunks):
            return self.weights[here], None
        begin, end = self.chunks[here], self.chunks[here + 1]
        if not self.linear:
            return self.weights[here], end
        part = (chunk - begin) / (end - begin)
        return (1 - part) * self.weights[here] + part * self.weights[here + 1], chunk + 1

    def block(self, chunk: int, n: int) -> np.ndarray:
        """Weights [m, K] of up to `n` chunks from one between two points, each as `at`."""
        here = int(np.searchsorted(self.chunks, chunk, side="right")) - 1
        begin, end = self.chunks[here], self.chunks[here + 1]
        chunks = np.arange(chunk, min(chunk + n, end))
        if not self.linear:
            return np.tile(self.weights[here], (len(chunks), 1))
        part = (chunks - begin)[:, None] / (end - begin)
        return (1 - part) * self.weights[here] + part * self.weights[here + 1]
