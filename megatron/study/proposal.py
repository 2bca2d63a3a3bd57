"""Proposal of a few more runs for a law that is not identified, with their cost at the measured speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from megatron.laws.design import Designer, RunSet
from megatron.laws.law import PUBLISHED, Law
from megatron.study.format import format_count, format_duration

PRIOR = "Besiroglu et al. 2024"  # law at which runs are planned, since the law of the study is not identified
NOISE = 0.005  # standard deviation of the log loss of a run, if the law has none
N_RUNS = 3
SPENDING = 0.5  # budget, as a share of the FLOPs of the study so far
TARGET = 10.0  # compute of the target of the design, times the largest run
SIZE_SPAN, TOKEN_SPAN = (0.5, 2.0), (0.5, 8.0)  # factors on the smallest and the largest so far
N_GRID = 12
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Proposal:
    """Runs to add, and the seconds to train them one after another; NaN if no run was timed."""

    runs: RunSet
    seconds: float

    def describe(self) -> str:
        """Return a description such as "three more runs: N = 41k on D = 3.1M tokens; about 12 min ..."."""
        cells = zip(self.runs.N, self.runs.D, strict=True)
        runs = "; ".join(f"N = {format_count(n)} on D = {format_count(d)} tokens" for n, d in cells)
        n = len(self.runs.N)
        cost = ""
        if np.isfinite(self.seconds):
            cost = f"; about {format_duration(self.seconds)} of training at the speed of the runs so far"
        return (
            f"{NUMBER_WORDS[n]} more {'run' if n == 1 else 'runs'}: {runs}{cost} (optimal for the constants "
            f"of {PRIOR}, within half of the compute of the study)"
        )


@dataclass(frozen=True)
class TimedRun:
    """Size and cost of a run: N parameters, D tokens read in `epochs`, in `wall_s` seconds; None if unknown.

    is_branch: its first steps, and their time, are those of another run
    """

    N: float
    D: float
    epochs: float | None = None
    wall_s: float | None = None
    is_branch: bool = False


def propose_runs(law: Law | None, trained: Sequence[TimedRun]) -> Proposal | None:
    """Propose up to N_RUNS runs with the most information on all constants, beside those that were trained.

    `law`, if given, provides the scatter of single runs. The design is at
    published constants, since those of the study are not identified. Returns
    None if half of the compute of the study is less than the cost of any run.
    """
    trained = [run for run in trained if run.N and run.D]
    if not trained:
        return None
    N, D = np.array([run.N for run in trained], float), np.array([run.D for run in trained], float)
    prior = Law(form="chinchilla", params=PUBLISHED[PRIOR], objective=0.0, huber_delta=1e-3, n_runs=240)
    done = RunSet(N, D, D)
    noise = law.spread if law is not None and law.spread else NOISE
    designer = Designer(prior, TARGET * float(done.flops.max()), noise, done)
    # at most the tokens of the text (D / epochs), or the largest D where text
    # was repeated
    text = [run.D / run.epochs for run in trained if run.epochs]
    top = min(TOKEN_SPAN[1] * D.max(), max(D.max(), *text)) if text else TOKEN_SPAN[1] * D.max()
    # 12 x 12 candidates, each as if its text were unique (U = D)
    sizes = np.geomspace(SIZE_SPAN[0] * N.min(), SIZE_SPAN[1] * N.max(), N_GRID)
    tokens = np.geomspace(TOKEN_SPAN[0] * D.min(), top, N_GRID)
    n, d = (grid.ravel() for grid in np.meshgrid(sizes, tokens, indexing="ij"))
    try:
        runs = designer.choose(RunSet(n, d, d), SPENDING * float(done.flops.sum()), N_RUNS, kind="D")
    except (ValueError, np.linalg.LinAlgError):
        return None
    return Proposal(runs, float((runs.flops * seconds_per_flop(trained, runs.N)).sum()))


def seconds_per_flop(trained: Sequence[TimedRun], N: np.ndarray) -> np.ndarray:
    """Return seconds per FLOP of 6 N D at sizes N [n], interpolated between timed sizes; NaN without any.

    Branched runs are skipped: their time includes that of the trunk's steps,
    which the trunk has too.
    """
    rates_of_size: dict[float, list[float]] = {}
    for run in trained:
        if run.wall_s and not run.is_branch:
            rates_of_size.setdefault(float(run.N), []).append(run.wall_s / (6.0 * run.N * run.D))
    if not rates_of_size:
        return np.full(len(N), np.nan)
    sizes = np.array(sorted(rates_of_size))
    rates = np.array([np.log(np.mean(rates_of_size[size])) for size in sizes])
    return np.exp(np.interp(np.log(N), np.log(sizes), rates))


def read_timed_runs(table: pd.DataFrame, N: str = "n_params", D: str = "train_tokens") -> list[TimedRun]:
    """Return the cost of the rows of a table that have N and D, in columns of these names."""
    names = [N, D, "epochs", "wall_s"]
    numbers = table.reindex(columns=names).apply(pd.to_numeric, errors="coerce")
    texts = table.reindex(columns=["run", "trunk"])
    is_branch = texts["trunk"].notna() & (texts["trunk"] != texts["run"])
    trained = []
    for (n, d, epochs, wall_s), branch in zip(numbers.to_numpy(float), is_branch, strict=True):
        if n > 0 and d > 0:
            # NaN is unknown
            values = [None if math.isnan(value) else value for value in (epochs, wall_s)]
            trained.append(TimedRun(n, d, values[0], values[1], bool(branch)))
    return trained
