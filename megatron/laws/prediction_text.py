"""Text of predictions with a law for the terminal: warnings, values and intervals, distance from the runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.laws.law import Law
from megatron.laws.prediction import LEVEL, Interval

INTERVAL = f"{100 * LEVEL:g} %"
NO_INTERVAL = "no interval: the law has no bootstrap replicates"
NOT_MEASURED = "the intervals lack the error of extrapolation: fit this law again with tools/fit_law.py"


def format_ends(ends: Sequence[float], digits: str) -> str:
    """Format an interval as [low, high], or 'not known' without an interval."""
    return "not known" if not np.isfinite(ends).all() else f"[{ends[0]:{digits}}, {ends[1]:{digits}}]"


def describe_law(law: Law) -> dict[str, Any]:
    """Return the law's formula and form, with its warnings and unidentified constants."""
    names = ("form", "identified", "not_identified", "ranges")
    about = {"formula": law.formula()} | {name: getattr(law, name) for name in names}
    warnings = list(law.warnings)
    if law.lack_of_fit and not law.lack_of_fit["passes"]:
        p_value = law.lack_of_fit["p_value"]
        warnings.append(f"The form does not fit repeated runs (lack of fit, p = {p_value:.2g}).")
    return about | {"warnings": warnings}


def list_warnings(about: dict[str, Any]) -> list[str]:
    """Return the warnings, which are printed before any number."""
    lines = []
    if about["identified"] is False:
        names = ", ".join(about["not_identified"]) or "its constants"
        lines.append(f"NOT IDENTIFIED by the runs of this law: {names}.")
    reasons = list(dict.fromkeys(about["not_identified"].values()))
    return lines + [f"warning: {warning}" for warning in dict.fromkeys(reasons + about["warnings"])]


def format_values(*rows: tuple[str, float, Interval, Interval]) -> list[str]:
    """Format a line for each (name, value, confidence interval, predictive interval of one new run)."""
    lines = []
    for name, value, confidence, predictive in rows:
        ends = [] if confidence is None else [f"{INTERVAL} confidence {format_ends(confidence, '.5g')}"]
        if predictive is not None:
            ends.append(f"one new run: {INTERVAL} predictive {format_ends(predictive, '.5g')}")
        lines.append("  ".join([f"  {name} {value:.5g}", *(ends or [NO_INTERVAL])]))
    return lines


def format_range_check(law: Law, outside: dict[str, str]) -> list[str]:
    """Format a line for each value outside the fitted range, or one if all are inside, and the note on it."""
    if not law.ranges or not outside:
        return [f"  {'within the' if law.ranges else 'not known:'} range of the fitted runs"]
    lines = [
        # ranges[name] is (low, high), and False and True are the indices 0 and 1
        f"  OUTSIDE the fitted runs: {name} is {side} {law.ranges[name][side == 'above']:.4g}; "
        "this extrapolates"
        for name, side in outside.items()
    ]
    note = describe_extrapolation(law, outside)
    return lines + ([f"  {note}"] if note else [])


def describe_extrapolation(law: Law, outside: dict[str, str]) -> str:
    """Describe the error of extrapolation in the intervals of a prediction; "" inside the runs."""
    if not outside or not law.replicates:
        return ""
    if not law.extrapolation:
        return NOT_MEASURED
    growth = 100 * law.extrapolation["growth"]
    return f"the intervals include {growth:.2g} % more deviation for each factor of e in compute"
