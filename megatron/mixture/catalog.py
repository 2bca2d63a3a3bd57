"""The catalog: a folder or an object store with the location and properties of documents.

A corpus is a set of files that share properties, and a Delta Lake table
(`table.py`). The text stays in the original files. Any number of processes and
machines register and read at the same time, and earlier versions of a corpus
can be read until they are pruned.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.config.presets import suggest_nearest
from megatron.mixture.files import SourceFile, connect_database, explain_errors, import_pyarrow
from megatron.mixture.properties import Corpus, Property, quote_identifier, read_property
from megatron.mixture.records import RecordFunction, RecordReader
from megatron.mixture.registration import RegistrationResult, add_files, find_input_files
from megatron.mixture.table import (
    KIND,
    META,
    CorpusTable,
    complete_columns,
    is_object_url,
    iter_file_batches,
    list_tables,
    make_schema,
)
from megatron.text.token_counts import TokenCounter

MAX_VALUES = 20  # most values listed per property

HistogramRow = tuple[Any, int, int | None]  # value, documents, tokens if they are counted


class Catalog(AbstractContextManager["Catalog"]):
    """Open catalog; a context manager.

    It shows the versions of its corpora when it was opened.
    """

    def __init__(
        self, path: Path | str, read_only: bool = False, n_threads: int | None = None,
        snapshot: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """Open a catalog.

        path       a folder, or a URL such as s3://bucket/catalog; a
                   registration creates it
        snapshot   versions of the corpora that are shown; None: the current
                   state of all

        Raises FileNotFoundError, or ValueError
        for something else or an unknown version.
        """
        is_remote = is_object_url(path)
        self.path: Path | str = str(path).rstrip("/") if is_remote else Path(path).absolute()
        self._read_only, self._n_threads = read_only, n_threads
        self.connection = connect_database(n_threads, self.path)
        self.tables: dict[str, CorpusTable] = {}
        self.files: tuple[SourceFile, ...] = ()
        names = list_tables(self.path) if snapshot is None else sorted(snapshot)
        if not names:
            self._check_new()
        for name in names:
            version = None if snapshot is None else snapshot[name]
            self._show(CorpusTable(self.path, name, version))

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def _check_new(self) -> None:
        """Raise unless a catalog without corpora is a new one."""
        path = Path(self.path)
        # a folder without files may belong to a corpus that another process
        # creates; an earlier version had the folder `commits`, or was one file
        files = [child for child in (path, *path.glob("*")) if child.is_file()]
        if not is_object_url(self.path) and (files or (path / "commits").is_dir()):
            raise ValueError(
                f"{path}: got other files or a catalog of an earlier version, expected a catalog of "
                "Delta Lake tables. Register the files again, in a new folder."
            )
        if self._read_only:
            raise FileNotFoundError(f"{self.path}: no such catalog. Create it with scaling register.")

    def _show(self, table: CorpusTable) -> None:
        """Add the files and the view of a table; an empty table is not shown."""
        name = table.name
        everything = f"all of {name}"
        with explain_errors(
            f"{self.path}: {name} version {table.version} cannot be read",
            "Use a version that was not pruned, or register it again.",
        ):
            files, dead = table.list_files(self.connection)
            table.scan(self.connection, "documents", everything)
        others = [file for file in self.files if file.corpus != name]
        # the number of a file depends on the
        # documents only, not on the registration
        self.files = tuple(sorted([*others, *files], key=SourceFile.order_key))
        self.tables.pop(name, None)
        if not files:
            return
        self.tables[name] = table
        where = f" WHERE file NOT IN ({', '.join(map(str, dead))})" if dead else ""
        self.connection.execute(
            f"CREATE OR REPLACE TEMP VIEW {self.view(name)} AS "
            f"SELECT * FROM {quote_identifier(everything)}{where}"
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
        """Return the table of a corpus.

        The ValueError for an unknown name suggests the nearest one.
        """
        if name not in self.tables:
            hint = suggest_nearest(name, list(self.tables))
            raise ValueError(f"{self.path}: no corpus {name!r}; {hint}")
        return self.tables[name]

    def register(
        self, name: str, inputs: Sequence[str], properties: Sequence[Property],
        text_key: str = "text", quiet: bool = False, counter: TokenCounter | None = None,
        shard: tuple[int, int] = (0, 1), function: RecordFunction | None = None,
    ) -> RegistrationResult:  # fmt: skip
        """Add new and changed files: JSON lines, parquet, tar archives, .bin/.idx datasets.

        counter    counts the tokens of documents; the index of a dataset contains them
        shard      (k, n): only files k, k + n, ... of the inputs, for n processes
        function   called with each record; its values are merged into the record

        A registered file with the same size and modification time is skipped.
        Broken lines are counted and located; `list_broken` returns them.
        Raises ValueError if the corpus has other properties or another
        tokenizer, or if a file cannot be read. The files before
        it stay registered. Small files are registered in batches.
        """
        paths = [path.resolve() for path in find_input_files(inputs)][shard[0] :: shard[1]]
        tokenizer = None if counter is None else counter.settings
        table = self._open_for_writing(Corpus(name, text_key, tuple(properties), tokenizer))
        with closing(connect_database(self._n_threads)) as scratch:
            reader = RecordReader(scratch, table.corpus, counter, function)
            before = table.list_files(self.connection)[0]
            result = add_files(table, before, paths, reader, quiet)
        dead = table.list_files(self.connection)[1]
        if dead:
            # another writer may add rows meanwhile:
            # readers skip the dead ones until then
            with suppress(ValueError):
                table.delete(dead)
        self._show(table)
        if result.n_documents:
            result.absent = self._find_absent(table.corpus)
        return result

    def _open_for_writing(self, corpus: Corpus) -> CorpusTable:
        """Return the current table of a corpus.

        Raises ValueError if it has other settings.
        """
        table = CorpusTable.create(self.path, corpus)
        existing = table.corpus
        if existing.compatibility_key == corpus.compatibility_key:
            return table
        properties = "; ".join(map(str, existing.properties)) or "none"
        tokenizer = (existing.tokenizer or {}).get("name", "no tokenizer")
        raise ValueError(
            f"{self.path}: corpus '{corpus.name}' has the properties {properties}, its text under "
            f"'{existing.text_key}', tokens of {tokenizer}. Use the same settings or another name, "
            "or delete the folder of the corpus first."
        )

    def _find_absent(self, corpus: Corpus) -> tuple[str, ...]:
        """Return the properties that no document of the corpus has."""
        # LIMIT: the scan ends at the first value,
        # usually in the first row group
        query = f"SELECT 1 FROM {self.view(corpus.name)} WHERE {{}} IS NOT NULL LIMIT 1"
        names = [prop.name for prop in corpus.properties]
        return tuple(name for name in names if not self._fetch(query.format(quote_identifier(name))))

    def add_property(self, name: str, prop: str, values: Any) -> int:
        """Add a property of the documents of a corpus, or replace it; return their number.

        prop     'NAME TYPE', or the NAME of a string
        values   path of a parquet file, or an Arrow table,
                 with the columns path (as registered),
                 row (from 0, without broken lines) and NAME

        Raises ValueError for a file without these columns,
        and for repeated or unknown documents.
        """
        if isinstance(values, Path) and not values.is_file():
            raise FileNotFoundError(f"{values}: no such file.")
        table, files = self.get_table(name), self.list_files(name)
        added = read_property(f"{prop.split()[0]} AS {prop}")
        if added.name in {old.name for old in table.corpus.properties}:
            raise ValueError(f"{name}: got '{added.name}', a property of the registration. Use another name.")
        others = tuple(old for old in table.corpus.added if old.name != added.name)
        corpus = replace(table.corpus, added=(*others, added))
        schema, arrow = make_schema(corpus), import_pyarrow()
        with explain_errors(f"values of {added.name}", f"Give path, row and {added.name}."):
            rows = arrow.parquet.read_table(values) if isinstance(values, Path) else values
            documents = self._join_values(table.corpus, added, rows)
        n = sum(documents.column("given").to_pylist())
        if n != len(rows) or len(documents) != sum(file.n_documents for file in files):
            raise ValueError(
                f"values of {added.name}: got {len(rows):,} rows, of which {n:,} are of documents of "
                f"'{name}', expected at most one row for each. Use the paths and rows of find_documents."
            )
        batches = complete_columns(documents, "documents", schema).to_batches()
        batches = [*batches, *iter_file_batches(files, schema)]
        table.overwrite(corpus, arrow.Table.from_batches(batches, schema))
        self._show(table)
        return n

    def _join_values(self, corpus: Corpus, added: Property, rows: Any) -> Any:
        """Return the documents with the values of `rows`, and whether they have a row."""
        files, column = self.list_files(corpus.name), quote_identifier(added.name)
        listed = {"path": [file.path for file in files], "file": [file.id for file in files]}
        self.connection.register("listed_files", import_pyarrow().table(listed))
        self.connection.register("given_rows", rows)
        names = set(make_schema(corpus).names) - {KIND, META, added.name}
        columns = ", ".join(f"d.{quote_identifier(name)}" for name in sorted(names))
        given = f"SELECT file, row, {column} AS value FROM given_rows JOIN listed_files USING (path)"
        return self.connection.sql(
            f"SELECT {columns}, CAST(value AS {added.sql_type}) AS {column}, "
            f"g.file IS NOT NULL AS given FROM {self.view(corpus.name)} d "
            f"LEFT JOIN ({given}) g USING (file, row) ORDER BY file, row"
        ).to_arrow_table()

    def _fetch(self, statement: str) -> list[tuple[Any, ...]]:
        with explain_errors(self.path):
            return self.connection.execute(statement).fetchall()

    def count_tokens(self, name: str) -> int | None:
        """Return the tokens of a corpus; None if they are not counted."""
        ((n_tokens,),) = self._fetch(f"SELECT CAST(sum(tokens) AS BIGINT) FROM {self.view(name)}")
        return n_tokens

    def list_broken(self, name: str) -> list[tuple[str, int, str]]:
        """Return (file, line or row from 1, reason) of the records that are not documents.

        At most the first thousand of each file are listed.
        """
        self.get_table(name)
        return sorted((file.path, *place) for file in self.list_files(name) for place in file.broken)

    def describe_corpus(self, name: str) -> dict[str, list[HistogramRow]]:
        """Return (value, documents, tokens) for each property of a corpus.

        At most MAX_VALUES values are listed, the most frequent first.
        A document counts once for each element of a list.
        None is a missing value or an empty list.
        """
        corpus = self.get_table(name).corpus
        return {prop.name: self._count_values(name, prop) for prop in corpus.all_properties}

    def _count_values(self, corpus: str, prop: Property) -> list[HistogramRow]:
        value, counts = quote_identifier(prop.name), "count(*), CAST(sum(tokens) AS BIGINT)"
        if prop.kind == "list":
            # unnest of an empty list has no row; of [NULL] it has one, which
            # counts the document
            value = f"unnest(CASE WHEN len({value}) > 0 THEN {value} ELSE [NULL] END)"
        values = f"(SELECT {value} AS value, tokens FROM {self.view(corpus)})"
        order = f"ORDER BY 2 DESC, 1 NULLS LAST LIMIT {MAX_VALUES}"
        return self._fetch(f"SELECT value, {counts} FROM {values} GROUP BY 1 {order}")

    def prune(self, keep: Mapping[str, int]) -> int:
        """Delete what neither the current versions nor the versions in `keep` need.

        Returns the number of deleted files.
        """
        return sum(
            CorpusTable(self.path, name).prune([keep[name]] if name in keep else [])
            for name in list_tables(self.path)
        )
