"""A local S3-compatible store for tests of remote files."""

import atexit
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

STORE_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_DEFAULT_REGION": "us-east-1"
}  # fmt: skip


# ends with this process; in a thread of it, a library that keeps the interpreter's lock would wait for ever
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
"""


@cache
def start_store() -> str:
    """Start a server, once per process; return its URL."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes)
    atexit.register(server.wait)
    atexit.register(server.kill)
    assert server.stdout is not None
    return server.stdout.readline().strip()


@contextmanager
def serve_store() -> Iterator[str]:
    """Yield the URL of an S3-compatible server of this process. Skips the test without moto and s3fs."""
    pytest.importorskip("s3fs", reason="requires s3fs (pip install -r requirements.txt)")
    pytest.importorskip("moto.server", reason="requires moto and flask (pip install -r requirements.txt)")
    yield start_store()


@contextmanager
def serve_bucket(monkeypatch: pytest.MonkeyPatch, name: str = "bucket") -> Iterator[Any]:
    """Yield the file system of a store with this bucket, whose variables are set.

    A bucket keeps its files for other tests of this process.
    """
    with serve_store() as endpoint:
        import s3fs

        for variable, value in (STORE_VARIABLES | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(variable, value)
        s3fs.S3FileSystem.clear_instance_cache()
        store = s3fs.S3FileSystem(use_listings_cache=False)
        if not store.exists(name):
            store.mkdir(name)
        yield store
    s3fs.S3FileSystem.clear_instance_cache()


def fail_reads(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make every read of the content of a store fail with this error of its package."""
    import s3fs

    async def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    for name in ("_cat_file", "_get_file"):
        monkeypatch.setattr(s3fs.S3FileSystem, name, fail)
    s3fs.S3FileSystem.clear_instance_cache()  # an instance has bound its methods
