"""What a server counts."""

import re

from megatron.mixture.metrics import BOUNDS_S, ServerCounts


class Clock:
    """A time that passes when told so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_histogram_counts_what_is_no_slower_than_each_bound() -> None:
    counts = ServerCounts(Clock())
    for seconds in (0.001, 0.0011, 0.2, 0.25, 7.0):
        counts.request("a", seconds, 1, 2)
    text = counts.exposition()
    found = {m[1]: int(m[2]) for m in re.finditer(r'_bucket\{le="([^"]+)"\} (\d+)', text)}
    assert list(found) == [*map(str, BOUNDS_S), "+Inf"]
    assert [found[k] for k in ("0.001", "0.0025", "0.1", "0.25", "5.0", "+Inf")] == [1, 2, 2, 4, 4, 5]
    assert "mixture_request_seconds_count 5\n" in text
    assert float(re.search(r"seconds_sum (\S+)", text)[1]) == sum((0.001, 0.0011, 0.2, 0.25, 7.0))


def test_clients_and_speed_are_those_of_the_last_minute() -> None:
    clock = Clock()
    counts = ServerCounts(clock)
    clock.now += 30
    counts.request("a", 0.1, 1, 600)
    counts.error("b", "refused")
    assert counts.clients() == 2
    assert counts.documents_per_s() == 600 / 30  # since the start
    clock.now += 40
    counts.request("a", 0.1, 1, 300)
    assert counts.documents_per_s() == 900 / 60
    clock.now += 30
    assert counts.clients() == 1
    assert counts.documents_per_s() == 300 / 60
    assert counts.documents == 900


def test_names_with_quotes_do_not_break_the_lines() -> None:
    text = ServerCounts(Clock()).exposition([("weight", "w", [({"domain": 'a"b\\c\nd'}, 0.5)])])
    assert 'mixture_weight{domain="a\\"b\\\\c\\nd"} 0.5\n' in text
    assert all(
        re.fullmatch(r"(# (HELP|TYPE) \S+ .+|[a-z_]+(\{.*\})? \S+)", line) for line in text.splitlines()
    )
