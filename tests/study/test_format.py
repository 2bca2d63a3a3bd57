"""Numbers, intervals and lists in the text for people."""

from collections.abc import Callable
from typing import Any

from megatron.study.format import (
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_interval,
    format_short,
    format_with_interval,
    join_list,
)

TEXTS: dict[Callable[[Any], str], dict[Any, str]] = {
    format_count: {
        0: "0", 950: "950", 999_600: "1.0M", 1_234_567: "1.2M", 214_336: "210k", 3.4e12: "3.4T",
        6e22: "6.0e22", 0.01: "1.0e-2", None: "–", float("nan"): "–",
    },
    format_exponent: {3.4e12: "3.4e12", 9.96e12: "1.0e13"},
    # three significant digits, never in exponent form
    format_digits: {0.012345: "0.0123", 4.5678: "4.57", 477.83: "478", 2143.4: "2,143"},
    format_duration: {3.14: "3.1 s", 93: "93 s", 300: "5.0 min", 7200: "2.0 h", 864_000: "10 d"},
    format_short: {12: "12", 250_000: "250k", 999_900: "1M", 1.28e9: "1.28B"},
    # constants of a law stay short however large or small
}  # fmt: skip


def test_numbers_are_written_with_the_digits_and_units_of_their_kind() -> None:
    for write, texts in TEXTS.items():
        assert {value: write(value) for value in texts} == texts


def test_an_interval_whose_ends_have_the_same_text_is_written_once() -> None:
    assert format_with_interval(1.8, [1.6, 2.0]) == "1.80 (1.60 to 2.00)"
    assert format_interval([1.2e6, 1.21e6], format_count) == "1.2M"
    assert format_with_interval(1.8, None) == "1.80"


def test_lists_read_as_a_sentence() -> None:
    sentences = {(): "", ("a",): "a", ("a", "b"): "a and b", ("a", "b", "c"): "a, b and c"}
    assert {parts: join_list(list(parts)) for parts in sentences} == sentences
