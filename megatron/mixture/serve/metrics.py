"""Metrics of a mixture server in the Prometheus text exposition format 0.0.4."""

import socket
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WINDOW_S = 60.0  # of documents per second, and of clients
MetricSample = tuple[Mapping[str, str], float]


class ServerCounts:
    """Counters of the requests of a server, updated by its threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.start_time = clock, clock()
        self.requests = self.chunks = self.documents = self.reports = 0
        self.errors: dict[str, int] = {}
        self.buckets, self.seconds = [0] * (len(BOUNDS_S) + 1), 0.0
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # client -> time of the latest request
        self._recent_documents: deque[tuple[float, int]] = deque()  # (time, number of documents)

    def count_request(self, client: str, seconds: float, chunks: int, documents: int) -> None:
        """Count a response that took `seconds` to compute."""
        with self._lock:
            now = self._mark_seen(client)
            self.requests += 1
            self.chunks += chunks
            self.documents += documents
            # Buckets are disjoint here, and cumulated for the exposition format.
            # bisect_left: a time equal to a bound is in its bucket, because `le` means at most.
            self.buckets[bisect_left(BOUNDS_S, seconds)] += 1
            self.seconds += seconds
            self._recent_documents.append((now, documents))

    def count_report(self, client: str) -> None:
        """Count reported losses."""
        with self._lock:
            self._mark_seen(client)
            self.reports += 1

    def count_error(self, client: str, kind: str) -> None:
        """Count a request that was refused or that failed."""
        with self._lock:
            self._mark_seen(client)
            self.errors[kind] = self.errors.get(kind, 0) + 1

    def documents_per_s(self) -> float:
        """Return the documents per second over the last minute, or since the start."""
        with self._lock:
            self._drop_expired(self.clock())
            return sum(n for _, n in self._recent_documents) / max(
                1e-9, min(WINDOW_S, self.clock() - self.start_time)
            )

    def count_clients(self) -> int:
        """Return the number of clients within the last minute."""
        with self._lock:
            self._drop_expired(self.clock())
            return len(self._seen)

    def format_metrics(self, gauges: Iterable[tuple[str, str, list[MetricSample]]] = ()) -> str:
        """Return all metrics as text. `gauges`: additional ones, as (name, help text, samples)."""
        with self._lock:
            count, seconds, buckets = sum(self.buckets), self.seconds, list(self.buckets)
            counters = [
                ("requests", "requests answered", [({}, self.requests)]),
                ("chunks", "chunks returned", [({}, self.chunks)]),
                ("documents", "documents returned", [({}, self.documents)]),
                ("reports", "losses reported by clients", [({}, self.reports)]),
                ("errors", "requests refused or failed", [({"kind": k}, n) for k, n in self.errors.items()]),
            ]
        lines: list[str] = []
        for name, help_text, samples in counters:
            lines += _format_family(f"mixture_{name}_total", "counter", help_text, samples)
        lines += _format_family("mixture_request_seconds", "histogram", "time to compute a response", [])
        for bound, n in zip([*map(str, BOUNDS_S), "+Inf"], _cumulate_counts(buckets), strict=True):
            lines.append(_format_sample("mixture_request_seconds_bucket", {"le": bound}, n))
        lines += [f"mixture_request_seconds_sum {seconds!r}", f"mixture_request_seconds_count {count}"]
        # after the lock is released, which is not reentrant: two of these methods acquire it
        server_gauges: list[tuple[str, str, list[MetricSample]]] = [
            (
                "documents_per_second",
                "documents returned per second, last minute",
                [({}, self.documents_per_s())],
            ),
            ("clients", "clients of the last minute", [({}, self.count_clients())]),
            ("uptime_seconds", "time since the start of the server", [({}, self.clock() - self.start_time)]),
        ]
        for name, help_text, samples in [*server_gauges, *gauges]:
            lines += _format_family(f"mixture_{name}", "gauge", help_text, samples)
        return "\n".join(lines) + "\n"

    def _mark_seen(self, client: str) -> float:
        now = self.clock()
        self._drop_expired(now)
        self._seen[client] = now
        return now

    def _drop_expired(self, now: float) -> None:
        while self._recent_documents and self._recent_documents[0][0] < now - WINDOW_S:
            self._recent_documents.popleft()
        # O(clients) per request, so that clients that are gone take no memory
        self._seen = {client: at for client, at in self._seen.items() if at >= now - WINDOW_S}


def start_metrics_server(host: str, port: int, render: Callable[[], str]) -> ThreadingHTTPServer:
    """Serve GET /metrics with the text that `render` returns, in a thread; port 0: a free one."""

    class Handler(BaseHTTPRequestHandler):
        """Handler of the only page, without log output."""

        timeout = 10  # of an idle connection

        def do_GET(self) -> None:  # noqa: N802, the library's name
            is_metrics = self.path.partition("?")[0] == "/metrics"
            content = render().encode() if is_metrics else b"the only page is /metrics\n"
            self.send_response(200 if is_metrics else 404)
            kind = "text/plain; version=0.0.4; charset=utf-8" if is_metrics else "text/plain; charset=utf-8"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: there is a request every few seconds."""

    # http.server assumes IPv4; the family of the address allows an IPv6 host too
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    attributes = {"address_family": family, "daemon_threads": True}
    server_class = type("MetricsServer", (ThreadingHTTPServer,), attributes)
    server = server_class((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="mixture-metrics", daemon=True).start()
    return server


def _format_family(name: str, kind: str, help_text: str, samples: Iterable[MetricSample]) -> list[str]:
    head = [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}"]
    return head + [_format_sample(name, labels, value) for labels, value in samples]


def _format_sample(name: str, labels: Mapping[str, str], value: float) -> str:
    label_text = ",".join(f'{key}="{_escape_label(text)}"' for key, text in labels.items())
    return f"{name}{{{label_text}}} {value!r}" if label_text else f"{name} {value!r}"


def _escape_label(text: str) -> str:
    # the backslash first: otherwise the backslashes of the other two would be escaped again
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _cumulate_counts(counts: Iterable[int]) -> list[int]:
    total, sums = 0, []
    for n in counts:
        total += n
        sums.append(total)
    return sums
