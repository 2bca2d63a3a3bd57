"""Locations of a mixture's documents, shared by all processes of a machine."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import open_dataset
from megatron.mixture.catalog.catalog import Catalog
from megatron.mixture.catalog.query import QueryResult, SourceFile
from megatron.mixture.shared_arrays import Arrays, Layout, delete_stale_arrays, open_shared_arrays

DOCUMENTS_AT_ONCE = 1 << 21  # while locations are read: about 50 MB


@dataclass(frozen=True)
class DocumentLocations:
    """Documents of all domains in one numbering, as intervals of rows, and the place of each row in its file.

    interval_file, interval_end   file (index) and row after the last document of each interval
    interval_last                 number after the last document of each interval
    begins, sizes                 of the rows of each file: bytes, rows of parquet, or tokens of a .bin
    """

    interval_file: np.ndarray
    interval_end: np.ndarray
    interval_last: np.ndarray
    begins: tuple[np.ndarray, ...]
    sizes: tuple[np.ndarray, ...]

    def lookup(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (file int32 [n], row int64 [n]) of documents int64 [n]."""
        # intervals of 10 and 4 documents: last = [10, 14]; numbers 10 (hence `right`) to 13 are in interval 1
        interval = np.searchsorted(self.interval_last, numbers, side="right")
        # The row counts back from the end of the interval.
        # Example: interval 1 is rows [100, 104): number 11 is row 104 - (14 - 11) = 101.
        rows = self.interval_end[interval] - (self.interval_last[interval] - numbers)
        return self.interval_file[interval], rows


def open_locations(folder: Path, catalog: Catalog, result: QueryResult) -> DocumentLocations:
    """Return the locations of the documents of a query: 16 bytes per document and 20 per interval.

    folder   of the mixture, for the file that processes share

    Raises ValueError for a file that is no longer registered, and for parts that cannot be read.
    """
    counts = [file.n_documents for file in result.files]
    bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).tolist()
    n_intervals = len(result.intervals)
    layout: Layout = {
        "file": ("<i4", n_intervals), "end": ("<i8", n_intervals), "last": ("<i8", n_intervals),
        "begin": ("<i8", bounds[-1]), "size": ("<i8", bounds[-1]),
    }  # fmt: skip

    def fill(arrays: Arrays) -> None:
        arrays["file"][:], arrays["end"][:] = result.get_column("file"), result.get_column("end")
        # intervals are sorted by domain, as the numbers of documents are
        np.cumsum(arrays["end"] - result.get_column("begin"), out=arrays["last"])
        for places in _iter_batches(counts):
            spans = locate_files(catalog, [result.files[i] for i in places])
            for i, (begins, sizes) in zip(places, spans, strict=True):
                arrays["begin"][bounds[i] : bounds[i + 1]] = begins
                arrays["size"][bounds[i] : bounds[i + 1]] = sizes

    # the ids too: without checksums the identity would not change with an edited file
    ids = ",".join(str(file.id) for file in result.files)
    name = f"documents-{hashlib.sha256((result.compute_identity() + ids).encode()).hexdigest()[:16]}"
    arrays = open_shared_arrays(folder / f"{name}.bin", layout, fill)
    delete_stale_arrays(folder, "documents-*", name)
    begins, sizes = (
        tuple(arrays[key][begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True))
        for key in ("begin", "size")
    )
    return DocumentLocations(arrays["file"], arrays["end"], arrays["last"], begins, sizes)


def _iter_batches(counts: Sequence[int]) -> Iterator[range]:
    """Yield ranges of files with about DOCUMENTS_AT_ONCE documents: neighbours are often in one part."""
    first, n = 0, 0
    for i, count in enumerate(counts):
        if n and n + count > DOCUMENTS_AT_ONCE:
            yield range(first, i)
            first, n = i, 0
        n += count
    yield range(first, len(counts))


def locate_files(catalog: Catalog, files: Sequence[SourceFile]) -> list[tuple[np.ndarray, np.ndarray]]:
    located = catalog.locate_texts([file.id for file in files])
    spans = []
    for file in files:
        if file.id not in located:
            raise ValueError(
                f"{file.path}: is no longer in {catalog.path}. Register it again and reopen the mixture."
            )
        if file.path.endswith(".bin"):
            # in tokens; the catalog has the number of tokens only
            index = open_dataset(Path(file.path).with_suffix(""))
            spans.append(index.document_spans(np.arange(index.n_documents)))
        else:
            spans.append(located[file.id])
    return spans
