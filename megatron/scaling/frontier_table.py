"""The frontier in words: a table of optima, what scatters, and what to do where it is not identified."""

import textwrap
from collections.abc import Sequence

import numpy as np

from megatron.scaling import wording
from megatron.scaling.compute_law import LARGEST_STEP, ComputeLaw, Optimum
from megatron.scaling.isoflop import budgets
from megatron.scaling.study_frontier import FrontierRuns

MOST_SIZES = 5  # sizes that a sentence names
WIDTH = 100  # columns of a terminal


def budgets_of(C: np.ndarray) -> list[float]:
    """The budgets of runs: the geometric mean of the FLOPs of each group, small to large."""
    return [float(np.exp(np.log(C[rows]).mean())) for rows in budgets(C)]


def frontier_table(law: ComputeLaw, compute: Sequence[tuple[float, str]]) -> str:
    """A line for each (C, remark): N*, D*, L*; at most 100 columns."""
    lines = [
        ["C (FLOPs)", "N*", "95 % confidence", "D*", "L*", "95 % of one new run", ""],
        *(_cells(law.optimum(C), remark) for C, remark in compute),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line in lines:
        cells = [f"{cell:>{width}}" for cell, width in zip(line[:-1], widths, strict=False)]
        text.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(text)


def _cells(optimum: Optimum, remark: str) -> list[str]:
    def size(value: float) -> str:
        return wording.count(value, 3)

    return [
        f"{optimum.C:.2e}",
        size(optimum.N),
        wording.interval(optimum.N_interval, size),
        size(optimum.D),
        wording.loss(optimum.loss),
        wording.interval(optimum.predictive, wording.loss),
        remark,
    ]


def default_compute(law: ComputeLaw, runs: FrontierRuns, blind: float | None) -> list[tuple[float, str]]:
    """(C, remark) of the rows of the table: the budgets of the runs, the blind one and the furthest."""
    rows = [(C, "") for C in budgets_of(runs.C)]
    if blind is not None:
        rows.append((blind, "blind check"))
    return sorted([*rows, (LARGEST_STEP * law.C[1], "furthest")])


def frontier_notes(law: ComputeLaw, runs: FrontierRuns) -> list[str]:
    """What the table does not show: exponent, scatter, lack of fit, what is not identified and what to do."""
    low, high = law.interval("size_exponent")
    told = [
        f"N* grows as C^{law.params['size_exponent']:.2f}, 95 % confidence [{low:.2f}, {high:.2f}]",
        f"scatter of single runs around the fit: {100 * law.spread:.2g} % of the loss, "
        f"{law.dof} degrees of freedom",
        _words_of_noise(law),
        *textwrap.wrap(law.steepening, WIDTH),
    ]
    if law.not_identified:
        told.append(f"NOT IDENTIFIED by these runs: {', '.join(law.not_identified)}")
        told += [f"  {reason}" for reason in law.not_identified.values()]
        told += [f"  to do: {step}" for step in next_steps(law, runs)]
    return told + [f"warning: {warning}" for warning in runs.warnings]


def _words_of_noise(law: ComputeLaw) -> str:
    tested = law.lack_of_fit
    if not tested:
        return "noise of seeds: not known. To do: train two cells with several seeds, as seeds: [0, 1, 2]"
    verdict = "the form agrees with them" if tested["passes"] else "the form DOES NOT FIT them"
    return (
        f"noise of seeds: {100 * tested['noise']:.2g} %; {verdict} "
        f"(lack of fit: p = {tested['p_value']:.2g}, misfit {100 * tested['misfit']:.2g} %)"
    )


def next_steps(law: ComputeLaw, runs: FrontierRuns) -> list[str]:
    """What to train for what these runs do not identify: one sentence each."""
    steps = []
    missing = law.not_identified
    if "log_size" in missing:
        steps.append(_sizes_to_add(law, runs))
    if "size_exponent" in missing:
        ratio = law.C[1] / law.C[0]
        steps.append(
            f"add a budget: they span a factor of {wording.times(ratio)} in FLOPs now, expected at least 30, "
            "with three sizes or more around the best N at each."
        )
    for name, side in (("alpha", "smaller"), ("beta", "larger")):
        if name in missing:
            steps.append(f"add to each budget a size {side} than the smallest loss by a factor of 2 to 4.")
    return steps


def _sizes_to_add(law: ComputeLaw, runs: FrontierRuns) -> str:
    """Where the best size is beyond those tried: the side on which to add some."""
    smaller, larger = [], []
    for rows in budgets(runs.C):
        N, L = runs.N[rows], runs.L[rows]
        C = f"{np.exp(np.log(runs.C[rows]).mean()):.2g}"
        best = N[L.argmin()]
        (smaller if best == N.min() else larger if best == N.max() else []).append(C)
    parts = [
        f"sizes {side} than {wording.count(edge, 3)} at {', '.join(at[:MOST_SIZES])} FLOPs"
        for side, at, edge in (("smaller", smaller, law.N[0]), ("larger", larger, law.N[1]))
        if at
    ]
    return f"add {wording.listed(parts) or 'sizes on both sides of the least loss at each budget'}."
