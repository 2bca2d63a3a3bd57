"""How numbers are written for people: 1.2M, 3.4e12, 4 min, 1.8 (1.6 to 2.0)."""

import math
from collections.abc import Callable, Sequence

SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
OBJECTIVES = {"autoregressive": "autoregressive", "masked_diffusion": "masked diffusion"}
NOT_KNOWN = "–"


def digits(value: float, n: int = 3) -> str:
    """`value` to n significant digits, never in exponent form: 0.0123, 4.56, 789."""
    if value == 0 or not math.isfinite(value):
        return str(value) if value else "0"
    decimals = max(0, n - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def count(value: float | None, n: int = 2) -> str:
    """A count with a suffix: 950, 1.2k, 3.4M, 56B. Beyond thousands of T, and for tiny values, the exponent
    form.
    """
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    if abs(value) >= 1e16 or 0 < abs(value) < 1:
        return exponent(value, n)
    for scale, suffix in SUFFIXES:
        # 999,600 is 1.0M, not 1000k: compare what is left after rounding
        if abs(float(f"{value:.{n}g}")) >= scale:
            return f"{digits(float(f'{value:.{n}g}') / scale, n)}{suffix}"
    return f"{value:.0f}"


def tick(value: float) -> str:
    """A round count without needless zeros: 500k, 1M."""
    for scale, suffix in SUFFIXES:
        if value >= scale:
            return f"{value / scale:g}{suffix}"
    return f"{value:g}"


def times(ratio: float) -> str:
    """A ratio to two digits: 24, 9, 2.5."""
    return f"{float(f'{ratio:.2g}'):,g}"


def exponent(value: float | None, n: int = 2) -> str:
    """3.4e12: as people write FLOPs."""
    if value is None or not math.isfinite(value):
        return NOT_KNOWN
    mantissa, power = f"{value:.{n - 1}e}".split("e")
    return f"{mantissa}e{int(power)}"


def loss(value: float | None, se: float | None = None) -> str:
    """A loss in nats a token with its standard error: 4.123 ± 0.010."""
    if value is None:
        return NOT_KNOWN
    return f"{value:.3f}" if se is None else f"{value:.3f} ± {se:.3f}"


def duration(seconds: float | None) -> str:
    """42 s, 6.5 min, 3.2 h, 12 d."""
    if seconds is None:
        return NOT_KNOWN
    for scale, unit, from_s in ((86400, "d", 172800), (3600, "h", 7200), (60, "min", 120)):
        if seconds >= from_s:
            return f"{digits(seconds / scale, 2)} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def interval(bounds: Sequence[float] | None, write: Callable[[float], str] = digits) -> str:
    """'1.6 to 2.0'; the empty text if there is no interval."""
    if bounds is None or not all(math.isfinite(bound) for bound in bounds):
        return ""
    low, high = (write(bound) for bound in bounds)
    return low if low == high else f"{low} to {high}"


def with_interval(
    value: float, bounds: Sequence[float] | None, write: Callable[[float], str] = digits
) -> str:
    """'1.8 (1.6 to 2.0)'."""
    inside = interval(bounds, write)
    return f"{write(value)} ({inside})" if inside else write(value)


def listed(parts: Sequence[str]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def plural(n: int, noun: str) -> str:
    """'1 run', '2 runs'."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def constant(value: float) -> str:
    """A constant of a law: three digits, with a power of ten outside 0.001 to 1e6; next to nothing is 0."""
    if abs(value) < 1e-9:
        return "0"
    return digits(value) if 1e-3 <= abs(value) < 1e6 else exponent(value)
