"""Type checks of the fields of law.json and stacked_law.json, made before anything is computed from them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron.laws.fitting.noise import MAX_TREND_SLOPE

MAX_RANGE = 200.0  # of log(N D): any pair of counts that a float holds with room for their ratio
Check = Callable[[Any], bool]


def is_number(value: Any) -> bool:
    """Return whether a value is an int or float that a float can hold, NaN and Inf included.

    A bool is not a number.
    """
    # type() and not isinstance, since a bool is an int; JSON may hold 10^400, for which float() raises
    try:
        return type(value) in (int, float) and float(value) is not None
    except OverflowError:
        return False


def _is_list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_table_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(end is None or is_number(end) for end in value)


def _is_interval(value: Any) -> bool:
    """Accept {}, or a level with [low, high] of constants and of derived values."""
    return isinstance(value, dict) and all(
        check(value[name])
        for name, check in (
            ("level", lambda level: is_number(level) and 0 < level < 1),
            ("n_bootstrap", lambda n: type(n) is int and n >= 0),
            ("n_units", lambda n: n is None or type(n) is int and n > 0),
            ("method", _is_text),
            ("params", _is_table_of(_is_range)),
            ("derived", _is_table_of(_is_range)),
        )
        if name in value
    )


def _is_noise(value: Any) -> bool:
    """Accept {}, or a dict with at least the degrees of freedom."""
    return isinstance(value, dict) and (
        not value
        or is_number(value.get("dof"))
        and value["dof"] > 0
        and (value.get("n_groups") is None or is_number(value["n_groups"]))
        and (value.get("trend") is None or _is_trend(value["trend"]))
    )


def _is_trend(value: Any) -> bool:
    """Accept all fields of noise.Trend with finite values and positive scales."""
    names = ("sigma", "slope", "centre", "low", "high", "dof_centre", "square_sum", "p_value")
    return (
        isinstance(value, dict)
        and set(value) == set(names)
        and all(is_number(number) and math.isfinite(number) for number in value.values())
        and min(value["sigma"], value["dof_centre"], value["square_sum"]) > 0
        # with both limits |slope (x - centre)| is at most 2 x 200 = 400, and exp(400) is finite in float64
        and value["low"] <= value["centre"] <= value["high"] <= value["low"] + MAX_RANGE
        and abs(value["slope"]) <= MAX_TREND_SLOPE
    )


def _is_text_error(value: Any) -> bool:
    """Accept {}, or both errors at 0 or above."""
    return isinstance(value, dict) and (
        not value or all(is_number(value.get(name)) and value[name] >= 0 for name in ("loss_se", "relative"))
    )


FIELDS: dict[str, tuple[Check, str]] = {
    "form": (_is_text, "the name of a form"),
    "params": (_is_table_of(is_number), "numbers by name"),
    "objective": (is_number, "a number"),
    "huber_delta": (is_number, "a number"),
    "n_runs": (lambda value: type(value) is int and value >= 0, "a whole number"),
    "columns": (_is_table_of(_is_text), "names of columns by letter"),
    "filter": (lambda value: isinstance(value, dict), "values by column"),
    "ranges": (_is_table_of(_is_range), "low and high by letter"),
    "interval": (_is_interval, "level, and low and high by name"),
    "standard_error": (_is_table_of(is_number), "numbers by name"),
    "derived": (_is_table_of(is_number), "numbers by name"),
    "replicates": (_is_table_of(_is_list_of(is_number)), "lists of numbers by name"),
    "warnings": (_is_list_of(_is_text), "a list of sentences"),
    "table": (lambda value: isinstance(value, dict), "path and sum"),
    "residual": (lambda value: value in ("log", "nats"), "log or nats"),
    "fixed": (_is_list_of(_is_text), "a list of names"),
    "tied": (_is_table_of(_is_text), "names by name"),
    "priors": (_is_list_of(lambda value: isinstance(value, dict)), "a list of objects"),
    "spread": (lambda value: is_number(value) and (math.isnan(value) or value >= 0), "a number of 0 or more"),
    "noise": (_is_noise, "the fields of a noise estimate"),
    "text_error": (_is_text_error, "loss_se and relative, 0 or more"),
    "lack_of_fit": (lambda value: isinstance(value, dict), "the fields of a test"),
    "identified": (lambda value: value is None or isinstance(value, bool), "true, false or null"),
    "not_identified": (_is_table_of(_is_text), "reasons by name"),
    "held_out": (lambda value: isinstance(value, dict), "an object"),
    "profile": (lambda value: isinstance(value, dict), "an object"),
    "runs": (_is_list_of(_is_text), "a list of names of runs"),
}


def check_fields(content: Mapping[str, Any]) -> None:
    """Check the types of the fields of a law.

    Raises ValueError for the first value of a wrong type, and for replicates whose constants are not those of
    `params` or whose lists have different lengths.
    """
    for name, value in content.items():
        is_valid, expected = FIELDS[name]
        # the value is cut to 40 characters, since replicates may be thousands of numbers
        if not is_valid(value):
            raise ValueError(f"{name}: got {str(value)[:40]!r}, expected {expected}")
    replicates = content.get("replicates")
    if replicates and (
        set(replicates) != set(content["params"]) or len(set(map(len, replicates.values()))) > 1
    ):
        raise ValueError(
            "replicates: got other constants or lengths, expected equally many values of each constant of "
            "params"
        )


def _is_above(least: float) -> Check:
    return lambda value: is_number(value) and least < value < math.inf


def _is_cut(value: Any) -> bool:
    return isinstance(value, dict) and _is_table_of(is_number)(value.get("rms"))


STACK_FIELDS: dict[str, tuple[Check, str]] = {
    "laws": (lambda value: _is_table_of(lambda law: isinstance(law, dict))(value) and value, "laws by form"),
    "weights": (_is_table_of(_is_above(0.0)), "numbers above 0 by form"),
    "growth": (lambda value: is_number(value) and 0 <= value < math.inf, "a number of 0 or more"),
    "growth_dof": (_is_above(0.0), "a number above 0"),
    "largest_compute": (_is_above(0.0), "FLOPs above 0"),
    "cuts": (_is_list_of(_is_cut), "a list of held-out parts"),
    "refused": (_is_table_of(_is_text), "reasons by form"),
    **{name: FIELDS[name] for name in ("n_runs", "ranges", "columns", "filter", "table", "warnings")},
    "held_out": FIELDS["held_out"],
    "runs": FIELDS["runs"],
}
REQUIRED_STACK_FIELDS = ("laws", "weights", "growth", "growth_dof", "largest_compute")


def check_stack(stored: Any) -> None:
    """Check the content of stacked_law.json.

    Raises ValueError for a missing or wrong field, weights of other forms, or weights whose sum is not 1.
    """
    if not isinstance(stored, dict):
        raise ValueError(f"got {type(stored).__name__}, expected an object")
    for name in REQUIRED_STACK_FIELDS:
        if name not in stored:
            raise ValueError(f"{name}: got none, expected {STACK_FIELDS[name][1]}")
    for name, (is_valid, expected) in STACK_FIELDS.items():
        if name in stored and not is_valid(stored[name]):
            raise ValueError(f"{name}: got {str(stored[name])[:40]!r}, expected {expected}")
    if set(stored["weights"]) != set(stored["laws"]):
        raise ValueError("weights: got other forms than laws, expected one weight per law")
    if abs(sum(stored["weights"].values()) - 1) > 1e-6:
        raise ValueError(f"weights: got a sum of {sum(stored['weights'].values()):.6g}, expected 1")
