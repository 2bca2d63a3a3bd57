"""A few more runs for a law that is not identified, and what they cost at the speed of the runs so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.scaling import wording
from megatron.scaling.design import Designer, Runs
from megatron.scaling.law import PUBLISHED, Law
from megatron.scaling.table import Row

PRIOR = "Besiroglu et al. 2024"  # the law that is taken for true: the study's own is not known
NOISE = 0.005  # spread of a run's log loss, where the law does not say
N_RUNS = 3
SPENDING = 0.5  # of what the study has cost so far
TARGET = 10.0  # times the largest run: where the design is centred
SIZE_SPAN, TOKEN_SPAN = (0.5, 2.0), (0.5, 8.0)  # beyond the smallest and largest so far
N_GRID = 12
NUMBERS = ("no", "one", "two", "three", "four", "five")


@dataclass(frozen=True)
class Proposal:
    """Runs to add, and the seconds that they take one after another; NaN where no run was timed."""

    runs: Runs
    seconds: float

    def words(self) -> str:
        """'three more runs: N = 41k on D = 3.1M tokens; ...; about 12 min ...'"""
        cells = zip(self.runs.N, self.runs.D, strict=True)
        runs = "; ".join(f"N = {wording.count(n)} on D = {wording.count(d)} tokens" for n, d in cells)
        n = len(self.runs.N)
        cost = ""
        if np.isfinite(self.seconds):
            cost = f"; about {wording.duration(self.seconds)} of training at the speed of the runs so far"
        return (
            f"{NUMBERS[n]} more {'run' if n == 1 else 'runs'}: {runs}{cost} (tightest for the constants of "
            f"{PRIOR} within half of what the study has spent)"
        )


def propose_runs(law: Law | None, rows: Sequence[Row]) -> Proposal | None:
    """At most N_RUNS runs that tell most about all constants, beside those of `rows` (columns of table.csv).

    `law`, where there is one, gives the scatter of single runs. They are planned at published constants,
    since a plan from constants that are not known is a guess. None where a budget of half the study buys no
    run.
    """
    rows = [row for row in rows if row.get("N") and row.get("D")]
    if not rows:
        return None
    N, D = (np.array([row[letter] for row in rows], dtype=float) for letter in "ND")
    prior = Law(form="chinchilla", params=PUBLISHED[PRIOR], objective=0.0, huber_delta=1e-3, n_runs=240)
    done = Runs(N, D, D)
    noise = law.spread if law is not None and law.spread else NOISE
    designer = Designer(prior, TARGET * float(done.flops.max()), noise, done)
    # no more than the text holds, nor than was read where it was read again
    text = [row["D"] / row["epochs"] for row in rows if row.get("epochs")]
    top = min(TOKEN_SPAN[1] * D.max(), max(D.max(), *text)) if text else TOKEN_SPAN[1] * D.max()
    sizes = np.geomspace(SIZE_SPAN[0] * N.min(), SIZE_SPAN[1] * N.max(), N_GRID)
    tokens = np.geomspace(TOKEN_SPAN[0] * D.min(), top, N_GRID)
    n, d = (grid.ravel() for grid in np.meshgrid(sizes, tokens, indexing="ij"))
    try:
        runs = designer.choose(Runs(n, d, d), SPENDING * float(done.flops.sum()), N_RUNS, kind="D")
    except (ValueError, np.linalg.LinAlgError):
        return None
    return Proposal(runs, float((runs.flops * seconds_per_flop(rows, runs.N)).sum()))


def seconds_per_flop(rows: Sequence[Row], N: np.ndarray) -> np.ndarray:
    """Seconds for a FLOP of 6 N D at sizes N [n], by the runs of the nearest sizes; NaN without any.

    The time of a run that branched is of its own steps only, and says nothing here.
    """
    found: dict[float, list[float]] = {}
    for row in rows:
        if row.get("wall_s") and row.get("trunk") in (None, "", row.get("run")):
            found.setdefault(float(row["N"]), []).append(row["wall_s"] / (6.0 * row["N"] * row["D"]))
    if not found:
        return np.full(len(N), np.nan)
    sizes = np.array(sorted(found))
    rates = np.array([np.log(np.mean(found[size])) for size in sizes])
    return np.exp(np.interp(np.log(N), np.log(sizes), rates))


def rows_of_table(table: dict[str, list[str]], columns: dict[str, str], runs: Sequence[str]) -> list[Row]:
    """Rows for `propose_runs` of a table as read_table returns it: those of `runs`, all where it is empty."""
    names = {"N": columns.get("N", "n_params"), "D": columns.get("D", "train_tokens")}
    names |= {name: name for name in ("wall_s", "epochs")}
    found = []
    for i in range(len(next(iter(table.values()), []))):
        row: Row = {name: table[name][i] for name in ("run", "trunk") if name in table}
        for name, column in names.items():
            try:
                row[name] = float(table[column][i])
            except (KeyError, ValueError):
                row[name] = None
        if not runs or row.get("run") in runs:
            found.append(row)
    return found
