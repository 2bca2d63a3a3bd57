"""Files in object stores and on web servers, through fsspec: list, read, download, upload.

Size and version (etag, or time of change) are pinned when a file is found. They are compared when it is
opened and when it is closed, so bytes of two versions are never mixed. Credentials come from the environment
(AWS_*, GOOGLE_*, HF_TOKEN). Messages contain neither user names, passwords nor queries of a URL.

A dataset is downloaded once for all processes of a machine, each file complete or absent:

    $SCALING_CACHE/remote/<name>-<key>/<name>.idx, .json, .bin     key: hash of the URL and of all versions
"""

import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.callbacks import Callback
from fsspec.spec import AbstractBufferedFile

from megatron.io import atomic_path, explain_disk_full, wait_for_lock
from megatron.log import get_logger

log = get_logger(__name__)
ResultT = TypeVar("ResultT")

# scheme: package that fsspec requires for it
PACKAGES = {
    "s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "https": "aiohttp",
    "http": "aiohttp",
}  # fmt: skip
WEB = ("http", "https")  # without folders, and the query may be a password
MAGIC = re.compile(r"[*?[]")
URL_IN_TEXT = re.compile(r"([a-z][a-z0-9+.-]*://)(?:[^\s/'\"@]*@)?([^\s'\"?#<>]*)(?:[?#][^\s'\"<>)]*)?")
# keys of fsspec's file information, in order of preference; backends have different ones
VERSION_KEYS = ("ETag", "etag", "blob_id", "Content-MD5", "Last-Modified", "mtime")
ATTEMPTS = 8  # per request
FIRST_WAIT_S = 0.5  # between attempts, doubled each time: about one minute in total
TIMEOUT_S = 60.0  # for a connection, and between two packets
BLOCK_BYTES = 8 << 20  # per request


class RemoteError(OSError):
    """A remote file that cannot be used. The message has the URL without its secrets.

    is_temporary   whether the same command may succeed later
    """

    is_temporary = False


class RemoteMissingError(RemoteError, FileNotFoundError):
    """No such remote file."""


class RemoteUnreachableError(RemoteError):
    """All attempts of a request have failed."""

    is_temporary = True


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL. `version`: its etag or time of change when it was found; None if unknown."""

    url: str
    size: int
    version: str | None

    def __str__(self) -> str:
        return redact(self.url) if urlsplit(self.url).scheme in WEB else self.url

    @property
    def name(self) -> str:
        """Name without folders and query; its suffix selects the reader."""
        path = urlsplit(self.url).path if urlsplit(self.url).scheme in WEB else self.url
        return unquote(path).rpartition("/")[2]

    def check_unchanged(self) -> None:
        """Raise RemoteError if the size or the version differ from when the file was found."""
        current = find_file(self.url)
        if current != self:
            raise RemoteError(
                f"{self}: got {current.size:,} bytes (version {current.version}), expected {self.size:,} "
                f"(version {self.version}) as when the job began. The file was replaced meanwhile: restore "
                "it, or start again from the new one."
            )


def redact(text: str) -> str:
    """Remove user names, passwords, queries and fragments from all URLs in a text."""
    return URL_IN_TEXT.sub(r"\1\2", text)


def check_url(url: str) -> None:
    """Raise ValueError for a scheme that is not supported, and for credentials in the URL of a store."""
    scheme = url.partition("://")[0]
    if scheme not in PACKAGES:
        raise ValueError(
            f"{redact(url)}: got an unsupported kind of URL, expected "
            f"{', '.join(f'{name}://' for name in PACKAGES)} or a file on this machine."
        )
    if scheme not in WEB and "@" in urlsplit(url).netloc:
        raise ValueError(
            f"{redact(url)}: got credentials in a URL. Set them in the environment, as described in DATA.md."
        )


def _connect(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it.

    Raises ValueError for a missing package, and as `check_url`.
    """
    check_url(url)
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {"use_listings_cache": False}  # a cached version would hide a change
    try:
        if scheme in WEB:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
            # other encodings have other byte positions
            options["client_kwargs"] = {"timeout": timeout, "headers": {"Accept-Encoding": "identity"}}
        filesystem, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise ValueError(
            f"{scheme}://: the package {PACKAGES[scheme]} is missing ({error}). "
            f"Install it with: pip install {PACKAGES[scheme]}"
        ) from error
    return filesystem, path


def find_file(url: str) -> RemoteFile:
    """Request the size and version of a remote file. Raises RemoteError."""

    def request() -> RemoteFile:
        filesystem, path = _connect(url)
        filesystem.invalidate_cache(path)
        record = filesystem.info(path)
        if record.get("type") == "directory":
            raise FileNotFoundError("it is a folder")
        return _parse_record(url, record)

    return _retry(url, request)


def _parse_record(url: str, record: dict[str, Any]) -> RemoteFile:
    """Convert fsspec's information on a file. Raises RemoteError for an unknown size."""
    if not isinstance(record.get("size"), int):
        raise RemoteError(f"{redact(url)}: the server does not report a size. Download the file first.")
    version = next((str(record[key]) for key in VERSION_KEYS if record.get(key)), None)
    return RemoteFile(url, record["size"], version)


def find_remote(url: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return the files of a URL: a file, a folder (all files below it), or a glob pattern; sorted.

    Folders skip hidden names; folders and patterns return files with one of the suffixes and skip the outputs
    of preprocessing. Raises RemoteError, or ValueError for a URL that cannot be read.
    """
    if urlsplit(url).scheme in WEB:
        return [find_file(url)]
    records = _retry(url, lambda: _list_records(url))
    scheme, (_, path) = url.partition("://")[0], _connect(url)
    if list(records) == [path]:
        return [_parse_record(url, records[path])]
    is_folder = not MAGIC.search(path)
    names = [
        name
        for name in sorted(records)
        if name.endswith(tuple(suffixes))
        and not (is_folder and any(part.startswith(".") for part in name[len(path) :].split("/")))
        and not name.endswith(".rejects.jsonl")
        and name.removesuffix(".json") + ".idx" not in records
    ]
    return [_parse_record(f"{scheme}://{name}", records[name]) for name in names]


def _list_records(url: str) -> dict[str, dict[str, Any]]:
    """Return fsspec's information by path on the files that a URL of a store names."""
    filesystem, path = _connect(url)
    filesystem.invalidate_cache()
    if not MAGIC.search(path):
        record = filesystem.info(path)
        return {path: record} if record["type"] == "file" else dict(filesystem.find(path, detail=True))
    # the pattern may match the sidecar of a dataset, but not its index
    indices = f"{path.rpartition('/')[0]}/*.idx"
    matches = filesystem.glob(path, detail=True) | filesystem.glob(indices, detail=True)
    return {name: record for name, record in matches.items() if record["type"] == "file"}


def open_remote(file: RemoteFile) -> io.BufferedReader:
    """Open a remote file for reading. fsspec loads the next block in the background.

    A read raises RemoteError. So do opening and closing if the file has changed since it was found.
    """
    file.check_unchanged()
    return io.BufferedReader(_BlockReader(file), 1 << 20)


class _BlockReader(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """Raw file that fsspec's cache reads in blocks."""

    def __init__(self, file: RemoteFile) -> None:
        self.file = file
        options = {"maxblocks": 3}  # current, next, and the previous one for a step back
        super().__init__(None, file.url, "rb", BLOCK_BYTES, True, "background", options, size=file.size)

    def _fetch_range(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end): the method that the cache calls."""
        end = min(end, self.file.size)

        def request() -> bytes:
            filesystem, path = _connect(self.file.url)
            data: bytes = filesystem.cat_file(path, start=begin, end=end)
            if len(data) != end - begin:
                self.file.check_unchanged()  # a shorter file has fewer bytes
                raise OSError(f"got {len(data):,} bytes, expected {end - begin:,}")
            return data

        return _retry(self.file.url, request) if end > begin else b""

    def close(self) -> None:
        if not self.closed:
            super().close()  # also of the cache and its thread
            # fsspec has no If-Match for all stores: bytes between two equal versions are of that version
            self.file.check_unchanged()


def upload_file(path: Path, url: str, advance: Callable[[int], object] = lambda n_bytes: None) -> RemoteFile:
    """Upload a file, in parts if it is large; it appears when it is complete. Raises RemoteError.

    advance   called with the number of bytes of each part
    """
    progress = Callback()
    progress.relative_update = advance

    def request() -> None:
        filesystem, remote = _connect(url)
        filesystem.put_file(str(path), remote, progress)

    _retry(url, request)
    return find_file(url)


def remove_file(url: str) -> None:
    """Delete a remote file if it exists. Raises RemoteError."""

    def request() -> None:
        filesystem, path = _connect(url)
        with suppress(FileNotFoundError):
            filesystem.rm_file(path)

    _retry(url, request)


@cache
def cache_dataset(prefix: str) -> "CachedDataset":
    """Find a dataset at a URL without suffix, and download its .idx and .json.

    A process uses the versions of its first call. Raises RemoteError, or ValueError for an unusable URL.
    """
    if redact(prefix) != prefix and urlsplit(prefix).scheme in WEB:
        # the prefix is recorded in configurations, plans and checkpoints
        raise ValueError(
            f"{redact(prefix)}: got a query or a password in the URL of a dataset, expected none. "
            "Use a store whose credentials are in the environment."
        )
    if os.environ.get("SCALING_CACHE_GB"):
        raise ValueError(
            "SCALING_CACHE_GB: got a limit, expected none: the cache stores whole files. Unset it, and set "
            "SCALING_CACHE to a folder with room for the dataset."
        )
    files = {suffix: find_file(prefix + suffix) for suffix in (".bin", ".idx")}
    with suppress(RemoteMissingError):  # other programs write no sidecar
        files[".json"] = find_file(f"{prefix}.json")
    content = [prefix, [[file.size, file.version] for file in files.values()]]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-scaling"
    folder = Path(os.environ.get("SCALING_CACHE") or default) / "remote"
    name = files[".bin"].name.removesuffix(".bin")
    dataset = CachedDataset(folder / f"{name[:80]}-{key}" / name, files)
    for suffix in files.keys() - {".bin"}:
        dataset.download(suffix)
    return dataset


@dataclass(frozen=True)
class CachedDataset:
    """Files of a remote dataset by suffix, and the prefix of their copies in the cache."""

    local_prefix: Path
    files: dict[str, RemoteFile]

    def download(self, suffix: str) -> Path:
        """Return the local copy of a file, after a download if it is missing. Raises RemoteError."""
        target = Path(f"{self.local_prefix}{suffix}")
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with explain_disk_full(target.parent), wait_for_lock(target.parent / f".lock{suffix}"):
                if not target.is_file():  # else another process has downloaded it meanwhile
                    _download_file(self.files[suffix], target)
        return target


def _download_file(file: RemoteFile, target: Path) -> None:
    """Download a file; the caller excludes other writers. Raises RemoteError if it changes meanwhile."""

    def request() -> None:
        filesystem, path = _connect(file.url)
        filesystem.get_file(path, str(partial))
        if partial.stat().st_size != file.size:
            raise OSError(f"got {partial.stat().st_size:,} bytes, expected {file.size:,}")

    file.check_unchanged()
    log.info("%s: downloading %s bytes to %s", file, f"{file.size:,}", target)
    with atomic_path(target) as partial:
        _retry(file.url, request)
        file.check_unchanged()


def _retry(url: str, request: Callable[[], ResultT]) -> ResultT:
    """Return the result of a request, repeated after failures of the network and the server.

    Raises RemoteError: at once for a missing file and a denied access, else after ATTEMPTS attempts.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return request()
        except (RemoteError, TypeError, ValueError):  # another attempt is useless
            raise
        except Exception as error:  # each backend has its own exceptions
            failure = _explain_error(url, error)
            if attempt == ATTEMPTS or not failure.is_temporary:
                raise failure from error
            reason = type(error).__name__
        log.warning("%s: attempt %d of %d failed (%s)", redact(url), attempt, ATTEMPTS, reason)
        time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
    raise AssertionError("the last attempt returns or raises")


def _explain_error(url: str, error: Exception) -> RemoteError:
    """Return the error of a request as one sentence without secrets."""
    words = redact(str(error).strip() or type(error).__name__).splitlines()[0][:200]
    reason = words if type(error).__name__ in words else f"{type(error).__name__}: {words}"
    label, status = redact(url), _find_status(error)
    if status in (404, 410):
        return RemoteMissingError(f"{label}: no such file ({reason}). Correct the URL.")
    if status in (401, 403):
        return RemoteError(
            f"{label}: access denied ({reason}). Set credentials that may read it in the environment "
            "(AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN); DATA.md lists them."
        )
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return RemoteError(f"{label}: the server refuses the request with status {status} ({reason}).")
    return RemoteUnreachableError(
        f"{label}: not readable after {ATTEMPTS} attempts ({reason}). "
        "Check the network, then run the same command again."
    )


def _find_status(error: Exception) -> int | None:
    """Return the HTTP status of an error, which fsspec may hide in its cause; None without one."""
    cause = error.__cause__ or error
    response = getattr(cause, "response", None)
    if isinstance(response, dict):  # botocore
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        status = getattr(cause, "status", None) or getattr(response, "status_code", None)
    if status is None and isinstance(cause, FileNotFoundError):
        return 404
    if status is None and (isinstance(cause, PermissionError) or "Credentials" in type(cause).__name__):
        return 403
    return status if isinstance(status, int) else None
