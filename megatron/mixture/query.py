"""Queries over a catalog: the documents that satisfy conditions, in domains, as one Arrow file.

The file has a row for each document. The processes of a machine map it, so that its pages are in memory once,
and nothing is read before it is used.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.io import atomic_path
from megatron.mixture.catalog import Catalog
from megatron.mixture.conditions import Condition
from megatron.mixture.files import SourceFile
from megatron.mixture.lazy_imports import import_duckdb, import_pyarrow
from megatron.mixture.properties import quote_identifier, quote_text

BUILTIN_PROPERTIES = {"corpus": "category", "tokens": "integer", "size": "integer"}  # type by name
COLUMNS = {"file": "<i4", "row": "<i4", "begin": "<i8", "size": "<i4"}  # of a selection
LIST_DOMAINS = ("once", "each")
BATCH_ROWS = 1 << 17
COUNTED_CODES = 1 << 20  # 8 MB of counters; batches have at most 2^17 documents
META_KEY = b"selection"
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """Conditions over corpora of a catalog. A document must satisfy all of them.

    list_domains   domain of a document with several values of a property, such as languages:
                   once   that of one value, chosen by a hash of the file's content, the row and the property;
                          values to which the mixture gives a weight take precedence
                   each   the domain of every value, so that an epoch contains the document once for each
    weighted       values of properties that take precedence
    """

    corpora: tuple[str, ...] = ()  # empty: all
    conditions: tuple[str | Condition, ...] = ()
    list_domains: str = "once"
    weighted: Mapping[str, Collection[str]] = field(default_factory=dict)

    def where(self, condition: str | Condition) -> "Query":
        """Return this query with one more condition: SQL, or an expression of `field`s."""
        return replace(self, conditions=(*self.conditions, condition))

    def run(self, catalog: Catalog, by: Sequence[str] = (), count_tokens: bool = False) -> "Selection":
        """Return the documents in domains, one for each combination of the properties `by`.

        Raises ValueError for an invalid condition, for an unknown column (with the nearest name), if no
        document satisfies the conditions, and if tokens are to be counted and a document has no count.
        """
        if self.list_domains not in LIST_DOMAINS:
            raise ValueError(
                f"list_domains: got '{self.list_domains}', expected one of {', '.join(LIST_DOMAINS)}."
            )
        gathered = _Gathered(catalog.files, count_tokens)
        for batch in self._iter_batches(catalog, by):
            gathered.add(batch, by)
        if not gathered.domains:
            condition_text = " AND ".join(map(str, self.conditions)) or "that"
            raise ValueError(f"{catalog.path}: no document satisfies {condition_text}")
        if count_tokens and gathered.n_without_tokens:
            raise ValueError(
                f"{catalog.path}: tokens of {gathered.n_without_tokens:,} of {gathered.n:,} "
                "documents are not counted. Register them with --tokenizer-model, or let weights count "
                "documents (count: documents)."
            )
        return replace(gathered.build_selection(tuple(by)), snapshot=catalog.versions)

    def _iter_batches(self, catalog: Catalog, by: Sequence[str]) -> Iterator[Any]:
        """Yield the documents that satisfy all conditions, with their domains, as Arrow batches."""
        names = list(self.corpora) or [corpus.name for corpus in catalog.list_corpora()]
        corpora = [catalog.get_table(name).corpus for name in names]
        if not corpora:
            raise ValueError(
                f"{catalog.path}: has no documents. Register files with tools/register_corpus.py."
            )
        kinds = {prop.name: prop.kind for corpus in corpora for prop in corpus.all_properties}
        kinds |= BUILTIN_PROPERTIES
        for name in by:
            if name not in kinds:
                raise ValueError(f"domains: no property {name!r}; {suggest_nearest(name, sorted(kinds))}")
        parts, lists = [], [name for name in by if kinds[name] == "list"]
        if len(lists) > 1 and self.list_domains == "each":
            raise ValueError(f"by: got {' and '.join(lists)}, expected one list for list_domains: each.")
        for corpus in corpora:
            available = {prop.name for prop in corpus.all_properties} | {"tokens", "size"}
            # all corpora get the same columns, so that they can be united; a missing property is NULL
            listed = [
                quote_identifier(name) if name in available else f"NULL AS {quote_identifier(name)}"
                for name in sorted(kinds.keys() - {"corpus"})
            ]
            listed.append(f"{quote_text(corpus.name)} AS corpus{', _sha256' * bool(lists)}")
            source = catalog.view(corpus.name) + (" JOIN file_sums USING (file)" if lists else "")
            parts.append(f'SELECT file, row, "begin", {", ".join(listed)} FROM {source}')
        domains = [self._list_sql(name) if name in lists else quote_identifier(name) for name in by]
        columns = ["file", "row", '"begin"', "size", "tokens", *domains]
        # the newline ends a comment, which would otherwise hide the parenthesis
        where = " AND ".join(f"({condition}\n)" for condition in self.conditions)
        duckdb, arrow = import_duckdb(), import_pyarrow()
        try:
            sums = {
                "file": [file.id for file in catalog.files],
                "_sha256": [file.sha256 for file in catalog.files],
            }
            catalog.connection.register("file_sums", arrow.table(sums))
            documents = catalog.connection.sql(" UNION ALL ".join(parts))
            for condition in self.conditions:
                # alone, so that `true) OR (true` is refused; as a filter, so that nothing follows the
                # condition
                if len(catalog.connection.extract_statements(f"SELECT 1 WHERE {condition}")) != 1:
                    raise ValueError(f"where {condition}: expected one condition.")
            documents = documents.filter(where) if where else documents
            selected = documents.project(", ".join(columns))
            for batch in selected.to_arrow_reader(BATCH_ROWS):
                yield batch.rename_columns(["file", "row", "begin", "size", "tokens", *by])
        except (duckdb.Error, arrow.ArrowException) as error:
            why = next(iter(str(error).splitlines()), "")
            unknown = re.search(r'Referenced column "(.+)" not found', why)
            hint = f"; {suggest_nearest(unknown[1].lower(), sorted(kinds))}" if unknown else ""
            raise ValueError(f"where {' '.join(where.split())}: {why}{hint}") from error

    def _list_sql(self, name: str) -> str:
        """Return the domain of a document by a property with several values, in SQL."""
        values = f"list_sort(list_distinct({quote_identifier(name)}))"  # without NULL
        if self.list_domains == "each":
            return f"unnest(CASE WHEN len({values}) > 0 THEN {values} ELSE [NULL] END)"
        if weighted := ", ".join(map(quote_text, sorted(self.weighted.get(name, ())))):
            preferred = f"list_sort(list_intersect({values}, [{weighted}]))"
            values = f"CASE WHEN len({preferred}) > 0 THEN {preferred} ELSE {values} END"
        # a function of the content, the row and the property: not of the place or the time of registration
        draw = f"md5_number_upper(concat_ws('/', _sha256, row, {quote_text(name)}))"
        return f"({values})[1 + CAST({draw} % greatest(len({values}), 1) AS BIGINT)]"


@dataclass(frozen=True)
class Selection:
    """Documents in domains, sorted by domain, file and row.

    by          the properties that define a domain
    domains     their values, a tuple for each domain, in the order of the values
    files       the files that contain the documents
    documents   Arrow table of COLUMNS: file (index into `files`), row (number of the document in the file),
                begin and size (bytes, of text)
    bounds      int64 [K + 1]: documents of domain k are bounds[k] to bounds[k + 1] - 1
    n_tokens    tokens of each domain, if they were requested
    snapshot    versions of the corpora
    identity    of the prepared mixture that the selection was saved for
    """

    by: tuple[str, ...]
    domains: tuple[Values, ...]
    files: tuple[SourceFile, ...]
    documents: Any
    bounds: np.ndarray
    n_tokens: tuple[int, ...] | None = None
    snapshot: Mapping[str, int] = field(default_factory=dict)
    identity: str | None = None

    def column(self, name: str) -> np.ndarray:
        """Return one column of the documents, without a copy."""
        return self.documents.column(name).combine_chunks().to_numpy(zero_copy_only=False)

    @property
    def n_documents(self) -> np.ndarray:
        """Number of documents of each domain, int64 [K]."""
        return np.diff(self.bounds)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the domains: their values joined by a slash."""
        return tuple("/".join(map(str, values)) or "all" for values in self.domains)

    def compute_identity(self) -> str:
        """Return a hash, 64 hex digits, of the documents and their domains.

        It covers the content of the files as registered, but not the folders that contain them.
        """
        contents = [(Path(file.path).name, file.n_bytes, file.sha256) for file in self.files]
        sums = hashlib.sha256(json.dumps([self.by, self.domains, contents], default=str).encode())
        file, row = self.column("file"), self.column("row")
        domain = np.repeat(np.arange(len(self.domains), dtype=np.int32), self.n_documents)
        # intervals of consecutive rows of one file and domain, as earlier versions hashed them
        is_first = np.ones(len(row), dtype=bool)
        is_first[1:] = (np.diff(row) != 1) | (np.diff(file) != 0) | (np.diff(domain) != 0)
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(row)) - 1
        for column in (
            domain[first],
            file[first],
            row[first].astype(np.int64),
            row[last].astype(np.int64) + 1,
        ):
            sums.update(np.ascontiguousarray(column).data)
        return sums.hexdigest()

    def save(self, path: Path) -> None:
        """Write the selection as one Arrow file, atomically."""
        arrow = import_pyarrow()
        meta = {
            "by": self.by, "domains": self.domains, "files": [asdict(file) for file in self.files],
            "bounds": self.bounds.tolist(), "n_tokens": self.n_tokens, "snapshot": dict(self.snapshot),
            "identity": self.identity,
        }  # fmt: skip
        table = self.documents.replace_schema_metadata({META_KEY: json.dumps(meta, default=str)})
        with (
            atomic_path(path) as partial,
            arrow.OSFile(str(partial), "wb") as sink,
            arrow.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    @classmethod
    def load(cls, path: Path) -> "Selection":
        """Load a selection that `save` wrote. Raises FileNotFoundError, or ValueError for other files."""
        arrow = import_pyarrow()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file. Run tools/prepare_mixture.py.")
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_file(source) as reader:
                # the columns are pages of the map: nothing is copied, and only what is used is read
                table = reader.read_all()
            meta = json.loads(table.schema.metadata[META_KEY])
            files = tuple(SourceFile(**file) for file in meta.pop("files"))
            domains = tuple(tuple(values) for values in meta.pop("domains"))
            bounds, by = np.array(meta.pop("bounds"), dtype=np.int64), tuple(meta.pop("by"))
            return cls(by, domains, files, table, bounds, **meta)
        except (arrow.ArrowException, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: got a damaged file, or one of an earlier version. Run tools/prepare_mixture.py."
            ) from error


class _Gathered:
    """Documents of a query, which arrive in batches: 24 bytes for each."""

    def __init__(self, files: Sequence[SourceFile], count_tokens: bool) -> None:
        keys = np.array([file.id for file in files], dtype=np.int64)
        self.files, self.count_tokens = files, count_tokens
        self._order = np.argsort(keys).astype(np.int32)
        self._keys = keys[self._order]
        self.domains: dict[Values, int] = {}  # numbers in the order of arrival
        self.tokens: list[int] = []
        self.n = self.n_without_tokens = 0
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, batch: Any, by: Sequence[str]) -> None:
        """Add an Arrow batch with the columns of COLUMNS, tokens and the properties `by`."""
        if not len(batch):
            return
        part = {name: batch.column(name).to_numpy(zero_copy_only=False).astype(kind, copy=False)
                for name, kind in COLUMNS.items() if name != "file"}  # fmt: skip
        keys = batch.column("file").to_numpy()
        # documents of a file are adjacent: only the first one of each run is searched
        cuts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        places = self._order[np.searchsorted(self._keys, keys[cuts])]
        part["file"] = np.repeat(places, np.diff(np.r_[cuts, len(keys)]))
        codes, values = _encode_domains(batch, by)
        # len is evaluated before the insertion: the k-th new domain gets number k
        numbers = np.array([self.domains.setdefault(key, len(self.domains)) for key in values], np.int32)
        part["domain"] = numbers[codes]
        self.tokens += [0] * (len(self.domains) - len(self.tokens))
        if self.count_tokens:
            column = batch.column("tokens")
            self.n_without_tokens += column.null_count
            counts = column.fill_null(0).to_numpy(zero_copy_only=False)
            # bincount sums in float64, which is exact for the tokens of a batch (below 2^53)
            for k, n in zip(numbers.tolist(), np.bincount(codes, counts, len(values)).tolist(), strict=True):
                self.tokens[k] += int(n)
        self.n += len(batch)
        self._parts.append(part)

    def build_selection(self, by: tuple[str, ...]) -> Selection:
        """Return the documents, sorted, with domains in the order of their values."""
        columns = {
            name: np.concatenate([part[name] for part in self._parts]) for name in (*COLUMNS, "domain")
        }
        # None is not comparable with a value: the first entry of each pair sorts missing values last
        values = sorted(self.domains, key=lambda key: [(v is None, 0 if v is None else v) for v in key])
        place = np.empty(len(values), dtype=np.int32)
        place[[self.domains[key] for key in values]] = np.arange(len(values))
        domain = place[columns.pop("domain")]
        bounds = np.concatenate([[0], np.cumsum(np.bincount(domain, minlength=len(values)))])
        order = _sort_documents(domain, columns["file"], columns["row"])
        used = np.flatnonzero(np.bincount(columns["file"]))
        # files 3 and 7 in use: numbers[3] = 0, numbers[7] = 1
        numbers = np.zeros(int(used[-1]) + 1, dtype=np.int32)
        numbers[used] = np.arange(len(used))
        columns["file"] = numbers[columns["file"]]
        documents = import_pyarrow().table({name: column[order] for name, column in columns.items()})
        tokens = tuple(self.tokens[self.domains[key]] for key in values) if self.count_tokens else None
        return Selection(
            by, tuple(values), tuple(self.files[int(k)] for k in used), documents, bounds, tokens
        )


def _sort_documents(domain: np.ndarray, file: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the order of documents by domain, file and row."""
    # one integer in place of (file, row); a file holds fewer than 2^31 documents
    place = file.astype(np.int64) << 31 | row
    if len(place) > 1 and not (np.diff(place) >= 0).all():
        order = np.argsort(place, kind="stable")  # DuckDB's threads return parts in any order
    else:
        order = np.arange(len(place))
    # a stable sort of 16 bits is a radix sort, ten times as fast as one of 32 bits
    narrow = domain[order].astype(np.uint16 if not len(domain) or int(domain.max()) < 1 << 16 else np.int32)
    return order[np.argsort(narrow, kind="stable")]


def _encode_domains(batch: Any, by: Sequence[str]) -> tuple[np.ndarray, list[Values]]:
    """Return (domain of each document int64, values of each domain) within a batch."""
    codes = np.zeros(len(batch), dtype=np.int64)
    values: list[Values] = [()]
    for name in by:
        column = batch.column(name).dictionary_encode(null_encoding="encode")
        distinct = column.dictionary.to_pylist()
        # Mixed radix: one integer for each combination of values.
        # Second property with 3 values: code = 3 * first + second, undone by // 3 and % 3.
        codes = codes * len(distinct) + column.indices.to_numpy()
        # counting is faster than sorting, but needs an array of every possible code: two unique properties
        # of 131,072 documents have 2^34
        few = len(values) * len(distinct) <= COUNTED_CODES
        present = np.flatnonzero(np.bincount(codes)) if few else np.unique(codes)
        values = [
            (*values[code // len(distinct)], distinct[code % len(distinct)]) for code in present.tolist()
        ]
        # `present` is sorted and contains every code: the result is its index, 0 to len(present) - 1
        codes = np.searchsorted(present, codes)
    return codes, values
