"""Files in object stores, through fsspec: list, read, download, upload.

Size and version (etag, or time of change) are pinned when a file is found. They
are compared when it is opened and when it is closed, so bytes of two versions
are never mixed. Credentials come from the environment (AWS_*, GOOGLE_*,
HF_TOKEN). Messages contain neither user names nor passwords of a URL. The
packages of the stores repeat failed requests.

A dataset is downloaded once for all processes
of a machine, each file complete or absent:

    $SCALING_CACHE/remote/<hash of URL, size and version>/<name of the file>
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.callbacks import Callback
from fsspec.spec import AbstractBufferedFile

from megatron.io import atomic_path, explain_disk_full, wait_for_lock
from megatron.log import get_logger

log = get_logger(__name__)

# scheme: package that fsspec requires for it
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
MAGIC = re.compile(r"[*?[]")
CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^\s/'\"@]*@")
# keys of fsspec's file information, in order
# of preference; backends have different ones
VERSION_KEYS = ("ETag", "etag", "blob_id", "Content-MD5", "Last-Modified", "mtime")
BLOCK_BYTES = 8 << 20  # per request


class RemoteError(OSError):
    """A remote file that cannot be used. The message has the URL without its secrets."""


class RemoteMissingError(RemoteError, FileNotFoundError):
    """No such remote file."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL. `version`: its etag or time of change when it was found; None if unknown."""

    url: str
    size: int
    version: str | None

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Name without folders; its suffix selects the reader."""
        return self.url.rpartition("/")[2]

    def check_unchanged(self) -> None:
        """Raise RemoteError if the size or the version differ from when the file was found."""
        current = find_file(self.url)
        if current != self:
            raise RemoteError(
                f"{self.url}: got {current.size:,} bytes (version {current.version}), expected {self.size:,} "
                f"(version {self.version}) as when the job began. The file was replaced meanwhile: restore "
                "it, or start again from the new one."
            )


def redact(text: str) -> str:
    """Remove user names and passwords from all URLs in a text."""
    return CREDENTIALS_IN_URL.sub("", text)


def check_url(url: str) -> None:
    """Raise ValueError for an unsupported scheme, and for credentials in a URL."""
    if url.partition("://")[0] not in PACKAGES:
        raise ValueError(
            f"{redact(url)}: got an unsupported kind of URL, expected "
            f"{', '.join(f'{name}://' for name in PACKAGES)} or a file on this machine. Download a file of "
            "a web server with curl first."
        )
    if "@" in urlsplit(url).netloc:
        raise ValueError(
            f"{redact(url)}: got credentials in a URL. Set them in the environment, as described in DATA.md."
        )


@contextmanager
def _connect(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the fsspec file system of a URL, and the path in it.

    Raises RemoteError for a failed request, ValueError for a missing package,
    and as `check_url`.
    """
    check_url(url)
    try:
        yield fsspec.url_to_fs(url, use_listings_cache=False)  # a cached version would hide a change
    except (RemoteError, TypeError, ValueError):
        raise
    except ImportError as error:
        package = PACKAGES[urlsplit(url).scheme]
        raise ValueError(
            f"{redact(url)}: the package {package} is missing ({error}). "
            f"Install it with: pip install {package}"
        ) from error
    except Exception as error:  # each backend has its own exceptions
        raise _explain_error(url, error) from error


def _explain_error(url: str, error: BaseException) -> RemoteError:
    """Return the error of a request as one sentence without secrets."""
    kind = type(error).__name__
    reason = f"{kind}: {redact(str(error))[:200]}".splitlines()[0]
    if isinstance(error, FileNotFoundError):
        return RemoteMissingError(f"{url}: no such file ({reason}). Correct the URL.")
    if isinstance(error, PermissionError) or "Credentials" in kind:
        return RemoteError(
            f"{url}: access denied ({reason}). Set credentials that may read it in the environment "
            "(AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN); DATA.md lists them."
        )
    return RemoteError(f"{url}: not readable ({reason}). Check the network, then run the same command again.")


def find_file(url: str) -> RemoteFile:
    """Request the size and version of a remote file. Raises RemoteError."""
    with _connect(url) as (filesystem, path):
        filesystem.invalidate_cache(path)
        return _parse_record(url, filesystem.info(path))


def _parse_record(url: str, record: dict[str, Any]) -> RemoteFile:
    """Convert fsspec's information on a file. Raises RemoteError for an unknown size."""
    if not isinstance(record.get("size"), int):
        raise RemoteError(f"{url}: the store does not report a size. Download the file first.")
    version = next((str(record[key]) for key in VERSION_KEYS if record.get(key)), None)
    return RemoteFile(url, record["size"], version)


def find_remote(url: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return the files of a URL: a file, a folder (all files below it), or a glob pattern; sorted.

    Folders skip hidden names; folders and patterns return files with one of the
    suffixes and skip the outputs of preprocessing. Raises RemoteError, or
    ValueError for a URL that cannot be read.
    """
    with _connect(url) as (filesystem, path):
        filesystem.invalidate_cache()
        if MAGIC.search(path):
            records = filesystem.glob(path, detail=True)
            # the pattern may match the sidecar of a dataset, but not its index
            indices = set(filesystem.glob(f"{path.rpartition('/')[0]}/*.idx"))
        else:
            if filesystem.info(path)["type"] == "file":
                return [find_file(url)]
            records = filesystem.find(path, detail=True)
            records = {name: record for name, record in records.items() if "/." not in name[len(path) :]}
            indices = set(records)
    scheme = url.partition("://")[0]
    return [
        _parse_record(f"{scheme}://{name}", record)
        for name, record in sorted(records.items())
        if record["type"] == "file"
        and name.endswith(tuple(suffixes))
        and not name.endswith(".rejects.jsonl")
        and name.removesuffix(".json") + ".idx" not in indices
    ]


def open_remote(file: RemoteFile) -> io.BufferedReader:
    """Open a remote file for reading. fsspec loads the next block in the background.

    A read raises RemoteError. So do opening and closing if the file has changed
    since it was found.
    """
    file.check_unchanged()
    return io.BufferedReader(_BlockReader(file), 1 << 20)


class _BlockReader(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """Raw file that fsspec's cache reads in blocks, with this module's errors."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        options = {"maxblocks": 3}  # current, next, and the previous one for a step back
        super().__init__(None, file.url, "rb", BLOCK_BYTES, True, "background", options, size=file.size)

    def _fetch_range(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end): the method that the cache calls."""
        end = min(end, self.file.size)
        with _connect(self.file.url) as (filesystem, path):
            data: bytes = filesystem.cat_file(path, start=begin, end=end) if end > begin else b""
            if len(data) != end - begin:
                self.file.check_unchanged()  # a shorter file has fewer bytes
                raise OSError(f"got {len(data):,} bytes, expected {end - begin:,}")
            return data

    def close(self) -> None:
        if not self.closed:
            super().close()  # also of the cache and its thread
            # not all stores have If-Match: bytes between
            # two equal versions are of that version
            self.file.check_unchanged()


def upload_file(path: Path, url: str, advance: Callable[[int], object] = lambda n_bytes: None) -> None:
    """Upload a file, in parts if it is large; it appears when it is complete. Raises RemoteError.

    advance   called with the number of bytes of each part
    """
    progress = Callback()
    progress.relative_update = advance
    with _connect(url) as (filesystem, remote):
        filesystem.put_file(str(path), remote, progress)


def remove_file(url: str) -> None:
    """Delete a remote file if it exists. Raises RemoteError."""
    with suppress(RemoteMissingError), _connect(url) as (filesystem, path):
        filesystem.rm_file(path)


@cache
def locate_remote(prefix: str) -> tuple[Path, Path, RemoteFile]:
    """Return (index, sidecar, .bin) of a dataset at a URL without suffix; the first two are downloaded.

    A process uses the versions of its first call. Raises RemoteError, or
    ValueError for an unusable URL.
    """
    data, index = find_file(f"{prefix}.bin"), cached_copy(find_file(f"{prefix}.idx"))
    try:
        return index, cached_copy(find_file(f"{prefix}.json")), data
    except RemoteMissingError:  # other programs write no sidecar
        return index, index.with_name("no sidecar"), data


def cached_copy(file: RemoteFile) -> Path:
    """Return the local copy of a file, after a download if it is missing. Raises RemoteError."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-scaling"
    folder = Path(os.environ.get("SCALING_CACHE") or default) / "remote"
    identity = json.dumps([file.url, file.size, file.version])
    target = folder / hashlib.sha256(identity.encode()).hexdigest()[:24] / file.name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with explain_disk_full(target.parent), wait_for_lock(target.parent / ".lock"):
        if not target.is_file():  # else another process has downloaded it meanwhile
            log.info("%s: downloading %s bytes to %s", file.url, f"{file.size:,}", target)
            with atomic_path(target) as partial:
                _download_file(file, partial)
    return target


def _download_file(file: RemoteFile, target: Path) -> None:
    """Download a file. Raises RemoteError if it fails, or if the file changes meanwhile."""
    file.check_unchanged()
    with _connect(file.url) as (filesystem, path):
        filesystem.get_file(path, str(target))
        if target.stat().st_size != file.size:
            raise OSError(f"got {target.stat().st_size:,} bytes, expected {file.size:,}")
    file.check_unchanged()
