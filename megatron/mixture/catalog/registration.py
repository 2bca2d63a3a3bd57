"""Registration of files: parts with their documents, and commits that make them visible.

Several processes and machines may register at the same time. Each batch of files is committed as a whole, and
after its commit a writer looks whether another one has registered the same files, or the same corpus with
other settings. Both writers decide alike, see commits.py.
"""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron.cli import ProgressBar
from megatron.mixture.catalog.commits import Commit, Corpus, FileEntry, Snapshot, make_file_keys
from megatron.mixture.catalog.input_files import find_input_files, hash_content, stat_file
from megatron.mixture.catalog.part_files import PartWriter, publish_part
from megatron.mixture.catalog.records import FileTarget, RecordCounts, register_file
from megatron.mixture.catalog.small_files import batch_files, register_small_files
from megatron.mixture.catalog.storage import LocalStorage, ObjectStorage
from megatron.text.token_counts import TokenCounter


class CatalogWriter(Protocol):
    """The methods of `catalog.Catalog` that a registration calls; its documentation applies."""

    path: Path | str
    storage: LocalStorage | ObjectStorage
    snapshot: Snapshot

    def refresh(self) -> None:
        """Show the current state."""

    def pin(self) -> str:
        """Store the snapshot."""
        ...

    def add_commit(self, commit: Commit) -> None:
        """Store a commit."""

    def list_commits(self, name: str) -> list[Commit]:
        """Return the commits of a corpus."""
        ...

    def list_removals(self, name: str) -> tuple[str, ...]:
        """Return the removals of a corpus."""
        ...

    def list_replaced_keys(self, name: str, paths: Sequence[str]) -> tuple[int, ...]:
        """Return the keys of all entries of some files."""
        ...


@dataclass
class RegistrationResult:
    """Counts of one registration.

    n_known       files that were registered before and have not changed
    n_edited      those of `n_files` that kept size and modification time, but have other content
    n_duplicates  files that another process registered at the same time, whose registration counts
    absent        properties that no document of the corpus has, usually because they are misspelt; empty if
                  no document was registered
    n_having      registered documents that have each property
    """

    n_files: int = 0
    n_known: int = 0
    n_documents: int = 0
    n_broken: int = 0
    n_edited: int = 0
    n_duplicates: int = 0
    absent: tuple[str, ...] = ()
    n_having: Counter[str] = field(default_factory=Counter)


def register_inputs(
    catalog: CatalogWriter, corpus: Corpus, inputs: Sequence[str], scratch: Any, counter: TokenCounter | None,
    quiet: bool, verify: bool, member_bytes: int, shard: tuple[int, int] = (0, 1),
) -> RegistrationResult:  # fmt: skip
    """Add new and changed files to a corpus: JSON lines, parquet, tar archives, or .bin/.idx datasets.

    counter        counts the tokens of each document; those of a .bin/.idx dataset are in its index
    verify         read registered files too, and compare their content; by default a file with the same
                   size and modification time is skipped
    member_bytes   size limit of one sample of a tar archive
    shard          (k, n): only files k, k + n, ... of the inputs, for n processes at once

    Broken lines are counted and located; `list_broken` returns them. Raises ValueError if the corpus has
    other properties or another tokenizer, or if a file cannot be read. The files before it stay registered.
    Small files are registered in batches: all files of a batch, or none.
    """
    paths = [path.resolve() for path in find_input_files(inputs)][shard[0] :: shard[1]]
    catalog.storage.delete_leftovers()
    catalog.refresh()
    _check_settings(catalog, corpus)
    result = RegistrationResult()
    # in bytes, because the number of documents is not known before the files are read
    total = sum(path.stat().st_size for path in paths)
    with (
        ProgressBar("registering", total, "B", quiet=quiet) as bar,
        ThreadPoolExecutor(1, thread_name_prefix="hash") as hashing,
    ):
        registered = _list_registered(catalog, corpus)
        new = []
        for path in paths:
            entry = registered.get(str(path))
            is_stamped = entry is not None and (entry.n_bytes, entry.mtime_ns) == stat_file(path)
            if entry is not None and is_stamped and (not verify or hash_content(path) == entry.sha256):
                result.n_known += 1
                bar.update(entry.n_bytes)
            else:
                # an older catalog has no checksums: whether its file was edited is not known
                result.n_edited += bool(is_stamped and entry is not None and entry.sha256)
                new.append(path)
        # one commit per batch: a killed registration keeps its finished batches
        for batch in batch_files(new):
            batch = _skip_registered(catalog, corpus, batch, registered, result)
            if batch:
                entries, n_having = _register_batch(
                    catalog, corpus, batch, scratch, counter, member_bytes, hashing
                )
                result.n_having.update(n_having)
                _count_entries(catalog, corpus, entries, result)
            bar.update(sum(path.stat().st_size for path in batch))
    return result


def _list_registered(catalog: CatalogWriter, corpus: Corpus) -> dict[str, FileEntry]:
    return {file.entry.path: file.entry for file in catalog.snapshot.files if file.corpus.name == corpus.name}


def _skip_registered(
    catalog: CatalogWriter, corpus: Corpus, batch: Sequence[Path], before: dict[str, FileEntry],
    result: RegistrationResult,
) -> list[Path]:  # fmt: skip
    """Return the files of a batch that no other process has registered since the beginning."""
    catalog.refresh()
    _check_settings(catalog, corpus)
    now = _list_registered(catalog, corpus)
    rest = []
    for path in batch:
        entry = now.get(str(path))
        is_new = entry is not None and entry != before.get(str(path))
        if entry is not None and is_new and (entry.n_bytes, entry.mtime_ns) == stat_file(path):
            result.n_duplicates += 1
        else:
            rest.append(path)
    return rest


def _register_batch(
    catalog: CatalogWriter, corpus: Corpus, paths: Sequence[Path], scratch: Any, counter: TokenCounter | None,
    member_bytes: int, hashing: Executor,
) -> tuple[tuple[FileEntry, ...], dict[str, int]]:  # fmt: skip
    """Add files to a corpus with one commit. Returns (their entries, documents that have each property)."""
    # sizes and times are read before the content, and compared again at the end: a file that changes in
    # between is not committed
    stamps, checksums = [stat_file(path) for path in paths], hashing.map(hash_content, paths)
    names = [str(path) for path in paths]
    replaces = catalog.list_replaced_keys(corpus.name, names)
    after = catalog.list_removals(corpus.name)
    keys = make_file_keys(
        corpus, [(name, *stamp) for name, stamp in zip(names, stamps, strict=True)], replaces, after
    )
    if replaces:
        catalog.pin()  # runs that use the old content can go on with it
    with catalog.storage.make_scratch() as path:
        with PartWriter(path, corpus) as sink:
            results = _write_documents(
                [
                    FileTarget(
                        file, sink, scratch, key, corpus.text_key, corpus.properties, counter, member_bytes
                    )
                    for file, key in zip(paths, keys, strict=True)
                ]
            )
        entries = tuple(
            FileEntry(key, name, *stamp, counts.n_documents, counts.n_broken, sha256, tuple(counts.broken))
            for key, name, stamp, counts, sha256 in zip(keys, names, stamps, results, checksums, strict=True)
        )
        for file, stamp in zip(paths, stamps, strict=True):
            if stat_file(file) != stamp:
                raise ValueError(f"{file}: changed while it was registered. Register it again.")
        part = publish_part(catalog.storage, path, corpus) if sink.n_rows else None
    commit = Commit.create(corpus, files=entries, part=part, replaces=replaces, after=after)
    catalog.add_commit(commit)
    _withdraw_conflict(catalog, commit)
    return entries, sink.n_having


def _write_documents(targets: Sequence[FileTarget]) -> list[RecordCounts]:
    results = register_small_files(targets) if len(targets) > 1 else None
    return results or [register_file(target) for target in targets]


def _count_entries(
    catalog: CatalogWriter, corpus: Corpus, entries: Sequence[FileEntry], result: RegistrationResult
) -> None:
    """Count the entries that the catalog shows, and those of which another process's registration counts."""
    visible = {file.entry.key for file in catalog.snapshot.files if file.corpus.name == corpus.name}
    for entry in entries:
        if entry.key in visible:
            result.n_files += 1
            result.n_documents += entry.n_documents
            result.n_broken += entry.n_broken
        else:
            result.n_duplicates += 1


def _withdraw_conflict(catalog: CatalogWriter, commit: Commit) -> None:
    """Remove a commit, and raise ValueError, if another process has given the corpus other settings.

    Each writer looks after its own commit is visible, so that of two at least one sees the other.
    """
    for other in catalog.list_commits(commit.corpus.name):
        if other.corpus.compatibility_key != commit.corpus.compatibility_key:
            catalog.add_commit(
                Commit.create(
                    commit.corpus, drops=(commit.id,), after=catalog.list_removals(commit.corpus.name)
                )
            )
            raise _make_settings_error(catalog, other.corpus)


def _check_settings(catalog: CatalogWriter, corpus: Corpus) -> None:
    """Raise ValueError if the corpus is registered with other settings."""
    for existing in catalog.snapshot.corpora:
        if existing.name == corpus.name and existing.compatibility_key != corpus.compatibility_key:
            raise _make_settings_error(catalog, existing)


def _make_settings_error(catalog: CatalogWriter, corpus: Corpus) -> ValueError:
    tokenizer = (corpus.tokenizer or {}).get("name")
    return ValueError(
        f"{catalog.path}: corpus '{corpus.name}' has the properties "
        f"{'; '.join(map(str, corpus.properties)) or 'none'}, its text under '{corpus.text_key}', "
        f"{f'tokens of {tokenizer}' if tokenizer else 'no tokenizer'}. "
        "Use the same settings or another name, or remove the corpus first."
    )
