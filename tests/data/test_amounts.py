"""Amounts of a command line."""

import argparse
from fractions import Fraction

import pytest

from megatron.data.amounts import amount, amount_or_share


@pytest.mark.parametrize(
    ("word", "n"),
    [("7", 7), ("100M", 10**8), ("1.5b", 1_500_000_000), ("20_000", 20_000), ("2e3", 2000), ("1.1K", 1100)],
)
def test_an_amount_is_exactly_what_is_written(word: str, n: int) -> None:
    assert amount(word) == n == amount_or_share(word)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "M",
        "0",
        "-5",
        "1.5",
        "1.0005K",
        "ten",
        "1/2",
        "nan",
        "inf",
        "5G",
        "1e999999999",
        "1e-999999999",
        "9" * 5000,
    ],
)
def test_what_is_no_amount_is_said(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"found '{word}', wanted"):
        amount(word)
    if word.startswith(("1e9", "1e-9", "9999")):  # written out it would take hours and all memory
        with pytest.raises(argparse.ArgumentTypeError, match="wanted a number, such as"):
            amount_or_share(word)


def test_a_share_is_between_0_and_1_and_exact() -> None:
    assert amount_or_share("0.1") == Fraction(1, 10)
    for word in ("0", "-0.5", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="or a share, as 0.1"):
            amount_or_share(word)
