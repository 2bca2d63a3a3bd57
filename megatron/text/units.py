"""Units of work: the output of one piece of the input is one file, complete or absent.

    <prefix folder>/.<prefix name>.shards/job.json        the job that the unit files belong to
                                          00000012.unit   ids and document lengths of piece 12, by key

Layout of a unit file: ids of each key, int32 lengths of each key, the record as JSON, its size. A unit file
is renamed into place and not synced. After a crash of the system it may lack its end: its size then differs
from its record, and the piece is encoded again.
"""

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from megatron.io import PARTIAL, open_exclusive, read_json, write_json
from megatron.log import get_logger

JOB_FILE, LOCK_FILE, SUFFIX = "job.json", ".lock", ".unit"
FOOTER = struct.Struct("<8sq")  # magic, bytes of the record
MAGIC = b"unit\0\0\0\1"

log = get_logger(__name__)


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of the encoding. `eod` -1: no end-of-document id is appended.

    max_tokens   tokens after which the rest of a piece is not needed; None: the whole piece is needed
    """

    keys: tuple[str, ...]
    eod: int
    dtype: str
    skip_bad_lines: bool
    max_tokens: int | None = None


@dataclass(frozen=True)
class UnitRecord:
    """Result of one piece. `n_tokens`: by key.

    rejects         skipped lines: `line` within the piece, `reason`, `documents_before`; `byte` of a file
    source_sha256   digest of each block of the input that begins in the piece
    error           the error that ended the piece early
    damage          why a whole file was skipped
    """

    n_lines: int
    n_documents: int
    n_tokens: Sequence[int]
    rejects: Sequence[dict[str, Any]] = ()
    source_sha256: Sequence[str] = ()
    error: str | None = None
    damage: str | None = None


class TokenWriter:
    """Writer of the documents of one key of a unit: ids and lengths, each through an unbuffered file."""

    def __init__(self, ids: IO[bytes], lengths: IO[bytes], settings: EncodeSettings) -> None:
        self.ids, self.lengths, self.settings = ids, lengths, settings
        self.dtype = np.dtype(settings.dtype)
        self.n_documents = self.n_tokens = 0
        self.on_write: Callable[[], object] = lambda: None  # called after documents are appended

    def write(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: concatenated ids, and the length of each document."""
        # unbuffered: Python and C++ append through the same descriptors
        for file, array, dtype in ((self.ids, ids, self.dtype), (self.lengths, lengths, "<i4")):
            view = memoryview(array.astype(dtype, copy=False).tobytes())
            while view:  # a call may write a part only
                view = view[file.write(view) :]
        self.count_documents(len(lengths), len(ids))

    def count_documents(self, n_documents: int, n_tokens: int) -> None:
        """Count documents that were appended, and call `on_write`."""
        self.n_documents += n_documents
        self.n_tokens += n_tokens
        self.on_write()

    def rewind(self) -> None:
        """Discard appended documents that are not counted yet."""
        # C++ writes through the same descriptors, so the offset must move back together with the size
        sizes = self.n_tokens * self.dtype.itemsize, 4 * self.n_documents
        for file, size in zip((self.ids, self.lengths), sizes, strict=True):
            file.truncate(size)
            file.seek(size)

    @property
    def has_enough(self) -> bool:
        """True once the unit has `max_tokens`, so that the rest of the piece is not needed."""
        return self.settings.max_tokens is not None and self.n_tokens >= self.settings.max_tokens


class UnitWriter:
    """Context manager that writes one unit file. Without `finish`, no file exists afterwards."""

    def __init__(self, path: Path, settings: EncodeSettings) -> None:
        self.path, self.settings = path, settings
        self.partial = path.with_name(path.name + PARTIAL)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        open_section = self._stack.enter_context
        self._stack.callback(self.partial.unlink, missing_ok=True)
        # the ids of the first key are written in place, the other sections are appended to them
        ids: list[IO[bytes]] = [open_section(self.partial.open("w+b", buffering=0))]
        ids += [open_section(self._open_section()) for _ in self.settings.keys[1:]]
        lengths = [open_section(self._open_section()) for _ in self.settings.keys]
        self._file, self._sections = ids[0], [*ids[1:], *lengths]
        self.writers = {
            key: TokenWriter(*files, self.settings)
            for key, files in zip(self.settings.keys, zip(ids, lengths, strict=True), strict=True)
        }
        return self

    def _open_section(self) -> IO[bytes]:
        return tempfile.TemporaryFile(buffering=0, dir=self.path.parent)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def clear(self) -> None:
        """Discard everything that was written."""
        for writer in self.writers.values():
            writer.n_documents = writer.n_tokens = 0
            writer.rewind()

    def finish(self, record: UnitRecord) -> None:
        """Append the sections and the record, and rename the file to its name."""
        for section in self._sections:
            section.seek(0)
            shutil.copyfileobj(section, self._file)
        content = json.dumps(asdict(record)).encode()
        self._file.write(content + FOOTER.pack(MAGIC, len(content)))
        self._file.close()
        self.partial.rename(self.path)


@dataclass(frozen=True)
class UnitFolder:
    """Folder of the unit files of one job."""

    folder: Path
    settings: EncodeSettings

    def path(self, number: int) -> Path:
        """Return the path of a unit file."""
        return self.folder / f"{number:08d}{SUFFIX}"

    def lock(self, name: Path) -> IO[bytes]:
        """Create the folder and lock it for this process until the returned file is closed.

        Raises ValueError, which contains `name`, if another process has the lock.
        """
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the previous owner has removed the folder in between
                return open_exclusive(self.folder / LOCK_FILE, name)

    def read_job(self) -> dict[str, Any] | None:
        """Return the description of the job in the folder, None for an empty folder."""
        return read_json(self.folder / JOB_FILE)

    def has_units(self) -> bool:
        """Return whether the folder has finished units."""
        return any(self.folder.glob(f"*{SUFFIX}"))

    def find_finished(self, job: dict[str, Any]) -> dict[int, UnitRecord]:
        """Return the records of the finished units of this job, by number.

        Units of other inputs or settings are discarded with a warning.
        """
        existing = self.read_job()
        paths = list(self.folder.glob(f"*{SUFFIX}"))
        if existing != job:
            if paths and existing is not None:
                changed = [name for name in job if existing.get(name) != job[name] and name != "job"]
                log.warning(
                    "%s: discarding %d finished pieces of an interrupted job: it had other %s",
                    self.folder, len(paths), " and ".join(changed),
                )  # fmt: skip
            self._delete_files()
            # after the deletion: a kill between the two leaves no unit of the other job
            write_json(self.folder / JOB_FILE, job)
            return {}
        records = {int(path.stem): self._read_record(int(path.stem)) for path in paths}
        return {number: record for number, record in sorted(records.items()) if record is not None}

    def _read_record(self, number: int) -> UnitRecord | None:
        """Return the record of a unit, None if the unit is missing or incomplete."""
        with suppress(OSError, ValueError, TypeError, struct.error), self.path(number).open("rb") as file:
            end = file.seek(-FOOTER.size, os.SEEK_END)
            magic, size = FOOTER.unpack(file.read())
            file.seek(end - size)
            record = UnitRecord(**json.loads(file.read(size)))
            if magic == MAGIC and end - size == self._lengths_offset(record, len(record.n_tokens)):
                return record
        return None

    def _lengths_offset(self, record: UnitRecord, key: int) -> int:
        n_bytes = sum(record.n_tokens) * np.dtype(self.settings.dtype).itemsize
        return n_bytes + 4 * record.n_documents * key

    def read_lengths(self, number: int, record: UnitRecord, key: int) -> np.ndarray:
        """Return the lengths of the documents of key number `key`, int32."""
        offset = self._lengths_offset(record, key)
        return np.fromfile(self.path(number), "<i4", record.n_documents, offset=offset)

    def remove(self) -> None:
        """Delete the folder and its content."""
        self._delete_files()
        # last: the lock file excludes other processes until then
        (self.folder / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: another process has locked it meanwhile
            self.folder.rmdir()

    def _delete_files(self) -> None:
        for path in self.folder.iterdir():
            if not path.name.startswith(LOCK_FILE):
                path.unlink(missing_ok=True)
