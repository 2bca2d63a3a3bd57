"""Amounts as people write them on a command line: 100M, 1.5B, 20_000."""

import argparse
from decimal import Decimal, InvalidOperation
from fractions import Fraction

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MOST_DIGITS = 40


def amount(word: str) -> int:
    """A whole number of 1 or more, for argparse's `type`: K, M, B and T are 10^3, 10^6, 10^9 and 10^12.

    Raises argparse.ArgumentTypeError, which argparse prints.
    """
    found = _number(word)
    if found < 1 or found.denominator != 1:
        raise argparse.ArgumentTypeError(f"found '{word}', wanted a whole number of 1 or more, such as 100M")
    return int(found)


def amount_or_share(word: str) -> int | Fraction:
    """An `amount`, or a share of all between 0 and 1."""
    found = _number(word)
    if found <= 0 or found > 1 and found.denominator != 1:
        raise argparse.ArgumentTypeError(f"found '{word}', wanted a number, as 20K, or a share, as 0.1")
    return found if found < 1 else int(found)


def _number(word: str) -> Fraction:
    """Exactly what is written; binary floats would not be."""
    digits, factor = word, 1
    if word[-1:].upper() in SUFFIXES:
        digits, factor = word[:-1], SUFFIXES[word[-1].upper()]
    try:
        if "/" in digits:
            raise ValueError("a ratio is no amount")
        size = Decimal(digits)
        if not size.is_finite() or len(digits) > MOST_DIGITS or abs(size.adjusted()) > MOST_DIGITS:
            raise ValueError("a number that no count reaches, and that may take hours to write out")
        return Fraction(digits) * factor
    except (ValueError, InvalidOperation) as error:
        raise argparse.ArgumentTypeError(
            f"found '{word}', wanted a number, such as 20000 or 100M (K, M, B, T)"
        ) from error
