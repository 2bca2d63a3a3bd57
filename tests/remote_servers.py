"""A local S3-compatible store for tests of remote files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

STORE_VARIABLES = {
    "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_DEFAULT_REGION": "us-east-1"
}  # fmt: skip


@contextmanager
def serve_store() -> Iterator[str]:
    """Run an S3-compatible server in a thread; yield its URL. Skips the test without moto and s3fs."""
    pytest.importorskip("s3fs", reason="requires s3fs (pip install -r requirements.txt)")
    pytest.importorskip("moto.server", reason="requires moto and flask (pip install -r requirements.txt)")
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@contextmanager
def serve_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run a store with an empty bucket `bucket`, whose variables are set; yield its file system."""
    with serve_store() as endpoint:
        import s3fs

        for name, value in (STORE_VARIABLES | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        store = s3fs.S3FileSystem(use_listings_cache=False)
        if not store.exists("bucket"):  # moto has one state per process
            store.mkdir("bucket")
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
