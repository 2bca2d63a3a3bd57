"""The catalog: which documents there are, where each stands, and with which properties. One DuckDB file.

A corpus is a set of files that share properties; each has a table of its own, one row a document. Text stays
where it is. Every file is taken in one transaction, so that a registration that was killed goes on with the
file it was at.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from megatron.config.presets import nearest
from megatron.data.documents import COMPRESSED, PLAIN, find_inputs
from megatron.data.token_counts import TokenCounter
from megatron.mixture.histogram import Row, histogram
from megatron.mixture.libraries import duckdb, rows
from megatron.mixture.properties import Property, quoted
from megatron.mixture.records import Records, Target, take_file
from megatron.mixture.tars import TARS

SCHEMA = """
CREATE SEQUENCE IF NOT EXISTS numbers START 1;
CREATE TABLE IF NOT EXISTS corpora (id INTEGER, name VARCHAR, text_key VARCHAR, properties VARCHAR);
ALTER TABLE corpora ADD COLUMN IF NOT EXISTS tokenizer VARCHAR;
CREATE TABLE IF NOT EXISTS files (id INTEGER, corpus INTEGER, path VARCHAR, bytes BIGINT, mtime_ns BIGINT,
    n_documents BIGINT, n_broken BIGINT);
CREATE TABLE IF NOT EXISTS broken (file INTEGER, line BIGINT, reason VARCHAR);
"""
MAGIC = b"DUCK"  # of every DuckDB file, behind 8 bytes of a sum
INPUTS = (*PLAIN, *COMPRESSED, ".parquet", *TARS, ".bin")


@dataclass(frozen=True)
class Corpus:
    """What is kept of a corpus beside its documents. `tokenizer`: what counted its tokens, if any did."""

    id: int
    name: str
    text_key: str
    properties: tuple[Property, ...]
    tokenizer: dict[str, Any] | None = None

    @property
    def table(self) -> str:
        """Of its documents."""
        return f"documents_{self.id}"

    @property
    def alike(self) -> tuple[Any, ...]:
        """What must be the same when files are added; a tokenizer may have another path."""
        return self.properties, self.text_key, self.tokenizer and self.tokenizer | {"name": None}


@dataclass
class Registered:
    """What a registration did. `n_known` files were there already, as they are.

    absent   properties that no document of the corpus has: misspelt, more often than not
    """

    n_files: int = 0
    n_known: int = 0
    n_documents: int = 0
    n_broken: int = 0
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listed:
    """A corpus in a few numbers."""

    name: str
    n_files: int
    n_documents: int
    n_broken: int
    n_tokens: int | None
    properties: tuple[str, ...]


class Catalog:
    """An open catalog; a context manager. One process may write to it, or any number may read."""

    def __init__(self, path: Path, read_only: bool = False, n_threads: int | None = None) -> None:
        """Open, and make it where it is not there. ValueError for what is none or is being written to."""
        self.path = path
        if read_only and not path.is_file():
            raise FileNotFoundError(f"{path}: no such catalog; make it with tools/register_corpus.py")
        if path.is_file() and path.stat().st_size and not _is_duckdb(path):
            raise ValueError(f"{path}: no DuckDB file; wanted a catalog, or a name for a new one")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._evaluating: Any = None
        self._config = config = {} if n_threads is None else {"threads": n_threads}
        try:
            self.connection = duckdb().connect(str(path), read_only=read_only, config=config)
            if not read_only:
                rows(self.connection, SCHEMA)
        except duckdb().Error as error:
            raise ValueError(
                f"{path}: cannot be opened as a catalog ({str(error).splitlines()[0]})"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._evaluating is not None:
            self._evaluating.close()
        self.connection.close()

    def corpora(self) -> list[Corpus]:
        """All, in the order in which they came."""
        found = rows(self.connection, "SELECT * FROM corpora ORDER BY id")
        return [
            Corpus(
                id,
                name,
                key,
                tuple(Property(**one) for one in json.loads(told)),
                json.loads(counted[0]) if counted and counted[0] else None,
            )  # fmt: skip
            for id, name, key, told, *counted in found  # older catalogs have no tokenizers
        ]

    def corpus(self, name: str) -> Corpus:
        """The one of a name. ValueError offers the nearest."""
        known = {one.name: one for one in self.corpora()}
        if name not in known:
            raise ValueError(f"{self.path}: no corpus {name!r}; {nearest(name, list(known))}")
        return known[name]

    def register(
        self, name: str, inputs: Sequence[str], properties: Sequence[Property],
        text_key: str = "text", quiet: bool = False, counter: TokenCounter | None = None,
    ) -> Registered:  # fmt: skip
        """Take new and changed files into a corpus: lines of JSON, parquet, tars, or pairs (.bin).

        `counter` counts the tokens of each document; of a pair they are known. Files that are there already,
        with the size and the time of change they had, are passed over. Broken lines are counted and located;
        `broken` lists them. ValueError for a corpus that has other properties or another tokenizer, or for a
        file that cannot be read; the files before it stay registered.
        """
        paths = [path.resolve() for path in _inputs(inputs)]
        told = None if counter is None else counter.told
        corpus = self._corpus_to_fill(Corpus(0, name, text_key, tuple(properties), told))
        known = {
            path: (id, size, mtime)
            for id, path, size, mtime in rows(
                self.connection, "SELECT id, path, bytes, mtime_ns FROM files WHERE corpus = ?", [corpus.id]
            )
        }
        done = Registered()
        total = sum(path.stat().st_size for path in paths)
        with tqdm(total=total, unit="B", unit_scale=True, disable=quiet or None, desc="registering") as bar:
            for path in paths:
                told = path.stat()
                old = known.get(str(path))
                if old is not None and old[1:] == (told.st_size, told.st_mtime_ns):
                    done.n_known += 1
                else:
                    records = self._take(corpus, path, None if old is None else old[0], counter)
                    done.n_files += 1
                    done.n_documents += records.n_documents
                    done.n_broken += records.n_broken
                bar.update(told.st_size)
        done.absent = self._absent(corpus)
        return done

    def _absent(self, corpus: Corpus) -> tuple[str, ...]:
        """Properties that none of its documents has."""
        counts = "".join(f", count({quoted(one.name)})" for one in corpus.properties)
        ((n_documents, *n_having),) = rows(self.connection, f"SELECT count(*){counts} FROM {corpus.table}")
        named = zip(corpus.properties, n_having, strict=True)
        return tuple(one.name for one, n in named if n_documents and not n)

    def summary(self) -> list[Listed]:
        """Every corpus in numbers."""
        told = []
        for corpus in self.corpora():
            ((n_files, n_documents, n_broken),) = rows(self.connection, 
                "SELECT count(*), coalesce(sum(n_documents), 0), coalesce(sum(n_broken), 0) "
                "FROM files WHERE corpus = ?", [corpus.id],
            )  # fmt: skip
            ((n_tokens,),) = rows(self.connection, f"SELECT sum(tokens) FROM {corpus.table}")
            names = tuple(one.name for one in corpus.properties)
            told.append(Listed(corpus.name, n_files, int(n_documents), int(n_broken), n_tokens, names))
        return told

    def describe(self, name: str) -> dict[str, list[Row]]:
        """(value, documents, tokens) of each property of a corpus: see `histogram`."""
        corpus = self.corpus(name)
        return {one.name: histogram(self.connection, corpus.table, one) for one in corpus.properties}

    def broken(self, name: str) -> list[tuple[str, int, str]]:
        """(file, line or row from 1, why) of what was no document; the first thousand of each file."""
        return rows(self.connection, 
            "SELECT path, line, reason FROM broken JOIN files ON files.id = broken.file "
            "WHERE corpus = ? ORDER BY path, line", [self.corpus(name).id],
        )  # fmt: skip

    def n_documents(self, corpora: Sequence[Corpus]) -> int:
        """Of some corpora together."""
        told = "SELECT corpus, CAST(sum(n_documents) AS BIGINT) FROM files GROUP BY 1"
        counts = dict(rows(self.connection, told))
        return sum(counts.get(corpus.id, 0) for corpus in corpora)

    def text_places(self, files: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """(begin int64, size int64, int32 where that does) of the documents of files.

        Bytes of a line or a sample; of parquet `begin` is the row.
        """
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        tables, wanted = {corpus.id: corpus.table for corpus in self.corpora()}, set(files)
        for file, corpus in rows(self.connection, "SELECT id, corpus FROM files"):
            if file in wanted:
                told = self.connection.sql(
                    f"SELECT begin, size FROM {tables[corpus]} WHERE file = {int(file)} ORDER BY row"
                ).to_arrow_table()
                begins, sizes = (told.column(name).to_numpy() for name in ("begin", "size"))
                narrow = not len(sizes) or sizes.max() <= np.iinfo(np.int32).max
                found[file] = begins.copy(), sizes.astype(np.int32 if narrow else np.int64)
        return found

    def remove(self, name: str) -> None:
        """Forget a corpus; its files are left alone."""
        corpus = self.corpus(name)
        with self._transaction():
            for (file,) in rows(self.connection, "SELECT id FROM files WHERE corpus = ?", [corpus.id]):
                rows(self.connection, "DELETE FROM broken WHERE file = ?", [file])
            rows(self.connection, "DELETE FROM files WHERE corpus = ?", [corpus.id])
            rows(self.connection, "DELETE FROM corpora WHERE id = ?", [corpus.id])
            rows(self.connection, f"DROP TABLE {corpus.table}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        rows(self.connection, "BEGIN")
        try:
            yield
        except BaseException:
            rows(self.connection, "ROLLBACK")
            raise
        rows(self.connection, "COMMIT")

    def _scratch(self) -> Any:
        if self._evaluating is None:
            self._evaluating = duckdb().connect(config=self._config)
        return self._evaluating

    def _next(self) -> int:
        return rows(self.connection, "SELECT nextval('numbers')")[0][0]

    def _corpus_to_fill(self, wanted: Corpus) -> Corpus:
        """The corpus of that name, made where there is none; the id of `wanted` is not looked at."""
        for known in self.corpora():
            if known.name == wanted.name:
                if known.alike != wanted.alike:
                    counted = (known.tokenizer or {}).get("name")
                    raise ValueError(
                        f"{self.path}: corpus '{known.name}' has the properties "
                        f"{'; '.join(map(str, known.properties)) or 'none'}, its text under "
                        f"'{known.text_key}', {f'tokens of {counted}' if counted else 'no tokenizer'}; "
                        "give the same, another name, or remove it first"
                    )
                return known
        with self._transaction():
            corpus = replace(wanted, id=self._next())
            told = json.dumps([asdict(one) for one in corpus.properties])
            rows(
                self.connection,
                "INSERT INTO corpora VALUES (?, ?, ?, ?, ?)",
                [corpus.id, corpus.name, corpus.text_key, told, json.dumps(corpus.tokenizer)],
            )
            columns = "".join(f", {quoted(one.name)} {one.sql_type}" for one in corpus.properties)
            rows(
                self.connection,
                f"CREATE TABLE {corpus.table} "
                f"(file INTEGER, row BIGINT, begin BIGINT, size BIGINT, tokens BIGINT{columns})",
            )
        return corpus

    def _take(self, corpus: Corpus, path: Path, old: int | None, counter: TokenCounter | None) -> Records:
        with self._transaction():
            if old is not None:
                rows(self.connection, f"DELETE FROM {corpus.table} WHERE file = ?", [old])
                rows(self.connection, "DELETE FROM broken WHERE file = ?", [old])
                rows(self.connection, "DELETE FROM files WHERE id = ?", [old])
            told = path.stat()
            file = self._next()
            target = Target(
                path, self.connection, self._scratch(), corpus.table, file, corpus.text_key,
                corpus.properties, counter,
            )  # fmt: skip
            records = take_file(target)
            rows(self.connection, 
                "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
                [file, corpus.id, str(path), told.st_size, told.st_mtime_ns,
                 records.n_documents, records.n_broken],
            )  # fmt: skip
            for line, reason in records.broken:
                rows(self.connection, "INSERT INTO broken VALUES (?, ?, ?)", [file, line, reason])
        return records


def _inputs(words: Sequence[str]) -> list[Path]:
    """Files that words name; the .bin of a pair, or its prefix, stands for the pair."""
    named = [f"{word}.bin" if _is_pair(Path(f"{word}.bin")) else word for word in words]
    return [
        path
        for path in find_inputs(named, INPUTS)
        if path.suffix not in (".parquet", ".json") or not _is_pair(path.with_suffix(".bin"))  # of that pair
    ]


def _is_duckdb(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == MAGIC


def _is_pair(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".idx").is_file()
