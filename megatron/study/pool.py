"""Choice of runs from a table, to predict the losses of another table's runs."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from megatron.cli import format_table
from megatron.laws.pool_design import PoolChoice, choose_from_pool, predict_targets
from megatron.study.selection import Columns, read_positive, require_column
from megatron.study.table import read_table


def choose_runs(
    paths: tuple[Path, Path],
    axes: Sequence[str],
    cost: str,
    budget: float,
    n_runs: int,
    losses_are_known: bool = False,
) -> tuple[pd.DataFrame, str]:
    """Choose rows of the pool's table to predict the targets' table, and describe the choice and predictions.

    paths             of the pool and of the targets
    axes, cost        names of columns above 0; cost of the pool alone
    losses_are_known  choose as if no run were finished, and score the prediction; otherwise rows of the pool
                      with a loss are finished

    Returns the chosen rows and the text. Raises ValueError for a missing column or a value not above 0.
    """
    pool, targets = map(read_table, paths)
    if losses_are_known:
        require_column(paths[0], pool, Columns.L)
        pool = pool[np.isfinite(pool[Columns.L])].reset_index(drop=True)
        if pool.empty:
            raise ValueError(f"{paths[0]}: got no row with a {Columns.L}, expected the losses of all runs")
    values, at = (
        np.column_stack([read_positive(path, table, name) for name in axes])
        for path, table in zip(paths, (pool, targets), strict=True)
    )
    losses = pool.get(Columns.L, pd.Series(np.nan, pool.index)).to_numpy(float)
    done = np.isfinite(losses) & (not losses_are_known)
    price = read_positive(paths[0], pool, cost)
    choice = choose_from_pool(values, price, at, budget, done=done, n_runs=n_runs)
    chosen = pool.iloc[choice.rows]
    text = _describe_choice(chosen[[*axes, cost]], choice, budget, bool(done.any()))
    informed = choice.rows if losses_are_known else np.flatnonzero(done)
    if len(informed) > 1:
        text += "\n" + _describe_targets(values[informed], losses[informed], at, targets.get(Columns.L))
    return chosen, text


def _describe_choice(chosen: pd.DataFrame, choice: PoolChoice, budget: float, has_finished: bool) -> str:
    cells = [[str(row + 1), *(f"{value:.4g}" for value in values)] for row, *values in chosen.itertuples()]
    lines = format_table(["row", *chosen], cells, ())
    lines.append(
        f"{len(chosen)} runs, cost {choice.cost:.3g} of {budget:.3g}; expected error of the reducible loss "
        f"at the targets: {choice.error_after:.2g}"
        + (f", without them {choice.error_before:.2g}" if has_finished else "")
    )
    return "\n".join(lines)


def _describe_targets(
    values: np.ndarray, losses: np.ndarray, at: np.ndarray, measured: pd.Series | None
) -> str:
    """Return a line for each target, and with their losses the coefficient of determination."""
    predicted = predict_targets(values, losses, at)
    ends = zip(predicted.loss, predicted.low, predicted.high, strict=True)
    lines = [f"target {i}: loss {L:.4f}  95 % [{a:.4f}, {b:.4f}]" for i, (L, a, b) in enumerate(ends, 1)]
    if measured is not None and np.isfinite(measured).all():
        inside = measured.between(predicted.low, predicted.high).mean()
        explained = 1 - ((measured - predicted.loss) ** 2).sum() / ((measured - measured.mean()) ** 2).sum()
        lines.append(f"R^2 {explained:.3f}; {inside:.0%} of {len(measured)} targets inside their interval")
    return "\n".join(lines)
