"""Queries over a catalog: the documents that satisfy conditions, in domains, as intervals in Arrow.

A condition is SQL over the properties, or a Python expression (`expression`). SQL is parsed and not trusted:
only comparisons, logic and the functions in `conditions` are allowed, and every column must be a property of
a corpus.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.io import atomic_path, wait_for_lock
from megatron.log import get_logger
from megatron.mixture.catalog.catalog import Catalog, Corpus
from megatron.mixture.catalog.commits import RegisteredFile
from megatron.mixture.catalog.computed import ComputedColumns
from megatron.mixture.catalog.conditions import build_filters
from megatron.mixture.catalog.expression import Condition
from megatron.mixture.catalog.input_files import hash_content
from megatron.mixture.catalog.intervals import (
    TOKENS_COLUMN,
    FileNumbers,
    GatheredDocuments,
    UnknownFileError,
)
from megatron.mixture.catalog.list_domains import split_list_domains
from megatron.mixture.catalog.properties import quote_identifier
from megatron.mixture.lazy_imports import import_duckdb, import_pyarrow
from megatron.text.text_readers import iter_blocks

COMPRESSED = (".gz", ".zst")
BUILTIN_PROPERTIES = {"corpus": "category", "tokens": "integer", "size": "integer"}  # type by name
BATCH_ROWS = 1 << 17
INTERVALS = ("domain", "file", "begin", "end")

log = get_logger(__name__)


@dataclass(frozen=True)
class Query:
    """Conditions over corpora of a catalog. A document must satisfy all of them.

    list_domains   domain of a document with several values of a property: see `list_domains`
    weighted       values of properties that take precedence in the choice of that domain
    """

    corpora: tuple[str, ...] = ()  # empty: all
    conditions: tuple[str | Condition, ...] = ()
    list_domains: str = "once"
    weighted: Mapping[str, Collection[str]] = field(default_factory=dict)

    def where(self, condition: str | Condition) -> "Query":
        """Return this query with one more condition: SQL, or an expression of `field`s."""
        return replace(self, conditions=(*self.conditions, condition))

    def run(self, catalog: Catalog, by: Sequence[str] = (), count_tokens: bool = False) -> "QueryResult":
        """Return the documents in domains, one for each combination of the properties `by`.

        Raises ValueError for an invalid condition, for an unknown column (with the nearest name), if no
        document satisfies the conditions, and if tokens are to be counted and a document has no count.
        """
        corpora = [catalog.get_corpus(name) for name in self.corpora] or catalog.list_corpora()
        computed = ComputedColumns(catalog.path, corpora)
        registered = {prop.name: prop.kind for corpus in corpora for prop in corpus.properties}
        kinds = computed.kinds | registered | BUILTIN_PROPERTIES
        for name in by:
            if name not in kinds:
                raise ValueError(f"domains: no property {name!r}; {suggest_nearest(name, sorted(kinds))}")
        duckdb = import_duckdb()
        filters = build_filters(catalog.connection, self.conditions, kinds)
        columns = [duckdb.ColumnExpression(name) for name in ("file", "row", *by)]
        columns += [duckdb.ColumnExpression("tokens").alias(TOKENS_COLUMN)] * count_tokens
        n_most = catalog.count_documents(corpora)
        files = load_source_files(catalog)
        tables = computed.join(catalog.connection, [*by, *map(str, self.conditions)], files)
        batches = _select_documents(catalog, corpora, sorted(kinds), columns, filters, tables)
        lists = [name for name in by if kinds[name] == "list"]
        batches = split_list_domains(batches, lists, self.list_domains, files, self.weighted)
        keys = np.array([file.entry.key for file in catalog.files], dtype=np.int64)
        try:
            gathered = GatheredDocuments.from_batches(batches, n_most, tuple(by), FileNumbers(keys))
        except UnknownFileError as error:
            raise ValueError(f"{catalog.path}: {error}") from error
        if not gathered.domains:
            condition_text = " AND ".join(map(str, self.conditions)) or "that"
            raise ValueError(f"{catalog.path}: no document satisfies {condition_text}")
        if gathered.n_without_tokens:
            raise ValueError(
                f"{catalog.path}: tokens of {gathered.n_without_tokens:,} of {len(gathered.domain):,} "
                "documents are not counted. Register them with --tokenizer-model, or let weights count "
                "documents (count: documents)."
            )
        domains, tokens, used, table = gathered.compute_intervals()
        used_files = tuple(_make_source_file(catalog.files[number]) for number in used)
        n_tokens = tuple(tokens) if count_tokens else None
        return QueryResult(tuple(by), domains, used_files, table, n_tokens, snapshot=catalog.snapshot.id)


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was registered.

    id   identifies the registration of this content in every snapshot, int64
    """

    id: int
    path: str
    text_key: str
    n_bytes: int
    mtime_ns: int
    n_documents: int
    sha256: str | None = None

    def verify(self) -> None:
        """Raise ValueError if the content differs, even if size and modification time are equal."""
        path = self.check_unchanged()
        if self.sha256 is None:
            raise ValueError(f"{path}: was registered without a checksum. Register it again with --verify.")
        if hash_content(path) != self.sha256:
            raise ValueError(
                f"{path}: got other content than was registered, with the same size and modification time. "
                "Restore the file, or register it again with --verify."
            )

    def check_unchanged(self) -> Path:
        """Return the path.

        Raises FileNotFoundError, or ValueError if size or modification time are not as registered.
        """
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: is in the catalog but missing on disk. Restore it, or register the corpus again."
            )
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (self.n_bytes, self.mtime_ns):
            raise ValueError(f"{path}: has changed since it was registered. Register it again.")
        return path

    def unpack(self, folder: Path) -> Path:
        """Return a path that allows random access: the file, or its content, decompressed into `folder`."""
        path = self.check_unchanged()
        if not path.name.endswith(COMPRESSED):
            return path
        # a changed file has another name here, so that an old content is never read in its place
        name = hashlib.sha256(json.dumps([self.path, self.n_bytes, self.sha256]).encode()).hexdigest()[:16]
        plain = folder / "unpacked" / f"{name}-{self.mtime_ns}"
        if plain.is_file():
            return plain
        plain.parent.mkdir(parents=True, exist_ok=True)
        # one process unpacks it, and the others wait
        with wait_for_lock(plain.with_name(plain.name + ".lock")):
            if not plain.is_file():
                with atomic_path(plain) as partial, partial.open("wb") as sink:
                    sink.writelines(iter_blocks(path))
        return plain


@dataclass(frozen=True)
class QueryResult:
    """Documents in domains. Rows of a file are those of its documents, counted from 0.

    by          the properties that define a domain
    domains     their values, a tuple for each domain, in the order of the values
    files       the files that contain the documents
    intervals   Arrow table: domain int32, file int32 (index into `files`), begin and end int64 (rows);
                sorted by domain, file and row
    n_tokens    tokens of each domain, if they were requested
    mixture     identity of the prepared mixture that the result was saved for
    snapshot    id of the catalog's snapshot
    """

    by: tuple[str, ...]
    domains: tuple[tuple[Any, ...], ...]
    files: tuple[SourceFile, ...]
    intervals: Any
    n_tokens: tuple[int, ...] | None = None
    mixture: str | None = None
    snapshot: str | None = None

    def get_column(self, name: str) -> np.ndarray:
        """Return one column of the intervals, without a copy."""
        return self.intervals.column(name).combine_chunks().to_numpy(zero_copy_only=False)

    @property
    def n_documents(self) -> np.ndarray:
        """Number of documents of each domain, int64."""
        lengths = self.get_column("end") - self.get_column("begin")
        counts = np.zeros(len(self.domains), dtype=np.int64)
        # not +=, which would add only one of several intervals of the same domain
        np.add.at(counts, self.get_column("domain"), lengths)
        return counts

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the domains: their values joined by a slash."""
        return tuple("/".join(map(str, values)) or "all" for values in self.domains)

    def compute_identity(self) -> str:
        """Return a hash, 64 hex digits, of the documents and their domains.

        It covers the content of the files as registered, but not the folders that contain them.
        """
        sums = hashlib.sha256(
            json.dumps([self.by, self.domains, self._list_contents()], default=str).encode()
        )
        for name in INTERVALS:
            sums.update(np.ascontiguousarray(self.get_column(name)).data)
        return sums.hexdigest()

    def save(self, path: Path) -> None:
        """Write the result as one Arrow file, atomically."""
        arrow = import_pyarrow()
        meta = {"by": self.by, "domains": self.domains, "files": [vars(file) for file in self.files],
                "n_tokens": self.n_tokens, "mixture": self.mixture, "snapshot": self.snapshot}  # fmt: skip
        table = self.intervals.replace_schema_metadata({"mixture": json.dumps(meta, default=str)})
        with (
            atomic_path(path) as partial,
            arrow.OSFile(str(partial), "wb") as sink,
            arrow.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    @classmethod
    def load(cls, path: Path) -> "QueryResult":
        """Load a result that `save` wrote. Raises FileNotFoundError, or ValueError for other files."""
        arrow = import_pyarrow()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such query result")
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_file(source) as reader:
                # the columns are pages of the map: nothing is copied, and only what is used is read
                return cls.from_table(reader.read_all())
        except (arrow.ArrowException, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: not a query result ({str(error).splitlines()[0]}). Run the query again."
            ) from error

    @classmethod
    def from_table(cls, table: Any) -> "QueryResult":
        """Return the result from a table of intervals whose schema metadata contains the rest."""
        meta = json.loads(table.schema.metadata[b"mixture"])
        files = tuple(SourceFile(**file) for file in meta["files"])
        domains = tuple(tuple(values) for values in meta["domains"])
        n_tokens = meta.get("n_tokens") and tuple(meta["n_tokens"])
        intervals = table.replace_schema_metadata(None)
        names = meta.get("mixture"), meta.get("snapshot")
        return cls(tuple(meta["by"]), domains, files, intervals, n_tokens, *names)

    def warn_missing_checksums(self, catalog: Path | str) -> None:
        """Log a warning if an older catalog has no checksums of files."""
        n = sum(file.sha256 is None for file in self.files)
        if n:
            log.warning(
                "%s: %d of %d files were registered without checksums. An edit that keeps the size is not "
                "detected once it is registered again. Register them again with --verify.",
                catalog, n, len(self.files),
            )  # fmt: skip

    def _list_contents(self) -> list[tuple[str | int, ...]]:
        return [
            (Path(file.path).name, file.n_bytes) + (() if file.sha256 is None else (file.sha256,))
            for file in self.files
        ]


def _select_documents(
    catalog: Catalog, corpora: Sequence[Corpus], properties: Sequence[str], columns: Sequence[Any],
    filters: Sequence[Any], tables: Mapping[str, tuple[str, list[str]]],
) -> Iterator[Any]:  # fmt: skip
    """Yield `columns` (expressions) of the documents that satisfy all `filters`, as Arrow batches.

    tables   of each corpus by name: its table in SQL, and the computed properties that it has
    """
    parts = []
    for corpus in corpora:
        table, computed = tables[corpus.name]
        available = {prop.name for prop in corpus.properties} | {"tokens", "size", *computed}
        # All corpora get the same columns, so that they can be united; a missing property is NULL.
        # chr(39) is the quote, which an f-string before Python 3.12 cannot contain in an expression.
        columns_sql = [f"'{corpus.name.replace(chr(39), chr(39) * 2)}' AS corpus"]
        columns_sql += [
            quote_identifier(name) if name in available else f"NULL AS {quote_identifier(name)}"
            for name in properties
            if name != "corpus"
        ]
        parts.append(f"SELECT file, row, {', '.join(columns_sql)} FROM {table}")
    try:
        documents = catalog.connection.sql(" UNION ALL ".join(parts))
        for condition in filters:
            documents = documents.filter(condition)
        yield from documents.select(*columns).to_arrow_reader(BATCH_ROWS)
    except (import_duckdb().Error, import_pyarrow().ArrowException) as error:
        where = " ".join(" AND ".join(map(str, filters)).split())
        raise ValueError(f"where {where}: {str(error).splitlines()[0]}") from error


def load_source_files(catalog: Catalog) -> dict[int, SourceFile]:
    """Return all files of a catalog by the key of their entry, which is in the column `file`."""
    return {file.entry.key: _make_source_file(file) for file in catalog.files}


def _make_source_file(file: RegisteredFile) -> SourceFile:
    entry = file.entry
    times = entry.n_bytes, entry.mtime_ns
    return SourceFile(entry.key, entry.path, file.corpus.text_key, *times, entry.n_documents, entry.sha256)
