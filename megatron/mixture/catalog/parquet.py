"""Texts of parquet files, read by row group: memory does not grow with the size of the files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.catalog.query import SourceFile
from megatron.mixture.lazy_imports import import_parquet, import_pyarrow
from megatron.mixture.lru_cache import LruCache

GROUP_CACHE_BYTES = 1 << 29  # texts of the latest row groups of a mixture
MAX_CACHED_GROUP_BYTES = 1 << 27  # bytes of texts; of a larger row group only the requested texts are kept
BATCH_ROWS = 256
PAGE_BYTES = 1 << 20  # read-ahead; without it a column of a row group is read as a whole


class ParquetTexts:
    """The text column of a parquet file.

    A row group is decoded once for all the rows of a `read` that are in it. It stays in `groups`, a cache of
    the latest row groups that all files of a mixture share.
    """

    def __init__(self, file: SourceFile, begins: np.ndarray, groups: LruCache) -> None:
        """begins int64 [n]: the row of each document."""
        self.file, self.path, self.begins, self.groups = file, Path(file.path), begins, groups
        self._ends: np.ndarray | None = None  # rows up to the end of each row group; loaded by the first read
        self._column = file.text_key

    def read(self, numbers: np.ndarray) -> Any:
        """Return the texts of documents int64 [n] as Arrow large_string.

        Raises ValueError for a file that has changed or cannot be read.
        """
        arrow = import_pyarrow()
        rows = self.begins[numbers]
        order = np.argsort(rows, kind="stable")
        ends = self._load_group_ends()
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < (int(ends[-1]) if len(ends) else 0):
            raise ValueError(
                f"{self.path}: got row {int(rows.max()):,}, expected a row of the file. Register it again."
            )
        # Row group g covers rows ends[g - 1] to ends[g] - 1.
        # Groups of 100 and 50 rows: ends = [100, 150]; row 100 is in group 1, hence `right`.
        groups = np.searchsorted(ends, rows[order], side="right")
        parts = []
        for group in np.unique(groups).tolist():
            first = int(ends[group - 1]) if group else 0
            # row numbers within the group, ascending because `order` sorts the rows
            parts.append(self._read_group_texts(group, rows[order][groups == group] - first))
        back = np.empty(len(order), dtype=np.int64)
        # inverse permutation: restores the order of `numbers`
        back[order] = np.arange(len(order))
        texts = arrow.concat_arrays(parts) if parts else arrow.array([], arrow.large_string())
        return texts.take(arrow.array(back))

    def _load_group_ends(self) -> np.ndarray:
        """Return the number of rows up to the end of each row group, int64."""
        if self._ends is None:
            with self._open_file() as source:
                names = source.schema_arrow.names
                # case-insensitive, as in DuckDB
                matches = [name for name in names if name.lower() == self._column.lower()]
                if not matches:
                    raise ValueError(f"{self.path}: no column '{self._column}'. Register it again.")
                self._column = self._column if self._column in matches else matches[0]
                metadata = source.metadata
                sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
                self._ends = np.cumsum(np.array(sizes, dtype=np.int64))
        return self._ends

    def _read_group_texts(self, group: int, rows: np.ndarray) -> Any:
        """Return the texts of rows of a row group, int64 [n] in ascending order."""
        # A group that is too large is stored as None with weight 0, so that its size is not measured again.
        whole = self.groups.get((self.path, group), lambda: self._load_small_group(group))
        if whole is not None:
            return whole.take(import_pyarrow().array(rows))
        first, parts = 0, []
        for batch in self._iter_batches(group):
            # rows are sorted, so that those of this batch are adjacent
            begin, end = np.searchsorted(rows, [first, first + len(batch)])
            if begin < end:
                parts.append(batch.take(import_pyarrow().array(rows[begin:end] - first)))
            first += len(batch)
            if end == len(rows):
                break
        return import_pyarrow().concat_arrays(parts)

    def _load_small_group(self, group: int) -> tuple[Any, int]:
        """Return (texts of a row group, their bytes), or (None, 0) if it is too large to cache."""
        parts, n_bytes = [], 0
        for batch in self._iter_batches(group):
            parts.append(batch)
            n_bytes += batch.nbytes
            # counted as decoded: the metadata has encoded sizes, which a dictionary makes much smaller
            if n_bytes > MAX_CACHED_GROUP_BYTES:
                return None, 0
        return import_pyarrow().concat_arrays(parts), n_bytes

    def _iter_batches(self, group: int) -> Iterator[Any]:
        """Yield the texts of a row group in batches of Arrow large_string."""
        arrow = import_pyarrow()
        with self._open_file() as source:
            try:
                for batch in source.iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=[self._column], use_threads=False
                ):
                    yield batch.column(0).cast(arrow.large_string())
            except (arrow.ArrowException, OSError, IndexError) as error:
                raise ValueError(
                    f"{self.path}: row group {group} cannot be read ({str(error).splitlines()[0]}). "
                    "Restore the registered file, or register it again."
                ) from error

    def _open_file(self) -> Any:
        """Return the file, checked to be as registered.

        It is opened for one read, so that no descriptor stays open.
        """
        self.file.check_unchanged()
        try:
            return import_parquet().ParquetFile(self.path, buffer_size=PAGE_BYTES, pre_buffer=False)
        except (import_pyarrow().ArrowException, OSError) as error:
            raise ValueError(f"{self.path}: cannot be read ({str(error).splitlines()[0]})") from error
