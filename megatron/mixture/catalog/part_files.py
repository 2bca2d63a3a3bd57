"""Parts of a catalog: parquet files with one row for each document, and properties as columns."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron.mixture.catalog.commits import Corpus
from megatron.mixture.catalog.storage import LocalStorage, ObjectStorage
from megatron.mixture.lazy_imports import import_parquet, import_pyarrow

LOCATION_COLUMNS = ("file", "row", "begin", "size", "tokens")
GROUP_ROWS = 1 << 17  # rows of a row group: what a query of other properties skips at a time


def make_schema(corpus: Corpus) -> Any:
    """Return the Arrow schema of the parts of a corpus."""
    arrow = import_pyarrow()
    kinds = {
        "VARCHAR": arrow.string(), "BIGINT": arrow.int64(), "DOUBLE": arrow.float64(),
        "BOOLEAN": arrow.bool_(), "DATE": arrow.date32(), "VARCHAR[]": arrow.list_(arrow.string()),
    }  # fmt: skip
    columns = [(name, arrow.int64()) for name in LOCATION_COLUMNS]
    columns += [(prop.name, kinds[prop.sql_type]) for prop in corpus.properties]
    return arrow.schema(columns)


class PartWriter:
    """Writer of one part; a context manager.

    Location columns are stored as differences, which take few bits, and properties with dictionaries.
    """

    def __init__(self, path: Path, corpus: Corpus) -> None:
        self.path, self.schema, self.n_rows = path, make_schema(corpus), 0
        numbers = ("row", "begin", "size", "tokens")
        self._writer = import_parquet().ParquetWriter(
            path, self.schema, compression="zstd",
            use_dictionary=[name for name in self._list_leaves() if name not in numbers],
            column_encoding=dict.fromkeys(numbers, "DELTA_BINARY_PACKED"),
            # of long texts, such as URLs, statistics would store a copy in each row group
            write_statistics=[name for name in self._list_leaves() if name not in ("row", "begin")],
        )  # fmt: skip
        # documents that have each property
        self.n_having = {prop.name: 0 for prop in corpus.properties}
        self._tables: list[Any] = []
        self._n_buffered = 0

    def _list_leaves(self) -> list[str]:
        arrow = import_pyarrow()
        return [
            f"{field.name}.list.element" if arrow.types.is_list(field.type) else field.name
            for field in self.schema
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, documents: Any) -> int:
        """Add an Arrow table, or the batches of a reader. Returns the number of rows.

        Raises pyarrow's errors for values that do not fit the schema.
        """
        arrow = import_pyarrow()
        n_before = self.n_rows
        for part in [documents] if isinstance(documents, arrow.Table) else documents:
            table = part if isinstance(part, arrow.Table) else arrow.Table.from_batches([part])
            table = table.cast(self.schema)
            for name in self.n_having:
                self.n_having[name] += len(table) - table.column(name).null_count
            self._tables.append(table)
            self._n_buffered += len(table)
            self.n_rows += len(table)
            if self._n_buffered >= GROUP_ROWS:
                self._flush()
        return self.n_rows - n_before

    def _flush(self) -> None:
        if self._tables:
            self._writer.write_table(import_pyarrow().concat_tables(self._tables), GROUP_ROWS)
        self._tables, self._n_buffered = [], 0

    def close(self) -> None:
        """Write the rest and the footer."""
        if self._writer.is_open:
            self._flush()
            self._writer.close()


def publish_part(storage: LocalStorage | ObjectStorage, path: Path, corpus: Corpus) -> tuple[str, int]:
    """Store a written part under the hash of its content. Returns (name, bytes)."""
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        name = f"{corpus.folder}/part-{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}.parquet"
    storage.publish(path, name)
    return name, n_bytes


def read_spans(
    storage: LocalStorage | ObjectStorage, part: str, counts: dict[int, int]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return (begin int64 [n], size int64 [n]) of the documents of files of one part.

    counts   documents of each file, by the key of its entry

    Raises ValueError if the part has another number of documents, or if it cannot be read.
    """
    arrow = import_pyarrow()
    requested = list(counts)
    try:
        with storage.open_parquet(part) as source:
            groups = [
                group for group in range(source.num_row_groups) if _may_contain(source, group, requested)
            ]
            table = source.read_row_groups(groups, ["file", "begin", "size"], use_threads=False)
        keys, begins, sizes = (table.column(i).to_numpy() for i in range(3))
    except (arrow.ArrowException, OSError, KeyError, IndexError) as error:
        raise ValueError(
            f"{part}: cannot be read ({str(error).splitlines()[0]}). Restore it, or register again."
        ) from error
    # The documents of a file are adjacent: each run of equal keys is a file.
    # keys [7, 7, 3]: cuts [0, 2], ends [2, 3]
    cuts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]) if len(keys) else np.empty(0, np.int64)
    ends = np.r_[cuts[1:], len(keys)]
    runs = {int(keys[cut]): slice(int(cut), int(end)) for cut, end in zip(cuts, ends, strict=True)}
    spans = {}
    for key, n in counts.items():
        run = runs.get(key, slice(0, 0))
        if run.stop - run.start != n:
            raise ValueError(
                f"{part}: got {run.stop - run.start:,} documents of a file, expected {n:,}. "
                "Restore the part, or register the corpus again."
            )
        spans[key] = begins[run], sizes[run]
    return spans


def _may_contain(source: Any, group: int, keys: Sequence[int]) -> bool:
    column = source.metadata.row_group(group).column(0)
    # the footer may come from another program: without statistics the group is read
    if column.path_in_schema != "file" or column.statistics is None or not column.statistics.has_min_max:
        return True
    low, high = column.statistics.min, column.statistics.max
    return any(low <= key <= high for key in keys)
