"""Properties that a Python function computes from the documents of a registered corpus.

Values are in a folder beside the catalog, which is not changed: one Arrow file for each registered file,
named by the hash of its content. Files that are registered later lack values until the property is computed
again; a query that uses it then fails with that hint. Queries join the values by (file, row).

    catalog.properties/corpus=code/length_bucket/property.json
                                                        HASH.arrow           values of one file
                                                        HASH.parts/0.arrow   of some documents, until all are

Computing runs code of the user: `compute_property.py`. Reading runs none.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import numpy as np

from megatron.io import read_json
from megatron.mixture.catalog.properties import TYPES, Property, quote_identifier, read_property
from megatron.mixture.lazy_imports import fetch_rows, import_pyarrow

File = TypeVar("File", bound="NumberedFile")
META, VALUES = "property.json", "value"
SUFFIX = ".properties"


class NumberedFile(Protocol):
    """Fields of query.SourceFile that are used here."""

    @property
    def path(self) -> str: ...  # noqa: D102
    @property
    def text_key(self) -> str: ...  # noqa: D102
    @property
    def n_bytes(self) -> int: ...  # noqa: D102
    @property
    def mtime_ns(self) -> int: ...  # noqa: D102
    @property
    def n_documents(self) -> int: ...  # noqa: D102
    @property
    def sha256(self) -> str | None: ...  # noqa: D102


@dataclass(frozen=True)
class ComputedProperty:
    """A computed property, and the folder of its values.

    function   module:name
    sha256     of the module's source, which must not change between the parts of one property
    """

    name: str
    kind: str
    function: str
    sha256: str
    folder: Path

    @property
    def prop(self) -> Property:
        """The property, as if it had been registered."""
        return Property(self.name, quote_identifier(self.name), self.kind)

    def values_path(self, file: NumberedFile) -> Path:
        """Return the path of the values of a file; they depend on its content and the key of the text."""
        content = file.sha256 or [Path(file.path).name, file.n_bytes, file.mtime_ns]
        key = hashlib.sha256(json.dumps([content, file.text_key]).encode()).hexdigest()[:32]
        return self.folder / f"{key}.arrow"


def corpus_folder(catalog: Path | str, corpus: str) -> Path:
    """Return the folder of the computed properties of a corpus."""
    # quote escapes slashes; the prefix keeps a corpus named .. inside
    return Path(f"{catalog}{SUFFIX}") / f"corpus={quote(corpus, safe='')}"


def list_computed(catalog: Path | str, corpus: str) -> dict[str, ComputedProperty]:
    """Return the computed properties of a corpus by name. Raises ValueError for a damaged description."""
    properties = {}
    for path in sorted(corpus_folder(catalog, corpus).glob(f"*/{META}")):
        try:
            record = read_json(path) or {}
            prop = read_property(f"{path.parent.name} AS {path.parent.name} {record['kind']}")
            function, sha256 = str(record["function"]), str(record["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: is not the description of a property ({error}). Delete it.") from error
        properties[prop.name] = ComputedProperty(prop.name, prop.kind, function, sha256, path.parent)
    return properties


def list_corpus_files(connection: Any, table: str, files: Mapping[int, File]) -> dict[int, File]:
    """Return those of `files` whose documents are in a table, by their number in its column `file`."""
    ids = {id for (id,) in fetch_rows(connection, f"SELECT DISTINCT file FROM {table}")}
    # in the order of `files`, not in that of the query, which differs from call to call
    return {id: file for id, file in files.items() if id in ids}


class ComputedColumns:
    """The computed properties of some corpora, joined to their tables where a query uses them.

    corpora   objects with a name, a table and properties, as catalog.Corpus
    """

    def __init__(self, catalog: Path | str, corpora: Sequence[Any]) -> None:
        self.corpora = corpora
        self.properties = {
            corpus.name: {
                name: prop
                for name, prop in list_computed(catalog, corpus.name).items()
                if name not in {registered.name for registered in corpus.properties}
            }
            for corpus in corpora
        }

    @property
    def kinds(self) -> dict[str, str]:
        """Type of each computed property."""
        return {name: prop.kind for props in self.properties.values() for name, prop in props.items()}

    def join(
        self, connection: Any, words: Sequence[str], files: Mapping[int, NumberedFile]
    ) -> dict[str, tuple[str, list[str]]]:
        """Return, for each corpus by name: its table in SQL, and the computed properties in it.

        words   names of properties and conditions in SQL; what they do not mention is not joined
        files   of the catalog, by their number in the column `file`

        Raises ValueError if a file has no values yet.
        """
        names = {word.lower() for text in words for word in re.findall(r"\w+", text)}
        return {corpus.name: self._join_corpus(connection, corpus, names, files) for corpus in self.corpora}

    def _join_corpus(
        self, connection: Any, corpus: Any, names: set[str], files: Mapping[int, NumberedFile]
    ) -> tuple[str, list[str]]:
        used = [prop for name, prop in self.properties[corpus.name].items() if name in names]
        if not used:
            return corpus.table, []
        of_corpus = list_corpus_files(connection, corpus.table, files)
        columns, joins = ["documents.*"], [f"{corpus.table} AS documents"]
        for i, prop in enumerate(used):
            view = f"computed_{corpus.table}_{i}"
            # replaces the view of an earlier query
            connection.register(view, load_values(prop, of_corpus, corpus.name))
            columns.append(f"c{i}.{VALUES} AS {quote_identifier(prop.name)}")
            condition = f"c{i}.file = documents.file AND c{i}.row = documents.row"
            joins.append(f"LEFT JOIN {view} AS c{i} ON {condition}")
        return f"(SELECT {', '.join(columns)} FROM {' '.join(joins)})", [prop.name for prop in used]


def make_value_type(kind: str) -> Any:
    """Return the Arrow type of the values of a kind of TYPES."""
    arrow = import_pyarrow()
    return {
        "VARCHAR": arrow.string(), "BIGINT": arrow.int64(), "DOUBLE": arrow.float64(),
        "BOOLEAN": arrow.bool_(), "DATE": arrow.date32(), "VARCHAR[]": arrow.list_(arrow.string()),
    }[TYPES[kind]]  # fmt: skip


def read_values(path: Path, kind: str, n: int) -> Any:
    """Return the values in a file, an Arrow array [n], mapped. Raises ValueError for other content."""
    arrow = import_pyarrow()
    try:
        with arrow.memory_map(str(path)) as source, arrow.ipc.open_file(source) as reader:
            table = reader.read_all()
        column = table.column(VALUES)
    except (arrow.ArrowException, KeyError) as error:
        raise ValueError(f"{path}: cannot be read ({str(error).splitlines()[0]}). Delete it.") from error
    if column.type != make_value_type(kind) or len(column) != n or column.null_count:
        raise ValueError(
            f"{path}: got {len(column):,} values of type {column.type}, expected {n:,} of {kind}. Delete it."
        )
    return column


def load_values(prop: ComputedProperty, files: Mapping[int, NumberedFile], corpus: str) -> Any:
    """Return the values of all documents as an Arrow table with file, row and value.

    Raises ValueError if files have no values yet.
    """
    arrow = import_pyarrow()
    missing = [file.path for file in files.values() if not prop.values_path(file).is_file()]
    if missing:
        raise ValueError(
            f"property '{prop.name}' of {corpus}: got no values for {len(missing):,} of {len(files):,} "
            f"files, such as {missing[0]}. Run tools/register_corpus.py CATALOG add-property again."
        )
    schema = arrow.schema(
        [("file", arrow.int64()), ("row", arrow.int64()), (VALUES, make_value_type(prop.kind))]
    )
    tables = [schema.empty_table()]
    for id, file in files.items():
        values = read_values(prop.values_path(file), prop.kind, file.n_documents)
        columns = [np.full(len(values), id, dtype=np.int64), np.arange(len(values)), values]
        tables.append(arrow.table(columns, schema=schema))
    return arrow.concat_tables(tables)
