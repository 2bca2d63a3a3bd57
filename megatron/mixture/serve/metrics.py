"""Metrics of a mixture server by prometheus_client, and the HTTP server of their page."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from typing import Any

from megatron.mixture.document_chunks import DocumentChunks

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
WINDOW_S = 60.0  # of documents per second, and of clients


class ServerCounts:
    """Counters of the requests of a server, updated by its threads.

    registry   of prometheus_client; other collectors may be registered with it
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import prometheus_client as prometheus

        # a counter would otherwise be accompanied by a gauge with the time of its creation
        prometheus.disable_created_metrics()
        self.clock, self.start_time = clock, clock()
        self.registry = registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter("mixture_requests", "requests answered", registry=registry)
        self._chunks = prometheus.Counter("mixture_chunks", "chunks returned", registry=registry)
        self._documents = prometheus.Counter("mixture_documents", "documents returned", registry=registry)
        self._reports = prometheus.Counter("mixture_reports", "losses reported by clients", registry=registry)
        self._errors = prometheus.Counter(
            "mixture_errors", "requests refused or failed", ["kind"], registry=registry
        )
        self._seconds = prometheus.Histogram(
            "mixture_request_seconds", "time to compute a response", buckets=BOUNDS_S, registry=registry
        )
        for name, help_text, read in (
            ("documents_per_second", "documents returned per second, last minute", self.documents_per_s),
            ("clients", "clients of the last minute", self.count_clients),
            ("uptime_seconds", "time since the start of the server", lambda: clock() - self.start_time),
        ):
            prometheus.Gauge(f"mixture_{name}", help_text, registry=registry).set_function(read)
        self._lock = threading.Lock()
        self._seen: dict[str, float] = {}  # client -> time of the latest request
        self._recent_documents: deque[tuple[float, int]] = deque()  # (time, number of documents)

    def count_request(self, client: str, seconds: float, chunks: int, documents: int) -> None:
        """Count a response that took `seconds` to compute."""
        with self._lock:
            self._recent_documents.append((self._mark_seen(client), documents))
        self._requests.inc()
        self._chunks.inc(chunks)
        self._documents.inc(documents)
        self._seconds.observe(seconds)

    def count_report(self, client: str) -> None:
        """Count reported losses."""
        with self._lock:
            self._mark_seen(client)
        self._reports.inc()

    def count_error(self, client: str, kind: str) -> None:
        """Count a request that was refused or that failed."""
        with self._lock:
            self._mark_seen(client)
        self._errors.labels(kind).inc()

    def totals(self) -> dict[str, int]:
        """Return the counts of requests, chunks, documents, reports and errors since the start."""
        counters = {
            "requests": self._requests, "chunks": self._chunks, "documents": self._documents,
            "reports": self._reports, "errors": self._errors,
        }  # fmt: skip
        # a counter has one sample, and that of errors one for each kind
        return {
            name: int(sum(sample.value for metric in counter.collect() for sample in metric.samples))
            for name, counter in counters.items()
        }

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

    def format_metrics(self) -> str:
        """Return all metrics in the text exposition format 0.0.4."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

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


class MixtureCollector:
    """Gauges of the mixtures of a server, read when the metrics are requested."""

    def __init__(
        self, mixtures: Mapping[str, DocumentChunks], runs: Mapping[tuple[str, str], DocumentChunks]
    ) -> None:
        """`runs`: the open runs of mixtures whose weights follow a model, by (mixture, run)."""
        self.mixtures, self.runs = mixtures, runs

    def collect(self) -> Iterator[Any]:
        """Yield the metric families, as prometheus_client expects of a collector."""
        from prometheus_client.core import GaugeMetricFamily

        documents = GaugeMetricFamily(
            "mixture_catalog_documents", "documents of a mixture's domains", labels=["mixture", "domain"]
        )
        weights = GaugeMetricFamily(
            "mixture_weight",
            "weight of a domain: the latest if it follows a model, else the first",
            labels=["mixture", "run", "domain"],
        )
        known_chunks = GaugeMetricFamily(
            "mixture_known_chunks", "chunks whose weights are computed", labels=["mixture", "run"]
        )
        # copies, because other threads create mixtures and open runs
        mixtures, runs = dict(self.mixtures), dict(self.runs)
        for name, source in mixtures.items():
            for domain, n in zip(source.names, source.counts.tolist(), strict=True):
                documents.add_metric([name, domain], n)
        static = {(name, ""): source for name, source in mixtures.items() if source.spec.adaptive is None}
        for (name, run), source in (static | runs).items():
            known_to = source.distributor.weights.known_to
            now = source.distributor.weights.weights_at(0 if known_to is None else known_to - 1)[0]
            for domain, share in zip(source.names, (now / now.sum()).tolist(), strict=True):
                weights.add_metric([name, run, domain], share)
            if known_to is not None:
                known_chunks.add_metric([name, run], known_to)
        yield from (documents, weights, known_chunks)


def start_metrics_server(host: str, port: int, registry: Any) -> ThreadingHTTPServer:
    """Serve GET /metrics with the metrics of a registry, in a thread; port 0: a free one."""
    from prometheus_client import MetricsHandler

    # not prometheus_client.start_http_server: it answers on every path, and a thread waits without limit for
    # a client that sends nothing
    class Handler(MetricsHandler.factory(registry)):  # type: ignore[misc]  # a class made at run time
        """Handler of the only page."""

        timeout = 10  # of an idle connection

        def do_GET(self) -> None:  # noqa: N802, the library's name
            if self.path.partition("?")[0] == "/metrics":
                super().do_GET()
                return
            content = b"the only page is /metrics\n"
            self.send_response(404)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    # http.server assumes IPv4; the family of the address allows an IPv6 host too
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    attributes = {"address_family": family, "daemon_threads": True}
    server_class = type("MetricsServer", (ThreadingHTTPServer,), attributes)
    server = server_class((host, port), Handler)
    threading.Thread(target=server.serve_forever, name="mixture-metrics", daemon=True).start()
    return server
