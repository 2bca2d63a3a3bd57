"""Units of work: the output of one piece of the input, complete once its record exists.

    <prefix folder>/.<prefix name>.shards/job.json            the job that the units belong to
                                          00000012.0.ids      ids of piece 12 for the first key
                                          00000012.0.lengths  int32 length of each of its documents
                                          00000012.unit       the record as JSON, written last

The files are not synced. After a crash of the system their sizes may differ from
the record: such a piece is encoded again.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron.io import PARTIAL, open_exclusive, read_json, write_json

JOB_FILE, LOCK_FILE, SUFFIX = "job.json", ".lock", ".unit"


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of the encoding. `eod` -1: no end-of-document id is appended.

    max_tokens   tokens after which the rest of a piece
                 is not needed; None: the whole piece is needed
    """

    keys: tuple[str, ...]
    eod: int
    dtype: str
    skip_bad_lines: bool
    max_tokens: int | None = None


@dataclass(frozen=True)
class UnitRecord:
    """Result of one piece. `n_tokens`: by key.

    rejects   skipped lines: `line` within the piece, from 0, and `reason`
    damage    why a whole file was skipped
    """

    n_lines: int
    n_documents: int
    n_tokens: Sequence[int]
    rejects: Sequence[dict[str, Any]] = ()
    damage: str | None = None


class TokenWriter:
    """Writer of the documents of one key of a unit: ids and lengths, each through an unbuffered file."""

    def __init__(self, ids: IO[bytes], lengths: IO[bytes], settings: EncodeSettings) -> None:
        self.ids, self.lengths, self.settings = ids, lengths, settings
        self.dtype = np.dtype(settings.dtype)
        self.n_documents = self.n_tokens = 0

    def write(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: concatenated ids, and the length of each document."""
        # unbuffered: Python and C++ append through the same descriptors
        for file, array, dtype in ((self.ids, ids, self.dtype), (self.lengths, lengths, "<i4")):
            view = memoryview(array.astype(dtype, copy=False).tobytes())
            while view:  # a call may write a part only
                view = view[file.write(view) :]
        self.count_documents(len(lengths), len(ids))

    def count_documents(self, n_documents: int, n_tokens: int) -> None:
        """Count documents that were appended."""
        self.n_documents += n_documents
        self.n_tokens += n_tokens

    def clear(self) -> None:
        """Discard all documents."""
        self.n_documents = self.n_tokens = 0
        self.rewind()

    def rewind(self) -> None:
        """Discard what was written after the counted documents."""
        sizes = self.n_tokens * self.dtype.itemsize, 4 * self.n_documents
        for file, size in zip((self.ids, self.lengths), sizes, strict=True):
            # C++ writes through the same descriptors, so the
            # offset must move back together with the size
            file.truncate(size)
            file.seek(size)

    @property
    def has_enough(self) -> bool:
        """True once the unit has `max_tokens`, so that the rest of the piece is not needed."""
        return self.settings.max_tokens is not None and self.n_tokens >= self.settings.max_tokens


def list_token_files(path: Path, key: int) -> tuple[Path, Path]:
    """Return the paths of the ids and of the lengths of key number `key` of the unit `path`."""
    return path.with_suffix(f".{key}.ids"), path.with_suffix(f".{key}.lengths")


@contextmanager
def open_writers(path: Path, settings: EncodeSettings) -> Iterator[dict[str, TokenWriter]]:
    """Yield a writer for each key of a unit. An exception deletes the files."""
    paths = [list_token_files(path, i) for i in range(len(settings.keys))]
    with ExitStack() as stack:
        try:
            writers = {}
            for key, names in zip(settings.keys, paths, strict=True):
                ids, lengths = (stack.enter_context(name.open("w+b", buffering=0)) for name in names)
                writers[key] = TokenWriter(ids, lengths, settings)
            yield writers
        except BaseException:
            for name in (name for names in paths for name in names):
                name.unlink(missing_ok=True)
            raise


def write_record(path: Path, record: UnitRecord) -> None:
    """Write the record of a unit, which completes it."""
    partial = path.with_name(path.name + PARTIAL)
    partial.write_text(json.dumps(asdict(record)))
    partial.rename(path)


@dataclass(frozen=True)
class UnitFolder:
    """Folder of the units of one job."""

    folder: Path
    settings: EncodeSettings

    def path(self, number: int) -> Path:
        """Return the path of the record of a unit."""
        return self.folder / f"{number:08d}{SUFFIX}"

    def lock(self, name: Path) -> IO[bytes]:
        """Create the folder and lock it for this process until the returned file is closed.

        Raises ValueError, which contains `name`, if another process has the lock.
        """
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the previous owner has removed the folder in between
                return open_exclusive(self.folder / LOCK_FILE, name)

    def is_begun(self, job: str | None, name: Path, may_discard: bool) -> bool:
        """Return whether the folder is from an interrupted call of this job.

        job   hash of all that the units depend on;
              None: unknown, so that nothing can be resumed

        Raises ValueError, which contains `name`,
        for units of another job, unless `may_discard`.
        """
        existing = (read_json(self.folder / JOB_FILE) or {}).get("job")
        has_units = any(self.folder.glob(f"*{SUFFIX}"))
        if has_units and existing not in (None, job) and not may_discard:
            raise ValueError(
                f"{name}: got an interrupted job of other inputs or settings. Run that job again to finish "
                "it, or discard its work with --overwrite."
            )
        return job is not None and existing == job

    def begin(self, job: str | None) -> None:
        """Assign the folder to a job, and discard the units of another one."""
        self._delete_files()
        # after the deletion: a kill between the two leaves no unit of the other job
        write_json(self.folder / JOB_FILE, {"job": job})

    def read_records(self) -> dict[int, UnitRecord]:
        """Return the records of the finished units, by number."""
        numbers = sorted(int(path.stem) for path in self.folder.glob(f"*{SUFFIX}"))
        records = {number: self._read_record(number) for number in numbers}
        return {number: record for number, record in records.items() if record is not None}

    def _read_record(self, number: int) -> UnitRecord | None:
        """Return the record of a unit, None if the unit is missing or incomplete."""
        path, token_bytes = self.path(number), np.dtype(self.settings.dtype).itemsize
        with suppress(OSError, ValueError, TypeError):
            record = UnitRecord(**json.loads(path.read_bytes()))
            for key, n_tokens in enumerate(record.n_tokens):
                sizes = [file.stat().st_size for file in list_token_files(path, key)]
                if sizes != [n_tokens * token_bytes, 4 * record.n_documents]:
                    return None
            return record
        return None

    def read_lengths(self, number: int, key: int) -> np.ndarray:
        """Return the lengths of the documents of key number `key`, int32."""
        return np.fromfile(list_token_files(self.path(number), key)[1], "<i4")

    def remove(self) -> None:
        """Delete the folder and its content."""
        self._delete_files()
        # last: the lock file excludes other processes until then
        (self.folder / LOCK_FILE).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: another process has locked it meanwhile
            self.folder.rmdir()

    def _delete_files(self) -> None:
        # the records first: no unit without its tokens may look finished
        for path in sorted(self.folder.iterdir(), key=lambda path: path.suffix != SUFFIX):
            if not path.name.startswith(LOCK_FILE):
                path.unlink(missing_ok=True)
