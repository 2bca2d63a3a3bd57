"""Delta Lake tables of a catalog: one per corpus, written by `deltalake` and read by DuckDB.

A table has the partition `_kind=documents` with a row for each document,
and `_kind=files` with a row for each registered file, whose `_meta`
is the JSON of a `SourceFile`. A registration appends to both
in one commit, so that it is visible as a whole or not at all,
in a folder and in an object store, whoever else writes.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from megatron.mixture.files import SourceFile, explain_errors, import_pyarrow
from megatron.mixture.properties import Corpus, quote_identifier, quote_text

KIND, META = "_kind", "_meta"
# files that no commit names may belong to a running registration until then
ORPHAN_HOURS = 7 * 24


def make_schema(corpus: Corpus) -> Any:
    """Return the columns of the table of a corpus, as Arrow."""
    arrow = import_pyarrow()
    types = {
        "VARCHAR": arrow.string(), "BIGINT": arrow.int64(), "DOUBLE": arrow.float64(),
        "BOOLEAN": arrow.bool_(), "DATE": arrow.date32(), "VARCHAR[]": arrow.list_(arrow.string()),
    }  # fmt: skip
    location = {"file": arrow.int64(), "row": arrow.int32(), "begin": arrow.int64(), "size": arrow.int32()}
    columns = location | {"tokens": arrow.int64()}
    columns |= {prop.name: types[prop.sql_type] for prop in corpus.all_properties}
    return arrow.schema(list((columns | {KIND: arrow.string(), META: arrow.string()}).items()))


def is_object_url(path: Path | str) -> bool:
    """Return whether a catalog is in an object store."""
    return "://" in str(path)


class CorpusTable:
    """The table of one corpus: its current version, or an earlier one."""

    def __init__(self, catalog: Path | str, name: str, version: int | None = None) -> None:
        """Open the table.

        Raises FileNotFoundError if it is missing,
        ValueError for an unknown version.
        """
        self.catalog, self.name = catalog, name
        self.uri = f"{catalog}/{quote(name, safe=' ')}"
        import deltalake

        what, options = f"{name} version {version}" if version is not None else name, storage_options()
        with explain_errors(f"{catalog}: {what} cannot be opened", "Register it again."):
            if not deltalake.DeltaTable.is_deltatable(self.uri, options):
                raise FileNotFoundError(f"{catalog}: no corpus '{name}'. Register it.")
            self.delta = deltalake.DeltaTable(self.uri, version=version, storage_options=options)
        self.corpus = Corpus.from_json(self.delta.metadata().description)

    @classmethod
    def create(cls, catalog: Path | str, corpus: Corpus) -> "CorpusTable":
        """Create the table of a corpus, or open the one that exists."""
        import deltalake

        uri = f"{catalog}/{quote(corpus.name, safe=' ')}"
        if not is_object_url(catalog):
            Path(uri).mkdir(parents=True, exist_ok=True)
        # one of two simultaneous creations fails; another failure is an error
        # of the next line
        with suppress(deltalake.exceptions.DeltaError):
            deltalake.DeltaTable.create(
                uri, make_schema(corpus), mode="ignore", partition_by=[KIND],
                description=corpus.to_json(), storage_options=storage_options(),
                # DuckDB reads the statistics in the parquet files
                configuration={"delta.dataSkippingNumIndexedCols": "0"},
            )  # fmt: skip
        return cls(catalog, corpus.name)

    @property
    def version(self) -> int:
        """Number of the commit that is shown."""
        return int(self.delta.version())

    def append(self, batches: Iterable[Any]) -> None:
        """Append Arrow batches with the columns of `make_schema` in one commit."""
        import deltalake

        failure: list[BaseException] = []

        def guard() -> Iterator[Any]:
            try:
                yield from batches
            # the writer would replace it by an error of its own
            except BaseException as error:
                failure.append(error)
                raise

        reader = import_pyarrow().RecordBatchReader.from_batches(make_schema(self.corpus), guard())
        plain = deltalake.ColumnProperties(dictionary_enabled=False, encoding="DELTA_BINARY_PACKED")
        columns = dict.fromkeys(("row", "begin", "size"), plain)
        properties = deltalake.WriterProperties(compression="ZSTD", column_properties=columns)
        try:
            with explain_errors(self.uri, "Run it again."):
                deltalake.write_deltalake(
                    self.uri, reader, mode="append", partition_by=[KIND],
                    writer_properties=properties, storage_options=storage_options(),
                )  # fmt: skip
        except (OSError, ValueError):
            if failure:
                raise failure[0] from None
            raise
        self.delta.update_incremental()

    def scan(self, connection: Any, kind: str, view: str) -> None:
        """Create a view of the rows of a kind in a DuckDB connection."""
        uris = [uri for uri in self.delta.file_uris() if f"/{KIND}={kind}/" in uri]
        columns = ", ".join(quote_identifier(name) for name in make_schema(self.corpus).names if name != KIND)
        if is_object_url(self.catalog) or not uris:
            rows = self.delta.to_pyarrow_dataset() if uris else make_schema(self.corpus).empty_table()
            connection.register(f"rows of {view}", rows)
            source = f"{quote_identifier(f'rows of {view}')} WHERE {KIND} = '{kind}'"
        else:
            paths = ", ".join(quote_text(unquote(uri)) for uri in uris)
            source = f"read_parquet([{paths}], hive_partitioning = false)"
        connection.execute(
            f"CREATE OR REPLACE TEMP VIEW {quote_identifier(view)} AS SELECT {columns} FROM {source}"
        )

    def list_files(self, connection: Any) -> tuple[list[SourceFile], list[int]]:
        """Return the registered files, and the ids of registrations that others replace."""
        self.scan(connection, "files", "registered_files")
        winners: dict[str, SourceFile] = {}
        dead = []
        rows = connection.execute(f"SELECT {META} FROM registered_files").fetchall()
        for (text,) in rows:
            fields = json.loads(text)
            broken = tuple((line, why) for line, why in fields.pop("broken"))
            file = SourceFile(**fields, broken=broken)
            # if a path was registered twice, the one with the later
            # content counts, whoever reads
            first, last = sorted([file, winners.get(file.path, file)], key=lambda file: file.age)
            winners[file.path] = last
            dead += [] if first is last else [first.id]
        return list(winners.values()), dead

    def delete(self, ids: Iterable[int]) -> None:
        """Delete the rows of some files in one commit.

        Earlier versions keep them.
        """
        with explain_errors(self.uri, "Run it again."):
            self.delta.delete(f"file IN ({', '.join(map(str, ids))})")
        self.delta.update_incremental()

    def overwrite(self, corpus: Corpus, reader: Any) -> None:
        """Replace all rows in one commit, with the columns of changed settings."""
        import deltalake

        with explain_errors(self.uri, "Run it again."):
            deltalake.write_deltalake(
                self.delta, reader, mode="overwrite", schema_mode="overwrite", partition_by=[KIND]
            )
            # a kill in between leaves a column that no property names
            self.delta.alter.set_table_description(corpus.to_json())
        self.delta.update_incremental()
        self.corpus = corpus

    def list_versions(self) -> list[tuple[int, float, str]]:
        """Return (version, seconds since 1970, operation) of commits, the latest first."""
        keys = ("version", "timestamp", "operation")
        commits = [[commit[key] for key in keys] for commit in self.delta.history()]
        return [(version, ms / 1000, operation) for version, ms, operation in commits]

    def prune(self, keep: list[int]) -> int:
        """Delete what neither the current version nor the versions in `keep` need.

        Returns the number of deleted files.
        """
        options: dict[str, Any] = {"dry_run": False, "enforce_retention_duration": False}
        options["keep_versions"] = keep or None
        removed = self.delta.vacuum(retention_hours=0, full=False, **options)
        return len(removed) + len(self.delta.vacuum(ORPHAN_HOURS, full=True, **options))


def storage_options() -> dict[str, str]:
    """Return the options of object stores that do not follow from the environment."""
    # a server on this machine or in the same
    # network, such as MinIO, often has no TLS
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    return {"aws_allow_http": "true"} if endpoint.startswith("http://") else {}


def list_tables(catalog: Path | str) -> list[str]:
    """Return the names of the corpora of a catalog, sorted."""
    if is_object_url(catalog):
        from deltalake.fs import DeltaStorageHandler

        arrow = import_pyarrow()
        files = arrow.fs.PyFileSystem(DeltaStorageHandler(str(catalog), storage_options()))
        folders = files.get_file_info(arrow.fs.FileSelector("", allow_not_found=True))
        names = [info.base_name for info in folders if info.type == arrow.fs.FileType.Directory]
    else:
        names = [folder.parent.name for folder in Path(catalog).glob("*/_delta_log")]
    return sorted(map(unquote, names))


def iter_file_batches(files: Sequence[SourceFile], schema: Any) -> Iterator[Any]:
    """Yield the entries of files."""
    arrow = import_pyarrow()
    ids = arrow.array([file.id for file in files], arrow.int64())
    meta = [json.dumps(asdict(file)) for file in files]
    rows = arrow.table({"file": ids, META: meta})
    yield from complete_columns(rows, "files", schema).to_batches()


def complete_columns(rows: Any, kind: str, schema: Any) -> Any:
    """Return an Arrow table with all columns of a schema: the missing ones are null."""
    arrow, n = import_pyarrow(), len(rows)
    present = dict(zip(rows.column_names, rows.columns, strict=True))
    present[KIND] = arrow.repeat(kind, n)
    columns = [present.get(field.name, arrow.nulls(n)).cast(field.type) for field in schema]
    return arrow.Table.from_arrays(columns, schema=schema)
