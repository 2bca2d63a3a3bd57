"""Folder of shards, one per piece: output of workers, input of the joiner, and state for a restart.

A shard is valid once its marker exists. The marker is renamed into place after the shard is closed. So a
process that is killed at any moment leaves complete shards, and incomplete ones that are written again.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron.io import open_exclusive, read_json, write_atomic, write_json
from megatron.owner_file import OWNER
from megatron.text.inputs import STDIN
from megatron.text.text_readers import InputPiece

PLAN_FILE = "plan.json"
JOIN_STATE_FILE = "joined.json"
PREPARED_FILE = "prepared.json"
LOCK_FILE = ".lock"


@dataclass(frozen=True)
class PieceResult:
    """Result of one piece. Tokens and bytes are those of its shards, summed over keys."""

    n_lines: int
    n_documents: int
    n_tokens: int
    n_rejected: int
    n_bytes: int
    error: str | None = None  # the error that ended the piece early
    damage: str | None = None  # why a whole file was skipped; its shards are then empty


@dataclass(frozen=True)
class JoinState:
    """Progress of joining: the first n_pieces. By key: (documents, tokens), and empty documents."""

    n_pieces: int
    outputs: dict[str, tuple[int, int]]
    empty: dict[str, int]


@dataclass(frozen=True)
class ShardFolder:
    """Folder of the shards of one job."""

    folder: Path
    keys: tuple[str, ...]

    def lock(self, name: Path) -> IO[bytes]:
        """Create the folder and lock it for this process until the returned file is closed.

        Raises ValueError, which contains `name`, if another process has the lock.
        """
        while True:
            # Protocol: create folder, open and lock the lock file. An owner that ends removes lock file and
            # folder, maybe between these two steps. open_exclusive checks that the path still names the
            # locked file.
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(
                FileNotFoundError
            ):  # the previous owner has removed the folder in between: try again
                return open_exclusive(self.folder / LOCK_FILE, name)

    def resume_or_clear(self, pieces: Sequence[InputPiece], job: str | None) -> dict[int, PieceResult]:
        """Return the finished pieces in the folder if they are from the same job; `job` None never matches.

        A folder of another job is emptied: its outputs are about to be replaced anyway.
        """
        # the plan includes the boundaries of pieces: another piece size must not reuse shards
        plan = [job, [[piece.begin, piece.end] for piece in pieces]]
        plan_sha256 = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
        existing = read_json(self.folder / PLAN_FILE)
        if existing is None or existing.get("sha256") != plan_sha256 or job is None:
            self._delete_files(set())
            # After the deletion: a kill between the two leaves a folder without a plan, which is emptied
            # again. In the other order the new plan would make shards of the old job valid.
            write_json(self.folder / PLAN_FILE, {"sha256": plan_sha256})
            return {}
        joined = self.read_join_state()
        n_joined = joined.n_pieces if joined else 0  # joined shards are deleted
        results = {i: self.read_result(i, has_shard=i >= n_joined) for i in range(len(pieces))}
        return {i: result for i, result in results.items() if result is not None}

    def has_work(self) -> bool:
        """Return whether the folder has work of an interrupted job."""
        return (self.folder / PLAN_FILE).is_file()

    def ids_path(self, piece: int, key: str) -> Path:
        """Return the file of ids of one piece, in the output's dtype."""
        return self.folder / f"{self.keys.index(key)}-{piece:08d}.ids"

    def lengths_path(self, piece: int, key: str) -> Path:
        """Return the file of document lengths of one piece, int32."""
        return self.ids_path(piece, key).with_suffix(".lengths")

    def rejects_path(self, piece: int) -> Path:
        """Return the file of rejected lines of one piece: JSON lines {"line" within the piece, "reason"}."""
        return self.folder / f"{piece:08d}.rejects"

    def long_line_path(self, piece: int) -> Path:
        """Return the spool file for a line of a stream that is too long for memory."""
        return self.folder / f"{piece:08d}.line"

    def _marker_path(self, piece: int) -> Path:
        return self.folder / f"{piece:08d}.done"

    def write_result(self, piece: int, result: PieceResult) -> None:
        """Write the marker of a finished piece, atomically."""
        # The shards are not synced, since most are deleted before they reach the disk. After a crash of the
        # system `read_result` compares their sizes.
        write_atomic(self._marker_path(piece), json.dumps(asdict(result)))

    def read_result(self, piece: int, has_shard: bool = True) -> PieceResult | None:
        """Return the result of a piece, None if it is not finished or its shards are incomplete."""
        record = read_json(self._marker_path(piece))
        if record is None:
            return None
        if not has_shard:
            return PieceResult(**record)
        sizes = sum(
            self.ids_path(piece, key).stat().st_size
            for key in self.keys
            if self.ids_path(piece, key).is_file()
        )
        # the shards of a marker may be missing or incomplete, for example after a crash of the system
        return PieceResult(**record) if sizes == record["n_bytes"] else None

    def write_join_state(self, state: JoinState) -> None:
        """Write the progress of joining, atomically."""
        write_atomic(self.folder / JOIN_STATE_FILE, json.dumps(asdict(state)))

    def read_join_state(self) -> JoinState | None:
        """Return the progress of joining, None before its first piece."""
        record = read_json(self.folder / JOIN_STATE_FILE)
        if record is None:
            return None
        outputs = {key: (counts[0], counts[1]) for key, counts in record["outputs"].items()}
        return JoinState(record["n_pieces"], outputs, record["empty"])

    def delete_shards(self, piece: int) -> None:
        """Delete the shards of a joined piece, but not its marker and its rejects."""
        for key in self.keys:
            self.ids_path(piece, key).unlink(missing_ok=True)
            self.lengths_path(piece, key).unlink(missing_ok=True)

    def mark_prepared(self, job: str | None) -> None:
        """Record that the outputs are complete except for the final renames."""
        write_json(self.folder / PREPARED_FILE, {"job": job})

    def is_prepared(self, job: str | None) -> bool:
        """Return whether this job's outputs are complete except for the final renames."""
        record = read_json(self.folder / PREPARED_FILE)
        return job is not None and record is not None and record["job"] == job

    def delete_all(self) -> None:
        """Delete the files of all pieces."""
        self._delete_files({PLAN_FILE})

    def remove(self) -> None:
        """Delete the folder and its content."""
        self._delete_files(set())
        (self.folder / LOCK_FILE).unlink(
            missing_ok=True
        )  # last: the lock file excludes other processes until then
        # exists only on a file system without flock (megatron/io.py)
        (self.folder / (LOCK_FILE + OWNER)).unlink(missing_ok=True)
        with suppress(OSError):
            # not empty if another process has created its lock file meanwhile: the folder is then in use
            self.folder.rmdir()

    def _delete_files(self, keep: set[str]) -> None:
        """Delete all files except `keep` and locks."""
        for path in self.folder.iterdir():
            if path.name not in keep and not path.name.startswith(LOCK_FILE):
                path.unlink(missing_ok=True)


def hash_job(paths: Sequence[Path], settings: Sequence[Any]) -> str | None:
    """Return a hash of the settings and of the path, size and mtime of each file.

    Jobs with equal hashes have equal outputs. Returns None if standard input is read, whose content is not
    known in advance.
    """
    if STDIN in paths:
        return None
    # the mtime instead of a hash: a hash would read terabytes before the first token
    files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    # JSON, not str: it quotes strings, so that no two lists have the same text
    return hashlib.sha256(json.dumps([list(settings), files]).encode()).hexdigest()
