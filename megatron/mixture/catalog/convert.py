"""Conversion of the DuckDB file of a catalog of an earlier version to a folder. The texts are not read."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.mixture.catalog.catalog import Catalog, Corpus
from megatron.mixture.catalog.catalog_access import connect_database_file, list_columns
from megatron.mixture.catalog.commits import Commit, FileEntry, make_file_keys
from megatron.mixture.catalog.part_files import PartWriter, publish_part
from megatron.mixture.catalog.properties import Property, quote_identifier
from megatron.mixture.lazy_imports import fetch_rows, import_duckdb, import_pyarrow

BATCH_FILES, BATCH_DOCUMENTS = 1000, 1 << 22  # of one part, if a file has not more
BATCH_ROWS = 1 << 17


def convert_catalog(catalog: Catalog, source: Path) -> int:
    """Add the corpora of a DuckDB file to an empty catalog. Returns the number of documents.

    Raises ValueError if the catalog is not empty, or if the file is not a catalog of an earlier version. If
    the conversion is interrupted, delete the folder and convert again.
    """
    if catalog.list_corpora():
        raise ValueError(
            f"{catalog.path}: got a catalog with corpora, expected a new folder to convert into."
        )
    connection = connect_database_file(source)
    try:
        n_documents = 0
        for corpus in _list_corpora(connection):
            for files in _iter_batches(_list_files(connection, corpus)):
                n_documents += _convert_batch(catalog, connection, corpus, files)
        return n_documents
    except (import_duckdb().Error, import_pyarrow().ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"{source}: cannot be converted ({str(error).splitlines()[0]}).") from error
    finally:
        connection.close()


def _list_corpora(connection: Any) -> list[Corpus]:
    records = fetch_rows(connection, "SELECT * FROM corpora ORDER BY id")
    return [
        Corpus(
            id, name, key, tuple(Property(**fields) for fields in json.loads(properties_json)),
            json.loads(tokenizer_json[0]) if tokenizer_json and tokenizer_json[0] else None,
        )
        for id, name, key, properties_json, *tokenizer_json in records  # the oldest have no tokenizer
    ]  # fmt: skip


def _list_files(connection: Any, corpus: Corpus) -> list[tuple[int, FileEntry]]:
    """Return (number in the DuckDB file, entry without a key) of the files of a corpus."""
    sums = "sha256" if "sha256" in list_columns(connection, "files") else "NULL"
    records = fetch_rows(
        connection,
        f"SELECT id, path, bytes, mtime_ns, n_documents, n_broken, {sums} FROM files "
        "WHERE corpus = ? ORDER BY path",
        [corpus.id],
    )
    broken: dict[int, list[tuple[int, str]]] = {}
    for file, line, reason in fetch_rows(connection, "SELECT file, line, reason FROM broken ORDER BY 1, 2"):
        broken.setdefault(file, []).append((line, reason))
    entries = []
    for id, path, n_bytes, mtime_ns, n_documents, n_broken, sha256 in records:
        places = tuple(broken.get(id, ()))
        entries.append((id, FileEntry(0, path, n_bytes, mtime_ns, n_documents, n_broken, sha256, places)))
    return entries


def _iter_batches(files: Sequence[tuple[int, FileEntry]]) -> Iterator[list[tuple[int, FileEntry]]]:
    batch: list[tuple[int, FileEntry]] = []
    n_documents = 0
    for file in files:
        n = file[1].n_documents
        if batch and (len(batch) == BATCH_FILES or n_documents + n > BATCH_DOCUMENTS):
            yield batch
            batch, n_documents = [], 0
        batch.append(file)
        n_documents += n
    if batch:
        yield batch


def _convert_batch(
    catalog: Catalog, connection: Any, corpus: Corpus, files: Sequence[tuple[int, FileEntry]]
) -> int:
    stamps = [(entry.path, entry.n_bytes, entry.mtime_ns) for _, entry in files]
    keys = np.array(make_file_keys(corpus, stamps, (), ()), dtype=np.int64)
    numbers = np.array([number for number, _ in files])
    order = np.argsort(numbers)
    columns = ", ".join(quote_identifier(prop.name) for prop in corpus.properties)
    batches = connection.sql(
        f"SELECT file, row, begin, size, tokens{', ' * bool(columns)}{columns} FROM {corpus.table} "
        f"WHERE file IN ({', '.join(map(str, numbers.tolist()))}) ORDER BY file, row"
    ).to_arrow_reader(BATCH_ROWS)
    arrow = import_pyarrow()
    with catalog.storage.make_scratch() as path:
        with PartWriter(path, corpus) as sink:
            for batch in batches:
                places = order[np.searchsorted(numbers[order], batch.column("file").to_numpy())]
                table = arrow.Table.from_batches([batch])
                sink.write(table.set_column(0, "file", arrow.array(keys[places])))
        part = publish_part(catalog.storage, path, corpus) if sink.n_rows else None
    entries = tuple(
        FileEntry(**{**vars(entry), "key": int(key)}) for key, (_, entry) in zip(keys, files, strict=True)
    )
    catalog.add_commit(Commit.create(corpus, files=entries, part=part))
    return sink.n_rows
