"""The catalog: a DuckDB file with the location and the properties of every document.

A corpus is a set of files that share properties. Each corpus has its own table, with one row per document.
The text stays in the original files. Every file is registered in one transaction, so that a registration
that was killed resumes with the file that it had not finished.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.mixture.catalog.catalog_access import connect_catalog, list_columns
from megatron.mixture.catalog.histogram import HistogramRow, count_values
from megatron.mixture.catalog.input_files import find_input_files, hash_content, stat_file
from megatron.mixture.catalog.properties import Property, quote_identifier
from megatron.mixture.catalog.records import FileTarget, RecordCounts, register_file
from megatron.mixture.catalog.small_files import batch_files, register_small_files
from megatron.mixture.catalog.tars import MAX_SAMPLE_BYTES
from megatron.mixture.lazy_imports import connect_scratch, fetch_rows, import_pyarrow
from megatron.terminal import ProgressBar
from megatron.text.token_counts import TokenCounter

SCHEMA = """
CREATE SEQUENCE IF NOT EXISTS numbers START 1;
CREATE TABLE IF NOT EXISTS corpora (id INTEGER, name VARCHAR, text_key VARCHAR, properties VARCHAR);
ALTER TABLE corpora ADD COLUMN IF NOT EXISTS tokenizer VARCHAR;
CREATE TABLE IF NOT EXISTS files (id INTEGER, corpus INTEGER, path VARCHAR, bytes BIGINT, mtime_ns BIGINT,
    n_documents BIGINT, n_broken BIGINT);
ALTER TABLE files ADD COLUMN IF NOT EXISTS sha256 VARCHAR;
CREATE TABLE IF NOT EXISTS broken (file INTEGER, line BIGINT, reason VARCHAR);
"""
FILE_COLUMNS = ("id", "corpus", "path", "bytes", "mtime_ns", "n_documents", "n_broken", "sha256")


@dataclass(frozen=True)
class Corpus:
    """Entry of a corpus in the catalog.

    tokenizer   the tokenizer that counted the tokens; None if they are not counted
    """

    id: int
    name: str
    text_key: str
    properties: tuple[Property, ...]
    tokenizer: dict[str, Any] | None = None

    @property
    def table(self) -> str:
        """Name of the table of its documents."""
        return f"documents_{self.id}"

    @property
    def compatibility_key(self) -> tuple[Any, ...]:
        """Properties that must be equal when files are added.

        The tokenizer is compared without its name, because its path may differ.
        """
        return self.properties, self.text_key, self.tokenizer and self.tokenizer | {"name": None}


@dataclass
class RegistrationResult:
    """Counts of one registration.

    n_known   files that were registered before and have not changed
    n_edited  those of `n_files` that kept size and modification time, but have other content
    absent    properties that no document of the corpus has, usually because they are misspelt
    """

    n_files: int = 0
    n_known: int = 0
    n_documents: int = 0
    n_broken: int = 0
    n_edited: int = 0
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class CorpusSummary:
    """Totals of one corpus."""

    name: str
    n_files: int
    n_documents: int
    n_broken: int
    n_tokens: int | None
    properties: tuple[str, ...]


class Catalog:
    """Open catalog; a context manager. One process may write to it, or any number of processes may read."""

    def __init__(self, path: Path, read_only: bool = False, n_threads: int | None = None) -> None:
        """Open a catalog, and create it if it is missing and not `read_only`.

        Raises ValueError for a file that is not a catalog, or to which another process is writing.
        """
        self.path, self._n_threads = path, n_threads
        self._scratch_connection: Any = None
        self.connection = connect_catalog(path, read_only, n_threads)
        if not read_only:
            fetch_rows(self.connection, SCHEMA)
        self.has_checksums = "sha256" in list_columns(self.connection, "files")  # older catalogs have none

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._scratch_connection is not None:
            self._scratch_connection.close()
        self.connection.close()

    def list_corpora(self) -> list[Corpus]:
        """Return all corpora in the order in which they were registered."""
        records = fetch_rows(self.connection, "SELECT * FROM corpora ORDER BY id")
        return [
            Corpus(
                id,
                name,
                key,
                tuple(Property(**fields) for fields in json.loads(properties_json)),
                json.loads(tokenizer_json[0]) if tokenizer_json and tokenizer_json[0] else None,
            )  # fmt: skip
            for id, name, key, properties_json, *tokenizer_json in records  # older catalogs have no tokenizer
        ]

    def get_corpus(self, name: str) -> Corpus:
        """Return the corpus of that name. The ValueError for an unknown name suggests the nearest one."""
        by_name = {corpus.name: corpus for corpus in self.list_corpora()}
        if name not in by_name:
            raise ValueError(f"{self.path}: no corpus {name!r}; {suggest_nearest(name, list(by_name))}")
        return by_name[name]

    def register(
        self, name: str, inputs: Sequence[str], properties: Sequence[Property],
        text_key: str = "text", quiet: bool = False, counter: TokenCounter | None = None,
        verify: bool = False, member_bytes: int = MAX_SAMPLE_BYTES,
    ) -> RegistrationResult:  # fmt: skip
        """Add new and changed files to a corpus: JSON lines, parquet, tar archives, or .bin/.idx datasets.

        counter        counts the tokens of each document; those of a .bin/.idx dataset are in its index
        verify         read registered files too, and compare their content; by default a file with the same
                       size and modification time is skipped
        member_bytes   size limit of one sample of a tar archive

        Broken lines are counted and located; `list_broken` returns them. Raises ValueError if the corpus has
        other properties or another tokenizer, or if a file cannot be read. The files before it stay
        registered. Small files are registered in batches: all files of a batch, or none.
        """
        paths = [path.resolve() for path in find_input_files(inputs)]
        tokenizer = None if counter is None else counter.settings
        corpus = self._get_or_create_corpus(Corpus(0, name, text_key, tuple(properties), tokenizer))
        registered = {
            path: (id, (size, mtime), sha256)
            for id, path, size, mtime, sha256 in fetch_rows(
                self.connection,
                "SELECT id, path, bytes, mtime_ns, sha256 FROM files WHERE corpus = ?",
                [corpus.id],
            )
        }
        result = RegistrationResult()
        # in bytes, because the number of documents is not known before the files are read
        total = sum(path.stat().st_size for path in paths)
        with (
            ProgressBar("registering", total, "B", quiet=quiet) as bar,
            ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing,
        ):
            new = []
            for path in paths:
                old = registered.get(str(path))
                if (
                    old is not None
                    and old[1] == stat_file(path)
                    and (not verify or self._has_same_content(path, *old))
                ):
                    result.n_known += 1
                    bar.update(old[1][0])
                else:
                    result.n_edited += old is not None and old[1] == stat_file(path)
                    new.append(path)
            # one transaction per batch: a killed registration keeps its finished batches
            for batch in batch_files(new):
                ids = [registered[str(path)][0] if str(path) in registered else None for path in batch]
                for records in self._register_files(corpus, batch, ids, counter, member_bytes, hashing):
                    result.n_documents += records.n_documents
                    result.n_broken += records.n_broken
                result.n_files += len(batch)
                bar.update(sum(path.stat().st_size for path in batch))
        result.absent = self._find_absent_properties(corpus)
        return result

    def _find_absent_properties(self, corpus: Corpus) -> tuple[str, ...]:
        """Return the properties that no document of the corpus has."""
        counts = "".join(f", count({quote_identifier(prop.name)})" for prop in corpus.properties)
        ((n_documents, *n_having),) = fetch_rows(
            self.connection, f"SELECT count(*){counts} FROM {corpus.table}"
        )
        named = zip(corpus.properties, n_having, strict=True)
        return tuple(prop.name for prop, n in named if n_documents and not n)

    def summarize_corpora(self) -> list[CorpusSummary]:
        """Return the totals of every corpus."""
        summaries = []
        for corpus in self.list_corpora():
            ((n_files, n_documents, n_broken),) = fetch_rows(self.connection, 
                "SELECT count(*), coalesce(sum(n_documents), 0), coalesce(sum(n_broken), 0) "
                "FROM files WHERE corpus = ?", [corpus.id],
            )  # fmt: skip
            ((n_tokens,),) = fetch_rows(self.connection, f"SELECT sum(tokens) FROM {corpus.table}")
            names = tuple(prop.name for prop in corpus.properties)
            summaries.append(
                CorpusSummary(corpus.name, n_files, int(n_documents), int(n_broken), n_tokens, names)
            )
        return summaries

    def describe_corpus(self, name: str) -> dict[str, list[HistogramRow]]:
        """Return (value, documents, tokens) for each property of a corpus: see `count_values`."""
        corpus = self.get_corpus(name)
        return {prop.name: count_values(self.connection, corpus.table, prop) for prop in corpus.properties}

    def list_broken(self, name: str) -> list[tuple[str, int, str]]:
        """Return (file, line or row from 1, reason) of the records that are not documents.

        At most the first thousand of each file are listed.
        """
        return fetch_rows(self.connection, 
            "SELECT path, line, reason FROM broken JOIN files ON files.id = broken.file "
            "WHERE corpus = ? ORDER BY path, line", [self.get_corpus(name).id],
        )  # fmt: skip

    def count_documents(self, corpora: Sequence[Corpus]) -> int:
        """Return the number of documents of some corpora together."""
        query = "SELECT corpus, CAST(sum(n_documents) AS BIGINT) FROM files GROUP BY 1"
        counts = dict(fetch_rows(self.connection, query))
        return sum(counts.get(corpus.id, 0) for corpus in corpora)

    def locate_texts(self, files: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return (begin int64, size int64, or int32 if that suffices) of the documents of each file.

        Begin and size are the bytes of a line or a sample. In parquet, begin is the row.
        """
        spans: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        tables, requested = {corpus.id: corpus.table for corpus in self.list_corpora()}, set(files)
        for file, corpus in fetch_rows(self.connection, "SELECT id, corpus FROM files"):
            if file in requested:
                table = self.connection.sql(
                    f"SELECT begin, size FROM {tables[corpus]} WHERE file = {int(file)} ORDER BY row"
                ).to_arrow_table()
                begins, sizes = (table.column(name).to_numpy() for name in ("begin", "size"))
                narrow = not len(sizes) or sizes.max() <= np.iinfo(np.int32).max
                spans[file] = begins.copy(), sizes.astype(np.int32 if narrow else np.int64)
        return spans

    def remove(self, name: str) -> None:
        """Remove a corpus from the catalog. Its files stay as they are."""
        corpus = self.get_corpus(name)
        with self._transaction():
            for (file,) in fetch_rows(self.connection, "SELECT id FROM files WHERE corpus = ?", [corpus.id]):
                fetch_rows(self.connection, "DELETE FROM broken WHERE file = ?", [file])
            fetch_rows(self.connection, "DELETE FROM files WHERE corpus = ?", [corpus.id])
            fetch_rows(self.connection, "DELETE FROM corpora WHERE id = ?", [corpus.id])
            fetch_rows(self.connection, f"DROP TABLE {corpus.table}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        fetch_rows(self.connection, "BEGIN")
        try:
            yield
        except BaseException:
            fetch_rows(self.connection, "ROLLBACK")
            raise
        fetch_rows(self.connection, "COMMIT")

    def _open_scratch(self) -> Any:
        if self._scratch_connection is None:
            self._scratch_connection = connect_scratch(self._n_threads)
        return self._scratch_connection

    def _next_id(self) -> int:
        return fetch_rows(self.connection, "SELECT nextval('numbers')")[0][0]

    def _get_or_create_corpus(self, requested: Corpus) -> Corpus:
        """Return the corpus with the name of `requested`, created if missing. Its id is ignored."""
        for existing in self.list_corpora():
            if existing.name == requested.name:
                if existing.compatibility_key != requested.compatibility_key:
                    tokenizer = (existing.tokenizer or {}).get("name")
                    raise ValueError(
                        f"{self.path}: corpus '{existing.name}' has the properties "
                        f"{'; '.join(map(str, existing.properties)) or 'none'}, its text under "
                        f"'{existing.text_key}', "
                        f"{f'tokens of {tokenizer}' if tokenizer else 'no tokenizer'}. "
                        "Use the same settings or another name, or remove the corpus first."
                    )
                return existing
        with self._transaction():
            corpus = replace(requested, id=self._next_id())
            properties_json = json.dumps([asdict(prop) for prop in corpus.properties])
            fetch_rows(
                self.connection,
                "INSERT INTO corpora VALUES (?, ?, ?, ?, ?)",
                [corpus.id, corpus.name, corpus.text_key, properties_json, json.dumps(corpus.tokenizer)],
            )
            columns = "".join(
                f", {quote_identifier(prop.name)} {prop.sql_type}" for prop in corpus.properties
            )
            fetch_rows(
                self.connection,
                f"CREATE TABLE {corpus.table} "
                f"(file INTEGER, row BIGINT, begin BIGINT, size BIGINT, tokens BIGINT{columns})",
            )
        return corpus

    def _has_same_content(
        self, path: Path, id: int, stamp: tuple[int, int], registered_sha256: str | None
    ) -> bool:
        """Return whether a registered file still has its content.

        The checksum is added if the file comes from an older catalog without checksums.
        """
        sha256 = hash_content(path)
        if registered_sha256 is None:
            fetch_rows(self.connection, "UPDATE files SET sha256 = ? WHERE id = ?", [sha256, id])
        return registered_sha256 in (None, sha256)

    def _register_files(
        self, corpus: Corpus, paths: Sequence[Path], old: Sequence[int | None], counter: TokenCounter | None,
        member_bytes: int, hashing: Executor,
    ) -> list[RecordCounts]:  # fmt: skip
        """Add files to a corpus, all of them or none.

        old   the ids of the entries that the files replace; None for a new file
        """
        # sizes and times are read before the content, and compared again at the end: a file that changes in
        # between fails the transaction
        stamps, checksums = [stat_file(path) for path in paths], hashing.map(hash_content, paths)
        with self._transaction():
            for id in filter(None, old):
                fetch_rows(self.connection, f"DELETE FROM {corpus.table} WHERE file = ?", [id])
                fetch_rows(self.connection, "DELETE FROM broken WHERE file = ?", [id])
                fetch_rows(self.connection, "DELETE FROM files WHERE id = ?", [id])
            ids = [
                id
                for (id,) in fetch_rows(
                    self.connection, f"SELECT nextval('numbers') FROM range({len(paths)})"
                )
            ]
            targets = [
                FileTarget(
                    path, self.connection, self._open_scratch(), corpus.table, id, corpus.text_key,
                    corpus.properties, counter, member_bytes,
                )
                for path, id in zip(paths, ids, strict=True)
            ]  # fmt: skip
            results = register_small_files(targets) if len(targets) > 1 else None
            results = results or [register_file(target) for target in targets]
            columns = (
                ids, [corpus.id] * len(ids), list(map(str, paths)), *zip(*stamps, strict=True),
                [records.n_documents for records in results],
                [records.n_broken for records in results], list(checksums),
            )  # fmt: skip
            table = import_pyarrow().table(dict(zip(FILE_COLUMNS, columns, strict=True)))
            self.connection.register("new_files", table)
            fetch_rows(
                self.connection, f"INSERT INTO files ({', '.join(FILE_COLUMNS)}) SELECT * FROM new_files"
            )
            self.connection.unregister("new_files")
            for id, records in zip(ids, results, strict=True):
                for line, reason in records.broken:
                    fetch_rows(self.connection, "INSERT INTO broken VALUES (?, ?, ?)", [id, line, reason])
            for path, stamp in zip(paths, stamps, strict=True):
                if stat_file(path) != stamp:
                    raise ValueError(f"{path}: changed while it was registered. Register it again.")
        return results
