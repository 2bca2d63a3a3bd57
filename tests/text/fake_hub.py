"""A local server with the routes of the Hugging Face hub that `huggingface_hub` uses for models."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def find_reply(models: Mapping[str, Mapping[str, bytes]], path: str) -> tuple[int, bytes, dict[str, str]]:
    """Return status, content and headers of the reply to a request for a path."""
    if match := re.fullmatch(rf"/api/models/(.+?)/(revision/main|tree/{COMMIT})/?", path):
        if match[1] not in models:
            return 404, b"", {"X-Error-Code": "RepoNotFound"}
        entries = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in models[match[1]].items()
        ]
        info = {"id": match[1], "sha": COMMIT}
        return 200, json.dumps(info if match[2] == "revision/main" else entries).encode(), {}
    if match := re.fullmatch(rf"/(.+?)/resolve/{COMMIT}/(.+)", path):
        content = models[match[1]][match[2]]
        return 200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
    return 404, b"", {}


@contextmanager
def serve_hub(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[str]:
    """Serve models (name -> path -> content) on a free port, and yield the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802
            status, content, headers = find_reply(models, self.path.split("?")[0])
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
