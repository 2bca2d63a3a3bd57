"""Metrics of a mixture server."""

import re
import socket
import urllib.request

from megatron.mixture.serve.metrics import BOUNDS_S, ServerCounts, start_metrics_server


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_histogram_counts_the_requests_up_to_each_bound() -> None:
    counts = ServerCounts(Clock())
    for seconds in (0.001, 0.0011, 0.2, 0.25, 7.0):
        counts.count_request("a", seconds, 1, 2)
    text = counts.format_metrics()
    buckets = {m[1]: float(m[2]) for m in re.finditer(r'_bucket\{le="([^"]+)"\} (\S+)', text)}
    assert list(buckets) == [*map(str, BOUNDS_S), "+Inf"]
    assert [buckets[k] for k in ("0.001", "0.0025", "0.1", "0.25", "5.0", "+Inf")] == [1, 2, 2, 4, 4, 5]
    assert "mixture_request_seconds_count 5.0\n" in text
    assert float(re.search(r"seconds_sum (\S+)", text)[1]) == sum((0.001, 0.0011, 0.2, 0.25, 7.0))


def test_clients_and_speed_cover_the_last_minute() -> None:
    clock = Clock()
    counts = ServerCounts(clock)
    clock.now += 30
    counts.count_request("a", 0.1, 1, 600)
    counts.count_error("b", "refused")
    assert counts.count_clients() == 2
    assert counts.documents_per_s() == 600 / 30  # since the start
    clock.now += 40
    counts.count_request("a", 0.1, 1, 300)
    assert counts.documents_per_s() == 900 / 60
    clock.now += 30
    assert counts.count_clients() == 1
    assert counts.documents_per_s() == 300 / 60
    assert counts.totals() == {"requests": 2, "chunks": 2, "documents": 900, "reports": 0, "errors": 1}


def test_quotes_in_labels_are_escaped() -> None:
    counts = ServerCounts(Clock())
    counts.count_error("a", 'a"b\\c\nd')
    text = counts.format_metrics()
    assert 'mixture_errors_total{kind="a\\"b\\\\c\\nd"} 1.0\n' in text
    assert all(
        re.fullmatch(r"(# (HELP|TYPE) \S+ .+|[a-z_]+(\{.*\})? \S+)", line) for line in text.splitlines()
    )


def test_no_metric_is_exposed_beside_the_documented_ones() -> None:
    counts = ServerCounts(Clock())
    counts.count_request("a", 0.1, 1, 1)
    counts.count_report("a")
    families = re.findall(r"# TYPE (\S+) (\S+)", counts.format_metrics())
    assert sorted(families) == [
        ("mixture_chunks_total", "counter"),
        ("mixture_clients", "gauge"),
        ("mixture_documents_per_second", "gauge"),
        ("mixture_documents_total", "counter"),
        ("mixture_errors_total", "counter"),
        ("mixture_reports_total", "counter"),
        ("mixture_request_seconds", "histogram"),
        ("mixture_requests_total", "counter"),
        ("mixture_uptime_seconds", "gauge"),
    ]


def test_a_client_that_sends_nothing_does_not_delay_another() -> None:
    counts = ServerCounts()
    server = start_metrics_server("127.0.0.1", 0, counts.registry)
    try:
        with socket.create_connection(server.server_address) as silent:
            url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
            with urllib.request.urlopen(url, timeout=60) as reply:
                assert b"mixture_requests_total 0.0\n" in reply.read()
            server.RequestHandlerClass.timeout = 0.2  # of later connections; the default is 10 s
            with socket.create_connection(server.server_address) as idle:
                idle.settimeout(60)
                assert idle.recv(1) == b""  # closed by the server
            silent.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert silent.recv(12) == b"HTTP/1.0 200"
    finally:
        server.shutdown()
        server.server_close()
