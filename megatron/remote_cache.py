"""Local cache of .bin/.idx datasets in object storage: the index completely, the tokens in blocks.

    <cache>/remote/<name>-<key>/<name>.idx, .json     the index and the sidecar
                               /blocks-BYTES/0012/00012345  bytes of the .bin, complete or absent
                               /locks/                      one file per group of blocks

The key is a hash of the URL and of the sizes and versions of all three files: a changed object has another
folder, so blocks of two versions are never mixed. The processes of a machine share the cache. A block is
written under a lock and renamed into place. Least recently used blocks are deleted above a size limit.
"""

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from urllib.parse import urlsplit

from megatron.io import acquire_lock, atomic_path, wait_for_lock, write_atomic_bytes, write_json
from megatron.log import get_logger
from megatron.remote_files import RemotePath
from megatron.remote_requests import WEB, RemoteMissingError, check_url, is_url, redact

log = get_logger(__name__)
FOLDER_VARIABLE, LIMIT_VARIABLE = "SCALING_CACHE", "SCALING_CACHE_GB"
DEFAULT_LIMIT_GB = 100.0
BLOCK_BYTES = 8 << 20  # of a dataset that fits the limit: it is downloaded completely
SMALL_BLOCK_BYTES = 1 << 20  # of a larger one: a sample of some KB evicts as little as possible
FOLDER_BLOCKS = 1000  # per folder
N_LOCKS = 64
N_REQUESTS = 8  # at a time and process
READ_AHEAD_BLOCKS = 8  # while tokens are read in order
TOUCH_S = 60.0  # resolution of the time of last use
TRIM_BYTES = 256 << 20  # downloaded by a process between two checks of the limit


def cache_folder() -> Path:
    """Return the folder of the cache: $SCALING_CACHE, or megatron-scaling in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-scaling"
    return Path(os.environ.get(FOLDER_VARIABLE) or default) / "remote"


def cache_limit() -> int:
    """Return the maximum bytes of blocks: $SCALING_CACHE_GB, 100 GB by default. Raises ValueError."""
    word = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GB)
    try:
        limit = float(word)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit > 0):
        raise ValueError(f"{LIMIT_VARIABLE}: got {word!r}, expected a number of GB above 0, such as 100")
    return int(limit * 1e9)


def localize(prefix: str | Path) -> str:
    """Return the prefix of a local .idx and .json: of the cache for a URL, else the prefix itself.

    The .bin of a URL is not there. Raises RemoteError.
    """
    return str(open_remote_dataset(str(prefix)).local_prefix) if is_url(prefix) else str(prefix)


def count_bin_bytes(prefix: str | Path) -> int:
    """Return the size of the .bin of a dataset, local or remote."""
    return open_remote_dataset(str(prefix)).size if is_url(prefix) else Path(f"{prefix}.bin").stat().st_size


@cache
def open_remote_dataset(prefix: str) -> "RemoteDataset":
    """Open a dataset at a URL without suffix. A process uses the version of its first call."""
    return RemoteDataset(prefix)


class RemoteDataset:
    """A .bin/.idx dataset at a URL. `local_prefix`: its .idx, and its .json if it exists."""

    def __init__(self, prefix: str) -> None:
        """Download index and sidecar. Raises RemoteError, or ValueError for a URL that is not supported."""
        check_url(prefix)
        parts = urlsplit(prefix)
        if parts.scheme in WEB and (parts.query or "@" in parts.netloc):
            # the prefix is recorded in configurations, plans and checkpoints
            raise ValueError(
                f"{redact(prefix)}: got a query or a password in the URL of a dataset, expected none. "
                "Use a store whose credentials are in the environment."
            )
        self.prefix = prefix
        self.bin, index = RemotePath(f"{prefix}.bin"), RemotePath(f"{prefix}.idx")
        sidecar: RemotePath | None = RemotePath(f"{prefix}.json")
        versions: list[tuple[int, str | None] | None] = []
        for path in (self.bin, index, sidecar):
            assert path is not None
            try:
                versions.append((path.info.size, path.info.version))
            except RemoteMissingError:
                if path is not sidecar:
                    raise
                sidecar = None  # other programs write none
                versions.append(None)
        self.size, self.limit = self.bin.info.size, cache_limit()
        self.block_bytes = BLOCK_BYTES if self.size <= self.limit else SMALL_BLOCK_BYTES
        self.n_blocks = -(-self.size // self.block_bytes)
        content = json.dumps([prefix, versions])
        name = self.bin.name.removesuffix(".bin")
        self.folder = cache_folder() / f"{name[:80]}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"
        self.local_prefix = self.folder / name
        self._download_index(index, sidecar)
        self._pending: dict[int, Future[bytes]] = {}
        self._queue: SimpleQueue[tuple[int, Future[bytes]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._n_threads = self._n_fetched = 0
        self._next_block = -1  # if tokens are read in order
        self._is_downloading = False

    def _download_index(self, index: RemotePath, sidecar: RemotePath | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(self.folder / ".lock"):
            # the index last: with it, the folder is complete
            target = Path(f"{self.local_prefix}.idx")
            if target.is_file() and target.stat().st_size == index.info.size:
                return
            write_json(
                self.folder / "source.json",
                {"url": self.prefix, "bytes": self.size, "version": self.bin.info.version},
            )
            if sidecar is not None:
                _download(sidecar, Path(f"{self.local_prefix}.json"))
            _download(index, target)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of the .bin. Raises RemoteError."""
        first, last = begin // self.block_bytes, max(begin, end - 1) // self.block_bytes
        if last > first or first == self._next_block:
            self.prefetch([(begin, end + READ_AHEAD_BLOCKS * self.block_bytes * (first == self._next_block))])
        self._next_block = last + 1 if end % self.block_bytes == 0 else last
        parts = []
        for number in range(first, last + 1):
            base = number * self.block_bytes
            parts.append(self._read_block(number, max(begin - base, 0), min(end - base, self.block_bytes)))
        return b"".join(parts)

    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Begin to download the blocks of spans (begin, end) of bytes that are not in the cache."""
        numbers = {
            number
            for begin, end in spans
            for number in range(begin // self.block_bytes, -(-min(end, self.size) // self.block_bytes))
        }
        for number in sorted(numbers):
            if not self._block_path(number).exists():
                self._submit(number)

    def download(self) -> None:
        """Begin to download all blocks in the background, if they fit the limit; safe to call repeatedly.

        One process of a machine does it. An error ends the download with a warning: a read of the block then
        raises it.
        """
        with self._lock:
            if self._is_downloading or self.size > self.limit:
                return
            self._is_downloading = True
        threading.Thread(target=self._download_all, daemon=True, name="dataset download").start()

    def _download_all(self) -> None:
        lock = acquire_lock(self.folder / ".download")
        if lock is None:
            return
        try:
            for number in range(self.n_blocks):
                if not self._block_path(number).exists():
                    self._submit(number).result()
        except (OSError, ValueError) as error:
            log.warning("background download stopped: %s", error)
        finally:
            lock.close()

    def _block_path(self, number: int) -> Path:
        return self.folder / f"blocks-{self.block_bytes}" / f"{number // FOLDER_BLOCKS:04d}" / f"{number:08d}"

    def _block_size(self, number: int) -> int:
        return min(self.block_bytes, self.size - number * self.block_bytes)

    def _read_block(self, number: int, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of a block."""
        part = _read_part(self._block_path(number), self._block_size(number), begin, end)
        return self._submit(number).result()[begin:end] if part is None else part

    def _submit(self, number: int) -> Future[bytes]:
        """Return the download of a block; another one of this process that runs already is shared."""
        with self._lock:
            if number not in self._pending:
                self._pending[number] = Future()
                self._queue.put((number, self._pending[number]))
                if self._n_threads < N_REQUESTS:
                    self._n_threads += 1
                    # daemon threads, not an executor: at exit that would wait for all downloads
                    threading.Thread(target=self._work, daemon=True, name="dataset blocks").start()
            return self._pending[number]

    def _work(self) -> None:
        while True:
            number, future = self._queue.get()
            try:
                data = self._fetch(number)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(data)
            with self._lock:  # the result is dropped: a later read takes it from the disk
                del self._pending[number]

    def _fetch(self, number: int) -> bytes:
        """Download a block and write it to the cache, unless another process has done it meanwhile."""
        path, size = self._block_path(number), self._block_size(number)
        locks = self.folder / "locks"
        for folder in (locks, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with wait_for_lock(locks / str(number % N_LOCKS)):
            if (data := _read_part(path, size, 0, size)) is not None:
                return data
            begin = number * self.block_bytes
            data = self.bin.read_range(begin, begin + size)
            # the version before and after the request is that of the key: so is that of the bytes
            self.bin.check_unchanged()
            write_atomic_bytes(path, data)
        with self._lock:
            self._n_fetched += size
            is_due = self._n_fetched >= min(TRIM_BYTES, self.limit // 8)
            self._n_fetched = 0 if is_due else self._n_fetched
        if is_due:
            trim_cache(self.limit)
        return data


def _download(path: RemotePath, target: Path) -> None:
    with path.open("rb") as source, atomic_path(target) as partial, partial.open("wb") as file:
        while part := source.read(1 << 20):
            file.write(part)


def _read_part(path: Path, size: int, begin: int, end: int) -> bytes | None:
    """Return the bytes [begin, end) of a block of the cache, None if it is missing or has another size."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(descriptor)
        if status.st_size != size:
            return None
        if time.time() - status.st_mtime > TOUCH_S:  # mtime is the time of last use
            with suppress(OSError):  # of another user, or deleted meanwhile
                os.utime(descriptor)
        return os.pread(descriptor, end - begin, begin)
    finally:
        os.close(descriptor)


def trim_cache(limit: int) -> None:
    """Delete the least recently used blocks of all datasets until at most 7/8 of `limit` bytes remain."""
    lock = acquire_lock(cache_folder() / ".trim")
    if lock is None:
        return  # another process does it
    try:
        blocks: list[tuple[float, int, Path]] = []
        for path in cache_folder().glob("*/blocks-*/*/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                blocks.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in blocks)
        for _, size, path in sorted(blocks) if total > limit else ():
            path.unlink(missing_ok=True)
            total -= size
            if total <= limit - limit // 8:
                break
    finally:
        lock.close()
