"""Storage of a catalog: a local folder, or a prefix of an object store. Files appear complete or not at all.

A local file is written under another name, synced and renamed. An object of S3 appears when its upload is
complete. Nothing is ever changed in place, and no lock is taken: writers on other machines are not noticed.
"""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from megatron.io import PARTIAL, acquire_lock, fsync_path, open_locked
from megatron.mixture.lazy_imports import (
    import_dataset,
    import_filesystem,
    import_parquet,
    import_pyarrow,
)

URL = re.compile(r"[a-z][a-z0-9+.-]*://.+", re.IGNORECASE)
UPLOAD_BYTES = 8 << 20  # of one write of an upload
READS_AT_ONCE = 16  # requests to an object store in progress; each takes tens of milliseconds


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes, and modification time in seconds since 1970."""

    n_bytes: int
    mtime: float


class Storage(Protocol):
    """Files by name, relative to the catalog; `/` separates folders."""

    def list_files(self, folder: str) -> dict[str, StoredFile]:
        """Return the files of a folder and those below it, by name; none if it is missing."""
        ...

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Return the content of files. Raises OSError."""
        ...

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file, complete or not at all."""
        ...

    @contextmanager
    def make_scratch(self) -> Iterator[Path]:
        """Yield the path of a new local file, which `publish` makes a file of the catalog."""
        ...

    def publish(self, scratch: Path, name: str) -> None:
        """Make a scratch file a file of the catalog. A file of that name is replaced."""
        ...

    def delete_leftovers(self) -> None:
        """Delete the partial files of processes that were killed."""
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        ...

    def open_parquet(self, name: str) -> Any:
        """Return pyarrow's `ParquetFile`."""
        ...

    def make_dataset(self, names: Sequence[str]) -> Any:
        """Return pyarrow's dataset of parquet files; None if DuckDB may read them itself."""
        ...


def is_object_url(location: str | Path) -> bool:
    """Return whether a location is in an object store, such as s3://bucket/catalog.

    Raises ValueError for file://, which has no atomic replacement as a folder has.
    """
    if str(location).lower().startswith("file:"):
        raise ValueError(f"{location}: got a URL of a local file. Use the path of the folder.")
    return URL.fullmatch(str(location)) is not None


def open_storage(location: str | Path) -> "LocalStorage | ObjectStorage":
    """Return the storage of a catalog. Raises ValueError for a URL that cannot be resolved."""
    return ObjectStorage(str(location)) if is_object_url(location) else LocalStorage(Path(location))


class LocalStorage:
    """A folder on a local disk, or on a file system that several machines mount."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def exists(self) -> bool:
        """Return whether the folder exists."""
        return self.folder.is_dir()

    def list_files(self, folder: str) -> dict[str, StoredFile]:
        """List regular files, as `Storage`. Links are not listed: they may point out of the catalog."""
        files: dict[str, StoredFile] = {}
        # scandir: a catalog has a commit for each registration, and `Path` objects take most of the time
        with suppress(FileNotFoundError), os.scandir(self.folder / folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    files |= self.list_files(name)
                elif entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):  # another writer's partial file, renamed meanwhile
                        status = entry.stat(follow_symlinks=False)
                        files[name] = StoredFile(status.st_size, status.st_mtime)
        return files

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Read files, as `Storage`."""
        return [(self.folder / name).read_bytes() for name in names]

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file, as `Storage`."""
        with self.make_scratch() as scratch:
            scratch.write_bytes(content)
            self.publish(scratch, name)

    @contextmanager
    def make_scratch(self) -> Iterator[Path]:
        """Yield a path beside the catalog's files, on the same file system, where a rename is atomic."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # a name of this writer alone: two may write the same part at once
        scratch = self.folder / f".{uuid.uuid4().hex}{PARTIAL}"
        # the lock ends with the process: `delete_leftovers` of another one sees that it was killed
        lock = open_locked(scratch)
        try:
            yield scratch
        finally:
            scratch.unlink(missing_ok=True)
            lock.close()

    def delete_leftovers(self) -> None:
        """Delete the partial files of killed processes, as `Storage`."""
        for path in self.folder.glob(f".*{PARTIAL}"):
            lock = acquire_lock(path)
            if lock is not None:
                path.unlink(missing_ok=True)
                lock.close()

    def publish(self, scratch: Path, name: str) -> None:
        """Rename a synced file, as `Storage`."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fsync_path(scratch)
        scratch.rename(path)
        fsync_path(path.parent)

    def delete(self, name: str) -> None:
        """Delete a file, as `Storage`."""
        (self.folder / name).unlink(missing_ok=True)

    def open_parquet(self, name: str) -> Any:
        """Open a parquet file, as `Storage`."""
        return import_parquet().ParquetFile(self.folder / name)

    def make_dataset(self, names: Sequence[str]) -> Any:
        """Return None: DuckDB reads the files of this folder."""
        return None


class ObjectStorage:
    """A prefix of an object store: s3:// and gs:// by pyarrow, other protocols by fsspec.

    Keys and regions come from the environment, as in each store's own tools: AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL for S3.
    """

    def __init__(self, url: str) -> None:
        """Resolve a URL. Raises ValueError if its protocol is unknown or its library is missing."""
        self.url = url
        self.filesystem, self.prefix = _resolve_url(url)
        self.prefix = self.prefix.rstrip("/")

    def exists(self) -> bool:
        """Return True: a prefix needs no creation."""
        return True

    def list_files(self, folder: str) -> dict[str, StoredFile]:
        """List objects, as `Storage`."""
        filesystem = import_filesystem()
        root = f"{self.prefix}/{folder}".rstrip("/")
        selector = filesystem.FileSelector(root, recursive=True, allow_not_found=True)
        return {
            info.path[len(self.prefix) + 1 :]: StoredFile(
                info.size, 0.0 if info.mtime is None else info.mtime.timestamp()
            )
            for info in self.filesystem.get_file_info(selector)
            if info.type == filesystem.FileType.File
        }

    def read_files(self, names: Sequence[str]) -> list[bytes]:
        """Read objects, as `Storage`, several at once."""
        with ThreadPoolExecutor(READS_AT_ONCE) as executor:
            return list(executor.map(self._read_file, names))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write an object, as `Storage`."""
        with self.filesystem.open_output_stream(self._make_path(name)) as sink:
            sink.write(content)

    @contextmanager
    def make_scratch(self) -> Iterator[Path]:
        """Yield a path in the folder of temporary files, as `Storage`."""
        with TemporaryDirectory() as folder:
            yield Path(folder) / "part"

    def publish(self, scratch: Path, name: str) -> None:
        """Upload a file, as `Storage`. No commit names what an interrupted upload leaves."""
        with scratch.open("rb") as source, self.filesystem.open_output_stream(self._make_path(name)) as sink:
            shutil.copyfileobj(source, sink, UPLOAD_BYTES)

    def delete_leftovers(self) -> None:
        """Do nothing, as scratch files are in the folder of temporary files."""

    def delete(self, name: str) -> None:
        """Delete an object, as `Storage`."""
        with suppress(FileNotFoundError):
            self.filesystem.delete_file(self._make_path(name))

    def open_parquet(self, name: str) -> Any:
        """Open a parquet file, as `Storage`."""
        return import_parquet().ParquetFile(self._make_path(name), filesystem=self.filesystem)

    def make_dataset(self, names: Sequence[str]) -> Any:
        """Return a dataset, as `Storage`: columns and row groups that a query does not need are not read."""
        paths = [self._make_path(name) for name in names]
        return import_dataset().dataset(paths, format="parquet", filesystem=self.filesystem)

    def _make_path(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def _read_file(self, name: str) -> bytes:
        with self.filesystem.open_input_file(self._make_path(name)) as source:
            return bytes(source.read())


def _resolve_url(url: str) -> tuple[Any, str]:
    """Return (pyarrow's file system, path in it) of a URL."""
    arrow, filesystem = import_pyarrow(), import_filesystem()
    try:
        if url.partition("://")[0].lower() in ("s3", "gs", "gcs"):
            resolved: tuple[Any, str] = filesystem.FileSystem.from_uri(url)
            return resolved
        import fsspec

        remote, path = fsspec.core.url_to_fs(url)
        return filesystem.PyFileSystem(filesystem.FSSpecHandler(remote)), path
    except (arrow.ArrowException, ImportError, ValueError, OSError) as error:
        raise ValueError(
            f"{url}: cannot be opened as an object store ({str(error).splitlines()[0]}). "
            "Use s3://BUCKET/FOLDER, a folder, or install the protocol's fsspec library."
        ) from error
