"""Chunks of whole documents, read from where they lie: lines, rows, samples, or token ids of a pair."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.mixture_use import folder_of
from megatron.data.indexed import IndexedTokens
from megatron.mixture.catalog import Catalog
from megatron.mixture.chunk import Turns
from megatron.mixture.distributor import Distributor
from megatron.mixture.libraries import duckdb, pyarrow
from megatron.mixture.query import Result, SourceFile
from megatron.mixture.spec import Spec, document_weights, read_spec
from megatron.mixture.tars import TARS, column_of

CHUNK_DOCUMENTS = 512


class DocumentChunks:
    """The documents of a mixture's chunks.

    Compressed files are unpacked once, into the mixture's folder, to be read at any place.
    """

    def __init__(self, path: str | Path, seed: int = 0, chunk_size: int = CHUNK_DOCUMENTS) -> None:
        """Raises what reading and querying raise; ValueError for weights that follow a model."""
        self.spec: Spec = read_spec(path)
        with Catalog(self.spec.catalog, read_only=True) as catalog:
            result: Result = self.spec.query().run(catalog, self.spec.by, self.spec.counts_tokens)
            columns = catalog.text_places([file.id for file in result.files])
        self.names, self.identity = result.names, result.identity()
        self.seed, self.chunk_size = seed, chunk_size
        told, counts = self.spec.told, result.n_documents
        self.distributor = Distributor(
            counts, self.names, document_weights(self.spec, result),
            chunk_size, seed, told.get("dry", "repeat"), told.get("shuffle", True),
        )  # fmt: skip
        self._firsts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        # 20 bytes an interval are kept of it, beside 12 a document of where the texts are
        self._file, self._end = result.column("file"), result.column("end")
        self._ends = np.cumsum(self._end - result.column("begin"))
        self._scratch = duckdb().connect(config={"threads": 1})
        self._readers = [
            _reader(file, columns[file.id], folder_of(path), self._scratch) for file in result.files
        ]

    def places(self, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
        """(file int32 [n], row int64 [n]) of the documents of some turns."""
        number = self._firsts[turns.domain] + self.distributor.orders.units(turns)
        interval = np.searchsorted(self._ends, number, side="right")
        return self._file[interval], self._end[interval] - (self._ends[interval] - number)

    def read(self, first: int, n_chunks: int) -> Any:
        """An Arrow table of chunks first, first + 1, ...: domain int32, and text or ids (list of int32).

        Of tars the second column is `sample`, as tars.column_of has it.
        Fewer rows than chunk_size * n_chunks come where the data end.
        """
        turns = self.distributor.chunks(first, n_chunks)
        arrow = pyarrow()
        file, row = self.places(turns)
        order = np.argsort(file, kind="stable")
        bounds = np.searchsorted(file[order], np.arange(len(self._readers) + 1))
        parts = [
            reader.read(row[order[bounds[k] : bounds[k + 1]]])
            for k, reader in enumerate(self._readers)
            if bounds[k] < bounds[k + 1]
        ]
        back = np.empty(len(order), dtype=np.int64)
        back[order] = np.arange(len(order))
        kinds = {part.type for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"{self.spec.path}: text, tars or pairs in one mixture; ask for one kind")
        kind = next(iter(kinds), arrow.string())
        name = "ids" if arrow.types.is_list(kind) else "sample" if arrow.types.is_struct(kind) else "text"
        whole = arrow.concat_arrays(parts) if parts else arrow.array([], arrow.string())
        return arrow.table({"domain": turns.domain, name: whole.take(arrow.array(back))})


class _Lines:
    """Lines of JSON; `begins` and `sizes` of the documents."""

    def __init__(self, path: Path, key: str, places: tuple[np.ndarray, np.ndarray], scratch: Any) -> None:
        self.begins, self.sizes = places
        self.key, self.scratch = key, scratch
        with path.open("rb") as file:
            self.held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, numbers: np.ndarray) -> Any:
        """Texts of documents int64 [n]: Arrow strings."""
        spans = zip(self.begins[numbers].tolist(), self.sizes[numbers].tolist(), strict=True)
        arrow = pyarrow()
        lines = arrow.array([self.held[begin : begin + size] for begin, size in spans], arrow.binary())
        self.scratch.register("lines", arrow.table({"record": lines.cast(arrow.string())}))
        key = self.key.replace("'", "''").replace('"', '\\"')
        told = self.scratch.sql(f"SELECT json_extract_string(record, '$.\"{key}\"') AS text FROM lines")
        found = told.to_arrow_table().column("text").combine_chunks()
        self.scratch.unregister("lines")
        return found


class _Samples:
    """A tar; `begins` and `sizes` of the samples."""

    def __init__(self, path: Path, key: str, places: tuple[np.ndarray, np.ndarray]) -> None:
        self.begins, self.sizes, self.key = *places, key
        with path.open("rb") as file:
            self.held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, numbers: np.ndarray) -> Any:
        """Samples int64 [n], as tars.column_of has them."""
        spans = zip(self.begins[numbers].tolist(), self.sizes[numbers].tolist(), strict=True)
        return column_of([self.held[begin : begin + size] for begin, size in spans], self.key)


class _Column:
    """The text column of a parquet file, read when first wanted."""

    def __init__(self, path: Path, key: str, begins: np.ndarray, scratch: Any) -> None:
        self.path, self.key, self.begins, self.scratch = path, key, begins, scratch
        self.held: Any = None

    def read(self, numbers: np.ndarray) -> Any:
        """As `_Lines`."""
        arrow = pyarrow()
        if self.held is None:
            key = '"' + self.key.replace('"', '""') + '"'
            source = self.scratch.sql(
                f"SELECT {key} AS text FROM read_parquet($path)", params={"path": str(self.path)}
            )
            self.held = source.to_arrow_table().column("text").combine_chunks().cast(arrow.string())
        return self.held.take(arrow.array(self.begins[numbers]))


class _Pair:
    """Token ids of a .bin/.idx pair."""

    def __init__(self, prefix: Path) -> None:
        self.pair = IndexedTokens(prefix)

    def read(self, numbers: np.ndarray) -> Any:
        """Ids of documents int64 [n]: Arrow lists of int32."""
        begins, lengths = self.pair.document_spans(numbers)
        ends = np.cumsum(lengths)
        ids = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int32)
        for begin, n, end in zip(begins.tolist(), lengths.tolist(), ends.tolist(), strict=True):
            ids[end - n : end] = self.pair.tokens[begin : begin + n]
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        return pyarrow().ListArray.from_arrays(offsets, ids)


def _reader(
    file: SourceFile, places: tuple[np.ndarray, np.ndarray], folder: Path, scratch: Any
) -> _Lines | _Samples | _Column | _Pair:
    path = file.unchanged()
    if path.suffix == ".bin":
        return _Pair(path.with_suffix(""))
    if path.suffix == ".parquet":
        return _Column(path, file.text_key, places[0], scratch)
    if file.path.endswith(TARS):
        return _Samples(file.plain(folder), file.text_key, places)
    return _Lines(file.plain(folder), file.text_key, places, scratch)
