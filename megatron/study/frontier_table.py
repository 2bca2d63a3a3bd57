"""Terminal output about the frontier: a table of optima, the scatter, and the runs to add."""

import textwrap
from collections.abc import Sequence

import numpy as np

from megatron.laws.compute_law import LARGEST_STEP, ComputeLaw, Optimum
from megatron.laws.isoflop import split_budgets
from megatron.study.format import (
    format_count,
    format_interval,
    format_loss,
    format_ratio,
    join_list,
)
from megatron.study.study_frontier import FrontierRuns

MAX_NAMED_BUDGETS = 5  # budgets that a sentence names
WIDTH = 100  # columns of a terminal


def mean_budgets(C: np.ndarray) -> list[float]:
    """Return the geometric mean of the FLOPs of each budget, in ascending order."""
    return [float(np.exp(np.log(C[rows]).mean())) for rows in split_budgets(C)]


def format_frontier_table(law: ComputeLaw, compute: Sequence[tuple[float, str]]) -> str:
    """Return a table with one line per (C, remark): N*, D*, L*; at most 100 columns wide."""
    lines = [
        ["C (FLOPs)", "N*", "95 % confidence", "D*", "L*", "95 % of one new run", ""],
        *(_format_cells(law.optimum(C), remark) for C, remark in compute),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        # the remark is left-aligned and outside the zip, since its width does not matter
        cells = [f"{cell:>{width}}" for cell, width in zip(line[:-1], widths, strict=False)]
        text.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(text)


def _format_cells(optimum: Optimum, remark: str) -> list[str]:
    def format_size(value: float) -> str:
        return format_count(value, 3)

    return [
        f"{optimum.C:.2e}",
        format_size(optimum.N),
        format_interval(optimum.N_interval, format_size),
        format_size(optimum.D),
        format_loss(optimum.loss),
        format_interval(optimum.predictive, format_loss),
        remark,
    ]


def choose_compute(law: ComputeLaw, runs: FrontierRuns, blind: float | None) -> list[tuple[float, str]]:
    """Return (C, remark) of the table's rows: budgets of the runs, the blind budget, the furthest C."""
    rows = [(C, "") for C in mean_budgets(runs.C)]
    if blind is not None:
        rows.append((blind, "blind check"))
    # the law raises ValueError beyond LARGEST_STEP times its largest budget, so this row is the last possible
    # one
    return sorted([*rows, (LARGEST_STEP * law.C[1], "furthest")])


def describe_frontier(law: ComputeLaw, runs: FrontierRuns) -> list[str]:
    """Return lines on exponent, scatter, lack of fit, constants not identified, and runs to add."""
    low, high = law.interval("size_exponent")
    notes = [
        f"N* grows as C^{law.params['size_exponent']:.2f}, 95 % confidence [{low:.2f}, {high:.2f}]",
        f"scatter of single runs around the fit: {100 * law.spread:.2g} % of the loss, "
        f"{law.dof} degrees of freedom",
        _describe_noise(law),
        *textwrap.wrap(law.steepening, WIDTH),
    ]
    if law.not_identified:
        notes.append(f"NOT IDENTIFIED by these runs: {', '.join(law.not_identified)}")
        notes += [f"  {reason}" for reason in law.not_identified.values()]
        notes += [f"  to do: {step}" for step in suggest_next_steps(law, runs)]
    return notes + [f"warning: {warning}" for warning in law.warnings + runs.warnings]


def _describe_noise(law: ComputeLaw) -> str:
    tested = law.lack_of_fit
    if not tested:
        return "noise of seeds: unknown. To do: train two cells with several seeds, as seeds: [0, 1, 2]"
    verdict = "the form agrees with them" if tested["passes"] else "the form DOES NOT FIT them"
    return (
        f"noise of seeds: {100 * tested['noise']:.2g} %; {verdict} "
        f"(lack of fit: p = {tested['p_value']:.2g}, misfit {100 * tested['misfit']:.2g} %)"
    )


def suggest_next_steps(law: ComputeLaw, runs: FrontierRuns) -> list[str]:
    """Return one sentence for each constant that is not identified, with the runs to add."""
    steps = []
    missing = law.not_identified
    if "log_size" in missing:
        steps.append(_suggest_sizes(law, runs))
    if "size_exponent" in missing:
        ratio = law.C[1] / law.C[0]
        steps.append(
            f"add a budget: the budgets span a factor of {format_ratio(ratio)} in FLOPs now, expected at "
            "least 30, with three sizes or more around the best N at each."
        )
    for name, side in (("alpha", "smaller"), ("beta", "larger")):
        if name in missing:
            steps.append(f"add to each budget a size {side} than the smallest loss by a factor of 2 to 4.")
    return steps


def _suggest_sizes(law: ComputeLaw, runs: FrontierRuns) -> str:
    """Return the sizes to add, on the side where the best size is beyond those tried."""
    smaller: list[str] = []
    larger: list[str] = []
    for rows in split_budgets(runs.C):
        N, L = runs.N[rows], runs.L[rows]
        C = f"{np.exp(np.log(runs.C[rows]).mean()):.2g}"
        # the smallest or largest size with the lowest loss: the minimum is outside the sizes on that side
        best = N[L.argmin()]
        (smaller if best == N.min() else larger if best == N.max() else []).append(C)
    parts = [
        f"sizes {side} than {format_count(edge, 3)} at {', '.join(at[:MAX_NAMED_BUDGETS])} FLOPs"
        for side, at, edge in (("smaller", smaller, law.N[0]), ("larger", larger, law.N[1]))
        if at
    ]
    return f"add {join_list(parts) or 'sizes on both sides of the least loss at each budget'}."
