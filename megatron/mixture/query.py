"""Which documents are wanted, and which domain each belongs to. The answer is intervals, in Arrow.

A condition is SQL over the properties, or a Python expression (`expression`). SQL is parsed, not trusted:
only comparisons, logic and the functions named here get through, and every column must be one that a corpus
has.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.presets import nearest
from megatron.data.documents import blocks_of
from megatron.data.indexed_writer import PARTIAL
from megatron.log import get_logger
from megatron.mixture.catalog import Catalog, Corpus
from megatron.mixture.content import hash_content
from megatron.mixture.expression import Condition
from megatron.mixture.intervals import OWN_TOKENS, Gathered
from megatron.mixture.libraries import duckdb, pyarrow, rows
from megatron.mixture.properties import quoted
from megatron.run_dir import written_whole

FUNCTIONS = frozenset(
    ["+", "-", "*", "/", "%", "||", "~~", "!~~", "~~*", "!~~*", "lower", "upper", "trim", "length", "len"]
    + ["contains", "starts_with", "ends_with", "prefix", "suffix", "substr", "substring", "regexp_matches"]
    + ["list_contains", "list_value", "abs", "round", "coalesce", "year", "month", "day", "hash"]
)
LOGIC = frozenset(["COMPARISON", "CONJUNCTION", "BETWEEN", "OPERATOR", "CASE"])
CLASSES = LOGIC | {"COLUMN_REF", "CONSTANT", "FUNCTION", "CAST"}
COMPRESSED = (".gz", ".zst")
ALWAYS = {"corpus": "category", "tokens": "integer", "size": "integer"}  # of every document, with their types
BATCH_ROWS = 1 << 17
MOST_DEPTH = 200  # of expressions within one another
INTERVALS = ("domain", "file", "begin", "end")

log = get_logger(__name__)


@dataclass(frozen=True)
class Query:
    """Conditions over corpora of a catalog; `where` of another condition asks for both."""

    corpora: tuple[str, ...] = ()  # none: all
    conditions: tuple[str | Condition, ...] = ()

    def where(self, condition: str | Condition) -> "Query":
        """As this one, and `condition` as well: SQL, or an expression of `field`s."""
        return Query(self.corpora, (*self.conditions, condition))

    def run(self, catalog: Catalog, by: Sequence[str] = (), count_tokens: bool = False) -> "Result":
        """The documents, in domains: one for each combination of the properties `by`.

        ValueError for a condition that is none, for an unknown column (the nearest is offered), where no
        document is left, and where tokens are to be counted and a document has no count.
        """
        corpora = [catalog.corpus(name) for name in self.corpora] or catalog.corpora()
        kinds = {one.name: one.kind for corpus in corpora for one in corpus.properties} | ALWAYS
        for name in by:
            if name not in kinds:
                raise ValueError(f"domains: no property {name!r}; {nearest(name, sorted(kinds))}")
            if kinds[name] == "list":
                raise ValueError(f"domains: '{name}' is a list; a document has one domain")
        where, given = _where(catalog, self.conditions, kinds)
        wanted = [f", {quoted(name)}" for name in by] + [f', tokens AS "{OWN_TOKENS}"'] * count_tokens
        n_most = catalog.n_documents(corpora)
        batches = _documents(catalog, corpora, sorted(kinds), "".join(wanted), where, given)
        found = Gathered.of(batches, n_most, tuple(by))
        if not found.domains:
            told = " AND ".join(map(str, self.conditions)) or "that"
            raise ValueError(f"{catalog.path}: no document satisfies {told}")
        if found.n_without_tokens:
            raise ValueError(
                f"{catalog.path}: tokens of {found.n_without_tokens:,} of {len(found.domain):,} documents "
                "are not counted; register them with --tokenizer-model, or let weights count documents "
                "(count: documents)"
            )
        domains, tokens, used, table = found.intervals()
        files = _files(catalog)
        n_tokens = tuple(tokens) if count_tokens else None
        return Result(tuple(by), domains, tuple(files[id] for id in used), table, n_tokens)


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was registered."""

    id: int
    path: str
    text_key: str
    n_bytes: int
    mtime_ns: int
    n_documents: int
    sha256: str | None = None

    def verify(self) -> None:
        """ValueError where the content is not what was registered, whatever size and time of change say."""
        path = self.unchanged()
        if self.sha256 is None:
            raise ValueError(
                f"{path}: was registered without a sum of its content. Register it again with --verify."
            )
        if hash_content(path) != self.sha256:
            raise ValueError(
                f"{path}: got other content than was registered, with the same size and time of change. "
                "Put the file back, or register it again with --verify."
            )

    def unchanged(self) -> Path:
        """Where it is. FileNotFoundError, or ValueError where it is not as it was."""
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: is in the catalog but not there; put it back or register anew")
        told = path.stat()
        if (told.st_size, told.st_mtime_ns) != (self.n_bytes, self.mtime_ns):
            raise ValueError(f"{path}: has changed since it was registered; register it again")
        return path

    def plain(self, folder: Path) -> Path:
        """Where its bytes can be read from any place on: itself, or what it holds, unpacked into `folder`."""
        path = self.unchanged()
        if not path.name.endswith(COMPRESSED):
            return path
        plain = folder / "unpacked" / f"{self.id}-{self.mtime_ns}"
        if not plain.is_file():
            plain.parent.mkdir(parents=True, exist_ok=True)
            partial = plain.with_name(f"{plain.name}.{os.getpid()}{PARTIAL}")  # several may be at it
            try:
                with partial.open("wb") as sink:
                    for block in blocks_of(path):
                        sink.write(block)
                partial.rename(plain)
            finally:
                partial.unlink(missing_ok=True)
        return plain


@dataclass(frozen=True)
class Result:
    """Documents in domains. Rows of a file are those of its documents, counted from 0.

    by          the properties that make a domain
    domains     their values, a tuple for each domain, in the order of the values
    files       where the documents are
    intervals   Arrow table: domain int32, file int32 (place in `files`), begin and end int64 (rows);
                sorted by domain, file and row
    n_tokens    of each domain, where they were asked for
    """

    by: tuple[str, ...]
    domains: tuple[tuple[Any, ...], ...]
    files: tuple[SourceFile, ...]
    intervals: Any
    n_tokens: tuple[int, ...] | None = None

    def column(self, name: str) -> np.ndarray:
        """One column of the intervals, without a copy."""
        return self.intervals.column(name).combine_chunks().to_numpy(zero_copy_only=False)

    @property
    def n_documents(self) -> np.ndarray:
        """Of each domain, int64."""
        lengths = self.column("end") - self.column("begin")
        counts = np.zeros(len(self.domains), dtype=np.int64)
        np.add.at(counts, self.column("domain"), lengths)
        return counts

    @property
    def names(self) -> tuple[str, ...]:
        """Of the domains, for people: their values joined by a slash."""
        return tuple("/".join(map(str, values)) or "all" for values in self.domains)

    def identity(self) -> str:
        """64 hex digits of which documents there are, in which domains, and of what is in their files as it
        was registered; not of the folders they are in."""
        sums = hashlib.sha256(json.dumps([self.by, self.domains, self._contents()], default=str).encode())
        for name in INTERVALS:
            sums.update(np.ascontiguousarray(self.column(name)).data)
        return sums.hexdigest()

    def save(self, path: Path) -> None:
        """Write everything as one Arrow file, whole or not at all."""
        arrow = pyarrow()
        told = {"by": self.by, "domains": self.domains, "files": [vars(file) for file in self.files],
                "n_tokens": self.n_tokens}  # fmt: skip
        table = self.intervals.replace_schema_metadata({"mixture": json.dumps(told, default=str)})
        with (
            written_whole(path) as partial,
            arrow.OSFile(str(partial), "wb") as sink,
            arrow.ipc.new_file(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    @classmethod
    def load(cls, path: Path) -> "Result":
        """Undo `save`. FileNotFoundError, or ValueError for another kind of file."""
        arrow = pyarrow()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such query result")
        try:
            with arrow.memory_map(str(path)) as source, arrow.ipc.open_file(source) as reader:
                return cls.from_table(reader.read_all())
        except (arrow.ArrowException, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: no query result ({str(error).splitlines()[0]}); make it anew"
            ) from error

    @classmethod
    def from_table(cls, table: Any) -> "Result":
        """From intervals whose schema carries the rest."""
        told = json.loads(table.schema.metadata[b"mixture"])
        files = tuple(SourceFile(**file) for file in told["files"])
        domains = tuple(tuple(values) for values in told["domains"])
        n_tokens = told.get("n_tokens") and tuple(told["n_tokens"])
        return cls(tuple(told["by"]), domains, files, table.replace_schema_metadata(None), n_tokens)

    def warn_without_sums(self, catalog: Path) -> None:
        """Log where an older catalog does not know the content of files."""
        n = sum(file.sha256 is None for file in self.files)
        if n:
            log.warning(
                "%s: %d of %d files were registered without a sum of their content; an edit that keeps the "
                "size is not noticed once it is registered again. Register them again with --verify",
                catalog, n, len(self.files),
            )  # fmt: skip

    def _contents(self) -> list[tuple[str | int, ...]]:
        return [
            (Path(file.path).name, file.n_bytes) + (() if file.sha256 is None else (file.sha256,))
            for file in self.files
        ]


def _where(
    catalog: Catalog, conditions: Sequence[str | Condition], kinds: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """All conditions in SQL, and the values of its parameters."""
    parts, given = ["true"], {}
    for condition in conditions:
        try:
            parts.append(_one_where(catalog, condition, kinds, given))
        except RecursionError:
            raise _too_deep(condition) from None
    return " AND ".join(parts), given


def _one_where(catalog: Catalog, condition: Any, kinds: Mapping[str, str], given: dict[str, Any]) -> str:
    if isinstance(condition, str):
        try:
            condition.encode()
        except UnicodeEncodeError:
            raise ValueError(f"where {condition!r}: got characters that are not UTF-8. Mend them.") from None
        _check(catalog, condition, sorted(kinds))
        return f"({condition}\n)"
    if not isinstance(condition, Condition):
        raise ValueError(f"where {condition!r}: wanted SQL, or a condition on a field")
    for name in condition.names():
        if name not in kinds:
            raise _unknown(str(condition), name, sorted(kinds))
    return condition.sql(kinds, given)


def _too_deep(condition: Any) -> ValueError:
    shown = f"{condition[:60]}..." if isinstance(condition, str) else "a Condition"
    return ValueError(
        f"where {shown!r}: got more than {MOST_DEPTH} levels within one another, expected fewer. Simplify it."
    )


def _unknown(condition: str, name: str, columns: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(name, columns, n=1, cutoff=0.0)[0]
    return ValueError(
        f"where {condition!r}: no property '{name}'; did you mean '{near}'? "
        f"known: {', '.join(columns)} (a text stands in single quotes)"
    )


def _check(catalog: Catalog, condition: str, columns: Sequence[str]) -> None:
    """ValueError for what is not a plain condition over known columns."""
    ((told,),) = rows(
        catalog.connection, "SELECT json_serialize_sql(?)", [f"SELECT 1 FROM t WHERE {condition}"]
    )
    parsed = json.loads(told)
    if parsed["error"]:
        raise ValueError(f"where {condition!r}: {parsed['error_message']}")
    nodes = [statement["node"] for statement in parsed["statements"]]
    if len(nodes) != 1 or nodes[0].get("type") != "SELECT_NODE" or nodes[0]["where_clause"] is None:
        raise ValueError(f"where {condition!r}: wanted one condition")
    rest = ("modifiers", "group_expressions", "having", "qualify", "sample")
    if any(nodes[0].get(name) for name in rest):
        raise ValueError(f"where {condition!r}: wanted a condition and nothing behind it")
    for node in _nodes(nodes[0]["where_clause"], condition):
        kind = node["class"]
        if kind not in CLASSES:
            raise ValueError(f"where {condition!r}: {kind.lower().replace('_', ' ')} is not allowed in it")
        if kind == "FUNCTION" and node["function_name"] not in FUNCTIONS:
            near = nearest(node["function_name"], sorted(FUNCTIONS))
            raise ValueError(
                f"where {condition!r}: function '{node['function_name']}' is not allowed; {near}"
            )
        if kind == "COLUMN_REF":
            name = node["column_names"][0].lower()
            if name not in columns or len(node["column_names"]) > 1:
                raise _unknown(condition, ".".join(node["column_names"]), columns)


def _nodes(tree: Any, condition: str) -> Iterator[dict[str, Any]]:
    """Every expression of a parsed condition. ValueError where they are nested too deep."""
    rest = [(tree, 0)]
    while rest:
        part, depth = rest.pop()
        if isinstance(part, dict):
            if "class" in part:
                depth += 1
                yield part
            rest += [(one, depth) for one in part.values()]
        elif isinstance(part, list):
            rest += [(one, depth) for one in part]
        if depth > MOST_DEPTH:
            raise _too_deep(condition)


def _documents(
    catalog: Catalog, corpora: Sequence[Corpus], columns: Sequence[str], wanted: str, where: str,
    given: dict[str, Any],
) -> Iterator[Any]:  # fmt: skip
    """(file, row, what is wanted besides) of the documents that satisfy `where`: Arrow batches."""
    parts = []
    for corpus in corpora:
        own = {one.name for one in corpus.properties} | {"tokens", "size"}
        told = [f"'{corpus.name.replace(chr(39), chr(39) * 2)}' AS corpus"]
        told += [
            quoted(name) if name in own else f"NULL AS {quoted(name)}" for name in columns if name != "corpus"
        ]
        parts.append(f"SELECT file, row, {', '.join(told)} FROM {corpus.table}")
    asked = f"SELECT file, row{wanted} FROM ({' UNION ALL '.join(parts)}) WHERE {where}"
    try:
        yield from catalog.connection.sql(asked, params=given or None).to_arrow_reader(BATCH_ROWS)
    except (duckdb().Error, pyarrow().ArrowException) as error:
        raise ValueError(f"where {' '.join(where.split())}: {str(error).splitlines()[0]}") from error


def _files(catalog: Catalog) -> dict[int, SourceFile]:
    sums = "sha256" if catalog.has_sums else "NULL"
    told = rows(
        catalog.connection,
        f"SELECT files.id, path, text_key, bytes, mtime_ns, n_documents, {sums} FROM files "
        "JOIN corpora ON corpora.id = files.corpus",
    )
    return {one[0]: SourceFile(*one) for one in told}
