"""Queries over a catalog: the documents that satisfy conditions, in domains, as one Arrow file.

The file has a row for each document. The processes of a machine map it, so that
its pages are in memory once, and nothing is read before it is used.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron.io import atomic_path
from megatron.mixture.catalog import Catalog
from megatron.mixture.files import SourceFile, explain_errors, import_pyarrow
from megatron.mixture.properties import quote_identifier, quote_text
from megatron.plan.mixture_use import mixture_folder

COLUMNS = {"file": "<i4", "row": "<i4", "begin": "<i8", "size": "<i4"}  # columns of a selection
BATCH_ROWS = 1 << 17
COUNTED_CODES = 1 << 20  # 8 MB of counters
META_KEY = b"selection"
Values = tuple[Any, ...]


@dataclass(frozen=True)
class Query:
    """Conditions over corpora of a catalog. A document must satisfy all of them."""

    corpora: tuple[str, ...] = ()  # empty: all
    conditions: tuple[str, ...] = ()

    def where(self, condition: str) -> "Query":
        """Return this query with one more condition, in SQL."""
        return replace(self, conditions=(*self.conditions, condition))

    def run(self, catalog: Catalog, by: Sequence[str] = (), count_tokens: bool = False) -> "Selection":
        """Return the documents in domains, one for each combination of the properties `by`.

        Raises ValueError for an invalid condition, for an unknown column (with
        the nearest name), if no document satisfies the conditions, and if
        tokens are to be counted and a document has no count.
        """
        tokens = ["tokens"] if count_tokens else []
        # encoded batch by batch, so that no text
        # of a property is in memory for each document
        rows = self._iter_batches(catalog, by, tokens)
        batches = [_encode_columns(batch, len(by), tokens) for batch in rows if len(batch)]
        if not batches:
            condition_text = " AND ".join(self.conditions) or "that"
            raise ValueError(f"{catalog.path}: no document satisfies {condition_text}")
        documents = import_pyarrow().Table.from_batches(batches).unify_dictionaries()
        n_missing = documents.column("tokens").null_count if count_tokens else 0
        if n_missing:
            raise ValueError(
                f"{catalog.path}: tokens of {n_missing:,} of {len(documents):,} documents are not "
                "counted. Register them with --tokenizer-model, or let weights count documents "
                "(count: documents)."
            )
        selection = _build_selection(documents, tuple(by), catalog.files, count_tokens)
        return replace(selection, snapshot=catalog.versions)

    def _iter_batches(self, catalog: Catalog, by: Sequence[str], others: Sequence[str]) -> Iterator[Any]:
        """Yield COLUMNS, `others` and the properties `by` of the documents that satisfy all conditions."""
        names = list(self.corpora) or [corpus.name for corpus in catalog.list_corpora()]
        corpora = [catalog.get_table(name).corpus for name in names]
        if not corpora:
            raise ValueError(f"{catalog.path}: has no documents. Register files with scaling register.")
        lists = {prop.name for corpus in corpora for prop in corpus.all_properties if prop.kind == "list"}
        for name in lists.intersection(by):
            raise ValueError(
                f"by: got {name!r}, a list, expected a property with one value. "
                "Register its first value, such as --property 'meta.tags[0] AS tag'."
            )
        domains = [f'{quote_identifier(name)} AS "domain {k}"' for k, name in enumerate(by)]
        columns = ", ".join(["file", "row", '"begin"', "size", *others, *domains])
        # also an unknown name in `by`, for which DuckDB suggests others
        with explain_errors(f"where {' AND '.join(self.conditions) or 'true'}", ""):
            yield from self._filter(catalog, names).project(columns).to_arrow_reader(BATCH_ROWS)

    def _filter(self, catalog: Catalog, names: Sequence[str]) -> Any:
        """Return the documents of some corpora that satisfy all conditions, as a relation."""
        connection = catalog.connection
        parts = [f"SELECT *, {quote_text(name)} AS corpus FROM {catalog.view(name)}" for name in names]
        # BY NAME: a property that a corpus does not have is NULL
        documents = connection.sql(" UNION ALL BY NAME ".join(parts))
        for condition in self.conditions:
            # alone, so that `true) OR (true` is refused
            if len(connection.extract_statements(f"SELECT 1 WHERE {condition}")) != 1:
                raise ValueError(f"where {condition}: expected one condition.")
            # as a filter, so that nothing follows the condition; the newline
            # ends a comment
            documents = documents.filter(f"({condition}\n)")
        return documents


def documents_path(mixture: str | Path, identity: str) -> Path:
    """Return the file of the documents of a prepared mixture."""
    return mixture_folder(mixture) / f"documents-{identity[:16]}.arrow"


@dataclass(frozen=True)
class Selection:
    """Documents in domains, sorted by domain, file and row.

    by          the properties that define a domain
    domains     their values, a tuple for each domain,
                in the order of the values
    files       the files that contain the documents
    documents   Arrow table of COLUMNS: file (index into `files`), row (number
                of the document in the file), begin and size (bytes, of text)
    bounds      int64 [K + 1]: documents of domain k are bounds[k] to bounds[k +
                1] - 1
    n_tokens    tokens of each domain, if they were requested
    snapshot    versions of the corpora
    """

    by: tuple[str, ...]
    domains: tuple[Values, ...]
    files: tuple[SourceFile, ...]
    documents: Any
    bounds: np.ndarray
    n_tokens: tuple[int, ...] | None = None
    snapshot: Mapping[str, int] = field(default_factory=dict)

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

        It covers the content of the files as registered, but not the folders
        that contain them.
        """
        contents = [(Path(file.path).name, file.n_bytes, file.sha256) for file in self.files]
        sums = hashlib.sha256(json.dumps([self.by, self.domains, contents], default=str).encode())
        file, row = self.column("file"), self.column("row")
        domain = np.repeat(np.arange(len(self.domains), dtype=np.int32), self.n_documents)
        # intervals of consecutive rows of one file and domain, as earlier
        # versions hashed them
        is_first = np.ones(len(row), dtype=bool)
        is_first[1:] = (np.diff(row) != 1) | (np.diff(file) != 0) | (np.diff(domain) != 0)
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(row)) - 1
        begins, ends = row[first].astype(np.int64), row[last].astype(np.int64) + 1
        for column in (domain[first], file[first], begins, ends):
            sums.update(np.ascontiguousarray(column).data)
        return sums.hexdigest()

    def save(self, path: Path) -> None:
        """Write the selection as one Arrow file, atomically."""
        arrow = import_pyarrow()
        meta = {
            "by": self.by, "domains": self.domains, "files": [asdict(file) for file in self.files],
            "bounds": self.bounds.tolist(), "n_tokens": self.n_tokens, "snapshot": dict(self.snapshot),
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
        """Load what `save` wrote.

        Raises FileNotFoundError, or ValueError for other files.
        """
        arrow = import_pyarrow()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file. Run scaling mixture.")
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_file(source) as reader:
                # the columns are pages of the map: nothing is copied, and only
                # what is used is read
                table = reader.read_all()
            meta = json.loads(table.schema.metadata[META_KEY])
            files = tuple(SourceFile(**file) for file in meta.pop("files"))
            domains = tuple(tuple(values) for values in meta.pop("domains"))
            bounds, by = np.array(meta.pop("bounds"), dtype=np.int64), tuple(meta.pop("by"))
            return cls(by, domains, files, table, bounds, **meta)
        except (arrow.ArrowException, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: got a damaged file, or one of an earlier version. Run scaling mixture."
            ) from error


def _encode_columns(batch: Any, n_properties: int, others: Sequence[str]) -> Any:
    """Return COLUMNS, `others`, and the properties as dictionaries, of an Arrow batch."""
    arrow = import_pyarrow()
    columns = {"file": batch.column("file"), **{name: batch.column(name) for name in others}}
    columns |= {name: batch.column(name) for name in COLUMNS if name != "file"}
    for name in (f"domain {k}" for k in range(n_properties)):
        columns[name] = batch.column(name).dictionary_encode(null_encoding="encode")
    return arrow.RecordBatch.from_pydict(columns)


def _build_selection(
    documents: Any, by: tuple[str, ...], files: Sequence[SourceFile], count_tokens: bool
) -> Selection:
    """Return documents of `_encode_columns`, sorted, with domains in the order of their values."""
    codes, values = _encode_domains(documents, len(by))
    # None is not comparable with a value:
    # the first entry of each pair sorts it last
    order = sorted(range(len(values)), key=lambda k: [(v is None, 0 if v is None else v) for v in values[k]])
    # argsort inverts the permutation
    domain = np.argsort(order).astype(np.int32)[codes]
    bounds = np.append(0, np.cumsum(np.bincount(domain, minlength=len(values))))
    columns = {name: _to_numpy(documents, name).astype(kind, copy=False)
               for name, kind in COLUMNS.items() if name != "file"}  # fmt: skip
    file, used = _number_files(_to_numpy(documents, "file"), files)
    sorting = _sort_documents(domain, file, columns["row"])
    table = {"file": file} | columns
    rows = import_pyarrow().table({name: column[sorting] for name, column in table.items()})
    tokens = None
    if count_tokens:
        # bincount sums in float64, which is exact below 2^53
        sums = np.bincount(domain, _to_numpy(documents, "tokens"), len(values))
        tokens = tuple(sums.astype(np.int64).tolist())
    return Selection(by, tuple(values[k] for k in order), used, rows, bounds, tokens)


def _to_numpy(table: Any, name: str) -> np.ndarray:
    return table.column(name).combine_chunks().to_numpy(zero_copy_only=False)


def _number_files(ids: np.ndarray, files: Sequence[SourceFile]) -> tuple[np.ndarray, tuple[SourceFile, ...]]:
    """Return the file of each document as an index into the files in use, and these files."""
    keys = np.array([file.id for file in files], dtype=np.int64)
    order = np.argsort(keys).astype(np.int32)
    # documents of a file are adjacent:
    # only the first one of each run is searched
    cuts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]])
    places = order[np.searchsorted(keys[order], ids[cuts])]
    used = np.unique(places)
    # files 3 and 7 in use: 3 becomes 0, 7 becomes 1
    numbers = np.searchsorted(used, places).astype(np.int32)
    return np.repeat(numbers, np.diff(np.r_[cuts, len(ids)])), tuple(files[k] for k in used)


def _sort_documents(domain: np.ndarray, file: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the order of documents by domain, file and row."""
    # one integer in place of (file, row); a file holds fewer than 2^31 documents
    place = file.astype(np.int64) << 31 | row
    # a stable sort of 8 or 16 bits is a radix sort, ten times as fast as one of 32 bits
    narrow = domain.astype(np.min_scalar_type(domain.max(initial=0)))
    # one thread of DuckDB returns documents in order, several return parts in any order
    if (place[1:] > place[:-1]).all():
        return np.argsort(narrow, kind="stable")
    order = np.argsort(place, kind="stable")
    return order[np.argsort(narrow[order], kind="stable")]


def _encode_domains(documents: Any, n_properties: int) -> tuple[np.ndarray, list[Values]]:
    """Return (domain of each document int64 [n], values of each domain)."""
    codes = np.zeros(len(documents), dtype=np.int64)
    values: list[Values] = [()]
    for k in range(n_properties):
        column = documents.column(f"domain {k}").combine_chunks()
        distinct = column.dictionary.to_pylist()
        # Mixed radix: one integer for each combination of values. Second
        # property with 3 values: code = 3 * first + second, undone by divmod.
        codes = codes * len(distinct) + column.indices.to_numpy()
        # counting is faster than sorting, but needs an array of every possible code
        if len(values) * len(distinct) <= COUNTED_CODES:
            is_present = np.bincount(codes) > 0
            present, codes = np.flatnonzero(is_present), (np.cumsum(is_present) - 1)[codes]
        else:
            present, codes = np.unique(codes, return_inverse=True)
        pairs = [divmod(code, len(distinct)) for code in present.tolist()]
        values = [(*values[first], distinct[second]) for first, second in pairs]
    return codes, values
