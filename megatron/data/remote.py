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
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.callbacks import Callback
from fsspec.spec import AbstractBufferedFile

from megatron.io import PARTIAL, explain_disk_full, fsync_path, wait_for_lock
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
VERSION_KEYS = (  # keys of fsspec's file information, in order of preference; backends have different ones
    "ETag", "etag", "generation", "md5Hash", "blob_id", "Content-MD5", "Digest", "Last-Modified",
    "LastModified", "last_modified", "updated", "mtime",
)  # fmt: skip
ATTEMPTS = 8  # per request, about one minute in total
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 30.0  # between attempts, doubled each time
TIMEOUT_S = 60.0  # for a connection, and between two packets
BLOCK_BYTES = 8 << 20  # per request
N_REQUESTS = 8  # parallel requests of a download
UPLOAD_BYTES, MAX_UPLOADS = 64 << 20, 9000  # parts of a multipart upload: S3 allows 10,000
PERMANENT = (TypeError, AttributeError, NotImplementedError, ImportError)  # raised before a request


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
    """Return the fsspec file system of a URL, and the path in it. Raises ValueError for a missing package."""
    scheme = urlsplit(url).scheme
    options: dict[str, Any] = {"use_listings_cache": False}  # a cached version would hide a change
    try:
        if scheme in WEB:
            import aiohttp

            timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT_S, sock_read=TIMEOUT_S)
            options["client_kwargs"] = {"timeout": timeout}
        filesystem, path = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise ValueError(
            f"{scheme}://: the package {PACKAGES[scheme]} is missing ({error}). "
            f"Install it with: pip install {PACKAGES[scheme]}"
        ) from error
    return filesystem, path


def find_file(url: str) -> RemoteFile:
    """Request the size and version of a remote file. Raises RemoteError."""
    check_url(url)

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
    lfs = record.get("lfs")  # the Hugging Face hub reports the sha256 of the content here
    version = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    versions = [version, *(record.get(name) for name in VERSION_KEYS)]
    return RemoteFile(url, record["size"], next((str(value) for value in versions if value), None))


def find_remote(url: str, suffixes: Sequence[str]) -> list[RemoteFile]:
    """Return the files of a URL: a file, a folder (all files below it), or a glob pattern; sorted.

    Folders skip hidden names; folders and patterns return files with one of the suffixes and skip the outputs
    of preprocessing. Raises RemoteError, or ValueError for a URL that cannot be read.
    """
    if urlsplit(url).scheme in WEB:
        return [find_file(url)]
    check_url(url)
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
    matches = dict(filesystem.glob(path, detail=True))
    for folder in sorted({name.rpartition("/")[0] for name in matches if name.endswith(".json")}):
        # the pattern may match the sidecar of a dataset, but not its index
        others = filesystem.ls(folder, detail=True)
        matches |= {record["name"]: record for record in others if record["name"].endswith(".idx")}
    return {name: record for name, record in matches.items() if record["type"] == "file"}


def read_range(file: RemoteFile, begin: int, end: int, stop: threading.Event | None = None) -> bytes:
    """Return the bytes [begin, end). Raises RemoteError. `stop` ends the waits between attempts."""

    def request() -> bytes:
        filesystem, path = _connect(file.url)
        # other encodings have other byte positions
        is_web = urlsplit(file.url).scheme in WEB
        options = {"headers": {"Accept-Encoding": "identity"}} if is_web else {}
        data: bytes = filesystem.cat_file(path, start=begin, end=end, **options)
        if len(data) != end - begin:
            file.check_unchanged()  # a shorter file has fewer bytes
            ignored = ": the server ignores byte ranges" if len(data) > end - begin else ""
            raise OSError(f"got {len(data):,} bytes, expected {end - begin:,}{ignored}")
        return data

    try:
        return _retry(file.url, request, stop) if end > begin else b""
    except RemoteError as error:
        if not error.is_temporary and not isinstance(error, FileNotFoundError):
            file.check_unchanged()  # a range after the end of a shorter file is refused with status 416
        raise


def open_remote(file: RemoteFile, begin: int = 0, end: int | None = None) -> io.BufferedReader:
    """Open the bytes [begin, end) for reading. fsspec loads the next block in the background.

    A read raises RemoteError. So do opening and closing if the file has changed since it was found.
    """
    last, stop = file.size if end is None else end, threading.Event()
    file.check_unchanged()

    def fetch(first: int, after: int) -> bytes:
        return read_range(file, begin + first, min(begin + after, last), stop)

    return io.BufferedReader(_CachedReader(file, last - begin, fetch, stop), 1 << 20)


class _CachedReader(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """Raw file whose blocks `fetch` returns; `stop` ends the waits of the background thread."""

    def __init__(
        self, file: RemoteFile, size: int, fetch: Callable[[int, int], bytes], stop: threading.Event
    ) -> None:
        self.file, self.stop, self.must_check = file, stop, False
        self._fetch_range = fetch  # the method that fsspec's cache calls
        options = {"maxblocks": 3}  # current, next, and the previous one for a step back
        super().__init__(None, file.url, "rb", BLOCK_BYTES, True, "background", options, size=size)

    def readinto(self, buffer: Any) -> int:
        self.must_check = False  # a failed read is reported, and needs no second error on closing
        n_bytes = int(super().readinto(buffer))
        self.must_check = True
        return n_bytes

    def close(self) -> None:
        if not self.closed:
            self.stop.set()
            super().close()  # also of the cache and its thread
            # fsspec has no If-Match for all stores: bytes between two equal versions are of that version
            if self.must_check:
                self.file.check_unchanged()


def upload_file(path: Path, url: str, advance: Callable[[int], object] = lambda n_bytes: None) -> RemoteFile:
    """Upload a file, in parts if it is large; it appears when it is complete. Raises RemoteError.

    advance   called with the number of bytes of each part
    """
    check_url(url)
    size, progress = path.stat().st_size, Callback()
    progress.relative_update = advance

    def request() -> None:
        filesystem, remote = _connect(url)
        filesystem.put_file(str(path), remote, progress, chunksize=max(UPLOAD_BYTES, size // MAX_UPLOADS))

    _retry(url, request)
    uploaded = find_file(url)
    if uploaded.size != size:
        raise RemoteError(
            f"{redact(url)}: got {uploaded.size:,} bytes after the upload, expected {size:,}. Run it again."
        )
    return uploaded


def remove_file(url: str) -> None:
    """Delete a remote file if it exists. Raises RemoteError."""

    def request() -> None:
        filesystem, remote = _connect(url)
        filesystem.rm_file(remote)

    try:
        find_file(url)
        _retry(url, request)
    except RemoteMissingError:
        return


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
        """Return the local copy of a file, and download it first if it is missing. Raises RemoteError."""
        target = Path(f"{self.local_prefix}{suffix}")
        if not target.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            with explain_disk_full(target.parent), wait_for_lock(target.parent / f".lock{suffix}"):
                if not target.is_file():  # else another process has downloaded it meanwhile
                    _download_file(self.files[suffix], target)
        return target


def _download_file(file: RemoteFile, target: Path) -> None:
    """Download a file; a killed download resumes. The caller excludes other writers."""
    partial = target.with_name(target.name + PARTIAL)
    file.check_unchanged()
    log.info("%s: downloading %s bytes to %s", file, f"{file.size:,}", target)

    def fetch(begin: int) -> bytes:
        return read_range(file, begin, min(begin + BLOCK_BYTES, file.size))

    with partial.open("ab") as output, ThreadPoolExecutor(N_REQUESTS, "download") as pool:
        # the partial file is of this version, which is in the name of its folder, and ends at any byte
        for first in range(output.tell(), file.size, step := N_REQUESTS * BLOCK_BYTES):
            for data in pool.map(fetch, range(first, min(first + step, file.size), BLOCK_BYTES)):
                output.write(data)
    file.check_unchanged()
    fsync_path(partial)
    partial.rename(target)
    fsync_path(target.parent)


def _retry(url: str, request: Callable[[], ResultT], stop: threading.Event | None = None) -> ResultT:
    """Return the result of a request, repeated after failures of the network and the server.

    Raises RemoteError: at once for a missing file and a denied access, else after ATTEMPTS attempts.
    """
    wait_s = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return request()
        except (RemoteError, *PERMANENT):
            raise
        except Exception as error:  # each backend has its own exceptions
            _raise_permanent(url, error)
            reason = _describe_error(error)
            if attempt == ATTEMPTS or (stop is not None and stop.is_set()):
                raise RemoteUnreachableError(
                    f"{redact(url)}: not readable after {attempt} attempts ({reason}). "
                    "Check the network, then run the same command again."
                ) from error
        log.warning(
            "%s: attempt %d of %d failed (%s); again in %.1f s",
            redact(url), attempt, ATTEMPTS, reason, wait_s,
        )  # fmt: skip
        # random: the workers of several machines do not repeat their requests together
        (stop or threading.Event()).wait(wait_s * random.uniform(0.7, 1.0))
        wait_s = min(2 * wait_s, MAX_WAIT_S)
    raise AssertionError("the last attempt returns or raises")


def _describe_error(error: BaseException) -> str:
    words = redact(str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return words if type(error).__name__ in words else f"{type(error).__name__}: {words}"


def _raise_permanent(url: str, error: BaseException) -> None:
    """Raise RemoteError if another attempt is useless, as for a missing file."""
    label, reason, status = redact(url), _describe_error(error), _find_status(error)
    if status is None and isinstance(error, FileNotFoundError) and error.__cause__ is None:
        status = 404
    if status is None and (isinstance(error, PermissionError) or "Credentials" in type(error).__name__):
        status = 403
    if status in (404, 410):
        raise RemoteMissingError(f"{label}: no such file ({reason}). Correct the URL.") from error
    if status in (401, 403):
        raise RemoteError(
            f"{label}: access denied ({reason}). Set credentials that may read it in the environment "
            "(AWS_*, GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN); DATA.md lists them."
        ) from error
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        raise RemoteError(
            f"{label}: the server refuses the request with status {status} ({reason})."
        ) from error


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error, which fsspec hides in its cause; None without one."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = getattr(cause, "status", None) or getattr(response, "status_code", None)
        if isinstance(status, int):
            return status
        cause = cause.__cause__ or cause.__context__
    return None
