"""Metrics of a mixture server."""

import re

from megatron.mixture.serve.metrics import BOUNDS_S, ServerCounts


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
    buckets = {m[1]: int(m[2]) for m in re.finditer(r'_bucket\{le="([^"]+)"\} (\d+)', text)}
    assert list(buckets) == [*map(str, BOUNDS_S), "+Inf"]
    assert [buckets[k] for k in ("0.001", "0.0025", "0.1", "0.25", "5.0", "+Inf")] == [1, 2, 2, 4, 4, 5]
    assert "mixture_request_seconds_count 5\n" in text
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
    assert counts.documents == 900


def test_quotes_in_labels_are_escaped() -> None:
    text = ServerCounts(Clock()).format_metrics([("weight", "w", [({"domain": 'a"b\\c\nd'}, 0.5)])])
    assert 'mixture_weight{domain="a\\"b\\\\c\\nd"} 0.5\n' in text
    assert all(
        re.fullmatch(r"(# (HELP|TYPE) \S+ .+|[a-z_]+(\{.*\})? \S+)", line) for line in text.splitlines()
    )
