"""A local server with the routes of the Hugging Face hub that `huggingface_hub` uses, and faults."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Content, faults and request log of the server.

    files       'datasets/owner/name' or 'models/name' -> path -> content
    token       refuse requests without it
    damaged     path of a file whose content is sent with its first byte changed
    """

    files: dict[str, dict[str, bytes]]
    token: str | None = None
    damaged: str | None = None
    address: str = ""
    requests: list[str] = field(default_factory=list)  # "GET /path", without the query

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.split("?")[0]
        self.requests.append(f"{handler.command} {path}")
        if self.token is not None and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return send_reply(handler, 401, b"Invalid credentials")
        if match := re.fullmatch(r"/api/(\w+/.+?)/revision/main", path):
            return self.send_json(handler, match[1], {"id": match[1], "sha": COMMIT})
        if match := re.fullmatch(rf"/api/(\w+/.+?)/tree/{COMMIT}/?(.*)", path):
            return self.send_json(handler, match[1], self.list_files(match[1], match[2]))
        if match := re.fullmatch(rf"/(.+?)/resolve/{COMMIT}/(.+)", path):
            key = match[1] if match[1] in self.files else f"models/{match[1]}"
            content = self.files[key][match[2]]
            if match[2] == self.damaged:
                content = bytes([content[0] ^ 1]) + content[1:]
            etag = hashlib.sha256(self.files[key][match[2]]).hexdigest()
            return send_reply(handler, 200, content, **{"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        return send_reply(handler, 200 if path == "/" else 404, b"")

    def send_json(self, handler: BaseHTTPRequestHandler, key: str, content: object) -> None:
        if key in self.files:
            return send_reply(handler, 200, json.dumps(content).encode())
        return send_reply(handler, 404, b"", **{"X-Error-Code": "RepoNotFound"})

    def list_files(self, key: str, folder: str) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = []
        for path, content in self.files.get(key, {}).items():
            if path.rpartition("/")[0] == folder:
                sha256 = hashlib.sha256(content).hexdigest()
                large = {"lfs": {"oid": sha256, "size": len(content), "pointerSize": 100}}
                entry = {"type": "file", "path": path, "size": len(content), "oid": sha256[:40]}
                entries.append(entry | (large if len(content) > 1000 else {}))
        return entries


def send_reply(handler: BaseHTTPRequestHandler, status: int, content: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(content)


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve a hub on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            hub.answer(self)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
