"""Files of object stores and web servers as inputs of a job: identity, byte ranges, listing.

The content is read by range requests, so nothing is stored on disk. Size and version (etag, or time of
change) are recorded when a file is found, and compared whenever it is opened and closed: bytes of two
versions are never mixed.
"""

import hashlib
import io
import os
import re
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PosixPath
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from megatron.remote_requests import (
    WEB,
    RemoteChangedError,
    RemoteDeniedError,
    RemoteError,
    RemoteInfo,
    RemoteMissingError,
    ShortReadError,
    check_url,
    connect,
    describe_info,
    parse_info,
    request_info,
    retry,
    strip_secrets,
)

MAGIC = re.compile(r"[*?[]")
SPAN_BYTES = 32 << 20  # minimum of a piece of a remote file: a cut costs a request
N_REQUESTS = 16  # at a time, for the cuts of a file
LINE_BYTES = 64 << 10  # of the first request for the end of a line


def is_remote(path: Path) -> bool:
    """Return whether a path of an input is a URL."""
    return isinstance(path, RemotePath)


class RemotePath(PosixPath):
    """Path of a file at a URL, for readers of input files: name, size, reading. No local file.

    Any use of it as a local path raises TypeError.
    """

    url: str
    _info: RemoteInfo | None

    def __new__(cls, url: str, info: RemoteInfo | None = None) -> "RemotePath":
        """`info`: of a listing; otherwise requested when needed."""
        self = super().__new__(cls, _drop_query(url))
        self.url, self._info = url, info
        return self

    def __init__(self, url: str, info: RemoteInfo | None = None) -> None:
        if sys.version_info >= (3, 12):  # before, __new__ parses the path
            super().__init__(_drop_query(url))

    def __str__(self) -> str:
        return strip_secrets(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> str:
        raise TypeError(f"{self}: is not a file on this machine")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __reduce__(self) -> Any:
        return RemotePath, (self.url, self._info)

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Return the path itself."""
        return self

    @property
    def info(self) -> RemoteInfo:
        """Size and version when the file was found. Raises RemoteError."""
        if self._info is None:
            self._info = request_info(self.url)
        return self._info

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the size as that of a regular file. Raises RemoteError."""
        return os.stat_result((0o100644, 0, 0, 1, 0, 0, self.info.size, 0, 0, 0))

    def open(self, *mode: Any, **options: Any) -> IO[Any]:  # type: ignore[override]  # only "rb"
        """Open the content for reading bytes."""
        return self.open_range(0, self.info.size)

    def open_range(self, begin: int, end: int) -> io.BufferedReader:
        """Open the bytes [begin, end) as a file. `raw` of the result is a RangeReader."""
        return io.BufferedReader(RangeReader(self, begin, end), buffer_size=1 << 20)

    def check_unchanged(self) -> None:
        """Request the size and version again. Raises RemoteChangedError if they differ from `info`."""
        current = request_info(self.url)
        if current != self.info:
            raise RemoteChangedError(
                f"{self}: got {describe_info(current)}, expected {describe_info(self.info)} as when the job "
                "began. The file was replaced meanwhile: restore it, or start again from the new one."
            )

    def read_range(self, begin: int, end: int, stop: threading.Event | None = None) -> bytes:
        """Return the bytes [begin, end). Raises RemoteError. `stop` ends the waits between attempts."""

        def request() -> bytes:
            filesystem, path = connect(self.url)
            options: dict[str, Any] = {}
            if urlsplit(self.url).scheme in WEB:  # other encodings have other byte positions
                options["headers"] = {"Accept-Encoding": "identity"}
            data: bytes = filesystem.cat_file(path, start=begin, end=end, **options)
            if len(data) != end - begin:
                self.check_unchanged()  # a shorter file has fewer bytes
                ignored = len(data) > end - begin
                raise ShortReadError(
                    f"got {len(data):,} bytes, expected {end - begin:,}"
                    + (": the server ignores byte ranges" if ignored else "")
                )
            return data

        try:
            return retry(self.url, request, stop) if end > begin else b""
        except RemoteMissingError:
            raise
        except RemoteError as error:
            if error.is_temporary or isinstance(error, RemoteDeniedError | RemoteChangedError):
                raise
            self.check_unchanged()  # a range after the end of a shorter file is refused with status 416
            raise


def _drop_query(url: str) -> str:
    """Return the path of a URL, whose last part is the file name, and whose suffix selects the reader."""
    parts = urlsplit(url)
    return f"{parts.netloc}/{unquote(parts.path)}" if parts.scheme in WEB else url


class RangeReader(io.RawIOBase):
    """Raw file of the bytes [begin, end) of a remote file, read in blocks; the next block is prefetched.

    sha256() is that of the range if it was read in order and completely.
    """

    BLOCK_BYTES = 8 << 20

    def __init__(self, path: RemotePath, begin: int, end: int) -> None:
        path.check_unchanged()
        self.path, self.begin, self.size = path, begin, end - begin
        self._at = 0
        self._number, self._block = -1, b""
        self._next: tuple[int, Future[bytes]] | None = None
        self._pool = ThreadPoolExecutor(1, "remote")
        self._stop = threading.Event()
        self._sha256, self._hashed_blocks = hashlib.sha256(), 0
        self._has_failed = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position, from the start of the range."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Set the position."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer. Raises RemoteError."""
        if self._at >= self.size:
            return 0
        number, offset = divmod(self._at, self.BLOCK_BYTES)
        if number != self._number:
            self._load(number)
        data = memoryview(self._block)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _fetch(self, number: int) -> bytes:
        first = self.begin + number * self.BLOCK_BYTES
        last = min(first + self.BLOCK_BYTES, self.begin + self.size)
        return self.path.read_range(first, last, self._stop)

    def _load(self, number: int) -> None:
        pending, self._next = self._next, None
        is_sequential = number == self._number + 1
        try:
            if pending is not None and pending[0] == number:
                self._block = pending[1].result()
            else:
                self._block = self._fetch(number)
        except BaseException:
            self._has_failed = True
            raise
        self._number = number
        if number == self._hashed_blocks:
            self._sha256.update(self._block)
            self._hashed_blocks += 1
        if is_sequential and (number + 1) * self.BLOCK_BYTES < self.size:
            self._next = number + 1, self._pool.submit(self._fetch, number + 1)

    def sha256(self) -> str | None:
        """Return the hash of the range in hexadecimal; None if it was not read in order to its end."""
        is_complete = self._hashed_blocks * self.BLOCK_BYTES >= self.size
        return self._sha256.hexdigest() if is_complete else None

    def close(self) -> None:
        """Close, and check that the file has not changed while it was read."""
        if self.closed:
            return
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        super().close()
        # no If-Match in fsspec's interface: bytes read between two equal versions are of that version
        if self._number >= 0 and not self._has_failed:
            self.path.check_unchanged()


def find_remote(word: str, suffixes: Sequence[str]) -> list[RemotePath]:
    """Return the files of a URL: a file, a folder (all files below it), or a glob pattern; sorted.

    Folders skip hidden names; folders and patterns return files with one of the suffixes and skip the outputs
    of preprocessing. Raises RemoteError, or ValueError for a URL that cannot be read.
    """
    check_url(word)
    if urlsplit(word).scheme in WEB:
        return [RemotePath(word, request_info(word))]
    scheme = word.partition("://")[0]

    def request() -> dict[str, dict[str, Any]]:
        filesystem, path = connect(word)
        filesystem.invalidate_cache()
        if MAGIC.search(path):
            matches = dict(filesystem.glob(path, detail=True))
            for folder in sorted({n.rpartition("/")[0] for n in matches if n.endswith(".json")}):
                # the pattern may match the sidecar of a dataset, but not its index
                others = filesystem.ls(folder, detail=True)
                matches |= {r["name"]: r for r in others if r["name"].endswith(".idx")}
            return {name: record for name, record in matches.items() if record["type"] == "file"}
        record = filesystem.info(path)
        if record["type"] == "file":
            return {path: record}
        return dict(filesystem.find(path, detail=True))

    records = retry(word, request)
    _, path = connect(word)
    if list(records) == [path]:
        return [RemotePath(word, parse_info(word, records[path]))]
    is_folder = not MAGIC.search(path)
    names = [
        name
        for name in sorted(records)
        if name.endswith(tuple(suffixes))
        and not (is_folder and any(part.startswith(".") for part in name[len(path) :].split("/")))
        and not name.endswith(".rejects.jsonl")
        and name.removesuffix(".json") + ".idx" not in records
    ]
    return [RemotePath(f"{scheme}://{name}", parse_info(name, records[name])) for name in names]


def find_remote_line_end(path: RemotePath, offset: int) -> int:
    """Return the offset after the line that contains byte `offset`; at most the size of the file."""
    size, n_bytes = path.info.size, LINE_BYTES
    while offset < size:
        part = path.read_range(offset, min(offset + n_bytes, size))
        if (end := part.find(b"\n")) >= 0:
            return offset + end + 1
        offset, n_bytes = offset + len(part), min(2 * n_bytes, RangeReader.BLOCK_BYTES)
    return size


def split_remote_lines(path: RemotePath, piece_bytes: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Split bytes [begin, end) at line ends into spans of about `piece_bytes`, SPAN_BYTES at least."""
    step = max(piece_bytes, SPAN_BYTES)
    with ThreadPoolExecutor(N_REQUESTS, "remote") as pool:
        # the line of the last byte before a cut: a cut directly after a line feed does not add a line
        ends = pool.map(lambda cut: find_remote_line_end(path, cut - 1), range(begin + step, end, step))
        places = sorted({begin, *(min(place, end) for place in ends), end})
    return list(zip(places[:-1], places[1:], strict=True))
