"""Formatting of numbers for people: 1.2M, 3.4e12, 4 min, 1.8 (1.6 to 2.0)."""

import math
from collections.abc import Callable, Sequence

SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
OBJECTIVE_NAMES = {"autoregressive": "autoregressive", "masked_diffusion": "masked diffusion"}
NOT_KNOWN = "–"


def format_digits(value: float, n: int = 3) -> str:
    """Format to n significant digits without an exponent: 0.0123, 4.56, 789."""
    # log10 is not defined for 0, and floor not for NaN or Inf
    if value == 0 or not math.isfinite(value):
        return str(value) if value else "0"
    # 0.0123: floor(log10) = -2, so 3 - 1 + 2 = 4 decimals; 789: 3 - 1 - 2 =
    # 0; larger numbers keep all digits
    decimals = max(0, n - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def format_count(value: float | None, n: int = 2) -> str:
    """Format a count with a suffix: 950, 1.2k, 3.4M, 56B. From 1e16 and below 1 with an exponent."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    if abs(value) >= 1e16 or 0 < abs(value) < 1:
        return format_exponent(value, n)
    for scale, suffix in SUFFIXES:
        # 999,600 is 1.0M, not 1000k: compare the rounded value
        if abs(float(f"{value:.{n}g}")) >= scale:
            return f"{format_digits(float(f'{value:.{n}g}') / scale, n)}{suffix}"
    return f"{value:.0f}"


def format_short(n: float) -> str:
    """Format 250000 as 250k and 1500000 as 1.5M: three digits at most, for names, tables, axes."""
    for size, letter in SUFFIXES:
        # 999,600 is 1M, not 1e+03k: from 0.9995 on, three digits round up to
        # the next suffix
        if n >= size * 0.9995:
            return f"{n / size:.3g}{letter}"
    return f"{n:.3g}"


def format_ratio(ratio: float) -> str:
    """Format a ratio to two digits: 24, 9, 2.5."""
    return f"{float(f'{ratio:.2g}'):,g}"


def format_exponent(value: float | None, n: int = 2) -> str:
    """Format a number with an exponent, such as FLOPs: 3.4e12."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    # the e-format rounds the mantissa, so 9.96e12 becomes 1.0e13
    mantissa, power = f"{value:.{n - 1}e}".split("e")
    return f"{mantissa}e{int(power)}"


def format_loss(value: float | None, se: float | None = None) -> str:
    """Format a loss in nats per token with its standard error: 4.123 ± 0.010."""
    if value is None:
        return NOT_KNOWN
    return f"{value:.3f}" if se is None else f"{value:.3f} ± {se:.3f}"


def format_duration(seconds: float | None) -> str:
    """Format a duration: 42 s, 6.5 min, 3.2 h, 12 d.

    A time that is not known, None or NaN, is a dash.
    """
    if seconds is None or not math.isfinite(seconds):
        return NOT_KNOWN
    # a unit starts at two of it: 119 s, but 2.0 min from 120 s, as a change
    # of unit at 1 would lose a digit
    for scale, unit, from_s in ((86400, "d", 172800), (3600, "h", 7200), (60, "min", 120)):
        if seconds >= from_s:
            return f"{format_digits(seconds / scale, 2)} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def format_interval(bounds: Sequence[float] | None, write: Callable[[float], str] = format_digits) -> str:
    """Format an interval as '1.6 to 2.0'; empty without a finite interval."""
    if bounds is None or not all(math.isfinite(bound) for bound in bounds):
        return ""
    low, high = (write(bound) for bound in bounds)
    return low if low == high else f"{low} to {high}"


def format_with_interval(
    value: float, bounds: Sequence[float] | None, write: Callable[[float], str] = format_digits
) -> str:
    """Format a value with its interval: '1.8 (1.6 to 2.0)'."""
    inside = format_interval(bounds, write)
    return f"{write(value)} ({inside})" if inside else write(value)


def join_list(parts: Sequence[str]) -> str:
    """Join words to a list: 'a', 'a and b', 'a, b and c'."""
    # parts[:-1] are joined by commas, then " and " and the last; filter drops
    # the empty part of a single word
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def format_plural(n: int, noun: str) -> str:
    """Format a number of things: '1 run', '2 runs'."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
