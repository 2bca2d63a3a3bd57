"""Words of a command line: counts such as 100M, 1.5B, 20_000, prefixes of outputs, and whether they exist."""

import argparse
import re
from fractions import Fraction
from pathlib import Path

from megatron.data.indexed_writer import DATASET_SUFFIXES
from megatron.io import is_url
from megatron.text.inputs import describe_inputs

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
NUMBER = re.compile(r"-?[\d_.]{1,40}(e-?\d\d?)?", re.IGNORECASE)


def parse_count(word: str) -> int:
    """Parse an integer of 1 or more, for argparse's `type`. K, M, B and T are 10^3, 10^6, 10^9 and 10^12.

    Raises argparse.ArgumentTypeError, which argparse prints.
    """
    number = _parse_number(word)
    if number < 1 or number.denominator != 1:
        raise argparse.ArgumentTypeError(f"got '{word}', expected a whole number of 1 or more, such as 100M")
    return int(number)


def parse_count_or_fraction(word: str) -> int | Fraction:
    """Parse a count as `parse_count` does, or a fraction of the whole between 0 and 1."""
    number = _parse_number(word)
    if number <= 0 or number > 1 and number.denominator != 1:
        raise argparse.ArgumentTypeError(
            f"got '{word}', expected a number, such as 20K, or a share, such as 0.1"
        )
    return number if number < 1 else int(number)


def _parse_number(word: str) -> Fraction:
    """Parse a number exactly, which binary floating point would not: 1.001K is 1001."""
    factor = SUFFIXES.get(word[-1:].upper(), 1)
    digits = word if factor == 1 else word[:-1]
    try:
        # the pattern excludes ratios, and 1e999999999,
        # which would take hours and all memory
        if not NUMBER.fullmatch(digits):
            raise ValueError("not a decimal number")
        return Fraction(digits) * factor
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"got '{word}', expected a number, such as 20000 or 100M (K, M, B, T)"
        ) from error


def parse_output_prefix(word: str) -> Path:
    """Parse the prefix of a dataset's file names, for argparse's `type`.

    Raises argparse.ArgumentTypeError, which argparse prints,
    for the name of a folder: Path would drop the last slash,
    and the files would be written beside the folder. Also for a URL.
    """
    if is_url(word):
        raise argparse.ArgumentTypeError(
            f"got the URL '{describe_inputs([word])}', expected a name on this machine"
        )
    if not word or word.endswith("/") or word.rpartition("/")[2] in (".", ".."):
        raise argparse.ArgumentTypeError(
            f"got '{word}', expected the first part of a file name. Add a file name, as in "
            f"'{word.rstrip('/') or '.'}/corpus'."
        )
    return Path(word)


def check_not_exists(*paths: Path) -> None:
    """Raise ValueError if one of the files exists."""
    for path in paths:
        if path.exists():
            raise ValueError(
                f"{path}: exists already, from other files or settings. "
                "Choose another name, or replace it with --overwrite."
            )


def dataset_files(prefix: Path) -> list[Path]:
    """Return the paths of the files of a .bin/.idx dataset."""
    return [prefix.with_name(prefix.name + suffix) for suffix in DATASET_SUFFIXES]
