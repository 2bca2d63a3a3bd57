"""Sentences about the compute-optimal frontier: what to train at the next budgets, or why it is unknown."""

import math
from collections.abc import Sequence

import numpy as np

from megatron.laws.compute_law import ComputeLaw, Optimum
from megatron.laws.fitting.frontier_form import CONSTANTS
from megatron.laws.isoflop import split_budgets
from megatron.report import blind_text
from megatron.report.study_data import AUTOREGRESSIVE, RunPoint, Study
from megatron.study.format import (
    format_count,
    format_duration,
    format_exponent,
    format_with_interval,
    join_list,
)
from megatron.study.proposal import NUMBER_WORDS, make_timed_run, seconds_per_flop
from megatron.study.run_row import FinishedRow

FACTORS = (1.0, 4.0, 10.0)  # budgets of the page's answers, as multiples of the largest fitted budget
NEXT_FACTOR = 4.0
MAX_RUNS = 3
MEANING = {
    "log_size": "the best N",
    "size_exponent": "its growth with C",
    "alpha": "the cost of too small a model",
    "beta": "the cost of too few tokens",
}
TOKEN_SPAN = (0.5, 4.0)  # limits of a proposal, as multiples of the fewest and the most tokens so far
COLUMNS = {"N": ("n_params", "n_non_embedding"), "C": ("train_flops", "flops_6nd")}


def has_answer(study: Study) -> bool:
    """Return whether the study has an identified frontier with a finite optimum."""
    law = study.compute_law
    return law is not None and law.identified and find_optimum(law, law.C[1]) is not None


def find_optimum(law: ComputeLaw, C: float) -> Optimum | None:
    """Return the law's optimum at C FLOPs; None if it or its loss overflows a float."""
    try:
        at = law.optimum(C)
    except (ValueError, OverflowError):
        return None
    return at if all(math.isfinite(x) and x > 0 for x in (at.N, at.D, at.loss)) else None


def list_answers(study: Study) -> list[tuple[float, Optimum]]:
    """Return (multiple of the largest fitted budget, optimum) of each answer; empty without an answer."""
    law = study.compute_law
    if law is None or not has_answer(study):
        return []
    optima = [(times, find_optimum(law, times * law.C[1])) for times in FACTORS]
    return [(times, at) for times, at in optima if at is not None]


def describe_optimum(at: Optimum) -> str:
    """Return 'At 4.8e12 FLOPs train 190k parameters (150k to 240k) on 3.9M tokens; expect a loss of ...'"""
    size = format_with_interval(at.N, at.N_interval, format_count)
    loss = format_with_interval(at.loss, at.predictive, "{:.2f}".format)
    return (
        f"At {format_exponent(at.C)} FLOPs train {size} parameters on {format_count(at.D)} tokens; "
        f"expect a loss of {loss} nats per token."
    )


def list_frontier_doubts(study: Study) -> list[str]:
    """Return the sentences at the top of the page: the frontier is not identified, and the runs to add."""
    law = study.compute_law
    if law is None or has_answer(study):
        return []
    # several constants often share one reason, which is then stated once
    reasons = " ".join(dict.fromkeys(law.not_identified.values()))
    names = [f"{name} ({MEANING[name]})" for name in CONSTANTS if name in law.not_identified]
    constants = join_list(names) or "the constants"
    words = [
        f"Not identified: these runs do not determine {constants} of the compute-optimal frontier, so no "
        "N*, D* "
        f"and L* are given. {reasons}".strip()
    ]
    return [*words, *filter(None, [suggest_frontier_runs(study)])]


def list_frontier_cautions(study: Study) -> list[str]:
    """Return caveats about the answer, one sentence each."""
    law = study.compute_law
    if law is None:
        return []
    words, test = list(law.warnings), law.lack_of_fit
    if not test.get("passes", True):
        words.append(
            f"The form of the frontier {describe_frontier_misfit(law)}. Its intervals include that misfit "
            "as scatter."
        )
    if law.steepening:
        words.append(law.steepening)
    if study.blind is not None and blind_text.is_inside(study.blind) is False:
        words.append("The blind run was outside its interval: the intervals below may be too narrow.")
    # N* can be beyond the sizes although C is within LARGEST_STEP: the frontier is then an extrapolation in N
    # too
    outside = [at for _, at in list_answers(study) if not law.N[0] <= at.N <= law.N[1]]
    if outside:
        budgets = join_list([format_exponent(at.C) for at in outside])
        words.append(
            f"At {budgets} FLOPs the best N is outside the sizes trained, {format_count(law.N[0])} to "
            f"{format_count(law.N[1])}."
        )
    return words


def describe_frontier_misfit(law: ComputeLaw) -> str:
    """Return the result of the frontier's lack-of-fit test as one clause."""
    test = law.lack_of_fit
    verb = "passes" if test.get("passes", True) else "fails"
    numbers = {"noise": 100.0, "misfit": 100.0, "statistic": 1.0, "p_value": 1.0}
    values = {name: scale * float(test.get(name) or math.nan) for name, scale in numbers.items()}
    if not all(map(math.isfinite, values.values())):
        return f"{verb} its lack-of-fit test"
    return (
        f"{verb} its lack-of-fit test (F = {values['statistic']:.3g}, p = {values['p_value']:.2g}): runs "
        f"that differ only in their seed scatter by {values['noise']:.2f} %, the form is off by another "
        f"{values['misfit']:.2f} %"
    )


def suggest_frontier_runs(study: Study) -> str:
    """Return a sentence with the runs that would help to identify the frontier; empty if there are none."""
    law, rows = study.compute_law, select_frontier_points(study)
    runs = choose_runs_to_add(law, rows) if law is not None else []
    if not runs:
        return ""
    N, D = (np.array(values) for values in zip(*runs, strict=True))
    # [n] FLOPs by 6 N D times [n] seconds per FLOP; NaN where the runs give no speed, and then no cost is
    # printed
    trained = [make_timed_run(row, row.N, row.D) for row in rows]
    seconds = float((6.0 * N * D * seconds_per_flop(trained, N)).sum())
    cost = f"; about {format_duration(seconds)} of training at the speed of the runs so far"
    listed = "; ".join(f"N = {format_count(n)} on D = {format_count(d)} tokens" for n, d in runs)
    return (
        f"To identify it train {NUMBER_WORDS[len(runs)]} more {'run' if len(runs) == 1 else 'runs'}: {listed}"
        f"{cost if math.isfinite(seconds) else ''}."
    )


def choose_runs_to_add(law: ComputeLaw, rows: Sequence[RunPoint]) -> list[tuple[float, float]]:
    """Return (N, D) of at most MAX_RUNS runs that would identify the missing constants.

    At the largest and the smallest budget, a size beyond the smallest or largest size tried if that one had
    the lowest loss, because the best N is then outside the sizes. After that, sizes far too small for their
    budget, which determine alpha, and far too large, which determine beta. Both also bound the growth of N*.
    """
    if not rows:
        return []
    cells: list[tuple[float, float]] = []
    # ends alternate: a smaller and a larger size at the largest budget, then at the smallest
    ends: list[tuple[float, float]] = []
    groups = split_budgets(np.array([row.C for row in rows]))
    for indices in (groups[-1], groups[0]):
        group = [rows[i] for i in indices]
        sizes, C = [row.N for row in group], float(np.mean([row.C for row in group]))
        best = min(group, key=lambda row: row.loss).N
        # Example: sizes 1M to 16M at C, lowest loss at 16M: the cell (32M, C) is added, since the minimum is
        # not bracketed.
        ends += [(min(sizes) / 2, C), (2 * max(sizes), C)]
        cells += [ends[-2]] if best == min(sizes) else [ends[-1]] if best == max(sizes) else []
    (small_last, large_last), (small_first, large_first) = ends[:2], ends[2:]
    # small sizes at a large budget have little of the loss in B/D^beta, and the reverse
    if "alpha" in law.not_identified:
        cells.append(small_last)
    if "beta" in law.not_identified:
        cells.append(large_first)
    if not cells:
        cells = [small_first, large_last]
    tokens = [row.D for row in rows]
    low, high = TOKEN_SPAN[0] * min(tokens), TOKEN_SPAN[1] * max(tokens)
    # clipped, because the D of an extreme size can be far from the tokens of the existing runs
    # dict.fromkeys removes a cell that two rules chose, in order: bracketing first
    runs = [(N, float(np.clip(law.tokens_of(N, C), low, high))) for N, C in dict.fromkeys(cells)]
    return [run for run in runs if all(map(math.isfinite, run))][:MAX_RUNS]


def select_frontier_points(study: Study) -> list[RunPoint]:
    """Return the finished runs that the frontier was fitted on, with their N, D and C.

    These are the runs that the law lists, or without a list all runs of its budgets except the blind run.
    FLOPs and parameters are read from the columns whose range is nearest to the law's.
    """
    law = study.compute_law
    if law is None:
        return []
    rows = study.finished_rows(AUTOREGRESSIVE) or study.finished_rows()
    # a law lists names or identities of its runs
    if law.runs:
        rows = [row for row in rows if {row.run, row.identity} & set(law.runs)]
    else:
        rows = [row for row in rows if not blind_text.is_blind_run(study, row)]
    names = {letter: _find_nearest_column(rows, COLUMNS[letter], getattr(law, letter)) for letter in COLUMNS}
    points = []
    for row in rows:
        N, C = row.number(names["N"]), row.number(names["C"])
        # 1 %: runs have whole steps, so their FLOPs differ slightly from the law's range
        if N and C and law.C[0] / 1.01 <= C <= law.C[1] * 1.01:
            points.append(RunPoint(**vars(row), N=N, D=row.train_tokens, C=C))
    return points


def _find_nearest_column(rows: Sequence[FinishedRow], names: Sequence[str], ends: tuple[float, float]) -> str:
    """Return the column whose smallest and largest values are nearest to `ends`, by their ratio."""

    def distance(name: str) -> float:
        values = [value for row in rows if (value := row.number(name))]
        if not values:
            return math.inf
        # in logs, since N with and without embeddings differ by a factor that is largest for small models
        return abs(math.log(min(values) / ends[0])) + abs(math.log(max(values) / ends[1]))

    return min(names, key=distance)
