"""The catalog: which documents there are, where each stands, and with which properties. One DuckDB file.

A corpus is a set of files that share properties; each has a table of its own, one row a document. Text stays
where it is. Every file is taken in one transaction, so that a registration that was killed goes on with the
file it was at.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from megatron.config.presets import nearest
from megatron.data.documents import COMPRESSED, PLAIN, find_inputs
from megatron.data.token_counts import TokenCounter
from megatron.mixture.catalog_access import columns_of_table, connect_catalog
from megatron.mixture.content import hash_content
from megatron.mixture.histogram import Row, histogram
from megatron.mixture.libraries import connect_scratch, pyarrow, rows
from megatron.mixture.properties import Property, quoted
from megatron.mixture.records import Records, Target, take_file
from megatron.mixture.small_files import batch_files, take_small_files
from megatron.mixture.tars import MEMBER_BYTES, TARS

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

    n_edited  files of `n_files` that have the size and the time of change they had, and other content
    absent    properties that no document of the corpus has: misspelt, more often than not
    """

    n_files: int = 0
    n_known: int = 0
    n_documents: int = 0
    n_broken: int = 0
    n_edited: int = 0
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
        self.path, self._n_threads = path, n_threads
        self._evaluating: Any = None
        self.connection = connect_catalog(path, read_only, n_threads)
        if not read_only:
            rows(self.connection, SCHEMA)
        self.has_sums = "sha256" in columns_of_table(self.connection, "files")  # older catalogs have none

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
        verify: bool = False, member_bytes: int = MEMBER_BYTES,
    ) -> Registered:  # fmt: skip
        """Take new and changed files into a corpus: lines of JSON, parquet, tars, or pairs (.bin).

        `counter` counts the tokens of each document; of a pair they are known. Files that are there already,
        with the size and the time of change they had, are passed over; `verify`: with the content they had,
        which is read. `member_bytes`: of a tar's largest sample. Broken lines are counted and located;
        `broken` lists them. ValueError for a corpus that has other properties or another tokenizer, or for a
        file that cannot be read; the files before it stay registered (small ones of one batch: all or none).
        """
        paths = [path.resolve() for path in _inputs(inputs)]
        told = None if counter is None else counter.told
        corpus = self._corpus_to_fill(Corpus(0, name, text_key, tuple(properties), told))
        known = {
            path: (id, (size, mtime), sums)
            for id, path, size, mtime, sums in rows(
                self.connection,
                "SELECT id, path, bytes, mtime_ns, sha256 FROM files WHERE corpus = ?",
                [corpus.id],
            )
        }
        done = Registered()
        total = sum(path.stat().st_size for path in paths)
        with (
            tqdm(total=total, unit="B", unit_scale=True, disable=quiet or None, desc="registering") as bar,
            ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing,
        ):
            new = []
            for path in paths:
                old = known.get(str(path))
                if old is not None and old[1] == _stamp(path) and (not verify or self._is_same(path, *old)):
                    done.n_known += 1
                    bar.update(old[1][0])
                else:
                    done.n_edited += old is not None and old[1] == _stamp(path)
                    new.append(path)
            for batch in batch_files(new):
                ids = [known[str(path)][0] if str(path) in known else None for path in batch]
                for records in self._take(corpus, batch, ids, counter, member_bytes, hashing):
                    done.n_documents += records.n_documents
                    done.n_broken += records.n_broken
                done.n_files += len(batch)
                bar.update(sum(path.stat().st_size for path in batch))
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
            self._evaluating = connect_scratch(self._n_threads)
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

    def _is_same(self, path: Path, id: int, stamp: tuple[int, int], sums: str | None) -> bool:
        """Whether a known file has the content it had; it gets a sum where an older catalog has none."""
        own = hash_content(path)
        if sums is None:
            rows(self.connection, "UPDATE files SET sha256 = ? WHERE id = ?", [own, id])
        return sums in (None, own)

    def _take(
        self, corpus: Corpus, paths: Sequence[Path], old: Sequence[int | None], counter: TokenCounter | None,
        member_bytes: int, hashing: Executor,
    ) -> list[Records]:  # fmt: skip
        """Put files into a corpus, in place of those that were `old`: all of them, or none."""
        stamps, sums = [_stamp(path) for path in paths], hashing.map(hash_content, paths)
        with self._transaction():
            for id in filter(None, old):
                rows(self.connection, f"DELETE FROM {corpus.table} WHERE file = ?", [id])
                rows(self.connection, "DELETE FROM broken WHERE file = ?", [id])
                rows(self.connection, "DELETE FROM files WHERE id = ?", [id])
            ids = [
                id for (id,) in rows(self.connection, f"SELECT nextval('numbers') FROM range({len(paths)})")
            ]
            targets = [
                Target(
                    path, self.connection, self._scratch(), corpus.table, id, corpus.text_key,
                    corpus.properties, counter, member_bytes,
                )
                for path, id in zip(paths, ids, strict=True)
            ]  # fmt: skip
            found = take_small_files(targets) if len(targets) > 1 else None
            found = found or [take_file(target) for target in targets]
            columns = (
                ids, [corpus.id] * len(ids), list(map(str, paths)), *zip(*stamps, strict=True),
                [one.n_documents for one in found], [one.n_broken for one in found], list(sums),
            )  # fmt: skip
            table = pyarrow().table(dict(zip(FILE_COLUMNS, columns, strict=True)))
            self.connection.register("new_files", table)
            rows(self.connection, f"INSERT INTO files ({', '.join(FILE_COLUMNS)}) SELECT * FROM new_files")
            self.connection.unregister("new_files")
            for id, records in zip(ids, found, strict=True):
                for line, reason in records.broken:
                    rows(self.connection, "INSERT INTO broken VALUES (?, ?, ?)", [id, line, reason])
            for path, stamp in zip(paths, stamps, strict=True):
                if _stamp(path) != stamp:
                    raise ValueError(f"{path}: was written to while it was registered. Register it again.")
        return found


def _stamp(path: Path) -> tuple[int, int]:
    """(bytes, time of the last change in ns) of a file: what is compared whenever it is opened."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _inputs(words: Sequence[str]) -> list[Path]:
    """Files that words name; the .bin of a pair, or its prefix, stands for the pair."""
    named = [f"{word}.bin" if _is_pair(Path(f"{word}.bin")) else word for word in words]
    return [
        path
        for path in find_inputs(named, INPUTS)
        if path.suffix not in (".parquet", ".json") or not _is_pair(path.with_suffix(".bin"))  # of that pair
    ]


def _is_pair(path: Path) -> bool:
    return path.is_file() and path.with_suffix(".idx").is_file()
