"""Numbers, intervals and lists in the text for people."""

from megatron.study.format import (
    format_constant,
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_interval,
    format_short,
    format_with_interval,
    join_list,
)


def test_numbers_are_written_with_the_digits_and_units_of_their_kind() -> None:
    counts = {
        0: "0", 950: "950", 999_600: "1.0M", 1_234_567: "1.2M", 214_336: "210k", 3.4e12: "3.4T",
        6e22: "6.0e22", 0.01: "1.0e-2", None: "–", float("nan"): "–",
    }  # fmt: skip
    assert {value: format_count(value) for value in counts} == counts
    flops = {3.4e12: "3.4e12", 9.96e12: "1.0e13"}
    assert {value: format_exponent(value) for value in flops} == flops
    # three significant digits, never in exponent form
    digits = {0.012345: "0.0123", 4.5678: "4.57", 477.83: "478", 2143.4: "2,143"}
    assert {value: format_digits(value) for value in digits} == digits
    durations = {3.14: "3.1 s", 93: "93 s", 300: "5.0 min", 390: "6.5 min", 7200: "2.0 h", 864_000: "10 d"}
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
    short = {12: "12", 250_000: "250k", 999_900: "1M", 1.28e9: "1.28B"}
    assert {value: format_short(value) for value in short} == short
    # constants of a law stay short however large or small
    constants = {4.5e-14: "0", 0.016385: "0.0164", 19273.0: "19,273", 9.9e21: "9.9e21", 2.3e-5: "2.3e-5"}
    assert {value: format_constant(value) for value in constants} == constants


def test_an_interval_whose_ends_have_the_same_text_is_written_once() -> None:
    assert format_with_interval(1.8, [1.6, 2.0]) == "1.80 (1.60 to 2.00)"
    assert format_interval([1.2e6, 1.21e6], format_count) == "1.2M"
    assert format_with_interval(1.8, None) == "1.80"


def test_lists_read_as_a_sentence() -> None:
    sentences = {(): "", ("a",): "a", ("a", "b"): "a and b", ("a", "b", "c"): "a, b and c"}
    assert {parts: join_list(list(parts)) for parts in sentences} == sentences
