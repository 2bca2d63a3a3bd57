"""Compute-equivalent gain between two ladders of a table, and its text.

A ladder is named by a pattern of its runs, `*-muon-*`, or by pattern and column of the loss:
`*:loss_ema` are all runs, scored with averaged weights.
"""

import fnmatch
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from megatron.cli import format_table
from megatron.laws.compute_law import MIN_SIZES, ComputeLaw
from megatron.laws.equivalent_gain import (
    BETTER,
    UNCHANGED,
    UNDECIDED,
    CellGain,
    EquivalentGain,
    GainAt,
    Ladder,
    fit_gain,
    gain_of_cells,
    ladder_of_frontier,
    ladder_of_runs,
)
from megatron.laws.isoflop import split_budgets
from megatron.study.differences import Difference, Side
from megatron.study.format import format_digits, format_exponent, format_interval, format_plural
from megatron.study.table import select_finished

COMPUTE, TOKENS = "train_flops", "train_tokens"
UNITS = {COMPUTE: "FLOPs", TOKENS: "tokens"}


def find_ladder(table: pd.DataFrame, name: str, by: str) -> Ladder:
    """Return the ladder of finished runs that match PATTERN or PATTERN:LOSS_COLUMN.

    by   column of the amount that grows: train_flops, or train_tokens of runs of one size

    Runs of several sizes at each budget give the ladder of the best sizes.

    Raises ValueError if no run matches, or a column is unknown.
    """
    pattern, _, column = name.partition(":")
    column = column or "loss"
    for needed in (column, by):
        if needed not in table:
            raise ValueError(f"{name}: the table has no column {needed!r}. Collect it with tools/collect.py.")
    runs = select_finished(table)
    matches = np.array([fnmatch.fnmatchcase(run, pattern) for run in runs["run"].astype(str)], bool)
    runs = runs[matches & (runs[column] > 0).to_numpy() & (runs[by] > 0).to_numpy()]
    if "held_out" in runs:
        runs = runs[~(runs["held_out"] > 0)]
    if runs.empty:
        raise ValueError(f"{name}: no finished run matches. Quote patterns with *, and see the column run.")
    x, losses, sizes = (runs[key].to_numpy(float) for key in (by, column, "n_params"))
    if by == COMPUTE and any(len(np.unique(sizes[rows])) >= MIN_SIZES for rows in split_budgets(x)):
        return ladder_of_frontier(sizes, runs["train_tokens"].to_numpy(float), losses, x)
    if by == TOKENS and len(np.unique(sizes)) > 1:
        raise ValueError(f"{name}: got {len(np.unique(sizes))} sizes, expected one to compare over tokens.")
    seeds = runs["seed"].fillna(-1).astype(int) if "seed" in runs else range(len(runs))
    # runs of equal size, length and seed read the same samples in the same order
    pairs = [f"{n:.0f} {d:.0f} {s}" for n, d, s in zip(sizes, runs["train_tokens"], seeds, strict=True)]
    return ladder_of_runs(x, losses, pairs)


def compare_ladders(table: pd.DataFrame, a: str, b: str, by: str = COMPUTE) -> EquivalentGain:
    """Fit the gain of ladder `b` over ladder `a`. Raises the errors of `find_ladder` and `fit_gain`."""
    return fit_gain(find_ladder(table, a, by), find_ladder(table, b, by))


def list_gains(gain: EquivalentGain, C: Sequence[float] | None = None) -> list[GainAt]:
    """Return the gain at A's compute C [n]; default: five amounts over the common range."""
    return [gain.at(float(at)) for at in (C or np.geomspace(*gain.C, 5))]


def describe_gain(gain: EquivalentGain, gains: Sequence[GainAt], a: str, b: str, by: str = COMPUTE) -> str:
    """Return the table of gains and a headline at the largest amount."""
    unit = UNITS[by]
    rows = []
    for at in gains:
        note = "" if gain.C[0] * 0.999 <= at.C <= gain.C[1] * 1.001 else "  beyond the runs"
        ends = format_interval(at.interval, _share)
        rows.append([format_exponent(at.C), _share(at.ratio), ends, at.verdict + note])
    heads = [f"{unit} of A", "B needs", "95 % confidence", "B is"]
    table = "\n".join(format_table(heads, rows, heads[3:]))
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
    change = f"the {kind} {gain.change} with size"
    if gain.change == UNCHANGED:
        change = "no change with size is shown"
    pairs = f", pairs correlate by {gain.correlation:.2f}" if gain.correlation else ""
    noise = f"noise of a run {format_digits(100 * gain.sigma, 2)} % of the loss, "
    noise += f"{format_plural(round(gain.dof), 'degree')} of freedom{pairs}"
    return f"A: {a}\nB: {b}\n{table}\n{start}; {change} ({decade}).\n{noise}"


def record_gain(gain: EquivalentGain, gains: Sequence[GainAt]) -> dict[str, Any]:
    """Return the gain for JSON."""
    record = asdict(gain) | {"covariance": gain.covariance.tolist(), "change": gain.change}
    record["gains"] = [asdict(at) | {"verdict": at.verdict} for at in gains]
    return record | {"factor_per_decade": gain.trend()}


def cell_gain(law: ComputeLaw, a: Side, b: Side, difference: Difference) -> CellGain | None:
    """Return the share of A's FLOPs that B needs, by a frontier's slope; None if the noise is not known."""
    if difference.se is None or difference.dof is None or not min(a.flops, b.flops) > 0:
        return None
    return gain_of_cells(law, (a.flops, b.flops), b.log_loss - a.log_loss, difference.se, difference.dof)


def describe_cell_gain(gain: CellGain | None) -> str:
    """Return the sentence about a gain between two cells; empty without one."""
    if gain is None:
        return ""
    inside = format_interval(gain.interval, _share) or "not bounded"
    slope = f"the frontier's slope, {format_digits(gain.slope, 2)} ± {format_digits(gain.slope_error, 1)}"
    return f"In compute: B needs {_share(gain.ratio)} times the FLOPs of A (95 %: {inside}), through {slope}."


def _share(ratio: float) -> str:
    return format_digits(ratio, 2) if ratio < 0.995 else format_digits(ratio, 3)
