"""Documents as they come from the catalog, a batch at a time, to intervals of each domain.

Twelve bytes a document are held until all have come, and then 24 an interval. No more is: neither a row of
Python nor a copy in another order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.libraries import pyarrow

OWN_TOKENS = "tokens of the document"  # no property's name
Values = tuple[Any, ...]


@dataclass
class Gathered:
    """Documents of a query. domain, file, row: int32 [n]; `domains`: values of each, as they came."""

    domain: np.ndarray
    file: np.ndarray
    row: np.ndarray
    domains: dict[Values, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    n_without_tokens: int = 0

    @classmethod
    def of(cls, batches: Iterable[Any], n_most: int, by: tuple[str, ...]) -> "Gathered":
        """From record batches: file, row, the properties `by`, and perhaps OWN_TOKENS; n_most documents."""
        # what is not filled takes no memory
        found, n, ordered = cls(*(np.empty(n_most, dtype=np.int32) for _ in range(3))), 0, True
        last = -1
        for batch in batches:
            if not len(batch):
                continue
            end = n + len(batch)
            file, row = batch.column("file").to_numpy(), batch.column("row").to_numpy()
            key = file.astype(np.int64) << 32 | row  # a file holds fewer than 2^31 documents
            ordered = ordered and bool(key[0] > last) and bool((key[1:] > key[:-1]).all())
            last = int(key[-1])
            found.file[n:end], found.row[n:end] = file, row
            found.domain[n:end] = found._codes(batch, by)
            n = end
        found.domain, found.file, found.row = found.domain[:n], found.file[:n], found.row[:n]
        if not ordered:
            order = np.lexsort((found.row, found.file))
            found.domain, found.file, found.row = (a[order] for a in (found.domain, found.file, found.row))
        return found

    def _codes(self, batch: Any, by: tuple[str, ...]) -> np.ndarray:
        """Domain of each document of a batch; new ones are numbered on."""
        codes, values = _domains_of(batch, by)
        numbers = np.array([self.domains.setdefault(one, len(self.domains)) for one in values])
        self.tokens += [0] * (len(self.domains) - len(self.tokens))
        if OWN_TOKENS in batch.schema.names:
            column = batch.column(OWN_TOKENS)
            self.n_without_tokens += column.null_count
            counts = column.fill_null(0).to_numpy(zero_copy_only=False)
            # floats hold the sum of a batch exactly
            for k, n in zip(numbers.tolist(), np.bincount(codes, counts, len(values)).tolist(), strict=True):
                self.tokens[k] += int(n)
        return numbers[codes]

    def intervals(self) -> tuple[tuple[Values, ...], list[int], list[int], Any]:
        """(domains by their values, tokens of each, files in use, table of intervals as Result has it)."""
        values = sorted(self.domains, key=lambda one: [(v is None, 0 if v is None else v) for v in one])
        place = np.empty(len(values), dtype=np.int32)
        place[[self.domains[one] for one in values]] = np.arange(len(values), dtype=np.int32)
        np.take(place, self.domain, out=self.domain, mode="clip")
        used = np.flatnonzero(np.bincount(self.file))
        of_file = np.zeros(int(used[-1]) + 1, dtype=np.int32)
        of_file[used] = np.arange(len(used), dtype=np.int32)
        np.take(of_file, self.file, out=self.file, mode="clip")
        columns = _csrc.domain_intervals(self.domain, self.file, self.row, len(values))
        table = pyarrow().table(dict(zip(("domain", "file", "begin", "end"), columns, strict=True)))
        return tuple(values), [self.tokens[self.domains[one]] for one in values], used.tolist(), table


def _domains_of(batch: Any, by: tuple[str, ...]) -> tuple[np.ndarray, list[Values]]:
    """(domain of each document int64, values of each domain) within a batch."""
    codes, values = np.zeros(len(batch), dtype=np.int64), [()]
    for name in by:
        column = batch.column(name).dictionary_encode(null_encoding="encode")
        own = column.dictionary.to_pylist()
        codes = codes * len(own) + column.indices.to_numpy()
        present = np.flatnonzero(np.bincount(codes))  # so that the product of the columns stays small
        values = [(*values[code // len(own)], own[code % len(own)]) for code in present.tolist()]
        codes = np.searchsorted(present, codes)
    return codes, values
