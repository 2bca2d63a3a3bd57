"""A local server with the routes of the Hugging Face hub that downloads use, and configurable faults."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = 2  # files per page of a listing


@dataclass
class FakeHub:
    """Content, faults and request log of the server.

    files       'datasets/owner/name' or 'models/name' -> path -> content
    token       refuse requests without it
    drop_after  close the connection after so many bytes of a file, `drops` times
    elsewhere   address of another host that serves the files, as for the hub's large files
    """

    files: dict[str, dict[str, bytes]]
    token: str | None = None
    drop_after: int = 0
    drops: int = 0
    elsewhere: str | None = None
    address: str = ""
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, query = (handler.path.split("?") + [""])[:2]
        self.requests.append((path, handler.headers.get("Range"), handler.headers.get("Authorization")))
        if self.token is not None and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return send_reply(handler, 401, b"Invalid credentials")
        if match := re.fullmatch(r"/api/(\w+/.+?)/revision/main", path):
            exists = match[1] in self.files
            return send_reply(handler, 200 if exists else 404, json.dumps({"sha": COMMIT}).encode())
        if match := re.fullmatch(rf"/api/(\w+/.+?)/tree/{COMMIT}/?(.*)", path):
            return self.list_files(handler, match[1], match[2], int(query.partition("=")[2] or 0))
        if match := re.fullmatch(rf"/(.+?)/resolve/{COMMIT}/(.+)", path):
            key = match[1] if match[1] in self.files else f"models/{match[1]}"
            if self.elsewhere is not None:
                return send_reply(handler, 302, b"", Location=self.elsewhere + handler.path)
            return self.send_content(handler, self.files[key][match[2]])
        return send_reply(handler, 404, b"")

    def list_files(self, handler: BaseHTTPRequestHandler, key: str, folder: str, first: int) -> None:
        paths = sorted(path for path in self.files[key] if path.rpartition("/")[0] == folder)
        page = []
        for path in paths[first : first + PAGE]:
            content = self.files[key][path]
            entry = {"type": "file", "path": path, "size": len(content)}
            entry["oid"] = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            if len(content) > 1000:
                entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
            page.append(entry)
        more = {}
        if first + PAGE < len(paths):
            more["Link"] = f'<{self.address}{handler.path.split("?")[0]}?cursor={first + PAGE}>; rel="next"'
        send_reply(handler, 200, json.dumps(page).encode(), **more)

    def send_content(self, handler: BaseHTTPRequestHandler, content: bytes) -> None:
        begin = 0
        if match := re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or ""):
            begin = int(match[1])
        handler.send_response(206 if begin else 200)
        handler.send_header("Content-Length", str(len(content) - begin))
        handler.end_headers()
        rest = content[begin:]
        if self.drops and len(rest) > self.drop_after:
            self.drops -= 1
            rest = rest[: self.drop_after]
            handler.close_connection = True
        handler.wfile.write(rest)


def send_reply(handler: BaseHTTPRequestHandler, status: int, content: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve the hub on a free port until the `with` block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            hub.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

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
