"""Weighted round robin: exact counts at every prefix, and random access."""

from fractions import Fraction
from math import lcm

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.plan.weighted_round_robin import WeightedRoundRobin

SLIMPAJAMA = ("0.522", "0.267", "0.052", "0.042", "0.046", "0.038", "0.033")
weights_of_sources = st.lists(st.floats(-2, 1).map(lambda x: Fraction(str(10**x))), min_size=1, max_size=8)


@settings(max_examples=12, deadline=None)
@given(weights_of_sources, st.sampled_from([0, 10**6, 10**13]))
@example([Fraction(x) for x in SLIMPAJAMA], 0)
@example([Fraction(178_992_411_307), Fraction(627_000_000_121), Fraction(123_456_789)], 10**13)
@example([Fraction(9), *[Fraction(1, 7)] * 6], 10**6)
@example([Fraction(1, 3)] * 3, 0)
def test_every_prefix_is_within_a_sample_of_its_weights(weights: list[Fraction], around: int) -> None:
    shares = WeightedRoundRobin(weights)
    first = around // shares.block_slots
    whole = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * whole) for weight in weights]
    total = sum(parts)
    n = first * shares.block_slots
    counts = shares.prefix_counts(n)
    assert sum(counts) == n
    for block in range(first, first + 2):
        for k, number in zip(*shares.get_block(block), strict=True):
            assert number == counts[k]  # the numbering inside a source continues across block boundaries
            counts[k] += 1
            n += 1
            assert all(-total < c * total - part * n < total for c, part in zip(counts, parts, strict=True))
        assert shares.prefix_counts(n) == counts


def test_a_slot_is_a_function_of_its_number() -> None:
    weights = [Fraction(str(weight)) for weight in (0.0123, 0.31, 0.777, 1.9, 4.05, 8.8)]
    first, second = (WeightedRoundRobin([k * weight for weight in weights]) for k in (1, 7))
    places = [5, 10**9 + 7, 0, 1024, 1023, 10**9 + 6, 3 * 1024 + 1]
    assert [first.locate_slot(i) for i in places] == [second.locate_slot(i) for i in reversed(places)][::-1]
    for i in places:
        source, number = first.locate_slot(i)
        assert [first.prefix_counts(n)[source] for n in (i, i + 1)] == [number, number + 1]


def test_a_weight_below_one_slot_per_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights: 1e-07 of 1 is one sample in 10,000,001; remove sources"):
        WeightedRoundRobin([Fraction(1), Fraction("1e-7")])
