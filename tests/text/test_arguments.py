"""Counts on a command line."""

import argparse
from fractions import Fraction

import pytest

from megatron.text.arguments import parse_count, parse_count_or_fraction


def test_a_count_is_parsed_exactly_or_refused() -> None:
    counts = {"7": 7, "100M": 10**8, "1.5b": 1_500_000_000, "20_000": 20_000, "2e3": 2000, "1.1K": 1100}
    for word, n in counts.items():
        assert parse_count(word) == n == parse_count_or_fraction(word)
    endless = ["1e999999999", "1e-999999999", "9" * 5000]  # exact fractions would take hours and all memory
    others = ["", "M", "0", "-5", "1.5", "1.0005K", "ten", "1/2", "nan", "inf", "5G"]
    for word in [*others, *endless]:
        with pytest.raises(argparse.ArgumentTypeError, match=f"got '{word}', expected"):
            parse_count(word)
    for word in endless:
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number, such as"):
            parse_count_or_fraction(word)


def test_a_share_is_between_0_and_1_and_exact() -> None:
    assert parse_count_or_fraction("0.1") == Fraction(1, 10)
    for word in ("0", "-0.5", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="or a share, such as 0.1"):
            parse_count_or_fraction(word)
