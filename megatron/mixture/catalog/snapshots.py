"""Stored snapshots of a catalog, and the deletion of what no snapshot needs."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.log import get_logger
from megatron.mixture.catalog.commits import COMMITS, NAME, SNAPSHOTS, Commit, Snapshot
from megatron.mixture.catalog.storage import Storage

RUNNING_S = 24 * 3600  # a part without a commit may belong to a registration that runs, up to this age

log = get_logger(__name__)


@dataclass(frozen=True)
class StoredSnapshot:
    """Commits of a snapshot, when it was stored (seconds since 1970), and its documents."""

    commits: tuple[str, ...]
    time: int
    documents: int

    @classmethod
    def from_json(cls, content: bytes) -> "StoredSnapshot":
        """Parse the file of a snapshot. Raises ValueError for another content."""
        record = json.loads(content)
        if not all(NAME.fullmatch(id) for id in record["commits"]):
            raise ValueError("got an invalid name of a commit")
        return cls(tuple(record["commits"]), int(record["time"]), int(record["documents"]))


def pin_snapshot(storage: Storage, snapshot: Snapshot, n_documents: int) -> None:
    """Store a snapshot, unless it is stored already. A reader that may not write logs that, and goes on."""
    name = f"{SNAPSHOTS}/{snapshot.id}.json"
    if name in storage.list_files(SNAPSHOTS):
        return
    stored = StoredSnapshot(snapshot.commits, round(time.time()), n_documents)
    try:
        storage.write_bytes(name, json.dumps(asdict(stored)).encode())
    except OSError as error:
        log.warning("%s: the snapshot was not stored (%s); after a change it cannot be opened.", name, error)


def list_snapshots(storage: Storage, where: Path | str) -> dict[str, StoredSnapshot]:
    """Return the stored snapshots by id, oldest first. Raises ValueError for a file that is none."""
    names = [name for name in storage.list_files(SNAPSHOTS) if name.endswith(".json")]
    snapshots = {}
    for name, content in zip(names, storage.read_files(names), strict=True):
        try:
            snapshots[name[len(SNAPSHOTS) + 1 : -5]] = StoredSnapshot.from_json(content)
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{where}/{name}: is not a snapshot ({error}). Delete it.") from error
    return dict(sorted(snapshots.items(), key=lambda pair: (pair[1].time, pair[0])))


def find_snapshot(storage: Storage, where: Path | str, word: str) -> tuple[str, StoredSnapshot]:
    """Return (id, snapshot) of an id or its first digits.

    Raises ValueError if none is stored, or several match.
    """
    stored = list_snapshots(storage, where)
    matches = [id for id in stored if word and id.startswith(word)]
    if len(matches) != 1:
        raise ValueError(
            f"{where}: got {len(matches)} snapshots {word!r}, expected one of {len(stored)} stored ones. "
            f"List them with tools/register_corpus.py {where} snapshots."
        )
    return matches[0], stored[matches[0]]


def prune_storage(
    storage: Storage, current: Snapshot, commits: Mapping[str, Commit],
    kept_snapshots: Mapping[str, tuple[str, ...]], stored: Mapping[str, Any],
) -> tuple[int, int]:  # fmt: skip
    """Delete what neither the current snapshot nor `kept_snapshots` need. Returns (files, bytes).

    Readers of other snapshots get an error from then on. Parts without a commit stay for a day, because a
    registration that runs may commit them.
    """
    kept_commits = {id for ids in kept_snapshots.values() for id in ids}
    in_use = {file.commit for file in current.files} | kept_commits
    dead = [commit for id, commit in commits.items() if id not in in_use]
    parts = {commit.part[0] for id, commit in commits.items() if id in in_use and commit.part}
    # Additions before removals: if the prune is killed in between, no removed file returns. A removal stays
    # as long as a commit that it drops.
    names = [f"{SNAPSHOTS}/{id}.json" for id in stored if id not in kept_snapshots]
    names += [f"{COMMITS}/{commit.id}.json" for commit in dead if commit.files]
    names += [
        f"{COMMITS}/{commit.id}.json"
        for commit in dead
        if not commit.files and not kept_commits & set(commit.drops)
    ]
    storage.delete_leftovers()
    files, now = storage.list_files(""), time.time()
    committed = {commit.part[0] for commit in commits.values() if commit.part}
    for name, file in files.items():
        is_part = name.startswith("corpus=") and name.endswith(".parquet") and name not in parts
        if is_part and (name in committed or now - file.mtime > RUNNING_S):
            names.append(name)
    n_bytes = sum(files[name].n_bytes for name in names if name in files)
    for name in names:
        storage.delete(name)
    return len(names), n_bytes
