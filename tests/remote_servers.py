"""Local servers for tests of remote files: an S3-compatible store, and a web server with faults."""

import hashlib
import re
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
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


class FaultyServer:
    """Web server of `files` (name: content) with byte ranges.

    faults     name -> faults of its next requests: a status, or of a GET "reset", "truncate", "whole" (no
               range) or "pass" (none)
    requests   (method, name, range) of all requests
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list[int | str]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _make_handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FaultyServer":
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _make_handler(server: FaultyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: Any) -> None:
            pass

        def do_HEAD(self) -> None:  # noqa: N802  # name of the base class
            self.answer(is_head=True)

        def do_GET(self) -> None:  # noqa: N802
            self.answer(is_head=False)

        def answer(self, is_head: bool) -> None:
            name = self.path.partition("?")[0].lstrip("/")
            requested = self.headers.get("Range")
            server.requests.append((self.command, name, requested))
            faults = server.faults.get(name, [])
            fault: int | str | None = None
            if faults and (not is_head or isinstance(faults[0], int)):
                fault = faults.pop(0)
            content = server.files.get(name)
            if fault == "reset":
                # a reset instead of an orderly end: linger of 0 seconds
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return
            if isinstance(fault, int) or content is None:
                self.send_response(fault if isinstance(fault, int) else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            begin, end = 0, len(content)
            match = re.fullmatch(r"bytes=(\d+)-(\d+)", requested or "")
            if match and fault != "whole":
                begin, end = int(match[1]), min(int(match[2]) + 1, end)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
            else:
                self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()[:16]}"')
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if not is_head:
                body = content[begin:end]
                self.wfile.write(body[: len(body) // 2] if fault == "truncate" else body)
                self.close_connection = self.close_connection or fault == "truncate"

    return Handler
