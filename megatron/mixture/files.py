"""Registered files: their formats, and the sizes, times and checksums that detect other content."""

import bz2
import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron.io import atomic_path, wait_for_lock
from megatron.mixture.lazy_imports import import_pyarrow
from megatron.mixture.tars import TAR_SUFFIXES

PARTS_SUFFIX = ".parts.json"  # a list of .bin/.idx datasets that are one
PACKED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
LINE_SUFFIXES = (
    ".jsonl",
    ".json",
    *(f".json{end}{packed}" for packed in PACKED_SUFFIXES for end in ("l", "")),
)
DATASET_SUFFIXES = (".bin", PARTS_SUFFIX)
INPUT_SUFFIXES = (*LINE_SUFFIXES, ".parquet", *TAR_SUFFIXES, *DATASET_SUFFIXES)


@dataclass(frozen=True)
class SourceFile:
    """A file as it was when it was registered.

    id             identifies the documents of the registration in the table of its corpus, int64
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
        # the folder last: it decides only between copies of the same content, which are the same documents
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

        Raises FileNotFoundError, or ValueError if size or modification time are not as registered.
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
        # a changed file has another name here, so that an old content is never read in its place
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
    # a hash of two hashes: of the two contents in sequence, the border between them could move
    return hashlib.sha256(json.dumps([_hash_file(path), _hash_file(index)]).encode()).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
