"""Chunks of whole documents, read from where they lie: lines, rows, samples, or token ids of a pair."""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any, Self

import numpy as np

from megatron.config.mixture_use import folder_of
from megatron.data.documents import without_lone_surrogates
from megatron.data.indexed import IndexedTokens
from megatron.mixture.catalog import Catalog
from megatron.mixture.chunk import Position, Turns
from megatron.mixture.distributor import Distributor
from megatron.mixture.journal import RUN_NAME, Learner
from megatron.mixture.libraries import connect_scratch, duckdb, pyarrow
from megatron.mixture.parquet import GROUPS_BYTES, ParquetTexts
from megatron.mixture.query import Result, SourceFile
from megatron.mixture.recent import Recent
from megatron.mixture.spans import SpanFiles
from megatron.mixture.spec import Spec, document_weights, read_spec
from megatron.mixture.tars import TARS, column_of

CHUNK_DOCUMENTS = 512
AT_ONCE_CHUNKS = 16  # read in one go
PIECE_BYTES = 1 << 22  # of an answer that a server has read and a client has not
MOST_PIECE_ROWS = 1 << 13
SETTLE_S = 60.0  # a re-fit takes seconds at most


class DocumentChunks:
    """The documents of a mixture's chunks.

    Compressed files are unpacked once, into the mixture's folder, to be read at any place. Weights that
    follow a model are those of one run, whose log is in that folder too.

    counts    documents of each domain, int64 [K]
    at_once   chunks that may be read in one go without a thought; 1 where the next may wait for losses
    is_shared what reads the documents belongs to another, see `of_run`
    """

    is_shared = False

    def __init__(
        self, path: str | Path, seed: int = 0, chunk_size: int = CHUNK_DOCUMENTS,
        run: str | None = "main", roots: Sequence[Path] = (), verify: bool = False,
    ) -> None:  # fmt: skip
        """`run` None: opened to be shared, see `of_run`. `roots`: where files may lie; none: anywhere.
        `verify`: read all files and compare their content with what was registered; by default size and time
        of change are compared.

        Raises what reading and querying raise; ValueError for a file outside of the roots, and for a log that
        another process keeps.
        """
        self.spec: Spec = read_spec(path)
        with Catalog(self.spec.catalog, read_only=True) as catalog:
            result: Result = self.spec.query().run(catalog, self.spec.by, self.spec.counts_tokens)
            columns = catalog.text_places([file.id for file in result.files])
        self.names, self.identity = result.names, result.identity()
        self.seed, self.chunk_size = seed, chunk_size
        self.counts = result.n_documents
        self._result = result if self.spec.adaptive is not None else None  # every run begins with it
        self.at_once = AT_ONCE_CHUNKS if self.spec.adaptive is None else 1
        self.learner: Learner | None = None
        self._deal(result, run)
        self._firsts = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        # 20 bytes an interval are kept of it, beside 12 a document of where the texts are
        self._file, self._end = result.column("file"), result.column("end")
        self._ends = np.cumsum(self._end - result.column("begin"))
        n_bytes, n_documents = (
            sum(getattr(file, of) for file in result.files) for of in ("n_bytes", "n_documents")
        )
        self._first_rows = min(MOST_PIECE_ROWS, max(1, PIECE_BYTES * n_documents // max(1, n_bytes)))
        self._open = _Open.make()
        self._readers = [
            _reader(file, columns[file.id], folder_of(path), self._open, roots) for file in result.files
        ]
        result.warn_without_sums(self.spec.catalog)
        for file in result.files if verify else ():
            file.verify()

    def of_run(self, run: str) -> "DocumentChunks":
        """The same documents for another run: itself, unless weights follow the model. ValueError for a name
        that cannot be one of a file."""
        if self._result is None:
            return self
        if not RUN_NAME.fullmatch(run):
            raise ValueError("run: letters, digits, _ . and -, at most 64")
        one = copy(self)
        one.is_shared = True
        one._deal(self._result, run)
        return one

    def _deal(self, result: Result, run: str | None) -> None:
        told = self.spec.told
        weights, rule = document_weights(self.spec, result)
        self.distributor = Distributor(
            self.counts, self.names, weights,
            self.chunk_size, self.seed, told.get("dry", "repeat"), told.get("shuffle", True),
        )  # fmt: skip
        if rule is not None and run is not None:
            adaptive = self.spec.adaptive
            assert adaptive is not None, "a rule is told by the spec"
            head = {"log_of": self.identity, "spec": self.spec.sha256(), "run": run,
                    "seed": self.seed, "chunk_size": self.chunk_size}  # fmt: skip
            place = folder_of(self.spec.path) / "logs" / f"{run}.jsonl"
            every, delay = adaptive["every_steps"], adaptive["delay_steps"]
            self.learner = Learner(place, head, rule, self.distributor, every, delay)

    def report(self, chunk: int, nats: np.ndarray, tokens: np.ndarray) -> bool:
        """As `Learner.report`; False for a mixture whose weights do not follow the model."""
        return self.learner is not None and self.learner.report(chunk, nats, tokens)

    def settle(self, wait_s: float) -> bool:
        """Wait for the weights that follow from what was reported; False where that takes longer."""
        return self.learner is None or self.learner.settle(wait_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the run's log and, but for one of `of_run`, of what reads the documents."""
        if self.learner is not None:
            self.learner.close()
        if not self.is_shared:
            self._open.close()

    def places(self, turns: Turns) -> tuple[np.ndarray, np.ndarray]:
        """(file int32 [n], row int64 [n]) of the documents of some turns."""
        number = self._firsts[turns.domain] + self.distributor.orders.units(turns)
        interval = np.searchsorted(self._ends, number, side="right")
        return self._file[interval], self._end[interval] - (self._ends[interval] - number)

    def read(self, first: int, n_chunks: int) -> Any:
        """An Arrow table of chunks first, first + 1, ...: domain int32, and text or ids (list of int32).

        Of tars the second column is `sample`, as tars.column_of has it.
        Fewer rows than chunk_size * n_chunks come where the data end: the last chunk may be shorter.
        NotYetError (a ValueError) for chunks whose weights follow from losses that nobody has reported.
        """
        if self._open.is_closed:
            raise ValueError(f"{self.spec.path}: the documents were closed; open them again")
        known_to = self.distributor.weights.known_to
        if known_to is not None and n_chunks and first + n_chunks > known_to:
            self.settle(SETTLE_S)
        return self._read_turns(self.distributor.chunks(first, n_chunks))

    def read_pieces(self, start: Position, n_chunks: int) -> Iterator[Any]:
        """The rows of `n_chunks` chunks from a position on, in tables of about PIECE_BYTES; at least one
        table.

        Each is read when it is requested, so that an answer of any length holds one of them.
        """
        n_rows, is_first = self._first_rows, True
        for made in range(0, max(n_chunks, 1), AT_ONCE_CHUNKS):
            turns, start = self.distributor.chunks_from(start, min(AT_ONCE_CHUNKS, n_chunks - made))
            begin = 0
            while begin < len(turns.domain) or is_first:
                piece = slice(begin, begin + n_rows)
                table = self._read_turns(Turns(turns.domain[piece], turns.number[piece]))
                begin, is_first = begin + n_rows, False
                n_rows = min(MOST_PIECE_ROWS, max(1, PIECE_BYTES * len(table) // max(1, table.nbytes)))
                yield table

    def _read_turns(self, turns: Turns) -> Any:
        """The table of `read` for some units."""
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
        kind = next(iter(kinds), arrow.large_string())
        name = "ids" if arrow.types.is_list(kind) else "sample" if arrow.types.is_struct(kind) else "text"
        whole = arrow.concat_arrays(parts) if parts else arrow.array([], arrow.large_string())
        return arrow.table({"domain": turns.domain, name: whole.take(arrow.array(back))})


class _Lines:
    """Lines of JSON; `begins` and `sizes` of the documents."""

    def __init__(
        self, path: Path, key: str, places: tuple[np.ndarray, np.ndarray], scratch: Any, files: SpanFiles
    ) -> None:
        self.begins, self.sizes = places
        self.path, self.key, self.scratch, self.files = path, key, scratch, files
        files.add(path)

    def read(self, numbers: np.ndarray) -> Any:
        """Texts of documents int64 [n]: Arrow large_string. ValueError for lines that hold no text."""
        arrow = pyarrow()
        # without its end, which the last line of a file may not have
        lines = self.files.read_binary(self.path, self.begins[numbers], self.sizes[numbers] - 1)
        try:
            try:
                return self._texts(lines)
            except (duckdb().Error, arrow.ArrowException):
                # the lines were read when they were registered: it is what was mended then
                mended = [without_lone_surrogates(line) for line in lines.to_pylist()]
                return self._texts(arrow.array(mended, arrow.large_binary()))
        except (duckdb().Error, arrow.ArrowException) as error:
            raise ValueError(
                f"{self.path}: got lines that are not JSON ({str(error).splitlines()[0]}). Register it again."
            ) from error

    def _texts(self, lines: Any) -> Any:
        key = self.key.replace("'", "''").replace('"', '\\"')
        arrow = pyarrow()
        self.scratch.register("lines", arrow.table({"record": lines.cast(arrow.large_string())}))
        try:
            told = self.scratch.sql(f"SELECT json_extract_string(record, '$.\"{key}\"') AS text FROM lines")
            texts = told.to_arrow_table().column("text")
            return arrow.concat_arrays([part.cast(arrow.large_string()) for part in texts.chunks])
        finally:
            self.scratch.unregister("lines")


class _Samples:
    """A tar; `begins` and `sizes` of the samples."""

    def __init__(self, path: Path, key: str, places: tuple[np.ndarray, np.ndarray], files: SpanFiles) -> None:
        self.begins, self.sizes = places
        self.path, self.key, self.files = path, key, files
        files.add(path)

    def read(self, numbers: np.ndarray) -> Any:
        """Samples int64 [n], as tars.column_of has them. ValueError for bytes that are no samples."""
        samples = self.files.read_binary(self.path, self.begins[numbers], self.sizes[numbers])
        try:
            return column_of(samples.to_pylist(), self.key)
        except (TarError, ValueError) as error:
            raise ValueError(f"{self.path}: got no samples ({error}). Register it again.") from error


class _Pair:
    """Token ids of a .bin/.idx dataset; 12 bytes a document of its index are kept, the index is not read
    again."""

    def __init__(self, prefix: Path, files: SpanFiles) -> None:
        index = IndexedTokens(prefix)
        self.begins, lengths = index.document_spans(np.arange(index.n_documents))
        self.lengths, self.dtype = lengths.astype(np.int32), index.dtype
        self.path, self.files = Path(f"{prefix}.bin"), files
        files.add(self.path)

    def read(self, numbers: np.ndarray) -> Any:
        """Ids of documents int64 [n]: Arrow lists of int32."""
        lengths, width = self.lengths[numbers].astype(np.int64), self.dtype.itemsize
        content = self.files.read(self.path, self.begins[numbers] * width, lengths * width)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pyarrow().ListArray.from_arrays(offsets, content.view(self.dtype).astype(np.int32))


@dataclass
class _Open:
    """What the readers of a mixture share: open files, row groups, and DuckDB for lines."""

    scratch: Any
    files: SpanFiles
    groups: Recent
    is_closed: bool = False

    @classmethod
    def make(cls) -> "_Open":
        return cls(connect_scratch(n_threads=1), SpanFiles(), Recent(GROUPS_BYTES))

    def close(self) -> None:
        self.is_closed = True
        self.scratch.close()
        self.files.close()
        self.groups.clear()


def _reader(
    file: SourceFile,
    places: tuple[np.ndarray, np.ndarray],
    folder: Path,
    shared: _Open,
    roots: Sequence[Path],
) -> _Lines | _Samples | ParquetTexts | _Pair:
    path = file.unchanged()
    if path.resolve() != path:
        raise ValueError(f"{path}: was a file when it was registered, and is a link to {path.resolve()}")
    if roots and not any(path.is_relative_to(root.resolve()) for root in roots):
        raise ValueError(f"{path}: lies in none of {', '.join(map(str, roots))}; add its folder as a --root")
    if path.suffix == ".bin":
        return _Pair(path.with_suffix(""), shared.files)
    if path.suffix == ".parquet":
        return ParquetTexts(file, places[0], shared.groups)
    if file.path.endswith(TARS):
        return _Samples(file.plain(folder), file.text_key, places, shared.files)
    return _Lines(file.plain(folder), file.text_key, places, shared.scratch, shared.files)
