import pytest

from megatron.study.format import (
    format_constant,
    format_count,
    format_digits,
    format_duration,
    format_exponent,
    format_interval,
    format_with_interval,
    join_list,
)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"),
        (950, "950"),
        (999_600, "1.0M"),
        (1_234_567, "1.2M"),
        (214_336, "210k"),
        (3.4e12, "3.4T"),
        (6e22, "6.0e22"),
        (0.01, "1.0e-2"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_counts_are_written_with_two_digits_and_a_suffix(value, written):
    assert format_count(value) == written


def test_flops_are_written_with_an_exponent():
    assert format_exponent(3.4e12) == "3.4e12"
    assert format_exponent(9.96e12) == "1.0e13"


@pytest.mark.parametrize(
    ("value", "written"), [(0.012345, "0.0123"), (4.5678, "4.57"), (477.83, "478"), (2143.4, "2,143")]
)
def test_three_significant_digits_never_in_exponent_form(value, written):
    assert format_digits(value) == written


@pytest.mark.parametrize(
    ("seconds", "written"), [(3.14, "3.1 s"), (93, "93 s"), (390, "6.5 min"), (11520, "3.2 h")]
)
def test_durations_have_a_unit_that_fits(seconds, written):
    assert format_duration(seconds) == written


def test_an_interval_whose_ends_have_the_same_text_is_written_once():
    assert format_with_interval(1.8, [1.6, 2.0]) == "1.80 (1.60 to 2.00)"
    assert format_interval([1.2e6, 1.21e6], format_count) == "1.2M"
    assert format_with_interval(1.8, None) == "1.80"


def test_lists_read_as_a_sentence():
    assert [join_list(parts) for parts in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]


def test_constants_of_a_law_stay_short_however_large_or_small() -> None:
    written = {4.5e-14: "0", 0.016385: "0.0164", 19273.0: "19,273", 9.9e21: "9.9e21", 2.3e-5: "2.3e-5"}
    assert {value: format_constant(value) for value in written} == written
