"""The compute-optimal frontier in words: what to train at the next budgets, or why that is not known."""

import math
from collections.abc import Sequence

import numpy as np

from megatron.scaling import blind_words, wording
from megatron.scaling.compute_law import ComputeLaw, Optimum
from megatron.scaling.frontier_form import CONSTANTS
from megatron.scaling.isoflop import budgets
from megatron.scaling.proposal import NUMBERS, seconds_per_flop
from megatron.scaling.study import AUTOREGRESSIVE, Study
from megatron.scaling.table import Row

FACTORS = (1.0, 4.0, 10.0)  # times the largest fitted budget: the answers of the page
NEXT = 4.0
MOST_RUNS = 3
MEANING = {
    "log_size": "the best N",
    "size_exponent": "its growth with C",
    "alpha": "the cost of too small a model",
    "beta": "the cost of too few tokens",
}
TOKEN_SPAN = (0.5, 4.0)  # times the fewest and the most tokens so far: what a proposal may ask for
COLUMNS = {"N": ("n_params", "n_non_embedding"), "C": ("train_flops", "flops_6nd")}


def is_answer(study: Study) -> bool:
    """Whether the study has a frontier whose optimum may be quoted."""
    law = study.compute_law
    return law is not None and law.identified and optimum_at(law, law.C[1]) is not None


def optimum_at(law: ComputeLaw, C: float) -> Optimum | None:
    """The law's optimum at C FLOPs; None where a float cannot hold it or its loss."""
    try:
        at = law.optimum(C)
    except (ValueError, OverflowError):
        return None
    return at if all(math.isfinite(x) and x > 0 for x in (at.N, at.D, at.loss)) else None


def answers(study: Study) -> list[tuple[float, Optimum]]:
    """(times the largest fitted budget, optimum) of the page's budgets; empty without an answer."""
    if not is_answer(study):
        return []
    found = [(times, optimum_at(study.compute_law, times * study.compute_law.C[1])) for times in FACTORS]
    return [(times, at) for times, at in found if at is not None]


def sentence(at: Optimum) -> str:
    """'At 4.8e12 FLOPs train 190k parameters (150k to 240k) on 3.9M tokens; expect a loss of ...'"""
    size = wording.with_interval(at.N, at.N_interval, wording.count)
    loss = wording.with_interval(at.loss, at.predictive, "{:.2f}".format)
    return (
        f"At {wording.exponent(at.C)} FLOPs train {size} parameters on {wording.count(at.D)} tokens; "
        f"expect a loss of {loss} nats per token."
    )


def doubts(study: Study) -> list[str]:
    """Sentences that come before anything else: the frontier is not identified, and the runs to add."""
    law = study.compute_law
    if law is None or is_answer(study):
        return []
    reasons = " ".join(dict.fromkeys(law.not_identified.values()))
    names = [f"{name} ({MEANING[name]})" for name in CONSTANTS if name in law.not_identified]
    constants = wording.listed(names) or "the constants"
    words = [
        f"Not identified: these runs do not hold {constants} of the compute-optimal frontier, so no N*, D* "
        f"and L* are given. {reasons}".strip()
    ]
    return [*words, *filter(None, [to_do(study)])]


def cautions(study: Study) -> list[str]:
    """What a reader of the answer should know of it, one sentence each."""
    law, words = study.compute_law, []
    test = law.lack_of_fit
    if not test.get("passes", True):
        words.append(
            f"The form of the frontier {misfit_words(law)}. Its intervals count that misfit as scatter."
        )
    if law.steepening:
        words.append(law.steepening)
    if study.blind is not None and blind_words.is_inside(study.blind) is False:
        words.append("The blind run was outside of its interval: take the intervals below as too narrow.")
    outside = [at for _, at in answers(study) if not law.N[0] <= at.N <= law.N[1]]
    if outside:
        budgets = wording.listed([wording.exponent(at.C) for at in outside])
        words.append(
            f"At {budgets} FLOPs the best N is outside of the sizes trained, {wording.count(law.N[0])} to "
            f"{wording.count(law.N[1])}."
        )
    return words


def misfit_words(law: ComputeLaw) -> str:
    """The frontier's lack-of-fit test in one clause."""
    test = law.lack_of_fit
    verb = "passes" if test.get("passes", True) else "fails"
    numbers = {"noise": 100.0, "misfit": 100.0, "statistic": 1.0, "p_value": 1.0}
    values = {name: scale * float(test.get(name) or math.nan) for name, scale in numbers.items()}
    if not all(map(math.isfinite, values.values())):
        return f"{verb} its lack-of-fit test"
    return (
        f"{verb} its lack-of-fit test (F = {values['statistic']:.3g}, p = {values['p_value']:.2g}): runs "
        f"that differ in their seed alone scatter by {values['noise']:.2f} %, the form is off by another "
        f"{values['misfit']:.2f} %"
    )


def to_do(study: Study) -> str:
    """The runs that would help to identify the frontier; empty where none can be named."""
    law, rows = study.compute_law, frontier_points(study)
    runs = runs_to_add(law, rows)
    if not runs:
        return ""
    N, D = (np.array(values) for values in zip(*runs, strict=True))
    seconds = float((6.0 * N * D * seconds_per_flop(rows, N)).sum())
    cost = f"; about {wording.duration(seconds)} of training at the speed of the runs so far"
    listed = "; ".join(f"N = {wording.count(n)} on D = {wording.count(d)} tokens" for n, d in runs)
    return (
        f"To identify it train {NUMBERS[len(runs)]} more {'run' if len(runs) == 1 else 'runs'}: {listed}"
        f"{cost if math.isfinite(seconds) else ''}."
    )


def runs_to_add(law: ComputeLaw, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(N, D) of at most MOST_RUNS runs that show what is not identified.

    At the largest and the smallest budget: a size beyond the smallest or largest tried where that had the
    lowest loss, for there the best N is outside. Then sizes far too small for their budget, which show alpha,
    and far too large, which show beta; both also bound the growth of N*.
    """
    if not rows:
        return []
    cells: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    groups = budgets(np.array([row["C"] for row in rows]))
    for indices in (groups[-1], groups[0]):
        own = [rows[i] for i in indices]
        sizes, C = [row["N"] for row in own], float(np.mean([row["C"] for row in own]))
        best = min(own, key=lambda row: row["loss"])["N"]
        ends += [(min(sizes) / 2, C), (2 * max(sizes), C)]
        cells += [ends[-2]] if best == min(sizes) else [ends[-1]] if best == max(sizes) else []
    (small_last, large_last), (small_first, large_first) = ends[:2], ends[2:]
    if "alpha" in law.not_identified:
        cells.append(small_last)
    if "beta" in law.not_identified:
        cells.append(large_first)
    if not cells:
        cells = [small_first, large_last]
    tokens = [row["D"] for row in rows]
    low, high = TOKEN_SPAN[0] * min(tokens), TOKEN_SPAN[1] * max(tokens)
    runs = [(N, float(np.clip(law.tokens_of(N, C), low, high))) for N, C in dict.fromkeys(cells)]
    return [run for run in runs if all(map(math.isfinite, run))][:MOST_RUNS]


def frontier_points(study: Study) -> list[Row]:
    """The finished runs that the frontier was fitted on, with its N, C and D as `N`, `C` and `D`.

    Those that the law lists, else all of its budgets but the blind run. FLOPs and parameters are read from
    the columns whose range is nearest to that of the law.
    """
    law = study.compute_law
    if law is None:
        return []
    rows = [row for row in study.done(AUTOREGRESSIVE) or study.done() if row["train_tokens"]]
    if law.runs:
        rows = [row for row in rows if {row["run"], row["identity"]} & set(law.runs)]
    else:
        rows = [row for row in rows if not blind_words.is_blind_run(study, row)]
    names = {letter: _nearest_column(rows, COLUMNS[letter], getattr(law, letter)) for letter in COLUMNS}
    rows = [
        row | {letter: row[name] for letter, name in names.items()} | {"D": row["train_tokens"]}
        for row in rows
        if all(row.get(name) for name in names.values())
    ]
    return [row for row in rows if law.C[0] / 1.01 <= row["C"] <= law.C[1] * 1.01]


def _nearest_column(rows: Sequence[Row], names: Sequence[str], ends: tuple[float, float]) -> str:
    """The column whose smallest and largest value are nearest to `ends`, by the ratio."""

    def distance(name: str) -> float:
        values = [row[name] for row in rows if row.get(name)]
        if not values:
            return math.inf
        return abs(math.log(min(values) / ends[0])) + abs(math.log(max(values) / ends[1]))

    return min(names, key=distance)
