"""Commits of a catalog, and their union: the files that are registered.

A commit is one JSON file, named after the hash of its content. It adds files with the documents of one
parquet part, or drops earlier commits. Any number of writers add commits without a lock, because the union
does not depend on their order (an observed-remove set, Shapiro et al., INRIA RR-7506, 2011): a commit drops
or replaces only what its writer has seen, so that a file which another writer adds meanwhile stays.

Conflicts are decided by content, never by time of arrival, so that every reader decides alike:
* two entries of one path: the later modification time, then the smaller hash of the commit
* two settings of one corpus: those of the commit with the smallest hash; files of the other are ignored
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import quote

from megatron.mixture.catalog.properties import TYPES, Property

COMMITS, SNAPSHOTS = "commits", "snapshots"
NAME = re.compile(r"[0-9a-f]{32}")
PART = re.compile(r"corpus=[^/]+/part-[0-9a-f]{32}\.parquet")
VERSION = 1


@dataclass(frozen=True)
class Corpus:
    """Settings of a corpus.

    id          number of its view, `table`, in an open catalog, from 1
    tokenizer   the tokenizer that counted the tokens; None if they are not counted
    """

    id: int
    name: str
    text_key: str
    properties: tuple[Property, ...]
    tokenizer: dict[str, Any] | None = None

    @property
    def table(self) -> str:
        """Name of the view of its documents."""
        return f"documents_{self.id}"

    @property
    def compatibility_key(self) -> tuple[Any, ...]:
        """Properties that must be equal when files are added.

        The tokenizer is compared without its name, because its path may differ.
        """
        return self.properties, self.text_key, self.tokenizer and self.tokenizer | {"name": None}

    @property
    def folder(self) -> str:
        """Folder of its parts. Characters with a meaning in paths are quoted."""
        return f"corpus={quote(self.name, safe=' ')}"


@dataclass(frozen=True)
class FileEntry:
    """A registered file.

    key      identifies its documents in the part, int64
    broken   (line or row from 1, reason) of records that are not documents
    """

    key: int
    path: str
    n_bytes: int
    mtime_ns: int
    n_documents: int
    n_broken: int
    sha256: str | None
    broken: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Commit:
    """One registration or removal.

    id         first 32 hex digits of the SHA-256 of its JSON
    part       (name, bytes) of the parquet file with the documents; None: there are none
    replaces   keys of earlier entries of the same paths
    drops      commits that are removed
    after      removals of this corpus that precede it; they give a repeated registration another id
    """

    id: str
    corpus: Corpus
    files: tuple[FileEntry, ...] = ()
    part: tuple[str, int] | None = None
    replaces: tuple[int, ...] = ()
    drops: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """Return the content of its file; `id` is not in it."""
        record = {
            "version": VERSION,
            "corpus": {
                "name": self.corpus.name, "text_key": self.corpus.text_key,
                "properties": [asdict(prop) for prop in self.corpus.properties],
                "tokenizer": self.corpus.tokenizer,
            },
            "files": [asdict(file) for file in self.files],
            "part": self.part, "replaces": sorted(self.replaces),
            "drops": sorted(self.drops), "after": sorted(self.after),
        }  # fmt: skip
        return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def create(cls, corpus: Corpus, **fields: Any) -> "Commit":
        """Return a commit with the id that follows from its content."""
        content = cls("", corpus, **fields).to_json()
        return cls(hash_content_name(content), corpus, **fields)

    @classmethod
    def from_json(cls, id: str, content: bytes) -> "Commit":
        """Parse a commit. Raises ValueError if the content does not match the id, or is not a commit."""
        if hash_content_name(content) != id:
            raise ValueError(f"commit {id}: got content with another hash. Restore the file from a copy.")
        try:
            record = json.loads(content)
            if record["version"] != VERSION:
                raise ValueError(f"got version {record['version']!r}, expected {VERSION}")
            corpus = _parse_corpus(record["corpus"])
            files = tuple(_parse_file(fields) for fields in record["files"])
            part = record["part"] and (str(record["part"][0]), int(record["part"][1]))
            if part and not (PART.fullmatch(part[0]) and part[0].startswith(f"{corpus.folder}/")):
                raise ValueError(f"got the part {part[0]!r}")
            names = [tuple(record[key]) for key in ("drops", "after")]
            if not all(NAME.fullmatch(name) for group in names for name in group):
                raise ValueError("got an invalid name of a commit")
            return cls(id, corpus, files, part or None, tuple(map(int, record["replaces"])), *names)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(
                f"commit {id}: is not a commit of a catalog ({error}). Delete it, or restore a copy."
            ) from error


def hash_content_name(content: bytes) -> str:
    """Return the first 32 hex digits of the SHA-256 of a file, which name it."""
    return hashlib.sha256(content).hexdigest()[:32]


def get_file_name(path: str) -> str:
    """Return the part of a path after its last slash."""
    return path.rpartition("/")[2]


def make_file_keys(
    corpus: Corpus, stamps: Sequence[tuple[str, int, int]], replaces: Sequence[int], after: Sequence[str]
) -> list[int]:
    """Return a key for each file of a commit, int64.

    stamps   (path, bytes, modification time in ns) of each file

    Equal registrations get equal keys on every machine, others get different ones (63 bits of a hash).
    """
    settings = [corpus.name, corpus.text_key, [str(prop) for prop in corpus.properties], corpus.tokenizer]
    batch = json.dumps([settings, list(stamps), sorted(replaces), sorted(after)], sort_keys=True)
    return [
        int.from_bytes(hashlib.sha256(f"{i} {batch}".encode()).digest()[:8], "little") >> 1
        for i in range(len(stamps))
    ]


def _parse_corpus(record: Mapping[str, Any]) -> Corpus:
    properties = tuple(Property(**fields) for fields in record["properties"])
    for prop in properties:
        texts = prop.name, prop.expression, prop.kind
        if not all(isinstance(text, str) for text in texts) or prop.kind not in TYPES:
            raise ValueError(f"got the property {prop}")
    if not isinstance(record["name"], str) or not isinstance(record["text_key"], str):
        raise ValueError("got a corpus without a name")
    if not isinstance(record["tokenizer"], dict | None):
        raise ValueError(f"got the tokenizer {record['tokenizer']!r}")
    return Corpus(0, record["name"], record["text_key"], properties, record["tokenizer"])


def _parse_file(record: Mapping[str, Any]) -> FileEntry:
    numbers = {name: record[name] for name in ("key", "n_bytes", "mtime_ns", "n_documents", "n_broken")}
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers.values()):
        raise ValueError(f"got a file with {numbers}")
    if not isinstance(record["path"], str) or not isinstance(record["sha256"], str | None):
        raise ValueError("got a file without a path")
    broken = tuple((int(line), str(reason)) for line, reason in record["broken"])
    return FileEntry(path=record["path"], sha256=record["sha256"], broken=broken, **numbers)


@dataclass(frozen=True)
class RegisteredFile:
    """A file of a snapshot, with the commit that added it."""

    entry: FileEntry
    corpus: Corpus
    commit: str
    part: str | None


@dataclass(frozen=True)
class Snapshot:
    """The files that a set of commits registers.

    id          hash of settings and contents, 64 hex digits: it is the same for any order of registration,
                any number of writers, and in another folder
    files       in the order of corpus, file name, content; the number of a file is its index
    parts       parts of each corpus by name, and their bytes
    dead_keys   keys of entries in these parts that are not in `files`
    ignored     commits whose settings contradict those of their corpus
    """

    id: str
    commits: tuple[str, ...]
    corpora: tuple[Corpus, ...]
    files: tuple[RegisteredFile, ...]
    parts: Mapping[str, Mapping[str, int]]
    dead_keys: Mapping[str, tuple[int, ...]]
    ignored: tuple[str, ...]


def merge_commits(commits: Iterable[Commit]) -> Snapshot:
    """Return the union of commits, which depends on the set only."""
    by_id = {commit.id: commit for commit in commits}
    dropped = {id for commit in by_id.values() for id in commit.drops}
    live = [by_id[id] for id in sorted(by_id) if id not in dropped and by_id[id].files]
    settings: dict[str, Corpus] = {}
    ignored = []
    for commit in live:  # ascending ids: the first commit of a corpus decides
        corpus = settings.setdefault(commit.corpus.name, commit.corpus)
        if corpus.compatibility_key != commit.corpus.compatibility_key:
            ignored.append(commit.id)
    live = [commit for commit in live if commit.id not in set(ignored)]
    replaced = {key for commit in live for key in commit.replaces}
    winners: dict[tuple[str, str], tuple[FileEntry, Commit]] = {}
    for commit in live:
        for entry in commit.files:
            place = commit.corpus.name, entry.path
            best = winners.get(place)
            # not >=: of equal times the commit that came first, with the smaller id, stays
            if entry.key not in replaced and (best is None or entry.mtime_ns > best[0].mtime_ns):
                winners[place] = entry, commit
    names = sorted({name for name, _ in winners})
    corpora = tuple(
        Corpus(i, name, defined.text_key, defined.properties, defined.tokenizer)
        for i, name in enumerate(names, 1)
        for defined in [settings[name]]
    )
    by_name = {corpus.name: corpus for corpus in corpora}
    files = sorted(
        (
            RegisteredFile(entry, by_name[name], commit.id, commit.part[0] if commit.part else None)
            for (name, _), (entry, commit) in winners.items()
        ),
        key=_order_key,
    )
    parts: dict[str, dict[str, int]] = {name: {} for name in names}
    for file in files:  # in the order of the files, so that documents are read in their order
        if file.part is not None:
            parts[file.corpus.name][file.part] = (by_id[file.commit].part or ("", 0))[1]
    in_use = {(file.commit, file.entry.key) for file in files}
    dead_keys = {
        name: tuple(sorted(
            entry.key for commit in live if commit.part and commit.part[0] in parts[name]
            for entry in commit.files if (commit.id, entry.key) not in in_use
        ))
        for name in names
    }  # fmt: skip
    id = _compute_identity(corpora, files)
    return Snapshot(id, tuple(sorted(by_id)), corpora, tuple(files), parts, dead_keys, tuple(ignored))


def _order_key(file: RegisteredFile) -> tuple[Any, ...]:
    # the folder last: it decides only between copies of the same content, which are the same documents
    entry = file.entry
    return file.corpus.name, get_file_name(entry.path), entry.sha256 or "", entry.n_bytes, entry.path


def _compute_identity(corpora: Sequence[Corpus], files: Sequence[RegisteredFile]) -> str:
    content: list[Any] = [
        [corpus.name, corpus.text_key, [str(prop) for prop in corpus.properties],
         corpus.tokenizer and corpus.tokenizer | {"name": None}]
        for corpus in corpora
    ]  # fmt: skip
    for file in files:
        entry = file.entry
        name = get_file_name(entry.path)
        content.append([file.corpus.name, name, entry.n_bytes, entry.sha256, entry.n_documents])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
