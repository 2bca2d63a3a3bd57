"""Index of concatenated datasets, written dataset by dataset, each at its final places in the file."""

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from megatron.data.indexed import DTYPE_CODES, IndexedTokens
from megatron.plan.idx_header import HEADER, MAGIC, VERSION


class MergedIndex:
    """Context manager that writes the index of `n_documents` documents, one sequence each.

    The number of documents gives the place of each array. So nothing is spooled, and a writer can continue
    after the last complete dataset of a killed one.

    n_empty, longest   documents without tokens and tokens of the longest document, of all added datasets
    """

    def __init__(
        self, path: Path, dtype: np.dtype, n_documents: int, n_empty: int = 0, longest: int = 0
    ) -> None:
        self.path, self.dtype, self.n = path, dtype, n_documents
        self.n_empty, self.longest = n_empty, longest

    def __enter__(self) -> Self:
        self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        self._file.truncate(HEADER.size + 20 * self.n + 8)
        self._write_at(0, HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], self.n, self.n + 1))
        # boundaries are 0, 1, ..., n: `add` writes the first n
        self._write_at(HEADER.size + 20 * self.n, np.array([self.n], dtype="<i8").tobytes())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, dataset: IndexedTokens, first_document: int, first_token: int) -> None:
        """Write the documents of a dataset from document and token numbers of the whole on."""
        at, begin = first_document, first_token
        for lengths in dataset.iter_document_lengths():
            ends = begin + np.cumsum(lengths, dtype="<i8")
            positions, numbers = (ends - lengths) * self.dtype.itemsize, np.arange(at, at + len(lengths))
            self._write_at(HEADER.size + 4 * at, lengths.astype("<i4"))
            self._write_at(HEADER.size + 4 * self.n + 8 * at, positions.astype("<i8"))
            self._write_at(HEADER.size + 12 * self.n + 8 * at, numbers.astype("<i8"))
            at, begin = at + len(lengths), int(ends[-1])
            self.n_empty += int((lengths == 0).sum())
            self.longest = max(self.longest, int(lengths.max(initial=0)))

    def flush(self) -> None:
        """Flush buffers to the operating system."""
        self._file.flush()

    def _write_at(self, offset: int, content: bytes | np.ndarray) -> None:
        self._file.seek(offset)
        self._file.write(content if isinstance(content, bytes) else content.data)
