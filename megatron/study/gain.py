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

from megatron.laws import equivalent_gain
from megatron.laws.compute_law import MIN_SIZES, ComputeLaw
from megatron.laws.equivalent_gain import CellGain, EquivalentGain, GainAt, Ladder
from megatron.laws.isoflop import split_budgets
from megatron.study.differences import Difference, Side
from megatron.study.table import select_finished

COMPUTE, TOKENS = "train_flops", "train_tokens"
UNITS = {COMPUTE: "FLOPs", TOKENS: "tokens"}


def find_ladder(table: pd.DataFrame, name: str, by: str) -> Ladder:
    """Return the ladder of finished runs that match PATTERN or PATTERN:LOSS_COLUMN.

    by   column of the amount that grows: train_flops, or train_tokens of runs of one size

    Runs of several sizes at each budget give the ladder of the best sizes.

    Raises ValueError if no run matches, or a column is unknown.
    """
    # names of runs have no colon (cell.py, NAME)
    pattern, _, column = name.partition(":")
    column = column or "loss"
    for needed in (column, by):
        if needed not in table:
            raise ValueError(f"{name}: the table has no column {needed!r}. Collect it with tools/collect.py.")
    runs = select_finished(table)
    matches = np.array([fnmatch.fnmatchcase(run, pattern) for run in runs["run"].astype(str)], bool)
    matches &= (pd.to_numeric(runs[column], errors="coerce") > 0).to_numpy() & (runs[by] > 0).to_numpy()
    # a forecast's run is no point of the ladder
    matches &= ~(runs.reindex(columns=["held_out"])["held_out"] > 0).to_numpy()
    # a copy of a run is no seed
    runs = runs[matches].drop_duplicates(["run", by, column])
    if runs.empty:
        raise ValueError(f"{name}: no finished run matches. Quote patterns with *, and see the column run.")
    x, losses, sizes = (runs[key].to_numpy(float) for key in (by, column, "n_params"))
    # several sizes at a budget: the best one is between them
    if by == COMPUTE and any(len(np.unique(sizes[rows])) >= MIN_SIZES for rows in split_budgets(x)):
        return equivalent_gain.ladder_of_frontier(sizes, runs["train_tokens"].to_numpy(float), losses, x)
    # at equal tokens two sizes differ by their compute
    if by == TOKENS and len(np.unique(sizes)) > 1:
        raise ValueError(f"{name}: got {len(np.unique(sizes))} sizes, expected one to compare over tokens.")
    seeds = runs["seed"].fillna(-1).astype(int) if "seed" in runs else range(len(runs))
    # runs of equal size, length and seed read the same samples in the same order
    pairs = [f"{n:.0f} {d:.0f} {s}" for n, d, s in zip(sizes, runs["train_tokens"], seeds, strict=True)]
    return equivalent_gain.ladder_of_runs(x, losses, pairs)


def compare_ladders(table: pd.DataFrame, a: str, b: str, by: str = COMPUTE) -> EquivalentGain:
    """Fit the gain of ladder `b` over ladder `a`. Raises the errors of `find_ladder` and `fit_gain`."""
    return equivalent_gain.fit_gain(find_ladder(table, a, by), find_ladder(table, b, by))


def list_gains(gain: EquivalentGain, C: Sequence[float] | None = None) -> list[GainAt]:
    """Return the gain at A's compute C [n]; default: five amounts over the common range."""
    return [gain.at(float(at)) for at in (C or np.geomspace(*gain.C, 5))]


def record_gain(gain: EquivalentGain, gains: Sequence[GainAt]) -> dict[str, Any]:
    """Return the gain for JSON."""
    record = asdict(gain) | {"covariance": gain.covariance.tolist(), "change": gain.change}
    record["gains"] = [asdict(at) | {"verdict": at.verdict} for at in gains]
    return record | {"factor_per_decade": gain.trend()}


def cell_gain(law: ComputeLaw, a: Side, b: Side, difference: Difference) -> CellGain | None:
    """Return the share of A's FLOPs that B needs, by a frontier's slope; None if the noise is not known."""
    if difference.se is None or difference.dof is None or not min(a.flops, b.flops) > 0:
        return None
    step = b.log_loss - a.log_loss
    return equivalent_gain.gain_of_cells(law, (a.flops, b.flops), step, difference.se, difference.dof)
