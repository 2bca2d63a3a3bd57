"""The catalog: a folder or an object store with the location and the properties of every document.

A corpus is a set of files that share properties, and a Delta Lake table (`table.py`). The text stays in the
original files. Any number of processes and machines register and read at the same time, and earlier versions
of a corpus can be read until they are pruned.
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from glob import glob
from json import dumps
from pathlib import Path
from typing import Any, Self

from megatron.cli import ProgressBar
from megatron.config.presets import suggest_nearest
from megatron.mixture.files import (
    INPUT_SUFFIXES,
    PARTS_SUFFIX,
    SourceFile,
    hash_content,
    properties_path,
    stat_file,
)
from megatron.mixture.lazy_imports import connect_database, fetch_rows, import_duckdb, import_pyarrow
from megatron.mixture.properties import Property, quote_identifier, read_property
from megatron.mixture.records import RecordCounts, RecordFunction, RecordReader, read_small_files
from megatron.mixture.table import (
    KIND,
    META,
    Corpus,
    CorpusTable,
    is_object_url,
    list_tables,
    make_schema,
)
from megatron.mixture.tars import MAX_SAMPLE_BYTES
from megatron.text.token_counts import TokenCounter

SMALL_BYTES, BATCH_BYTES, BATCH_FILES = 1 << 20, 16 << 20, 1000  # of adjacent files that share a commit
MAX_VALUES, N_BINS = 20, 10  # values of a property that are listed, bins of numbers with more values
BINNED_KINDS = ("integer", "float", "date")

HistogramRow = tuple[Any, int, int | None]  # value, documents, tokens if they are counted


@dataclass
class RegistrationResult:
    """Counts of one registration.

    n_known       files that were registered before and have not changed
    n_edited      those of `n_files` that kept size and modification time, but have other content
    n_duplicates  files that another process registered at the same time, whose registration counts
    absent        properties that no new document has, usually because they are misspelt
    n_having      registered documents that have each property
    """

    n_files: int = 0
    n_known: int = 0
    n_documents: int = 0
    n_broken: int = 0
    n_edited: int = 0
    n_duplicates: int = 0
    absent: tuple[str, ...] = ()
    n_having: Counter[str] = field(default_factory=Counter)


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
    """Open catalog; a context manager. It shows the versions of its corpora when it was opened."""

    def __init__(
        self, path: Path | str, read_only: bool = False, n_threads: int | None = None,
        snapshot: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Open a catalog.

        path       a folder, or a URL such as s3://bucket/catalog; created by the first registration
        snapshot   versions of some corpora; the others are not shown; None: the current state of all

        Raises FileNotFoundError, or ValueError for something else than a catalog or an unknown version.
        """
        self.path: Path | str = str(path).rstrip("/") if is_object_url(path) else Path(path).absolute()
        self._read_only, self._n_threads = read_only, n_threads
        self.connection = connect_database(n_threads, self.path)
        self.tables: dict[str, CorpusTable] = {}
        self.files: tuple[SourceFile, ...] = ()
        names = list_tables(self.path) if snapshot is None else sorted(snapshot)
        if snapshot is None and not names:
            self._check_new()
        for name in names:
            self._show(CorpusTable(self.path, name, None if snapshot is None else snapshot[name]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def _check_new(self) -> None:
        """Raise unless a catalog without corpora is a new one."""
        path = Path(self.path)
        is_old = path.is_file() or (path / "commits").is_dir()
        # a folder without files is that of a corpus that another process creates
        if not is_object_url(self.path) and (is_old or any(child.is_file() for child in path.glob("*"))):
            content = "a catalog of an earlier version" if is_old else "a folder with other files"
            raise ValueError(
                f"{path}: got {content}, expected a catalog of Delta Lake tables. "
                "Register the files again, in a new folder."
            )
        if self._read_only:
            raise FileNotFoundError(f"{self.path}: no such catalog. Create it with tools/register_corpus.py.")

    def _show(self, table: CorpusTable) -> None:
        """Add the files and the view of a table; an empty table is not shown."""
        name = table.name
        try:
            files, dead = table.list_files(self.connection)
            table.scan(self.connection, "documents", f"all of {name}")
        except import_duckdb().Error as error:
            raise ValueError(
                f"{self.path}: {name} version {table.version} cannot be read ({str(error).splitlines()[0]}). "
                "Use a version that was not pruned, or register it again."
            ) from error
        self.files = tuple(file for file in self.files if file.corpus != name)
        self.tables.pop(name, None)
        if not files:
            return
        self.tables[name] = table
        # the number of a file depends on the documents only, and not on who registered them where and when
        self.files = tuple(sorted((*self.files, *files), key=SourceFile.order_key))
        where = f" WHERE file NOT IN ({', '.join(map(str, dead))})" if dead else ""
        source = quote_identifier(f"all of {name}")
        self.connection.execute(
            f"CREATE OR REPLACE TEMP VIEW {self.view(name)} AS SELECT * FROM {source}{where}"
        )

    def list_files(self, name: str) -> list[SourceFile]:
        """Return the files of a corpus."""
        return [file for file in self.files if file.corpus == name]

    @staticmethod
    def view(name: str) -> str:
        """Return the name of the view of the documents of a corpus, in SQL."""
        return quote_identifier(f"documents of {name}")

    @property
    def versions(self) -> dict[str, int]:
        """Version of each corpus, from which `snapshot` opens the same documents."""
        return {name: table.version for name, table in self.tables.items()}

    def list_corpora(self) -> list[Corpus]:
        """Return all corpora in the order of their names."""
        return [self.tables[name].corpus for name in sorted(self.tables)]

    def get_table(self, name: str) -> CorpusTable:
        """Return the table of a corpus. The ValueError for an unknown name suggests the nearest one."""
        if name not in self.tables:
            raise ValueError(f"{self.path}: no corpus {name!r}; {suggest_nearest(name, list(self.tables))}")
        return self.tables[name]

    def register(
        self, name: str, inputs: Sequence[str], properties: Sequence[Property],
        text_key: str = "text", quiet: bool = False, counter: TokenCounter | None = None,
        verify: bool = False, member_bytes: int = MAX_SAMPLE_BYTES, shard: tuple[int, int] = (0, 1),
        function: RecordFunction | None = None,
    ) -> RegistrationResult:  # fmt: skip
        """Add new and changed files to a corpus: JSON lines, parquet, tar archives, or .bin/.idx datasets.

        counter        counts the tokens of each document; those of a .bin/.idx dataset are in its index
        verify         read registered files too, and compare their content; by default a file with the same
                       size and modification time is skipped
        member_bytes   size limit of one sample of a tar archive
        shard          (k, n): only files k, k + n, ... of the inputs, for n processes at once
        function       called with each record; its values are merged into the record

        Broken lines are counted and located; `list_broken` returns them. Raises ValueError if the corpus has
        other properties or another tokenizer, or if a file cannot be read. The files before it stay
        registered. Small files are registered in batches: all files of a batch, or none.
        """
        self._check_writable()
        paths = [path.resolve() for path in find_input_files(inputs)][shard[0] :: shard[1]]
        tokenizer = None if counter is None else counter.settings
        table = self._open_for_writing(Corpus(name, text_key, tuple(properties), tokenizer))
        result, new = RegistrationResult(), []
        with (
            connect_scratch(self._n_threads) as scratch,
            ProgressBar("registering", sum(path.stat().st_size for path in paths), "B", quiet=quiet) as bar,
            ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing,
        ):
            reader = RecordReader(scratch, text_key, tuple(properties), counter, member_bytes, function)
            before = {entry.path: entry for entry in table.list_files(self.connection)[0]}
            for path in paths:
                entry = before.get(str(path))
                is_stamped = entry is not None and entry.stamp == stat_file(path)
                if entry is not None and is_stamped and (not verify or hash_content(path) == entry.sha256):
                    result.n_known += 1
                    bar.update(path.stat().st_size)
                else:
                    result.n_edited += is_stamped
                    new.append(path)
            # one commit per batch: a killed registration keeps its finished batches
            for batch in batch_files(new):
                rest = self._skip_registered(table, batch, before, result)
                if rest:
                    batch_writer = _BatchWriter(rest, reader, table.corpus, hashing)
                    table.append(batch_writer.iter_batches())
                    batch_writer.count(result)
                bar.update(sum(path.stat().st_size for path in batch))
        dead = table.list_files(self.connection)[1]
        if dead:
            # another writer may add rows meanwhile: readers skip the dead ones until the next registration
            with suppress(ValueError):
                table.delete(dead)
        self._show(table)
        result.absent = self._find_absent(table.corpus, result)
        return result

    def _open_for_writing(self, corpus: Corpus) -> CorpusTable:
        """Return the current table of a corpus. Raises ValueError if it has other settings."""
        try:
            table = CorpusTable(self.path, corpus.name)
        except FileNotFoundError:
            table = CorpusTable.create(self.path, corpus)
        existing = table.corpus
        if existing.compatibility_key == corpus.compatibility_key:
            return table
        if not table.list_files(self.connection)[0]:
            return CorpusTable.create(self.path, corpus, replace=True)  # it was removed
        tokenizer = (existing.tokenizer or {}).get("name")
        raise ValueError(
            f"{self.path}: corpus '{corpus.name}' has the properties "
            f"{'; '.join(map(str, existing.properties)) or 'none'}, its text under '{existing.text_key}', "
            f"{f'tokens of {tokenizer}' if tokenizer else 'no tokenizer'}. "
            "Use the same settings or another name, or remove the corpus first."
        )

    def _skip_registered(
        self, table: CorpusTable, batch: list[Path], before: dict[str, SourceFile], result: RegistrationResult
    ) -> list[Path]:
        """Return the files of a batch that no other process has registered since the beginning."""
        if not table.refresh():
            return batch
        now = {entry.path: entry for entry in table.list_files(self.connection)[0]}
        entries = [now.get(str(path)) for path in batch]
        rest = [
            path for path, entry in zip(batch, entries, strict=True)
            if entry is None or entry == before.get(str(path)) or entry.stamp != stat_file(path)
        ]  # fmt: skip
        result.n_duplicates += len(batch) - len(rest)
        return rest

    def _find_absent(self, corpus: Corpus, result: RegistrationResult) -> tuple[str, ...]:
        """Return the properties that no document of the corpus has."""
        if not result.n_documents:
            return ()
        # a query only for those that no new document has: it reads the whole column if there is no value
        names = [prop.name for prop in corpus.properties if not result.n_having[prop.name]]
        query = f"SELECT 1 FROM {self.view(corpus.name)} WHERE {{}} IS NOT NULL LIMIT 1"
        return tuple(name for name in names if not self._fetch(query.format(quote_identifier(name))))

    def add_property(self, name: str, prop: str, values: Path) -> int:
        """Add a property to the documents of a corpus, or replace it; return the number of documents.

        prop     'NAME TYPE', or the NAME of a string
        values   parquet with the columns path (as registered), row (from 0, without broken lines) and NAME

        Raises ValueError for a file without these columns, and for repeated or unknown documents.
        """
        self._check_writable()
        table = self.get_table(name)
        added = read_property(f"{prop.split()[0]} AS {prop}")
        if added.name in {old.name for old in table.corpus.properties}:
            raise ValueError(f"{name}: got '{added.name}', a property of the registration. Use another name.")
        others = tuple(old for old in table.corpus.added if old.name != added.name)
        corpus = replace(table.corpus, added=(*others, added))
        schema, arrow, column = make_schema(corpus), import_pyarrow(), quote_identifier(added.name)
        files = self.list_files(name)
        try:
            rows = arrow.parquet.read_table(values, columns=["path", "row", added.name])
            listed = {"path": [file.path for file in files], "file": [file.id for file in files]}
            self.connection.register("listed_files", arrow.table(listed))
            self.connection.register("given_rows", rows)
            given = f"SELECT file, row, {column} AS value FROM given_rows JOIN listed_files USING (path)"
            columns = [
                f"d.{quote_identifier(col)}" for col in schema.names if col not in (KIND, META, added.name)
            ]
            documents = self.connection.sql(
                f"SELECT {', '.join(columns)}, CAST(value AS {added.sql_type}) AS {column}, "
                f"g.file IS NOT NULL AS given FROM {self.view(name)} d "
                f"LEFT JOIN ({given}) g USING (file, row) ORDER BY file, row"
            ).to_arrow_table()
        except (import_duckdb().Error, arrow.ArrowException, OSError) as error:
            raise ValueError(
                f"{values}: {str(error).splitlines()[0]}. Give path, row and {added.name}."
            ) from error
        n, n_documents = sum(documents.column("given").to_pylist()), sum(file.n_documents for file in files)
        if n != len(rows) or len(documents) != n_documents:
            raise ValueError(
                f"{values}: got {len(rows):,} rows, of which {n:,} are of documents of '{name}', expected at "
                "most one row for each. Use the paths and rows that find_documents returns."
            )
        batches = [
            *complete_columns(documents, "documents", schema).to_batches(),
            *_iter_file_batches(files, schema),
        ]
        table.overwrite(corpus, arrow.Table.from_batches(batches, schema))
        self._show(table)
        return n

    def remove(self, name: str) -> None:
        """Remove a corpus from the catalog. Its files stay, and earlier versions can be opened."""
        self._check_writable()
        table = self.get_table(name)
        table.refresh()
        table.delete()
        self._show(table)

    def _check_writable(self) -> None:
        if self._read_only:
            raise ValueError(f"{self.path}: was opened to be read. Open it without read_only.")

    def _fetch(self, statement: str, given: Any = None) -> list[tuple[Any, ...]]:
        try:
            return fetch_rows(self.connection, statement, given)
        except import_duckdb().Error as error:
            raise ValueError(f"{self.path}: {str(error).splitlines()[0]}") from error

    def summarize_corpora(self) -> list[CorpusSummary]:
        """Return the totals of every corpus."""
        summaries = []
        for corpus in self.list_corpora():
            files = self.list_files(corpus.name)
            ((n_tokens,),) = self._fetch(f"SELECT CAST(sum(tokens) AS BIGINT) FROM {self.view(corpus.name)}")
            n_documents, n_broken = (
                sum(getattr(file, of) for file in files) for of in ("n_documents", "n_broken")
            )
            names = tuple(prop.name for prop in corpus.all_properties)
            summaries.append(CorpusSummary(corpus.name, len(files), n_documents, n_broken, n_tokens, names))
        return summaries

    def list_broken(self, name: str) -> list[tuple[str, int, str]]:
        """Return (file, line or row from 1, reason) of the records that are not documents.

        At most the first thousand of each file are listed.
        """
        self.get_table(name)
        return sorted((file.path, *place) for file in self.list_files(name) for place in file.broken)

    def describe_corpus(self, name: str) -> dict[str, list[HistogramRow]]:
        """Return (value, documents, tokens) for each property of a corpus.

        At most MAX_VALUES values are listed, the most frequent first, and the others are summed. Numbers and
        dates with more values are counted in bins of equal width. A document counts once for each element of
        a list. The value None means a missing value or an empty list.
        """
        corpus = self.get_table(name).corpus
        return {prop.name: self._count_values(self.view(name), prop) for prop in corpus.all_properties}

    def _count_values(self, view: str, prop: Property) -> list[HistogramRow]:
        name, counts = quote_identifier(prop.name), "count(*), CAST(sum(tokens) AS BIGINT)"
        if prop.kind == "list":
            # unnest of an empty or missing list has no row; of [NULL] it has one, which counts the document
            name = f"unnest(CASE WHEN len({name}) > 0 THEN {name} ELSE [NULL] END)"
        values = f"(SELECT {name} AS value, tokens FROM {view})"
        ((n_values,),) = self._fetch(f"SELECT count(DISTINCT value) FROM {values}")
        if n_values > MAX_VALUES and prop.kind in BINNED_KINDS:
            # the number of a bin of equal width; NULL for a missing value, and for NaN and Inf
            number = "value - DATE '1970-01-01'" if prop.kind == "date" else "value"
            shown = {"date": "{} to {}", "integer": "{:,} to {:,}", "float": "{:.4g} to {:.4g}"}[prop.kind]
            ends = "CAST(min(value) AS VARCHAR), CAST(max(value) AS VARCHAR)" if prop.kind == "date" else (
                "min(value), max(value)"
            )  # fmt: skip
            source = f"SELECT *, CAST({number} AS DOUBLE) AS x FROM {values}"
            source = f"SELECT value, tokens, CASE WHEN isfinite(x) THEN x END AS x FROM ({source})"
            width = f"nullif(max(x) OVER () - min(x) OVER (), 0) / {N_BINS}"
            bin_number = f"least({N_BINS - 1}, floor((x - min(x) OVER ()) / ({width})))"
            source = f"SELECT *, {bin_number} AS bin FROM ({source})"
            return self._fetch(
                f"SELECT CASE WHEN bin IS NOT NULL THEN format('{shown}', {ends}) "
                f"WHEN any_value(value) IS NOT NULL THEN 'not finite' END, {counts} FROM ({source}) "
                "GROUP BY bin, value IS NULL ORDER BY bin NULLS LAST"
            )
        # the most frequent values, and the others as one
        rows = self._fetch(f"SELECT value, {counts} FROM {values} GROUP BY 1 ORDER BY 2 DESC, 1 NULLS LAST")
        others = rows[MAX_VALUES:]
        if others:
            tokens = None if others[0][2] is None else sum(t or 0 for *_, t in others)
            n_others = sum(value is not None for value, *_ in others)
            rows = [
                *rows[:MAX_VALUES],
                (f"({n_others:,} other values)", sum(n for _, n, _ in others), tokens),
            ]
        return rows

    def prune(self, keep: Mapping[str, int]) -> int:
        """Delete what neither the current versions nor those of `keep` need; return the number of files."""
        self._check_writable()
        return sum(
            CorpusTable(self.path, name).prune([keep[name]] if name in keep else [])
            for name in list_tables(self.path)
        )


@contextmanager
def connect_scratch(n_threads: int | None) -> Iterator[Any]:
    """Yield a database that evaluates expressions over records."""
    connection = connect_database(n_threads)
    try:
        yield connection
    finally:
        connection.close()


class _BatchWriter:
    """Documents and entries of some files, as Arrow batches of one commit."""

    def __init__(
        self, paths: Sequence[Path], reader: RecordReader, corpus: Corpus, hashing: ThreadPoolExecutor
    ) -> None:
        # sizes and times are read before the content, and compared again at the end: a file that changes in
        # between is not committed
        self.paths, self.reader, self.corpus = paths, reader, corpus
        self.stamps = [stat_file(path) for path in paths]
        self.keys = [secrets.randbits(62) for _ in paths]
        self.sums: list[Future[str]] = [hashing.submit(hash_content, path) for path in paths]
        self.counts = [RecordCounts() for _ in paths]
        self.n_having: Counter[str] = Counter()

    def iter_batches(self) -> Iterator[Any]:
        """Yield the documents, and last the entries of the files."""
        schema = make_schema(self.corpus)
        names = [prop.name for prop in self.corpus.properties]
        for documents in self._iter_documents():
            for name in names:
                self.n_having[name] += len(documents) - documents.column(name).null_count
            yield from complete_columns(documents, "documents", schema).to_batches()
        for path, stamp in zip(self.paths, self.stamps, strict=True):
            if stat_file(path) != stamp:
                raise ValueError(f"{path}: changed while it was registered. Register it again.")
        columns = self.keys, self.paths, self.stamps, self.counts, self.sums
        files = [
            SourceFile(
                key, str(path), *stamp, counts.n_documents, sums.result(), self.corpus.name,
                self.corpus.text_key, counts.n_broken, tuple(counts.broken), time.time_ns(),
            )
            for key, path, stamp, counts, sums in zip(*columns, strict=True)
        ]  # fmt: skip
        yield from _iter_file_batches(files, schema)

    def _iter_documents(self) -> Iterator[Any]:
        if len(self.paths) > 1 and self.reader.function is None:
            read = read_small_files(self.reader, self.paths, self.keys)
            if read is not None:
                for counts, n in zip(self.counts, read[1], strict=True):
                    counts.n_documents = n
                yield read[0]
                return
        for path, key, counts in zip(self.paths, self.keys, self.counts, strict=True):
            yield from self.reader.read(path, key, counts)

    def count(self, result: RegistrationResult) -> None:
        """Add the counts of the batch, which is committed."""
        result.n_files += len(self.paths)
        result.n_documents += sum(counts.n_documents for counts in self.counts)
        result.n_broken += sum(counts.n_broken for counts in self.counts)
        result.n_having.update(self.n_having)


def complete_columns(rows: Any, kind: str, schema: Any) -> Any:
    """Return an Arrow table with all columns of a schema: the missing ones are null."""
    arrow, n = import_pyarrow(), len(rows)
    present = dict(zip(rows.column_names, rows.columns, strict=True)) | {
        KIND: arrow.array([kind] * n, arrow.string())
    }
    columns = [present.get(name, arrow.nulls(n)) for name in schema.names]
    columns = [column.cast(kind) for column, kind in zip(columns, schema.types, strict=True)]
    return arrow.Table.from_arrays(columns, schema=schema)


def _iter_file_batches(files: Sequence[SourceFile], schema: Any) -> Iterator[Any]:
    arrow = import_pyarrow()
    ids = arrow.array([file.id for file in files], arrow.int64())
    rows = arrow.table({"file": ids, META: [dumps(asdict(file)) for file in files]})
    yield from complete_columns(rows, "files", schema).to_batches()


def batch_files(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield files in order: adjacent small files of plain lines in one batch, every other file alone."""
    batch: list[Path] = []
    n_bytes = 0
    for path in paths:
        size = path.stat().st_size
        is_small = (
            path.suffix in (".jsonl", ".json") and size <= SMALL_BYTES and not properties_path(path).exists()
        )
        if batch and (not is_small or n_bytes + size > BATCH_BYTES or len(batch) == BATCH_FILES):
            yield batch
            batch, n_bytes = [], 0
        if is_small:
            batch.append(path)
            n_bytes += size
        else:
            yield [path]
    if batch:
        yield batch


def find_input_files(inputs: Sequence[str]) -> list[Path]:
    """Return the files of paths, folders and patterns. A .bin, or its prefix, stands for its dataset.

    <prefix>.parquet and <prefix>.json beside an input are parts of it. Raises FileNotFoundError.
    """
    paths: dict[Path, None] = {}
    for word in inputs:
        path = Path(word)
        if path.is_dir():
            walked = os.walk(path, followlinks=True)
            matches = sorted(
                Path(folder) / name for folder, _, names in walked for name in names if name[0] != "."
            )
        elif path.is_file():
            matches = [path]
        else:
            datasets = [Path(f"{word}{suffix}") for suffix in (".bin", PARTS_SUFFIX)]
            matches = [path for path in datasets if path.is_file()] or [
                Path(name) for name in sorted(glob(word, recursive=True))
            ]
        names = set(matches)
        chosen = [
            path for path in matches if path.name.endswith(INPUT_SUFFIXES) and not _is_part(path, names)
        ]
        if not chosen:
            raise FileNotFoundError(
                f"{word}: no such file, and no folder or pattern of {', '.join(INPUT_SUFFIXES)}."
            )
        paths |= dict.fromkeys(chosen)
    return list(paths)


def _is_part(path: Path, names: set[Path]) -> bool:
    """Return whether a file belongs to another input: properties, a sidecar, or an index."""
    if path.name.endswith((PARTS_SUFFIX, ".bin")):
        return False
    prefix = path.with_suffix("")
    if path.suffix == ".json":
        return any(prefix.with_name(prefix.name + suffix).is_file() for suffix in (".bin", PARTS_SUFFIX))
    others = [prefix.with_name(prefix.name + suffix) for suffix in INPUT_SUFFIXES if suffix != ".parquet"]
    return path.suffix == ".parquet" and any(
        other in names or other.suffix == ".bin" and other.is_file() for other in others
    )
