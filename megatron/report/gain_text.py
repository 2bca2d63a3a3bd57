"""Sentences and tables about gains and decisions, for the terminal."""

from collections.abc import Sequence

from megatron.cli import format_table
from megatron.laws.equivalent_gain import (
    BETTER,
    FALLS,
    RISES,
    UNCHANGED,
    UNDECIDED,
    CellGain,
    EquivalentGain,
    GainAt,
)
from megatron.study.decision import EQUAL, Decision
from megatron.study.differences import LEVEL
from megatron.study.format import format_digits, format_exponent, format_interval, format_plural
from megatron.study.gain import COMPUTE, UNITS


def describe_gain(gain: EquivalentGain, gains: Sequence[GainAt], a: str, b: str, by: str = COMPUTE) -> str:
    """Return the table of gains and a headline at the largest amount."""
    unit = UNITS[by]
    rows = []
    for at in gains:
        # the ends of the common range are computed through logarithms
        note = "" if gain.C[0] * 0.999 <= at.C <= gain.C[1] * 1.001 else "  beyond the runs"
        ends = format_interval(at.interval, _share)
        rows.append([format_exponent(at.C), _share(at.ratio), ends, at.verdict + note])
    heads = [f"{unit} of A", "B needs", "95 % confidence", "B is"]
    table = "\n".join(format_table(heads, rows, heads[3:]))
    # the headline is about the largest amount, which is nearest to the next run
    last = gains[-1]
    size = f"{_share(last.ratio)} times the {unit} of A (95 %: {format_interval(last.interval, _share)})"
    if last.verdict == UNDECIDED:
        start = f"Undecided at {format_exponent(last.C)}: B needs {size}"
    else:
        start = f"B needs {size}, at {format_exponent(last.C)}"
    # the ratio of a recipe that is not better is no gain
    kind = "gain" if last.verdict == BETTER else "difference"
    factor, low, high = gain.trend()
    decade = f"{_share(factor)} ({format_interval((low, high), _share)}) per decade"
    kind = "ratio" if gain.change in (FALLS, RISES) else kind
    change = f"the {kind} {gain.change} with size"
    if gain.change == UNCHANGED:
        change = "no change with size is shown"
    pairs = f", pairs correlate by {gain.correlation:.2f}" if gain.correlation else ""
    noise = f"noise of a run {format_digits(100 * gain.sigma, 2)} % of the loss, "
    noise += f"{format_plural(round(gain.dof), 'degree')} of freedom{pairs}"
    return f"A: {a}\nB: {b}\n{table}\n{start}; {change} ({decade}).\n{noise}"


def describe_cell_gain(gain: CellGain | None) -> str:
    """Return the sentence about a gain between two cells; empty without one."""
    if gain is None:
        return ""
    inside = format_interval(gain.interval, _share) or "not bounded"
    slope = f"the frontier's slope, {format_digits(gain.slope, 2)} ± {format_digits(gain.slope_error, 1)}"
    return f"In compute: B needs {_share(gain.ratio)} times the FLOPs of A (95 %: {inside}), through {slope}."


def describe_decision(decision: Decision) -> str:
    """Return a decision as sentences."""
    ends = [100 * end for end in decision.interval]
    inside = format_interval(ends, lambda end: format_digits(end, 2))
    seeds = f"{format_plural(decision.n_a, 'seed')} and {decision.n_b}{', paired' * decision.paired}"
    basis = f"{seeds}; {100 * LEVEL:g} % at every look: {inside or 'not bounded yet'}"
    size = f"{decision.a} minus {decision.b}: {format_digits(100 * decision.relative, 2)} % of the loss"
    size = f"{size} ({basis})."
    if decision.verdict == EQUAL:
        return f"{size}\nDecided: they differ by less than {100 * decision.share:g} %."
    if decision.verdict != "undecided":
        return f"{size}\nDecided: {decision.a} is {decision.verdict}."
    return f"{size}\nNot decided. Next: train {decision.next_run} with seed {decision.next_seed}."


def _share(ratio: float) -> str:
    # 0.83 and 1.05: two decimals on both sides of 1
    return format_digits(ratio, 2) if ratio < 0.995 else format_digits(ratio, 3)
