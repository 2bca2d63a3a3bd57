"""Texts of parquet files, read by row group: memory does not grow with the files, whatever their size."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.libraries import parquet, pyarrow
from megatron.mixture.query import SourceFile
from megatron.mixture.recent import Recent

GROUPS_BYTES = 1 << 29  # of texts that a mixture keeps of the row groups used last
LARGEST_GROUP = 1 << 27  # bytes of texts; of a larger one only the texts that are read are kept
BATCH_ROWS = 256
PAGE_BYTES = 1 << 20  # read ahead: else a column of a row group is read as a whole


class ParquetTexts:
    """The text column of a parquet file.

    A row group is decoded once for all the rows of a `read` that are in it, and stays among the latest ones
    of `groups`, which all files of a mixture share.
    """

    def __init__(self, file: SourceFile, begins: np.ndarray, groups: Recent) -> None:
        """begins int64 [n]: the row of each document."""
        self.file, self.path, self.begins, self.groups = file, Path(file.path), begins, groups
        self._ends: np.ndarray | None = None  # of row groups, in rows; known from the first read on
        self._column = file.text_key

    def read(self, numbers: np.ndarray) -> Any:
        """Texts of documents int64 [n]: Arrow large_string.

        ValueError for a file that has changed or cannot be read.
        """
        arrow = pyarrow()
        rows = self.begins[numbers]
        order = np.argsort(rows, kind="stable")
        ends = self._row_groups()
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < (int(ends[-1]) if len(ends) else 0):
            raise ValueError(
                f"{self.path}: got row {int(rows.max()):,}, expected one of the file. Register it again."
            )
        groups = np.searchsorted(ends, rows[order], side="right")
        parts = []
        for group in np.unique(groups).tolist():
            first = int(ends[group - 1]) if group else 0
            parts.append(self._texts(group, rows[order][groups == group] - first))
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        texts = arrow.concat_arrays(parts) if parts else arrow.array([], arrow.large_string())
        return texts.take(arrow.array(back))

    def _row_groups(self) -> np.ndarray:
        """Rows up to the end of each row group, int64."""
        if self._ends is None:
            with self._opened() as source:
                names = source.schema_arrow.names
                same = [name for name in names if name.lower() == self._column.lower()]  # as in DuckDB
                if not same:
                    raise ValueError(f"{self.path}: no column '{self._column}'. Register it again.")
                self._column = self._column if self._column in same else same[0]
                metadata = source.metadata
                sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self._ends = np.cumsum(np.array(sizes, dtype=np.int64))
        return self._ends

    def _texts(self, group: int, rows: np.ndarray) -> Any:
        """Texts of rows of a row group, int64 [n] in rising order."""
        whole = self.groups.get((self.path, group), lambda: self._small_group(group))
        if whole is not None:
            return whole.take(pyarrow().array(rows))
        first, parts = 0, []
        for batch in self._batches(group):
            begin, end = np.searchsorted(rows, [first, first + len(batch)])
            if begin < end:
                parts.append(batch.take(pyarrow().array(rows[begin:end] - first)))
            first += len(batch)
            if end == len(rows):
                break
        return pyarrow().concat_arrays(parts)

    def _small_group(self, group: int) -> tuple[Any, int]:
        """(texts of a row group, their bytes); (None, 0) for one that is too large to keep."""
        parts, n_bytes = [], 0
        for batch in self._batches(group):
            parts.append(batch)
            n_bytes += batch.nbytes
            if n_bytes > LARGEST_GROUP:
                return None, 0
        return pyarrow().concat_arrays(parts), n_bytes

    def _batches(self, group: int) -> Iterator[Any]:
        """The texts of a row group, some at a time: Arrow large_string."""
        arrow = pyarrow()
        with self._opened() as source:
            try:
                for batch in source.iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=[self._column], use_threads=False
                ):
                    yield batch.column(0).cast(arrow.large_string())
            except (arrow.ArrowException, OSError, IndexError) as error:
                raise ValueError(
                    f"{self.path}: row group {group} cannot be read ({str(error).splitlines()[0]}). "
                    "Put the file back that was registered, or register it again."
                ) from error

    def _opened(self) -> Any:
        """The file, as it was registered: opened for one read, so that it takes no descriptor."""
        self.file.unchanged()
        try:
            return parquet().ParquetFile(self.path, buffer_size=PAGE_BYTES, pre_buffer=False)
        except (pyarrow().ArrowException, OSError) as error:
            raise ValueError(f"{self.path}: cannot be read ({str(error).splitlines()[0]})") from error
