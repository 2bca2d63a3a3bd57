"""Registered files: their formats, and the sizes, times and sums that detect other content.

A WebDataset archive contains samples. A sample is the members of a tar that share a name up
to its first dot: `3/cat.json`, `3/cat.txt` and `3/cat.jpg`, in adjacent positions, are the
sample `3/cat`. Its record is the object in `.json`, with the key `__key__` added. The content
of `.txt` becomes its text if `.json` has none. In the catalog it is the span from its first
header to the end of its last member, of the decompressed content. Headers are those of the
standard library, and what its `data` filter refuses is refused here: links outside of the
archive, devices, absolute names.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from megatron.io import atomic_path, wait_for_lock

TAR_SUFFIXES = (".tar", ".tar.gz", ".tar.zst")
KEY_FIELD = "__key__"
# 3/cat.seg.png: key 3/cat, extension seg.png. A name such as 3/.hidden has no key.
MEMBER_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")  # files with other names belong to no sample
TEXT_EXTENSIONS = ("json", "txt")  # members that registration reads
BLOCK_BYTES = 512  # members are padded to multiples of it
MAX_SAMPLE_BYTES = 256 << 20  # limit of a sample with all its members, because it is read as a whole
TAR_ERRORS = (tarfile.TarError, EOFError, OSError, zlib.error, ArithmeticError)
PARTS_SUFFIX = ".parts.json"  # a list of .bin/.idx datasets that are one
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
LINE_SUFFIXES = (
    ".jsonl",
    ".json",
    *(f".json{end}{packed}" for packed in PACKED_SUFFIXES for end in ("l", "")),
)
DATASET_SUFFIXES = (".bin", PARTS_SUFFIX)
INPUT_SUFFIXES = (*LINE_SUFFIXES, ".parquet", *TAR_SUFFIXES, *DATASET_SUFFIXES)


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
    # Otherwise each failed handshake prints a line on the terminal. gRPC reads it when it is
    # loaded, hence before the import; a value of the user has priority.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import pyarrow.flight

    return pyarrow.flight


def connect_database(n_threads: int | None = None, folder: Path | str | None = None) -> Any:
    """Return an in-memory database. With `folder` it reads no file outside of it, whatever the query is."""
    threads = {} if n_threads is None else {"threads": n_threads}
    connection = import_duckdb().connect(":memory:", config=threads)
    # DuckDB's progress bar of statements of over 2 s goes to standard output by
    # default
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

    id             identifies the documents of the registration in the table of its
                   corpus, int64
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
        # the folder last: it decides only between copies of the same content, which
        # are the same documents
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
                "Restore the file, or register it again with --verify."
            )

    def check_unchanged(self) -> Path:
        """Return the path.

        Raises FileNotFoundError, or ValueError if size or modification time are not
        as registered.
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
        """Return a path that allows random access: the file, or its content, decompressed into `folder`."""
        path = self.check_unchanged()
        if not path.name.endswith(PACKED_SUFFIXES):
            return path
        # a changed file has another name here, so that an old content is never read
        # in its place
        name = hashlib.sha256(json.dumps([self.path, self.n_bytes, self.sha256]).encode()).hexdigest()[:16]
        plain = folder / "unpacked" / f"{name}-{self.mtime_ns}"
        if plain.is_file():
            return plain
        plain.parent.mkdir(parents=True, exist_ok=True)
        # one process unpacks it, and the others wait
        with wait_for_lock(plain.with_name(plain.name + ".lock")):
            if not plain.is_file():
                with (
                    atomic_path(plain) as partial,
                    partial.open("wb") as sink,
                    open_decompressed(path) as source,
                ):
                    while block := source.read(1 << 20):
                        sink.write(block)
        return plain


class Pool:
    """Open values by key, such as files. A full pool is emptied, and values are loaded again when needed."""

    def __init__(self, capacity: int, close: Callable[[Any], None] = lambda value: None) -> None:
        """`capacity`: sum of the weights of the values."""
        self.capacity, self._close, self._weight = capacity, close, 0
        self._values: dict[Any, Any] = {}

    def get(self, key: Any, load: Callable[[], tuple[Any, int]]) -> Any:
        """Return the value of a key. A missing value is loaded as (value, weight)."""
        if key not in self._values:
            value, weight = load()
            if self._weight + weight > self.capacity:
                self.clear()
            self._values[key] = value
            self._weight += weight
        return self._values[key]

    def clear(self) -> None:
        """Close all values."""
        for value in self._values.values():
            self._close(value)
        self._values, self._weight = {}, 0


def properties_path(path: Path) -> Path:
    """Return the path of the parquet file with the properties of a file's documents: <prefix>.parquet."""
    suffix = max((end for end in INPUT_SUFFIXES if path.name.endswith(end)), key=len, default=path.suffix)
    return path.with_name(path.name.removesuffix(suffix) + ".parquet")


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open the decompressed content of a file. Opening and reading a damaged one raise ValueError."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    try:
        if path.name.endswith(".zst"):
            with import_pyarrow().CompressedInputStream(str(path), "zstd") as stream:
                yield stream
        else:
            with openers.get(path.suffix, Path.open)(path, "rb") as stream:
                yield stream
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ValueError(f"{path}: cannot be read to its end ({error}). Copy it again.") from error


def stat_file(path: Path) -> tuple[int, int]:
    """Return (bytes, modification time in ns) of a file, which are compared whenever it is opened."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def hash_content(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. The hash of a dataset covers its index as well."""
    index = {".bin": path.with_suffix(".idx")}.get(path.suffix)
    if index is None:
        return _hash_file(path)
    # a hash of two hashes: of the two contents in sequence, the border between them
    # could move
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


@dataclass
class TarSample:
    """Adjacent members with a common name.

    members   content by extension; empty for those that were not read
    fault     reason why it is not a sample
    """

    key: str
    begin: int
    end: int
    members: dict[str, bytes] = field(default_factory=dict)
    fault: str | None = None

    def build_record(self, text_key: str) -> dict[str, Any]:
        """Return the record over which properties are evaluated. Raises ValueError for a broken sample."""
        if self.fault is not None:
            raise ValueError(self.fault)
        try:
            record = json.loads(self.members.get("json", b"{}"))
        except (ValueError, RecursionError):
            raise ValueError("its .json is not JSON") from None
        if not isinstance(record, dict):
            raise ValueError("its .json is not an object")
        if not isinstance(record.get(text_key), str):
            if "txt" not in self.members:
                raise ValueError(f"no text under '{text_key}' in its .json, and no .txt")
            try:
                record[text_key] = self.members["txt"].decode()
            except UnicodeDecodeError:
                raise ValueError("its .txt is not UTF-8") from None
        # last, so that a `__key__` in the .json does not replace the key
        return {**record, KEY_FIELD: self.key}


def iter_samples(path: Path, stream: IO[bytes], max_bytes: int = MAX_SAMPLE_BYTES) -> Iterator[TarSample]:
    """Yield the samples of an archive in order, read forwards from its decompressed content.

    Raises ValueError for an archive that cannot be read to its end, that contains a
    member which the `data` filter refuses, or with a sample of more than
    `max_bytes` bytes. Memory is bounded by one sample and the names of all.
    """
    try:
        # "r|" reads forwards only, and does not require a file that can seek
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header) as archive:
            yield from _group_members(archive, max_bytes, TEXT_EXTENSIONS)
    except TAR_ERRORS as error:
        raise ValueError(f"{path}: cannot be read to its end ({error}). Pack it again.") from error


def _group_members(
    archive: tarfile.TarFile, max_bytes: int, extensions: Collection[str] | None = None
) -> Iterator[TarSample]:
    """Yield samples with the content of the members in `extensions`; None: of all."""
    seen: set[str] = set()
    sample: TarSample | None = None
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]  # typeshed lacks it; the list would only grow
        if tarfile.data_filter(member, "/archive") is None or member.issparse():
            raise tarfile.ReadError(f"{member.name}: got a sparse member, expected a plain one")
        named = MEMBER_NAME.fullmatch(member.name)
        if not member.isfile() or named is None:
            continue
        key, extension = named[1], named[2].lower()
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            # `offset` is the first header of the member, including a long name or
            # PAX record before it
            sample = TarSample(key, member.offset, 0)
            # members of the sample that are not adjacent cannot be one span of
            # bytes
            if key in seen:
                sample.fault = "not adjacent to other members of its name; sort them (tar --sort=name)"
            seen.add(key)
        # rounded up to a multiple of the block size
        sample.end = member.offset_data + -(-member.size // BLOCK_BYTES) * BLOCK_BYTES
        if sample.end - sample.begin > max_bytes:
            raise tarfile.ReadError(
                f"{member.name}: got a sample of {sample.end - sample.begin:,} bytes, expected at most "
                f"{max_bytes:,}; if the sample is valid, raise --max-sample-mb"
            )
        if extension in sample.members:
            sample.fault = f"two members .{extension}"
        is_read = extensions is None or extension in extensions
        sample.members[extension] = _read_member(archive, member) if is_read else b""
    if sample is not None:
        yield sample


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None, "extractfile returns None for non-files only"
    return file.read()


def read_sample(span: bytes, text_key: str) -> dict[str, Any]:
    """Return the bytes of one sample as a document: `__key__`, `text`, and each member by its extension.

    Raises ValueError for bytes that are not one sample.
    """
    try:
        # a span has no end-of-archive blocks: tarfile also ends where the bytes end
        with tarfile.open(fileobj=io.BytesIO(span), mode="r|", tarinfo=_Header) as archive:
            samples = list(_group_members(archive, len(span)))
    except TAR_ERRORS as error:
        raise ValueError(f"got bytes that are not a sample ({error})") from error
    if len(samples) != 1:
        raise ValueError(f"got members of {len(samples)} samples, expected one")
    sample = samples[0]
    return {**sample.members, KEY_FIELD: sample.key, "text": sample.build_record(text_key)[text_key]}
