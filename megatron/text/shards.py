"""Folder of shards, one per piece: output of workers, input of the joiner, and state for a restart.

A shard is valid once its marker exists. The marker is renamed into place after the shard is closed. So a
process that is killed at any moment leaves complete shards, and incomplete ones that are written again.
Shards are not synced to the disk, since most are deleted before they reach it. Those of another machine, or
of this one before it was booted, may have lost bytes, and are written again too. What is joined is synced.
"""

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.io import open_exclusive, read_json, write_atomic_bytes, write_json
from megatron.remote_files import RemotePath
from megatron.text.block_writer import WriterCounts, WrittenBlocks
from megatron.text.inputs import STDIN
from megatron.text.text_readers import InputPiece

FORMAT = 2  # of the folder; 1 stored neither digests nor counts
PLAN_FILE = "plan.json"
REMOTE_FILE = "remote.json"
JOIN_STATE_FILE = "joined.npz"
JOURNAL_FILE = "joined.jsonl"  # results of the joined pieces
PREPARED_FILE = "prepared.json"
LOCK_FILE = ".lock"


@dataclass(frozen=True)
class PieceResult:
    """Result of one piece. Tokens and bytes are those of its shards, summed over keys.

    source_sha256   digest of each block of the input that begins in the piece (`hash_source`)
    """

    n_lines: int
    n_documents: int
    n_tokens: int
    n_rejected: int
    n_bytes: int
    error: str | None = None  # the error that ended the piece early
    damage: str | None = None  # why a whole file was skipped; its shards are then empty
    source_sha256: Sequence[str] = ()


@dataclass(frozen=True)
class JoinState:
    """Progress of joining by key: after the first n_pieces pieces, counts, and documents without text."""

    n_pieces: int
    counts: dict[str, WriterCounts]
    empty: dict[str, int]


@dataclass(frozen=True)
class JoinRecord:
    """State that a restart continues from: pieces whose shards are not needed any more, and written blocks.

    journal_bytes   size of the journal with the results of these pieces
    """

    state: JoinState
    blocks: dict[str, WrittenBlocks]
    journal_bytes: int


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

        A folder of another job is emptied: its outputs are about to be replaced anyway. Raises ValueError for
        a folder of this job that another version of this code has written.
        """
        # the plan includes the boundaries of pieces: another piece size must not reuse shards
        plan = [job, [[piece.begin, piece.end] for piece in pieces]]
        plan_sha256 = hashlib.sha256(json.dumps(plan).encode()).hexdigest()
        existing = read_json(self.folder / PLAN_FILE)
        if existing is None or existing.get("sha256") != plan_sha256 or job is None:
            self._delete_files(set())
            # After the deletion: a kill between the two leaves a folder without a plan, which is emptied
            # again. In the other order the new plan would make shards of the old job valid.
            write_json(self.folder / PLAN_FILE, {"sha256": plan_sha256, "format": FORMAT})
            return {}
        if existing.get("format", 1) != FORMAT:
            raise ValueError(
                f"{self.folder}: got unfinished work in format {existing.get('format', 1)} of another "
                f"version, expected format {FORMAT}. Finish it with that version, or delete the folder to "
                "start again."
            )
        record = self.read_join_record()
        n_joined = record.state.n_pieces if record else 0
        results = dict(enumerate(self._read_journal(record)))
        # one listing: asking for each of 100,000 files takes minutes on a parallel file system
        for name in os.listdir(self.folder):
            number, _, suffix = name.rpartition("-")[2].partition(".")
            if suffix not in ("done", "ids", "lengths") or not number.isdigit():
                continue
            if int(number) < n_joined:  # a kill came between the record and the deletion
                (self.folder / name).unlink(missing_ok=True)
            elif suffix == "done" and (result := self.read_result(int(number))) is not None:
                results[int(number)] = result
        return results

    def check_remote_unchanged(self, paths: Sequence[Path]) -> None:
        """Raise ValueError if a remote file has changed since an interrupted job in this folder began."""
        record = read_json(self.folder / REMOTE_FILE) or {}
        for path in (path for path in paths if str(path) in record):
            version, expected = _get_version(path), record[str(path)]
            if version != expected:
                raise ValueError(
                    f"{path}: got version {version}, expected {expected} as when the interrupted job began. "
                    "Restore the file, or start from the beginning with --overwrite."
                )

    def write_remote_versions(self, paths: Sequence[Path]) -> None:
        """Record the versions of the remote files for `check_remote_unchanged`."""
        versions = {str(path): _get_version(path) for path in paths if isinstance(path, RemotePath)}
        if versions:
            write_json(self.folder / REMOTE_FILE, versions)

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
        """Write the marker of a finished piece: it is complete or absent while the system runs."""
        marker = self._marker_path(piece)
        partial = marker.with_suffix(".marker")
        partial.write_text(json.dumps({"boot": read_boot_id(), **asdict(result)}))
        partial.rename(marker)

    def read_result(self, piece: int) -> PieceResult | None:
        """Return the result of a piece, None if it is not finished or its shards may be incomplete."""
        try:
            record = json.loads(self._marker_path(piece).read_text())
            boot = record.pop("boot")
            result = PieceResult(**record)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None  # lost, maybe partly, in a crash of the system
        paths = [self.ids_path(piece, key) for key in self.keys]
        n_bytes = sum(path.stat().st_size for path in paths if path.is_file())
        return result if boot == read_boot_id() and n_bytes == result.n_bytes else None

    def record_joined(
        self, state: JoinState, blocks: dict[str, WrittenBlocks], results: Iterable[PieceResult]
    ) -> None:
        """Record the progress of joining durably. `results`: of the pieces since the previous record.

        The caller has synced the outputs; it may delete the shards of the pieces afterwards.
        """
        previous = self.read_join_record()
        with (self.folder / JOURNAL_FILE).open("ab") as journal:
            # a kill may have left lines that no record knows
            journal.truncate(previous.journal_bytes if previous else 0)
            journal.seek(0, os.SEEK_END)
            journal.writelines(json.dumps(asdict(result)).encode() + b"\n" for result in results)
            journal.flush()
            os.fsync(journal.fileno())
            content = {"journal_bytes": journal.tell(), **asdict(state)}
        arrays = {"state": np.frombuffer(json.dumps(content).encode(), np.uint8)}
        for i, key in enumerate(self.keys):
            arrays[f"digests-{i}"] = np.frombuffer(b"".join(blocks[key].digests), np.uint8)
            if (counts := blocks[key].counts) is not None:
                arrays[f"counts-{i}"] = counts
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the arrays for allow_pickle
        write_atomic_bytes(self.folder / JOIN_STATE_FILE, buffer.getvalue())

    def read_join_record(self) -> JoinRecord | None:
        """Return the progress of joining, None before its first record."""
        path = self.folder / JOIN_STATE_FILE
        if not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as arrays:
                content = json.loads(arrays["state"].tobytes())
                counts = {key: WriterCounts(**content["counts"][key]) for key in self.keys}
                state = JoinState(content["n_pieces"], counts, content["empty"])
                blocks = {}
                for i, key in enumerate(self.keys):
                    digests = arrays[f"digests-{i}"].tobytes()
                    blocks[key] = WrittenBlocks(
                        tuple(digests[at : at + 32] for at in range(0, len(digests), 32)),
                        arrays.get(f"counts-{i}"),
                    )
                return JoinRecord(state, blocks, content["journal_bytes"])
        except (ValueError, TypeError, AttributeError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path}: got invalid content ({error}), expected the progress of this job. "
                f"Delete {self.folder} and run again."
            ) from error

    def _read_journal(self, record: JoinRecord | None) -> list[PieceResult]:
        """Return the results of the joined pieces."""
        if record is None:
            return []
        with (self.folder / JOURNAL_FILE).open("rb") as journal:
            lines = journal.read(record.journal_bytes).splitlines()
        return [PieceResult(**json.loads(line)) for line in lines]

    def delete_shards(self, piece: int, result: PieceResult) -> None:
        """Delete the shards and the marker of a joined piece, but not its rejects."""
        for key in self.keys:
            self.ids_path(piece, key).unlink(missing_ok=True)
            self.lengths_path(piece, key).unlink(missing_ok=True)
        self._marker_path(piece).unlink(missing_ok=True)
        if not result.n_rejected and result.damage is None:
            self.rejects_path(piece).unlink(missing_ok=True)  # empty

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
        with suppress(OSError):
            # not empty if another process has created its lock file meanwhile: the folder is then in use
            self.folder.rmdir()

    def _delete_files(self, keep: set[str]) -> None:
        """Delete all files except `keep` and locks."""
        for path in self.folder.iterdir():
            if path.name not in keep and not path.name.startswith(LOCK_FILE):
                path.unlink(missing_ok=True)


def read_boot_id() -> str | None:
    """Return an identifier of this machine since it was booted; None on systems without one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def hash_job(paths: Sequence[Path], settings: Sequence[Any]) -> str | None:
    """Return a hash of the settings and of the path, size and mtime of each file; of a URL size and version.

    Jobs with equal hashes have equal outputs. Returns None if standard input is read, whose content is not
    known in advance.
    """
    if STDIN in paths:
        return None
    # the mtime instead of a hash: a hash would read terabytes before the first token
    files = [[str(path.resolve()), path.stat().st_size, _get_version(path)] for path in paths]
    # JSON, not str: it quotes strings, so that no two lists have the same text
    return hashlib.sha256(json.dumps([list(settings), files]).encode()).hexdigest()


def _get_version(path: Path) -> int | str | None:
    """Return what changes with the content of a file: mtime in ns, or version of a remote file."""
    return path.info.version if isinstance(path, RemotePath) else path.stat().st_mtime_ns
