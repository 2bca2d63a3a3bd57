"""Measure the extrapolation from published sets of runs: hold out and predict the runs with the most compute.

    OMP_NUM_THREADS=1 python tools/bench/extrapolate.py
    SCALING_LAWS=laws OMP_NUM_THREADS=1 python tools/bench/extrapolate.py --share 0.2

For each set the tenth of the runs with the most compute is held out. Chinchilla's form, fitted to the other
runs, predicts them: plain, and with the error of extrapolation that the other runs show (holdout.py). The
tool prints the share inside the 95 % predictive interval, the mean absolute error, and the median half-width
of the interval. Sets are read from the folder SCALING_LAWS, by default ../shared/laws; a set whose file is
missing is skipped.
"""

import argparse
import csv
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from harness import write_results

from megatron.cli import create_parser, positive_int, run_main
from megatron.laws.holdout import HoldoutScore, extrapolate_law, select_largest

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "laws"
CORPORA = {"c4_original": "C4", "rpj": "RedPajama", "rw_original": "RefinedWeb"}
TEXTS = {
    "loss_c4_val": "C4",
    "loss_openlm": "OpenLM",
    "loss_paloma_redpajama": "RedPajama",
    "loss_paloma_falcon-refinedweb": "RefinedWeb",
}


@dataclass(frozen=True)
class RunSet:
    """N, D and L of one published set, each [n]."""

    name: str
    N: np.ndarray
    D: np.ndarray
    L: np.ndarray


def read_columns(path: Path, *names: str) -> list[np.ndarray]:
    """Read columns as numbers, NaN for an empty cell."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [np.array([float(row[name] or "nan") for row in rows]) for name in names]


def read_chinchilla(folder: Path) -> Iterator[RunSet]:
    """Read the 245 runs extracted from a figure of Hoffmann et al., and the 240 that Besiroglu et al. fit."""
    path = folder / "chinchilla_epoch" / "svg_extracted_data.csv"
    # the published data have FLOPs instead of tokens: D = C / 6N
    N, C, L = read_columns(path, "Model Size", "Training FLOP", "loss")
    below = np.sort(L)[-5] > L  # Besiroglu et al. drop the five runs of highest loss
    yield RunSet("Chinchilla, 245 runs", N, C / (6 * N), L)
    yield RunSet("Chinchilla, 240 runs", *(v[below] for v in (N, C / (6 * N), L)))


def read_datablations(folder: Path) -> Iterator[RunSet]:
    """Read the runs of Muennighoff et al.: all, those that their fit uses, and those without repetition."""
    for label, name in (("182 runs", "datablations_182.csv"), ("all runs", "datablations_all.csv")):
        path = folder / "datablations" / name
        N, D, U, L = read_columns(path, "params", "tokens", "unique_tokens", "val_loss")
        yield RunSet(f"Data-constrained, {label}", N, D, L)
        once = D <= U * 1.001  # at most one epoch, with a tolerance of 0.1 %
        yield RunSet(f"Data-constrained, {label}, one epoch", N[once], D[once], L[once])


def read_gadre(folder: Path) -> Iterator[RunSet]:
    """Read the runs of Gadre et al. by training corpus and held-out text."""
    path = folder / "gadre_openlm" / "gadre_openlm_104.csv"
    with path.open(encoding="utf-8") as file:
        corpus = np.array([row["dataset_name"] for row in csv.DictReader(file)])
    N, D, *losses = read_columns(path, "N", "D", *TEXTS)
    for key, name in CORPORA.items():
        for text, L in zip(TEXTS.values(), losses, strict=True):
            # not every run was scored on every text: an empty cell is NaN
            rows = (corpus == key) & np.isfinite(L)
            yield RunSet(f"Over-training, {name} on {text}", N[rows], D[rows], L[rows])


READERS: tuple[Callable[[Path], Iterator[RunSet]], ...] = (read_chinchilla, read_datablations, read_gadre)


def read_sets(folder: Path) -> Iterator[RunSet]:
    """Yield all sets whose files exist; print a line for each missing file."""
    for reader in READERS:
        try:
            yield from reader(folder)
        except FileNotFoundError as error:
            print(f"skipped: {error.filename}: no such file; set the folder with SCALING_LAWS")


def extrapolate_runs(runs: RunSet, share: float, n_bootstrap: int) -> dict[str, HoldoutScore]:
    """Return the scores of each method on the held-out runs."""
    # by compute, as in a study: the law is fitted to the small runs and must predict the large ones
    is_out = select_largest(runs.N, runs.D, max(1, round(share * len(runs.N))))
    inner, (N, D, L) = ([v[rows] for v in (runs.N, runs.D, runs.L)] for rows in (~is_out, is_out))
    law = extrapolate_law(*inner, n_bootstrap=n_bootstrap)
    laws = {"plain": replace(law, extrapolation={}), "extrapolated": law}
    return {name: HoldoutScore(*law.predict(N, D), L) for name, law in laws.items()}


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("runs and fits").add_argument
    add("--share", type=float, default=0.1, metavar="SHARE", help="share of held-out runs")
    add("--n-bootstrap", type=positive_int, default=300, metavar="R", help="bootstrap replicates of each fit")
    add("--sets", metavar="WORDS", default="", help="only sets whose name contains these words")
    add("--json", type=Path, metavar="FILE", help="also write the table to this file")
    return parser


def format_row(name: str, n_runs: int, n_out: int, cells: dict[str, tuple[float, float, float]]) -> str:
    """Format one line: share inside, mean absolute error in %, median half-width in % of each method."""
    parts = [f"{inside:7.2f}{error:8.2f}{half:8.2f}" for inside, error, half in cells.values()]
    return f"{name:<42}{n_runs:>5}{n_out:>5}" + "  ".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict the held-out runs of each set, and print one row per set."""
    args = build_parser().parse_args(argv)
    folder = Path(os.environ.get("SCALING_LAWS", FOLDER))
    print("inside the 95 % predictive interval, mean absolute error (%), median half-width (%)")
    print(f"{'':<42}{'runs':>5}{'out':>5}{'plain chinchilla':>23}{'extrapolated':>25}")
    rows, table = [], {}
    for runs in read_sets(folder):
        if args.sets not in runs.name:
            continue
        # cells[method] = (inside [n], |error| in % [n], half-width in % [n])
        scores = extrapolate_runs(runs, args.share, args.n_bootstrap)
        cells = {}
        for name, scored in scores.items():
            inside = (scored.low <= scored.measured) & (scored.measured <= scored.high)
            # half the width of the interval of log L, in %
            half = 50 * np.log(scored.high / scored.low)
            cells[name] = (inside, 100 * np.abs(scored.error), half)
        means = {name: (v[0].mean(), v[1].mean(), np.median(v[2])) for name, v in cells.items()}
        rows.append(cells)
        n_out = len(next(iter(cells.values()))[0])
        print(format_row(runs.name, len(runs.N), n_out, means), flush=True)
        table[runs.name] = {name: [float(x) for x in v] for name, v in means.items()}
    if rows:
        methods = list(rows[0])
        # Two means: over sets, where a set of 20 runs counts
        # as much as one of 240, and over all held-out runs.
        by_set = {
            m: tuple(np.mean([(r[m][0].mean(), r[m][1].mean(), np.median(r[m][2])) for r in rows], axis=0))
            for m in methods
        }
        pooled = {m: [np.concatenate([r[m][i] for r in rows]) for i in range(3)] for m in methods}
        by_run = {m: (v[0].mean(), v[1].mean(), np.median(v[2])) for m, v in pooled.items()}
        print(format_row(f"mean of {len(rows)} sets", 0, 0, by_set))
        print(format_row("all runs held out", 0, len(pooled[methods[0]][0]), by_run))
    write_results(args.json, table)
    return 0


if __name__ == "__main__":
    run_main(main)
