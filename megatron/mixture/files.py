"""Registered files: their formats, and the sizes, times and sums that detect other content.

Every text is a line of JSON with random access. A compressed file, a parquet file and a
WebDataset archive are unpacked once into such lines.

A WebDataset archive contains samples. A sample is the members of a tar that share a name up
to its first dot: `3/cat.json`, `3/cat.txt` and `3/cat.jpg`, in adjacent positions, are the
sample `3/cat`. Its record is the object in `.json`, with the key `__key__` added. The content
of `.txt` becomes its text if `.json` has none; other members are not read. Headers are read
by the standard library, and what its `data` filter refuses is refused here: links outside of
the archive, devices, absolute names.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megatron.io import atomic_path, wait_for_lock
from megatron.text.inputs import COMPRESSED_SUFFIXES, PLAIN_SUFFIXES
from megatron.text.text_readers import iter_blocks, open_decompressed, translate_read_errors

TAR_SUFFIXES = (".tar", ".tar.gz", ".tar.zst")
KEY_FIELD = "__key__"
# 3/cat.seg.png: key 3/cat, extension seg.png. A name such as 3/.hidden has no
# key. Files with other names belong to no sample
MEMBER_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")
TEXT_EXTENSIONS = ("json", "txt")  # members that registration reads
MAX_MEMBER_BYTES = 256 << 20  # limit of a text, because it is read as a whole
PARTS_SUFFIX = ".parts.json"  # a list of .bin/.idx datasets that are one
DATASET_SUFFIXES = (".bin", PARTS_SUFFIX)
INPUT_SUFFIXES = (*PLAIN_SUFFIXES, *COMPRESSED_SUFFIXES, ".parquet", *TAR_SUFFIXES, *DATASET_SUFFIXES)
# modules of errors; the last: of deltalake
LIBRARIES = ("duckdb", "_duckdb", "pyarrow", "_internal")
FileType = TypeVar("FileType")


def import_duckdb() -> ModuleType:
    """Return the module `duckdb`."""
    import duckdb

    return duckdb


def import_pyarrow() -> ModuleType:
    """Return the module `pyarrow`, the format of all columns, with its submodules."""
    import pyarrow
    import pyarrow.fs
    import pyarrow.parquet

    return pyarrow


def import_flight() -> ModuleType:
    """Return the module `pyarrow.flight`."""
    # Otherwise each failed handshake prints a line
    # on the terminal. gRPC reads it when it is loaded,
    # hence before the import; a value of the user has priority.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import pyarrow.flight

    return pyarrow.flight


def connect_database(n_threads: int | None = None, folder: Path | str | None = None) -> Any:
    """Return an in-memory database.

    With `folder` it reads no file outside of it, whatever the query is.
    """
    threads = {} if n_threads is None else {"threads": n_threads}
    connection = import_duckdb().connect(":memory:", config=threads)
    # DuckDB's progress bar of statements of over
    # 2 s goes to standard output by default
    connection.execute("SET enable_progress_bar = false")
    # 64-bit offsets: with 32 bits a batch is limited to 2 GiB of text
    connection.execute("SET arrow_large_buffer_size = true")
    if folder is not None:
        connection.execute("SET python_enable_replacements = false")
        connection.execute(f"SET allowed_directories = {[str(folder)]!r}")
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    return connection


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was registered.

    id             identifies the documents of the registration
                   in the table of its corpus, int64
    n_broken       records that are not documents
    broken         (line or row from 1, reason) of the first of them
    registered_ns  time of the registration
    """

    id: int
    path: str
    n_bytes: int
    mtime_ns: int
    n_documents: int
    sha256: str
    corpus: str = ""
    text_key: str = "text"
    n_broken: int = 0
    broken: tuple[tuple[int, str], ...] = ()
    registered_ns: int = 0

    def order_key(self) -> tuple[str, str, str, int, str]:
        """Return the key by which the files of a catalog are numbered."""
        # the folder last: it decides only between copies of the same content,
        # which are the same documents
        return self.corpus, Path(self.path).name, self.sha256, self.n_bytes, self.path

    @property
    def stamp(self) -> tuple[int, int]:
        """Size and modification time, as `stat_file` returns them."""
        return self.n_bytes, self.mtime_ns

    @property
    def age(self) -> tuple[int, int, int]:
        """Key of the registration that counts, of several of one path: the largest."""
        return self.mtime_ns, self.registered_ns, self.id

    @property
    def is_dataset(self) -> bool:
        """Whether the file holds token ids instead of text."""
        return self.path.endswith(DATASET_SUFFIXES)

    @property
    def prefix(self) -> str:
        """Prefix of a dataset."""
        return self.path.removesuffix(PARTS_SUFFIX).removesuffix(".bin")

    def verify(self) -> None:
        """Raise ValueError if the content differs, even if size and modification time are equal."""
        path = self.check_unchanged()
        if hash_content(path) != self.sha256:
            raise ValueError(
                f"{path}: got other content than was registered, with the same size and modification time. "
                "Restore the file, or touch it and register it again."
            )

    def check_unchanged(self) -> Path:
        """Return the path.

        Raises FileNotFoundError, or ValueError if size
        or modification time are not as registered.
        """
        path = Path(self.path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: is in the catalog but missing on disk. Restore it, or register the corpus again."
            )
        if stat_file(path) != self.stamp:
            raise ValueError(f"{path}: has changed since it was registered. Register it again.")
        return path

    def unpack(self, folder: Path) -> Path:
        """Return a file of lines with random access: this one, or its lines, unpacked into `folder`."""
        path = self.check_unchanged()
        if path.name.endswith(PLAIN_SUFFIXES):
            return path
        # a changed file has another name here, so that an old content is never
        # read in its place
        content = json.dumps([self.path, self.n_bytes, self.sha256, self.text_key])
        name = hashlib.sha256(content.encode()).hexdigest()[:16]
        plain = folder / "unpacked" / f"{name}-{self.mtime_ns}.jsonl"
        plain.parent.mkdir(parents=True, exist_ok=True)
        # one process unpacks it, and the others wait
        with wait_for_lock(plain.with_name(plain.name + ".lock")):
            if not plain.is_file():
                with atomic_path(plain) as partial, partial.open("wb") as sink:
                    sink.writelines(iter_content(path, self.text_key))
        return plain


class Pool:
    """Open values by key, such as files.

    A full pool is emptied, and values are loaded again when needed.
    """

    def __init__(self, capacity: int, close: Callable[[Any], None]) -> None:
        """`capacity`: number of values."""
        self.capacity, self._close = capacity, close
        self._values: dict[Any, Any] = {}

    def get(self, key: Any, load: Callable[[], Any]) -> Any:
        """Return the value of a key, which is loaded if it is missing."""
        if key not in self._values:
            value = load()
            if len(self._values) >= self.capacity:
                self.clear()
            self._values[key] = value
        return self._values[key]

    def clear(self) -> None:
        """Close all values."""
        for value in self._values.values():
            self._close(value)
        self._values = {}


def batch_files(
    files: Iterable[FileType], describe: Callable[[FileType], tuple[int, str]],
    most_bytes: int, most_files: int,
) -> Iterator[list[FileType]]:  # fmt: skip
    """Yield files in order: adjacent ones with the same key in one batch, a large one alone.

    describe   returns (bytes, key) of a file
    """
    batch: list[FileType] = []
    state = 0, ""  # (bytes, key) of the batch
    for file in files:
        n_bytes, key = describe(file)
        fits = state[0] + n_bytes <= most_bytes and len(batch) < most_files
        if batch and (key != state[1] or not fits):
            yield batch
            batch, state = [], (0, "")
        batch.append(file)
        state = state[0] + n_bytes, key
    if batch:
        yield batch


def properties_path(path: Path) -> Path:
    """Return the path of the parquet file with the properties of a file's documents: <prefix>.parquet."""
    suffix = max((end for end in INPUT_SUFFIXES if path.name.endswith(end)), key=len, default=path.suffix)
    return path.with_name(path.name.removesuffix(suffix) + ".parquet")


def iter_content(path: Path, text_key: str) -> Iterator[bytes]:
    """Yield the lines of a file in any blocks; of parquet and tars the lines with its texts.

    Raises ValueError for a file that cannot be read to its end.
    """
    if path.suffix == ".parquet":
        for batch in import_pyarrow().parquet.ParquetFile(path).iter_batches(1 << 12, columns=[text_key]):
            yield from iter_row_lines(batch, text_key)
    elif path.name.endswith(TAR_SUFFIXES):
        yield from iter_sample_lines(path, text_key)
    else:
        yield from iter_blocks(path)


def iter_row_lines(rows: Any, text_key: str) -> Iterator[bytes]:
    """Yield the texts of rows of Arrow as lines of JSON."""
    for text in rows.column(text_key).to_pylist():
        yield json.dumps({text_key: text}).encode() + b"\n"


@contextmanager
def explain_errors(where: object, fix: str = "Register it again.") -> Iterator[None]:
    """Convert errors of DuckDB, Arrow and Delta Lake to ValueErrors of one line, with a fix."""
    try:
        yield
    except Exception as error:
        # compared by name, so that no library is imported for it
        if type(error).__module__.partition(".")[0] not in LIBRARIES:
            raise
        # DuckDB adds the statement after an empty line
        why = " ".join(str(error).partition("\n\n")[0].split())
        raise ValueError(f"{where}: {why}. {fix}".rstrip()) from error


def stat_file(path: Path) -> tuple[int, int]:
    """Return (bytes, modification time in ns) of a file, which are compared whenever it is opened."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def hash_content(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits.

    The hash of a dataset covers its index as well.
    """
    index = {".bin": path.with_suffix(".idx")}.get(path.suffix)
    if index is None:
        return _hash_file(path)
    # a hash of two hashes: of the two contents in sequence, the border between
    # them could move
    return hashlib.sha256(json.dumps([_hash_file(path), _hash_file(index)]).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Header(tarfile.TarInfo):
    """Tar header that raises an error for damage that tarfile treats as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(archive)
        except (tarfile.EOFHeaderError, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]  # as below
            raise  # the regular ends of an archive
        except tarfile.HeaderError as error:  # not in typeshed
            raise tarfile.ReadError(str(error)) from error


def iter_sample_lines(path: Path, text_key: str) -> Iterator[bytes]:
    """Yield the records of the samples of a tar in order, as lines of JSON.

    Raises ValueError for an archive that cannot be read to its end, or with a member
    that the `data` filter refuses. A sample without a text has a record without it.
    """
    try:
        # "r|" reads forwards only, and does not require a file that can seek
        with (
            translate_read_errors(path),
            path.open("rb") if path.suffix == ".tar" else open_decompressed(path) as stream,
            tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive,
        ):
            for key, members in groupby(_iter_members(archive), key=itemgetter(0)):
                contents = {extension: content for _, extension, content in members}
                yield json.dumps(_build_record(key, contents, text_key)).encode() + b"\n"
    except (tarfile.TarError, ArithmeticError) as error:
        raise ValueError(f"{path}: cannot be read to its end ({error}). Pack it again.") from error


def _iter_members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, bytes]]:
    """Yield (key of the sample, extension, content) of members; no content of other than text."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it; the list would only grow
        if tarfile.data_filter(member, "/archive") is None or member.issparse():
            raise tarfile.ReadError(f"{member.name}: got a sparse member, expected a plain one")
        named = MEMBER_NAME.fullmatch(member.name)
        if not member.isfile() or named is None:
            continue
        file = archive.extractfile(member) if named[2].lower() in TEXT_EXTENSIONS else None
        if file is not None and member.size > MAX_MEMBER_BYTES:
            raise tarfile.ReadError(f"{member.name}: got a text of over {MAX_MEMBER_BYTES:,} bytes")
        yield named[1], named[2].lower(), b"" if file is None else file.read()


def _build_record(key: str, contents: dict[str, bytes], text_key: str) -> dict[str, Any]:
    """Return the record of a sample."""
    try:
        record = json.loads(contents.get("json", b"{}"))
        if not isinstance(record, dict):
            raise ValueError("its .json is not an object")
        if not isinstance(record.get(text_key), str) and "txt" in contents:
            record[text_key] = contents["txt"].decode()
    except (ValueError, RecursionError):
        record = {}  # without a text it counts as broken
    # last, so that a `__key__` in the .json does not replace the key
    return {**record, KEY_FIELD: key}
