"""The catalog: a folder of parquet with the location and the properties of every document.

A corpus is a set of files that share properties. The text stays in the original files. The folder may be
local, on a file system that several machines mount, or in an object store:

    catalog.json                          format and version
    corpus=c4/part-HASH.parquet           one row per document
    commits/HASH.json                     the files of one registration, see commits.py
    snapshots/HASH.json                   commits of a snapshot that a run uses, or that was changed since

Every file is complete or absent, and none is changed in place. A registration is visible as a whole with its
commit. Any number of processes and machines register and read at the same time.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron.config.presets import suggest_nearest
from megatron.log import get_logger
from megatron.mixture.catalog.catalog_access import connect_parts, explain_other_format
from megatron.mixture.catalog.commits import (
    COMMITS,
    NAME,
    Commit,
    Corpus,
    RegisteredFile,
    Snapshot,
    merge_commits,
)
from megatron.mixture.catalog.histogram import HistogramRow, count_values
from megatron.mixture.catalog.part_files import make_schema, read_spans
from megatron.mixture.catalog.properties import Property, quote_identifier
from megatron.mixture.catalog.registration import RegistrationResult, register_inputs
from megatron.mixture.catalog.snapshots import (
    StoredSnapshot,
    find_snapshot,
    list_snapshots,
    pin_snapshot,
    prune_storage,
)
from megatron.mixture.catalog.storage import StoredFile, is_object_url, open_storage
from megatron.mixture.catalog.tars import MAX_SAMPLE_BYTES
from megatron.mixture.lazy_imports import connect_scratch, fetch_rows, import_duckdb
from megatron.text.token_counts import TokenCounter

FORMAT = {"format": "mixture catalog", "version": 1}
MARKER = "catalog.json"
READ_ATTEMPTS = 5  # a prune may delete commits between listing and reading

__all__ = ["Catalog", "Corpus", "CorpusSummary", "RegistrationResult"]
log = get_logger(__name__)


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
    """Open catalog; a context manager. It shows one snapshot, which `refresh` and its own writes renew."""

    def __init__(
        self, path: Path | str, read_only: bool = False, n_threads: int | None = None,
        snapshot: str | None = None,
    ) -> None:  # fmt: skip
        """Open a catalog, and create it if it is missing and not `read_only`.

        path       a folder, or a URL such as s3://bucket/catalog
        snapshot   id of an earlier snapshot, or its first digits; None: the current state

        Raises FileNotFoundError, or ValueError for something else than a catalog and for a snapshot that is
        not stored.
        """
        self.path: Path | str = str(path) if is_object_url(path) else Path(path)
        self.storage, self._n_threads, self._read_only = open_storage(path), n_threads, read_only
        self._scratch_connection: Any = None
        self._connection: Any = None
        self._commits: dict[str, Commit] = {}
        self._open_folder()
        self.snapshot: Snapshot = merge_commits([])
        if snapshot is None:
            self.refresh()
        else:
            self._load_commits(find_snapshot(self.storage, self.path, snapshot)[1].commits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._scratch_connection is not None:
            self._scratch_connection.close()
        self._close_connection()

    def _open_folder(self) -> None:
        if isinstance(self.path, Path) and not self.path.is_dir():
            if self.path.exists() or self.path.is_symlink():
                raise explain_other_format(self.path)
            if self._read_only:
                raise FileNotFoundError(
                    f"{self.path}: no such catalog. Create it with tools/register_corpus.py."
                )
        try:
            (content,) = self.storage.read_files([MARKER])
            if json.loads(content) != FORMAT:
                raise ValueError(f"got {content[:80]!r}")
        except FileNotFoundError:
            if self.storage.list_files(COMMITS) or isinstance(self.path, Path) and _has_files(self.path):
                raise ValueError(
                    f"{self.path}: got a folder without {MARKER}, expected a catalog or a new folder."
                ) from None
            if self._read_only:
                raise FileNotFoundError(
                    f"{self.path}: no such catalog. Create it with tools/register_corpus.py."
                ) from None
            self.storage.write_bytes(MARKER, json.dumps(FORMAT).encode())
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.path}/{MARKER}: {error}, expected {json.dumps(FORMAT)}. Use another catalog."
            ) from error

    def refresh(self) -> None:
        """Show the current state, with the registrations of other processes."""
        for attempt in range(READ_ATTEMPTS):
            files = self.storage.list_files(COMMITS)
            names = [name[len(COMMITS) + 1 : -5] for name in files if name.endswith(".json")]
            try:
                self._load_commits([name for name in names if NAME.fullmatch(name)])
                return
            except FileNotFoundError:
                if attempt == READ_ATTEMPTS - 1:
                    raise

    def _load_commits(self, ids: Iterable[str]) -> None:
        ids = sorted(set(ids))
        missing = [id for id in ids if id not in self._commits]
        contents = self.storage.read_files([f"{COMMITS}/{id}.json" for id in missing])
        try:
            loaded = {id: Commit.from_json(id, text) for id, text in zip(missing, contents, strict=True)}
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        merged = self._commits | loaded
        self._commits = {id: merged[id] for id in ids}
        if self.snapshot.commits != tuple(ids):
            self.snapshot = merge_commits(self._commits.values())
            self._close_connection()
            for id in self.snapshot.ignored:
                log.warning(
                    "%s: commit %s is ignored: corpus '%s' has other settings in an earlier commit.",
                    self.path, id, self._commits[id].corpus.name,
                )  # fmt: skip

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @property
    def connection(self) -> Any:
        """DuckDB connection with a view of the documents of each corpus, `Corpus.table`."""
        if self._connection is None:
            folder = self.path if isinstance(self.path, Path) else None
            connection = connect_parts(folder, self._n_threads)
            try:
                for corpus in self.snapshot.corpora:
                    self._create_view(connection, corpus)
            except import_duckdb().Error as error:
                raise ValueError(f"{self.path}: {str(error).splitlines()[0]}") from error
            self._connection = connection
        return self._connection

    def _create_view(self, connection: Any, corpus: Corpus) -> None:
        parts = self.snapshot.parts[corpus.name]
        stored = self.storage.list_files(corpus.folder)
        for name, n_bytes in parts.items():
            size = stored.get(name, StoredFile(-1, 0.0)).n_bytes
            if size != n_bytes:
                raise ValueError(
                    f"{self.path}/{name}: {'is missing' if size < 0 else f'got {size:,} bytes'}, expected "
                    f"{n_bytes:,} bytes. Restore it, or use a snapshot that was not pruned."
                )
        columns = ", ".join(quote_identifier(name) for name in make_schema(corpus).names)
        if not parts:
            # no document: a view of the same columns without rows
            connection.register(f"parts_{corpus.id}", make_schema(corpus).empty_table())
            source = f"parts_{corpus.id}"
        elif (dataset := self.storage.make_dataset(list(parts))) is not None:
            connection.register(f"parts_{corpus.id}", dataset)
            source = f"parts_{corpus.id}"
        else:
            paths = ", ".join(quote_text(str(Path(self.path).absolute() / name)) for name in parts)
            source = f"read_parquet([{paths}], hive_partitioning = false)"
        dead = self.snapshot.dead_keys[corpus.name]
        where = f" WHERE file NOT IN ({', '.join(map(str, dead))})" if dead else ""
        connection.execute(f"CREATE TEMP VIEW {corpus.table} AS SELECT {columns} FROM {source}{where}")

    def _fetch(self, statement: str) -> list[tuple[Any, ...]]:
        try:
            return fetch_rows(self.connection, statement)
        except import_duckdb().Error as error:
            raise ValueError(f"{self.path}: {str(error).splitlines()[0]}") from error

    @property
    def files(self) -> tuple[RegisteredFile, ...]:
        """The registered files. The number of a file is its index; it depends on their content only."""
        return self.snapshot.files

    def list_corpora(self) -> list[Corpus]:
        """Return all corpora in the order of their names."""
        return list(self.snapshot.corpora)

    def get_corpus(self, name: str) -> Corpus:
        """Return the corpus of that name. The ValueError for an unknown name suggests the nearest one."""
        by_name = {corpus.name: corpus for corpus in self.snapshot.corpora}
        if name not in by_name:
            raise ValueError(f"{self.path}: no corpus {name!r}; {suggest_nearest(name, list(by_name))}")
        return by_name[name]

    def register(
        self, name: str, inputs: Sequence[str], properties: Sequence[Property],
        text_key: str = "text", quiet: bool = False, counter: TokenCounter | None = None,
        verify: bool = False, member_bytes: int = MAX_SAMPLE_BYTES, shard: tuple[int, int] = (0, 1),
    ) -> RegistrationResult:  # fmt: skip
        """Add new and changed files to a corpus, see `registration.register_inputs`."""
        self._check_writable()
        if self._scratch_connection is None:
            self._scratch_connection = connect_scratch(self._n_threads)
        tokenizer = None if counter is None else counter.settings
        corpus = Corpus(0, name, text_key, tuple(properties), tokenizer)
        result = register_inputs(
            self, corpus, inputs, self._scratch_connection, counter, quiet, verify, member_bytes, shard
        )
        result.absent = self._find_absent_properties(name, result)
        return result

    def add_commit(self, commit: Commit) -> None:
        """Store a commit, which makes its files visible, and show the current state."""
        self._check_writable()
        self.storage.write_bytes(f"{COMMITS}/{commit.id}.json", commit.to_json())
        self.refresh()

    def list_commits(self, name: str) -> list[Commit]:
        """Return the commits that add files to a corpus and are not removed."""
        dropped = {id for commit in self._commits.values() for id in commit.drops}
        return [
            commit
            for id, commit in self._commits.items()
            if id not in dropped and commit.files and commit.corpus.name == name
        ]

    def list_removals(self, name: str) -> tuple[str, ...]:
        """Return the ids of the removals of a corpus."""
        return tuple(
            id for id, commit in self._commits.items() if commit.drops and commit.corpus.name == name
        )

    def list_replaced_keys(self, name: str, paths: Sequence[str]) -> tuple[int, ...]:
        """Return the keys of all entries of some files of a corpus, also of those that are replaced."""
        requested = set(paths)
        return tuple(
            entry.key
            for commit in self.list_commits(name)
            for entry in commit.files
            if entry.path in requested
        )

    def _find_absent_properties(self, name: str, result: RegistrationResult) -> tuple[str, ...]:
        """Return the properties that no document of the corpus has."""
        if not result.n_documents:
            return ()
        # a query only for those that no new document has: it reads the whole column if there is no value
        corpus = self.get_corpus(name)
        names = [prop.name for prop in corpus.properties if not result.n_having[prop.name]]
        query = f"SELECT 1 FROM {corpus.table} WHERE {{}} IS NOT NULL LIMIT 1"
        return tuple(name for name in names if not self._fetch(query.format(quote_identifier(name))))

    def summarize_corpora(self) -> list[CorpusSummary]:
        """Return the totals of every corpus."""
        summaries = []
        for corpus in self.snapshot.corpora:
            entries = [file.entry for file in self.files if file.corpus.name == corpus.name]
            ((n_tokens,),) = self._fetch(f"SELECT sum(tokens) FROM {corpus.table}")
            summaries.append(
                CorpusSummary(
                    corpus.name, len(entries), sum(entry.n_documents for entry in entries),
                    sum(entry.n_broken for entry in entries), None if n_tokens is None else int(n_tokens),
                    tuple(prop.name for prop in corpus.properties),
                )
            )  # fmt: skip
        return summaries

    def describe_corpus(self, name: str) -> dict[str, list[HistogramRow]]:
        """Return (value, documents, tokens) for each property of a corpus: see `count_values`."""
        corpus = self.get_corpus(name)
        return {prop.name: count_values(self.connection, corpus.table, prop) for prop in corpus.properties}

    def list_broken(self, name: str) -> list[tuple[str, int, str]]:
        """Return (file, line or row from 1, reason) of the records that are not documents.

        At most the first thousand of each file are listed.
        """
        corpus = self.get_corpus(name)
        entries = [file.entry for file in self.files if file.corpus.name == corpus.name]
        return sorted((entry.path, *place) for entry in entries for place in entry.broken)

    def count_documents(self, corpora: Sequence[Corpus]) -> int:
        """Return the number of documents of some corpora together."""
        names = {corpus.name for corpus in corpora}
        return sum(file.entry.n_documents for file in self.files if file.corpus.name in names)

    def locate_texts(self, files: Sequence[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return (begin int64, size int64, or int32 if that suffices) of the documents of each file.

        files   ids, `SourceFile.id`; those that are not in the snapshot are not in the result

        Begin and size are the bytes of a line or a sample. In parquet, begin is the row.
        """
        empty, requested = np.empty(0, dtype=np.int64), set(files)
        spans: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        of_part: dict[str, dict[int, int]] = {}
        for file in self.files:
            entry = file.entry
            if entry.key in requested:
                spans[entry.key] = empty, empty
                if file.part is not None and entry.n_documents:
                    of_part.setdefault(file.part, {})[entry.key] = entry.n_documents
        for part, counts in of_part.items():
            try:
                located = read_spans(self.storage, part, counts)
            except ValueError as error:
                raise ValueError(f"{self.path}/{error}") from error
            for key, (begins, sizes) in located.items():
                narrow = not len(sizes) or sizes.max() <= np.iinfo(np.int32).max
                spans[key] = begins.copy(), sizes.astype(np.int32 if narrow else np.int64)
        return spans

    def remove(self, name: str) -> None:
        """Remove a corpus from the catalog. Its files stay, and the snapshot before it until `prune`."""
        self._check_writable()
        self.refresh()
        corpus = self.get_corpus(name)
        self.pin()
        ids = tuple(commit.id for commit in self.list_commits(name))
        self.add_commit(Commit.create(corpus, drops=ids, after=self.list_removals(name)))

    def pin(self) -> str:
        """Store the snapshot under its id, so that it can be opened after later changes. Returns the id."""
        pin_snapshot(self.storage, self.snapshot, self.count_documents(self.snapshot.corpora))
        return self.snapshot.id

    def list_snapshots(self) -> dict[str, StoredSnapshot]:
        """Return the stored snapshots by id, oldest first."""
        return list_snapshots(self.storage, self.path)

    def prune(self, keep: Sequence[str] = ()) -> tuple[int, int]:
        """Delete what only removals, replaced files and older snapshots need, see `prune_storage`.

        keep   ids of snapshots that stay

        Returns (files, bytes).
        """
        self._check_writable()
        kept_commits = {
            id: stored.commits for word in keep
            for id, stored in [find_snapshot(self.storage, self.path, word)]
        }  # fmt: skip
        self.refresh()
        done = prune_storage(self.storage, self.snapshot, self._commits, kept_commits, self.list_snapshots())
        self.refresh()
        return done

    def _check_writable(self) -> None:
        if self._read_only:
            raise ValueError(f"{self.path}: was opened to be read. Open it without read_only.")


def quote_text(text: str) -> str:
    """Return a text in SQL."""
    return "'" + text.replace("'", "''") + "'"


def _has_files(folder: Path) -> bool:
    # another writer may be creating the catalog: its partial marker is no foreign file
    return folder.is_dir() and any(
        not path.name.startswith(".") and path.name != MARKER for path in folder.iterdir()
    )
