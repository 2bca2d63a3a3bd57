"""Chunks of whole documents, read from the registered files.

Documents are JSON lines, rows of parquet, samples of tar archives, or token ids of a .bin/.idx dataset.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any, Self

import numpy as np

from megatron.data import open_dataset
from megatron.mixture.catalog.parquet import GROUP_CACHE_BYTES, ParquetTexts
from megatron.mixture.catalog.query import QueryResult, SourceFile
from megatron.mixture.catalog.tars import TAR_SUFFIXES, sample_to_document, samples_to_arrow
from megatron.mixture.chunk import ChunkUnits, Position
from megatron.mixture.distributor import Distributor
from megatron.mixture.document_locations import open_locations
from megatron.mixture.journal import RUN_NAME, Learner
from megatron.mixture.journal_follower import JournalFollower
from megatron.mixture.lazy_imports import connect_scratch, import_duckdb, import_pyarrow
from megatron.mixture.lru_cache import LruCache
from megatron.mixture.spans import SpanFiles
from megatron.mixture.spec import MixtureSpec, build_chunk_weights, read_spec
from megatron.plan.mixture_use import mixture_folder
from megatron.text.text_readers import replace_lone_surrogates

CHUNK_DOCUMENTS = 512
AT_ONCE_CHUNKS = 16  # chunks per read
PIECE_BYTES = 1 << 22  # of a response in the memory of a server
MAX_PIECE_ROWS = 1 << 13
SETTLE_S = 60.0  # a fit of the rule takes seconds at most


class DocumentChunks:
    """The documents of the chunks of a mixture.

    Compressed files are unpacked once into the mixture's folder, for random access. Weights that follow a
    model are those of one run, whose log is in that folder too.

    counts     documents of each domain, int64 [K]
    at_once    chunks that one call may read without waiting; 1 if the next chunk may need losses
    is_shared  another object owns the open files, see `open_run`
    """

    is_shared = False

    def __init__(
        self, path: str | Path, seed: int = 0, chunk_size: int = CHUNK_DOCUMENTS,
        run: str | None = "main", roots: Sequence[Path] = (), verify: bool = False, follow: bool = False,
        selected: QueryResult | None = None,
    ) -> None:  # fmt: skip
        """Open the documents.

        run      name of the run whose weights are used; None: opened to be shared, see `open_run`
        roots    folders that must contain all files; empty: files may be anywhere
        verify   read all files and compare their content with the catalog; by default only size and
                 modification time are compared
        follow   read the weights of a run from the log that another process writes, see `JournalFollower`
        selected a saved result of the mixture's query, instead of the documents that the catalog has now

        Raises what reading and querying raise, and ValueError for a file outside of the roots and for a log
        that another process has locked.
        """
        self.spec: MixtureSpec = read_spec(path)
        with self.spec.open_catalog(None if selected is None else selected.snapshot) as catalog:
            query, by = self.spec.make_query(), self.spec.by
            result = query.run(catalog, by, self.spec.counts_tokens) if selected is None else selected
            # before the documents are located: a changed file has another index, too
            for file in result.files:
                _check_place(file, roots)
            self._locations = open_locations(mixture_folder(path), catalog, result)
        self.names, self.identity = result.names, result.compute_identity()
        self.seed, self.chunk_size = seed, chunk_size
        self.counts = result.n_documents
        self._result = result if self.spec.adaptive is not None else None  # needed to open further runs
        self.at_once = AT_ONCE_CHUNKS if self.spec.adaptive is None else 1
        self.learner: Learner | JournalFollower | None = None
        self._follow = follow
        self._make_distributor(result, run)
        # documents of all domains in one numbering. Domains of 10, 4 and 2 documents: firsts = [0, 10, 14]
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        n_bytes, n_documents = (
            sum(getattr(file, of) for file in result.files) for of in ("n_bytes", "n_documents")
        )
        # Rows of the first piece, from the mean size of a document; later pieces follow the measured size.
        # Only an estimate, because a compressed file has fewer bytes than its text.
        self._first_rows = min(MAX_PIECE_ROWS, max(1, PIECE_BYTES * n_documents // max(1, n_bytes)))
        self._shared = _SharedResources.open()
        self._readers = [
            _open_reader(file, spans, mixture_folder(path), self._shared)
            for file, *spans in zip(result.files, self._locations.begins, self._locations.sizes, strict=True)
        ]
        result.warn_missing_checksums(self.spec.catalog)
        for file in result.files if verify else ():
            file.verify()

    def open_run(self, run: str) -> "DocumentChunks":
        """Return the same documents for another run: this object, unless weights follow the model.

        Raises ValueError for a name that cannot be a file name.
        """
        if self._result is None:
            return self
        # the name comes from a client and becomes a file name: it has no slash and no leading dot
        if not RUN_NAME.fullmatch(run):
            raise ValueError("run: expected a name of letters, digits, _ . and -, of at most 64 characters.")
        # shares the open files and readers, with a separate distributor and learner
        view = copy(self)
        view.is_shared = True
        view._make_distributor(self._result, run)
        return view

    def _make_distributor(self, result: QueryResult, run: str | None) -> None:
        settings = self.spec.settings
        weights, rule = build_chunk_weights(self.spec, result)
        self.distributor = Distributor(
            self.counts, self.names, weights,
            self.chunk_size, self.seed, settings.dry, settings.shuffle,
        )  # fmt: skip
        if rule is not None and run is not None:
            adaptive = self.spec.adaptive
            assert adaptive is not None, "a rule comes from the spec"
            # all that determines the order besides the log: Journal rejects a log with another head
            head = {"log_of": self.identity, "spec": self.spec.compute_sha256(), "run": run,
                    "seed": self.seed, "chunk_size": self.chunk_size}  # fmt: skip
            path = mixture_folder(self.spec.path) / "logs" / f"{run}.jsonl"
            every, delay = adaptive.every_steps, adaptive.delay_steps
            if self._follow:
                head |= {"every": every, "delay": delay}
                self.learner = JournalFollower(path, head, self.distributor)
            else:
                self.learner = Learner(path, head, rule, self.distributor, every, delay)

    @property
    def order(self) -> str:
        """Hash of all that determines the documents of a chunk, besides the log of adaptive weights."""
        content = [self.identity, self.spec.compute_sha256(), self.seed, self.chunk_size]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """Report losses as `Learner.report`; False for a mixture whose weights do not follow the model."""
        return self.learner is not None and self.learner.report(chunk, nats, tokens)

    def settle(self, wait_s: float) -> bool:
        """Wait for the weights that follow from the reported losses.

        Returns False if that takes longer than `wait_s`.
        """
        return self.learner is None or self.learner.settle(wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the run's log, and the files unless they are shared (`is_shared`)."""
        if self.learner is not None:
            self.learner.close()
        if not self.is_shared:
            self._shared.close()

    def locate_documents(self, units: ChunkUnits) -> tuple[np.ndarray, np.ndarray]:
        """Return (file int32 [n], row int64 [n]) of the documents of some units."""
        # documents are numbered by domain; an interval is a run of documents of one domain in one file
        return self._locations.lookup(
            self._firsts[units.domain] + self.distributor.orders.lookup_units(units)
        )

    def read(self, first: int, n_chunks: int) -> Any:
        """Return chunks first, first + 1, ... as Arrow: domain int32, and text or ids (list of int32).

        The second column of tar archives is `sample`, as tars.samples_to_arrow returns it. There are fewer
        rows than chunk_size * n_chunks if the data end: the last chunk may be shorter. Raises NotReadyError
        (a ValueError) for chunks whose weights follow from losses that are not reported yet.
        """
        # otherwise SpanFiles would open the files again, and they would stay open
        if self._shared.is_closed:
            raise ValueError(f"{self.spec.path}: the documents were closed. Open them again.")
        known_to = self.distributor.weights.known_to
        # The weights may be in computation, or wait for losses that have not arrived. In the second case the
        # schedule below raises NotReadyError.
        if known_to is not None and n_chunks and first + n_chunks > known_to:
            self.settle(SETTLE_S)
        return self._read_units(self.distributor.schedule_chunks(first, n_chunks))

    def read_tables(self, start: Position, n_chunks: int) -> Iterator[Any]:
        """Yield the rows of `n_chunks` chunks from a position on, in tables of about PIECE_BYTES.

        At least one table is yielded. Each is read when it is requested, so that a response of any length
        keeps one of them in memory.
        """
        n_rows, is_first = self._first_rows, True
        # also once for 0 chunks: the schema of an empty table is sent before any row
        for n_read in range(0, max(n_chunks, 1), AT_ONCE_CHUNKS):
            turns, start = self.distributor.schedule_from(start, min(AT_ONCE_CHUNKS, n_chunks - n_read))
            begin = 0
            while begin < len(turns.domain) or is_first:
                piece = slice(begin, begin + n_rows)
                table = self._read_units(ChunkUnits(turns.domain[piece], turns.number[piece]))
                begin, is_first = begin + n_rows, False
                # adapt the next piece to the bytes per row of this one
                n_rows = min(MAX_PIECE_ROWS, max(1, PIECE_BYTES * len(table) // max(1, table.nbytes)))
                yield table

    def _read_units(self, units: ChunkUnits) -> Any:
        """Return the table of `read` for some units."""
        arrow = import_pyarrow()
        file, row = self.locate_documents(units)
        # group the documents by file, read each file once, and restore the order of the chunk with `back`
        order = np.argsort(file, kind="stable")
        # [n_files + 1]: order[bounds[k] : bounds[k + 1]] are the units of file k
        bounds = np.searchsorted(file[order], np.arange(len(self._readers) + 1))
        parts = [
            reader.read(row[order[bounds[k] : bounds[k + 1]]])
            for k, reader in enumerate(self._readers)
            if bounds[k] < bounds[k + 1]
        ]
        back = np.empty(len(order), dtype=np.int64)
        # inverse permutation, for file [2, 0, 1]: order [1, 2, 0], back [2, 0, 1]
        back[order] = np.arange(len(order))
        kinds = {part.type for part in parts}
        if len(kinds) > 1:
            raise ValueError(
                f"{self.spec.path}: got text, tar archives and .bin/.idx datasets in one mixture. "
                "Select files of one kind."
            )
        kind = next(iter(kinds), arrow.large_string())
        name = "ids" if arrow.types.is_list(kind) else "sample" if arrow.types.is_struct(kind) else "text"
        whole = arrow.concat_arrays(parts) if parts else arrow.array([], arrow.large_string())
        return arrow.table({"domain": units.domain, name: whole.take(arrow.array(back))})


class _JsonLinesReader:
    """Reader of JSON lines; `begins` and `sizes` of the documents."""

    def __init__(
        self, path: Path, key: str, spans: Sequence[np.ndarray], scratch: Any, files: SpanFiles
    ) -> None:
        self.begins, self.sizes = spans
        self.path, self.key, self.scratch, self.files = path, key, scratch, files
        files.add(path)

    def read(self, numbers: np.ndarray) -> Any:
        """Return the texts of documents int64 [n] as Arrow large_string.

        Raises ValueError for lines without text.
        """
        arrow = import_pyarrow()
        # without the newline, which the last line of a file may not have
        lines = self.files.read_binary(self.path, self.begins[numbers], self.sizes[numbers] - 1)
        try:
            try:
                return self._extract_texts(lines)
            except (import_duckdb().Error, arrow.ArrowException):
                # every line was valid after this replacement when it was registered
                replaced = [replace_lone_surrogates(line) for line in lines.to_pylist()]
                return self._extract_texts(arrow.array(replaced, arrow.large_binary()))
        except (import_duckdb().Error, arrow.ArrowException) as error:
            raise ValueError(
                f"{self.path}: got lines that are not JSON ({str(error).splitlines()[0]}). Register it again."
            ) from error

    def _extract_texts(self, lines: Any) -> Any:
        # the key is in a JSON path, which is in an SQL string: ' becomes '' and " becomes \"
        key = self.key.replace("'", "''").replace('"', '\\"')
        arrow = import_pyarrow()
        self.scratch.register("lines", arrow.table({"record": lines.cast(arrow.large_string())}))
        try:
            relation = self.scratch.sql(
                f"SELECT json_extract_string(record, '$.\"{key}\"') AS text FROM lines"
            )
            texts = relation.to_arrow_table().column("text")
            return arrow.concat_arrays([part.cast(arrow.large_string()) for part in texts.chunks])
        finally:
            self.scratch.unregister("lines")


class _TarReader:
    """Reader of a tar archive; `begins` and `sizes` of the samples."""

    def __init__(self, path: Path, key: str, spans: Sequence[np.ndarray], files: SpanFiles) -> None:
        self.begins, self.sizes = spans
        self.path, self.key, self.files = path, key, files
        files.add(path)

    def read(self, numbers: np.ndarray) -> Any:
        """Return samples int64 [n], as tars.samples_to_arrow returns them.

        Raises ValueError for bytes that are not samples.
        """
        samples = self.files.read_binary(self.path, self.begins[numbers], self.sizes[numbers])
        try:
            return samples_to_arrow(samples.to_pylist(), self.key)
        except (TarError, ValueError) as error:
            raise ValueError(
                f"{self.path}: got bytes that are not samples ({error}). Register it again."
            ) from error


class _TokenReader:
    """Reader of the token ids of a .bin/.idx dataset; `begins` and `lengths` of the documents in tokens."""

    def __init__(self, prefix: Path, spans: Sequence[np.ndarray], files: SpanFiles) -> None:
        self.begins, self.lengths = spans
        self.dtype = open_dataset(prefix).dtype
        self.path, self.files = Path(f"{prefix}.bin"), files
        files.add(self.path)

    def read(self, numbers: np.ndarray) -> Any:
        """Return the ids of documents int64 [n] as Arrow lists of int32."""
        lengths, width = self.lengths[numbers], self.dtype.itemsize
        content = self.files.read(self.path, self.begins[numbers] * width, lengths * width)
        # Arrow list offsets [n + 1]: document i is values[offsets[i]:offsets[i + 1]]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        # clients get int32, whatever the width of the ids in the file
        return import_pyarrow().ListArray.from_arrays(offsets, content.view(self.dtype).astype(np.int32))


@dataclass
class _SharedResources:
    """Resources that the readers of a mixture share: open files, row groups, and DuckDB for JSON lines."""

    scratch: Any
    files: SpanFiles
    groups: LruCache
    is_closed: bool = False

    @classmethod
    def open(cls) -> "_SharedResources":
        return cls(connect_scratch(n_threads=1), SpanFiles(), LruCache(GROUP_CACHE_BYTES))

    def close(self) -> None:
        self.is_closed = True
        self.scratch.close()
        self.files.close()
        self.groups.clear()


@contextmanager
def open_documents(
    file: SourceFile, spans: Sequence[np.ndarray], folder: Path
) -> Iterator[Callable[[np.ndarray], list[Any]]]:
    """Yield a function that returns the documents int64 [n] of one file, numbered as `spans`.

    They are texts, lists of ids, or dicts of the members of tar samples. `folder`: for unpacked files.
    """
    shared = _SharedResources.open()
    try:
        _check_place(file, ())
        reader = _open_reader(file, spans, folder, shared)

        def read(numbers: np.ndarray) -> list[Any]:
            column = reader.read(numbers)
            is_sample = import_pyarrow().types.is_struct(column.type)
            return [sample_to_document(record) if is_sample else record for record in column.to_pylist()]

        yield read
    finally:
        shared.close()


def _check_place(file: SourceFile, roots: Sequence[Path]) -> None:
    """Raise ValueError for a file that has changed, that is a link now, or that is in none of the roots."""
    path = file.check_unchanged()
    # registered paths have no links: one that appeared later may point to a file outside of the roots
    if path.resolve() != path:
        raise ValueError(
            f"{path}: got a link to {path.resolve()}, expected the registered file. Restore the file."
        )
    # after the test for links, because is_relative_to compares names only
    if roots and not any(path.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path}: is in none of {', '.join(map(str, roots))}. Add its folder as a --root.")


def _open_reader(
    file: SourceFile, spans: Sequence[np.ndarray], folder: Path, shared: _SharedResources
) -> _JsonLinesReader | _TarReader | ParquetTexts | _TokenReader:
    path = Path(file.path)
    if path.suffix == ".bin":
        return _TokenReader(path.with_suffix(""), spans, shared.files)
    if path.suffix == ".parquet":
        return ParquetTexts(file, spans[0], shared.groups)
    if file.path.endswith(TAR_SUFFIXES):
        return _TarReader(file.unpack(folder), file.text_key, spans, shared.files)
    return _JsonLinesReader(file.unpack(folder), file.text_key, spans, shared.scratch, shared.files)
