"""What workers leave for the one who joins, and what a restart finds: a shard for each piece.

A shard counts once its marker is there; the marker is renamed into place after the shard is closed, so that
a process killed at any moment leaves whole shards and rubbish that is written anew, nothing in between.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron.data.documents import STDIN, Piece
from megatron.io import OWNER
from megatron.run_dir import open_alone, read_json, write_json

PLAN = "plan.json"
JOINED = "joined.json"
PREPARED = "prepared.json"
LOCK = ".lock"


@dataclass(frozen=True)
class Done:
    """What became of one piece; tokens and bytes are of its shards, over all keys."""

    n_lines: int
    n_documents: int
    n_tokens: int
    n_rejected: int
    n_bytes: int
    error: str | None = None  # what ended the piece early
    damage: str | None = None  # why a whole file was passed over; then nothing of it is in the shards


@dataclass(frozen=True)
class Joined:
    """How far the shards are joined: the first n_pieces. By key (documents, tokens), and empty documents."""

    n_pieces: int
    outputs: dict[str, tuple[int, int]]
    empty: dict[str, int]


@dataclass(frozen=True)
class Shards:
    """The folder of shards of one job."""

    folder: Path
    keys: tuple[str, ...]

    def take(self, name: Path) -> IO[bytes]:
        """Make the folder, for this process alone until what is given is closed.

        ValueError, which says `name`, where another process has it.
        """
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # removed in between by who had it
                return open_alone(self.folder / LOCK, name)

    def open_folder(self, pieces: Sequence[Piece], job: str | None) -> dict[int, Done]:
        """The pieces that are done in the folder already, by the same job; None is never the same.

        A folder of another job is emptied: its outputs are about to be replaced anyway.
        """
        plan = [job, [[piece.begin, piece.end] for piece in pieces]]
        wanted = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
        held = read_json(self.folder / PLAN)
        if held is None or held.get("sha256") != wanted or job is None:
            self._empty(set())
            write_json(self.folder / PLAN, {"sha256": wanted})
            return {}
        joined = self.read_joined()
        n_joined = joined.n_pieces if joined else 0  # their shards are gone
        found = {i: self.read_done(i, has_shard=i >= n_joined) for i in range(len(pieces))}
        return {i: done for i, done in found.items() if done is not None}

    def has_begun(self) -> bool:
        """Whether a job has left work in the folder."""
        return (self.folder / PLAN).is_file()

    def ids(self, piece: int, key: str) -> Path:
        """Ids of one piece, in the output's dtype."""
        return self.folder / f"{self.keys.index(key)}-{piece:08d}.ids"

    def lengths(self, piece: int, key: str) -> Path:
        """Tokens of each of its documents, int32."""
        return self.ids(piece, key).with_suffix(".lengths")

    def rejects(self, piece: int) -> Path:
        """Its lines that were no documents: JSON lines of {"line" within the piece, "reason"}."""
        return self.folder / f"{piece:08d}.rejects"

    def long_line(self, piece: int) -> Path:
        """A line of a stream that is too long to be held, while it is encoded."""
        return self.folder / f"{piece:08d}.line"

    def _marker(self, piece: int) -> Path:
        return self.folder / f"{piece:08d}.done"

    def mark_done(self, piece: int, done: Done) -> None:
        """Say that a piece is whole."""
        partial = self._marker(piece).with_suffix(".partial")
        partial.write_text(json.dumps(asdict(done)))
        partial.rename(self._marker(piece))

    def read_done(self, piece: int, has_shard: bool = True) -> Done | None:
        """What became of a piece, None while it is not whole."""
        held = read_json(self._marker(piece))
        if held is None:
            return None
        if not has_shard:
            return Done(**held)
        sizes = sum(
            self.ids(piece, key).stat().st_size for key in self.keys if self.ids(piece, key).is_file()
        )
        return Done(**held) if sizes == held["n_bytes"] else None

    def mark_joined(self, joined: Joined) -> None:
        """Say how far the joining has come."""
        partial = self.folder / f"{JOINED}.partial"
        partial.write_text(json.dumps(asdict(joined)))
        partial.rename(self.folder / JOINED)

    def read_joined(self) -> Joined | None:
        """How far the joining has come, None before its first piece."""
        held = read_json(self.folder / JOINED)
        if held is None:
            return None
        outputs = {key: (told[0], told[1]) for key, told in held["outputs"].items()}
        return Joined(held["n_pieces"], outputs, held["empty"])

    def forget(self, piece: int) -> None:
        """Delete the shards of a piece that is joined; that it is done, and its rejects, stay known."""
        for key in self.keys:
            self.ids(piece, key).unlink(missing_ok=True)
            self.lengths(piece, key).unlink(missing_ok=True)

    def mark_prepared(self, job: str | None) -> None:
        """Say that only the names of the outputs are missing."""
        write_json(self.folder / PREPARED, {"job": job})

    def is_prepared(self, job: str | None) -> bool:
        """Whether only the names of this job's outputs are missing."""
        held = read_json(self.folder / PREPARED)
        return job is not None and held is not None and held["job"] == job

    def forget_all(self) -> None:
        """Delete what any piece has left."""
        self._empty({PLAN})

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        self._empty(set())
        (self.folder / LOCK).unlink(missing_ok=True)  # last: until then no other process begins
        (self.folder / (LOCK + OWNER)).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def _empty(self, but: set[str]) -> None:
        """Delete all other files, locks excepted."""
        for path in self.folder.iterdir():
            if path.name not in but and not path.name.startswith(LOCK):
                path.unlink(missing_ok=True)


def job_of(paths: Sequence[Path], settings: Sequence[Any]) -> str | None:
    """What is equal for two jobs whose outputs are: a sum over the files as they are now and the settings.

    None where standard input is read, of which nobody knows what it will be.
    """
    if STDIN in paths:
        return None
    files = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return hashlib.sha256(json.dumps([list(settings), files]).encode()).hexdigest()
