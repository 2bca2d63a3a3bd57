"""What a mixture server counts, as Prometheus reads it (text exposition format 0.0.4)."""

import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WINDOW_S = 60.0  # of documents a second, and of who is a client
Sample = tuple[Mapping[str, str], float]


class ServerCounts:
    """Requests of a server, counted by its threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.since = clock, clock()
        self.requests = self.chunks = self.documents = self.reports = 0
        self.errors: dict[str, int] = {}
        self.buckets, self.seconds = [0] * (len(BOUNDS_S) + 1), 0.0
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # client: when last
        self._given: deque[tuple[float, int]] = deque()  # when, how many documents

    def request(self, client: str, seconds: float, chunks: int, documents: int) -> None:
        """An answer that was made in so many seconds."""
        with self._lock:
            now = self._saw(client)
            self.requests += 1
            self.chunks += chunks
            self.documents += documents
            self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
            self.seconds += seconds
            self._given.append((now, documents))

    def report(self, client: str) -> None:
        """Losses that came in."""
        with self._lock:
            self._saw(client)
            self.reports += 1

    def error(self, client: str, kind: str) -> None:
        """A request that was refused, or that failed."""
        with self._lock:
            self._saw(client)
            self.errors[kind] = self.errors.get(kind, 0) + 1

    def documents_per_s(self) -> float:
        """Over the last minute, or since the start."""
        with self._lock:
            self._forget(self.clock())
            return sum(n for _, n in self._given) / max(1e-9, min(WINDOW_S, self.clock() - self.since))

    def clients(self) -> int:
        """Who asked within the last minute."""
        with self._lock:
            self._forget(self.clock())
            return len(self._seen)

    def exposition(self, gauges: Iterable[tuple[str, str, list[Sample]]] = ()) -> str:
        """All of it; `gauges`: more of them, as (name, what it is, samples)."""
        with self._lock:
            count, seconds, buckets = sum(self.buckets), self.seconds, list(self.buckets)
            counters = [
                ("requests", "requests answered", [({}, self.requests)]),
                ("chunks", "chunks given", [({}, self.chunks)]),
                ("documents", "documents given", [({}, self.documents)]),
                ("reports", "losses reported by clients", [({}, self.reports)]),
                ("errors", "requests not answered", [({"kind": k}, n) for k, n in self.errors.items()]),
            ]
        lines: list[str] = []
        for name, told, samples in counters:
            lines += _family(f"mixture_{name}_total", "counter", told, samples)
        lines += _family("mixture_request_seconds", "histogram", "time to make an answer", [])
        for bound, n in zip([*map(str, BOUNDS_S), "+Inf"], _running(buckets), strict=True):
            lines.append(_line("mixture_request_seconds_bucket", {"le": bound}, n))
        lines += [f"mixture_request_seconds_sum {seconds!r}", f"mixture_request_seconds_count {count}"]
        own: list[tuple[str, str, list[Sample]]] = [
            ("documents_per_second", "documents given a second, last minute", [({}, self.documents_per_s())]),
            ("clients", "clients of the last minute", [({}, self.clients())]),
            ("uptime_seconds", "since the server was started", [({}, self.clock() - self.since)]),
        ]
        for name, told, samples in [*own, *gauges]:
            lines += _family(f"mixture_{name}", "gauge", told, samples)
        return "\n".join(lines) + "\n"

    def _saw(self, client: str) -> float:
        now = self.clock()
        self._forget(now)
        self._seen[client] = now
        return now

    def _forget(self, now: float) -> None:
        while self._given and self._given[0][0] < now - WINDOW_S:
            self._given.popleft()
        self._seen = {client: at for client, at in self._seen.items() if at >= now - WINDOW_S}


def listen(host: str, port: int, told: Callable[[], str]) -> ThreadingHTTPServer:
    """Answer GET /metrics with what `told` returns, in a thread; port 0: a free one."""

    class Handler(BaseHTTPRequestHandler):
        """One page, and no words on the console."""

        timeout = 10  # of a connection that says nothing

        def do_GET(self) -> None:  # noqa: N802, the library's name
            found = self.path.partition("?")[0] == "/metrics"
            content = told().encode() if found else b"only /metrics is here\n"
            self.send_response(200 if found else 404)
            kind = "text/plain; version=0.0.4; charset=utf-8" if found else "text/plain; charset=utf-8"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a scrape every few seconds is no news."""

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    attributes = {"address_family": family, "daemon_threads": True}
    server_class = type("MetricsServer", (ThreadingHTTPServer,), attributes)
    server = server_class((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="mixture-metrics", daemon=True).start()
    return server


def _family(name: str, kind: str, told: str, samples: Iterable[Sample]) -> list[str]:
    head = [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
    return head + [_line(name, labels, value) for labels, value in samples]


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{told}}} {value!r}" if told else f"{name} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _running(counts: Iterable[int]) -> list[int]:
    total, found = 0, []
    for n in counts:
        total += n
        found.append(total)
    return found
