"""Conversion of the documents of a query, which arrive in batches, to intervals of each domain.

12 bytes per document are in memory until all have arrived, and 24 bytes per interval afterwards. There are no
Python objects per row and no copy in another order.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron import _csrc
from megatron.mixture.lazy_imports import import_pyarrow

TOKENS_COLUMN = "tokens of the document"  # has spaces, so that it is not the name of a property
COUNTED_CODES = 1 << 20  # 8 MB of counters; batches have at most 2^17 documents
Values = tuple[Any, ...]


class UnknownFileError(ValueError):
    """Documents that are not registered."""


class FileNumbers:
    """Numbers of files, 0, 1, ..., by the keys of their documents, int64 [n]."""

    def __init__(self, keys: np.ndarray) -> None:
        self._order = np.argsort(keys).astype(np.int32)
        self._keys = keys[self._order]

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """Return the numbers, int32 [n]. Raises UnknownFileError for another key."""
        if not len(keys):
            return np.empty(0, dtype=np.int32)
        # documents of a file are adjacent: only the first one of each run is searched
        cuts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        places = np.minimum(np.searchsorted(self._keys, keys[cuts]), len(self._keys) - 1)
        if not len(self._keys) or (self._keys[places] != keys[cuts]).any():
            raise UnknownFileError(
                "got documents of a file that is not registered. Register the corpus again."
            )
        return np.repeat(self._order[places], np.diff(np.r_[cuts, len(keys)]))


@dataclass
class GatheredDocuments:
    """Documents of a query.

    domain, file, row   int32 [n]
    domains             values of each domain, in order of arrival
    """

    domain: np.ndarray
    file: np.ndarray
    row: np.ndarray
    domains: dict[Values, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    n_without_tokens: int = 0

    @classmethod
    def from_batches(
        cls, batches: Iterable[Any], n_most: int, by: tuple[str, ...], numbers: FileNumbers | None = None
    ) -> "GatheredDocuments":
        """Collect record batches with the columns file, row, the properties `by`, and perhaps TOKENS_COLUMN.

        n_most    expected number of documents; more of them are copied to larger arrays
        numbers   of the keys in the column file; None: the column contains numbers

        Raises UnknownFileError for a key without a number.
        """
        # pages that are not written take no memory
        domain, file, row = (np.empty(n_most, dtype=np.int32) for _ in range(3))
        gathered, n, last, ordered = cls(domain, file, row), 0, -1, True
        for batch in batches:
            if not len(batch):
                continue
            end = n + len(batch)
            if end > len(gathered.row):
                # documents with several domains arrive several times
                for name in ("domain", "file", "row"):
                    grown = np.empty(2 * end, dtype=np.int32)
                    grown[:n] = getattr(gathered, name)[:n]
                    setattr(gathered, name, grown)
            file, row = batch.column("file").to_numpy(), batch.column("row").to_numpy()
            file = file if numbers is None else numbers.lookup(file)
            # one integer in place of (file, row): a strictly increasing key means sorted documents
            key = file.astype(np.int64) << 32 | row  # a file holds fewer than 2^31 documents
            ordered = ordered and bool(key[0] > last) and bool((key[1:] > key[:-1]).all())
            last = int(key[-1])
            gathered.file[n:end], gathered.row[n:end] = file, row
            gathered.domain[n:end] = gathered._encode_domains(batch, by)
            n = end
        gathered.domain, gathered.file, gathered.row = (
            gathered.domain[:n],
            gathered.file[:n],
            gathered.row[:n],
        )
        if not ordered:
            # DuckDB may return batches of several threads in another order
            order = np.lexsort((gathered.row, gathered.file))
            gathered.domain, gathered.file, gathered.row = (
                a[order] for a in (gathered.domain, gathered.file, gathered.row)
            )
        return gathered

    def _encode_domains(self, batch: Any, by: tuple[str, ...]) -> np.ndarray:
        """Return the domain of each document of a batch. A new domain gets the next number."""
        codes, values = _encode_batch_domains(batch, by)
        numbers = np.array(
            # len is evaluated before the insertion: the k-th new domain gets number k
            [self.domains.setdefault(domain_values, len(self.domains)) for domain_values in values]
        )
        self.tokens += [0] * (len(self.domains) - len(self.tokens))
        if TOKENS_COLUMN in batch.schema.names:
            column = batch.column(TOKENS_COLUMN)
            self.n_without_tokens += column.null_count
            counts = column.fill_null(0).to_numpy(zero_copy_only=False)
            # bincount sums in float64, which is exact for the tokens of a batch (below 2^53)
            for k, n in zip(numbers.tolist(), np.bincount(codes, counts, len(values)).tolist(), strict=True):
                self.tokens[k] += int(n)
        return numbers[codes]

    def compute_intervals(self) -> tuple[tuple[Values, ...], list[int], list[int], Any]:
        """Return (values of each domain, tokens of each domain, files in use, table of intervals).

        The table is that of `QueryResult`.
        """
        values = sorted(
            self.domains,
            # None is not comparable with a value: the first entry of each tuple sorts missing values last
            key=lambda domain_values: [(v is None, 0 if v is None else v) for v in domain_values],
        )
        place = np.empty(len(values), dtype=np.int32)
        # place [K]: number by arrival -> number in sorted order
        place[[self.domains[domain_values] for domain_values in values]] = np.arange(
            len(values), dtype=np.int32
        )
        # in place: with mode="raise" numpy would make a buffer of the size of the output
        np.take(place, self.domain, out=self.domain, mode="clip")
        used = np.flatnonzero(np.bincount(self.file))
        # catalog ids 3 and 7 in use: used = [3, 7], of_file[3] = 0, of_file[7] = 1
        of_file = np.zeros(int(used[-1]) + 1, dtype=np.int32)
        of_file[used] = np.arange(len(used), dtype=np.int32)
        np.take(of_file, self.file, out=self.file, mode="clip")
        columns = _csrc.domain_intervals(self.domain, self.file, self.row, len(values))
        table = import_pyarrow().table(dict(zip(("domain", "file", "begin", "end"), columns, strict=True)))
        return (
            tuple(values),
            [self.tokens[self.domains[domain_values]] for domain_values in values],
            used.tolist(),
            table,
        )


def _encode_batch_domains(batch: Any, by: tuple[str, ...]) -> tuple[np.ndarray, list[Values]]:
    """Return (domain of each document int64, values of each domain) within a batch."""
    codes = np.zeros(len(batch), dtype=np.int64)
    values: list[Values] = [()]
    for name in by:
        column = batch.column(name).dictionary_encode(null_encoding="encode")
        distinct = column.dictionary.to_pylist()
        # Mixed radix: one integer for each combination of values.
        # Second property with 3 values: code = 3 * first + second, undone by // 3 and % 3.
        codes = codes * len(distinct) + column.indices.to_numpy()
        # renumbered, so that the product of the columns stays small
        n_codes = len(values) * len(distinct)
        # counting is faster than sorting, but needs an array of every possible code: two unique properties
        # of 131,072 documents have 2^34
        few = n_codes <= COUNTED_CODES
        present = np.flatnonzero(np.bincount(codes)) if few else np.unique(codes)
        values = [
            (*values[code // len(distinct)], distinct[code % len(distinct)]) for code in present.tolist()
        ]
        # `present` is sorted and contains every code: the result is its index, 0 to len(present) - 1
        codes = np.searchsorted(present, codes)
    return codes, values
