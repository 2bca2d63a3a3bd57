"""The few routes of the Hugging Face hub that a download uses, on the loopback, with its faults on order."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = 2  # files of a listing's page


@dataclass
class FakeHub:
    """What it holds, how it misbehaves, and what it was asked.

    files       'datasets/owner/name' or 'models/name' -> path -> content
    token       refuses who does not know it
    drop_after  ends the connection after so many bytes of a file, as long as `drops` lasts
    elsewhere   address of another host that gives the files, as the hub's large ones are
    """

    files: dict[str, dict[str, bytes]]
    token: str | None = None
    drop_after: int = 0
    drops: int = 0
    elsewhere: str | None = None
    address: str = ""
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, query = (handler.path.split("?") + [""])[:2]
        self.asked.append((path, handler.headers.get("Range"), handler.headers.get("Authorization")))
        if self.token is not None and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return reply(handler, 401, b"Invalid credentials")
        if found := re.fullmatch(r"/api/(\w+/.+?)/revision/main", path):
            known = found[1] in self.files
            return reply(handler, 200 if known else 404, json.dumps({"sha": COMMIT}).encode())
        if found := re.fullmatch(rf"/api/(\w+/.+?)/tree/{COMMIT}/?(.*)", path):
            return self.list(handler, found[1], found[2], int(query.partition("=")[2] or 0))
        if found := re.fullmatch(rf"/(.+?)/resolve/{COMMIT}/(.+)", path):
            key = found[1] if found[1] in self.files else f"models/{found[1]}"
            if self.elsewhere is not None:
                return reply(handler, 302, b"", Location=self.elsewhere + handler.path)
            return self.give(handler, self.files[key][found[2]])
        return reply(handler, 404, b"")

    def list(self, handler: BaseHTTPRequestHandler, key: str, folder: str, first: int) -> None:
        held = sorted(path for path in self.files[key] if path.rpartition("/")[0] == folder)
        page = []
        for path in held[first : first + PAGE]:
            content = self.files[key][path]
            one = {"type": "file", "path": path, "size": len(content)}
            one["oid"] = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            if len(content) > 1000:
                one["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
            page.append(one)
        more = {}
        if first + PAGE < len(held):
            more["Link"] = f'<{self.address}{handler.path.split("?")[0]}?cursor={first + PAGE}>; rel="next"'
        reply(handler, 200, json.dumps(page).encode(), **more)

    def give(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        begin = 0
        if found := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or ""):
            begin = int(found[1])
        handler.send_response(206 if begin else 200)
        handler.send_header("Content-Length", str(len(content) - begin))
        handler.end_headers()
        rest = content[begin:]
        if self.drops and len(rest) > self.drop_after:
            self.drops -= 1
            rest = rest[: self.drop_after]
            handler.close_connection = True
        handler.wfile.write(rest)


def reply(handler: BaseHTTPRequestHandler, status: int, content: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """The hub on a free port, until the `with` ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            hub.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
