"""Benchmark the fit of a law: ours against scipy's L-BFGS from a grid of starts, on the same runs.

    OMP_NUM_THREADS=1 python tools/bench/fit.py
    OMP_NUM_THREADS=1 python tools/bench/fit.py table.csv --starts 150

The other side is the method of the Chinchilla paper and of its replication (arXiv 2404.10102): minimise the
sum of Huber terms in (log A, log B, log E, alpha, beta) with L-BFGS from 4,500 starts. `--starts` uses fewer,
evenly spaced starts and scales their time to 4,500. Without a table the runs are drawn from a known law.
Times are CPU times of one thread.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from harness import add_options, write_results
from scipy.optimize import minimize
from scipy.special import logsumexp

from megatron.cli import create_parser, positive_int, run_main
from megatron.laws.fit import fit_law

# starts of (log A, log B, log E, alpha, beta): 6 x 6 x 5 x 5 x 5 = 4,500
EXPONENTS = np.arange(0, 2.5, 0.5)
GRID = (range(0, 30, 5), range(0, 30, 5), np.arange(-1, 1.5, 0.5), EXPONENTS, EXPONENTS)
N_STARTS = 4500
DELTA = 1e-3


def draw_runs(n_runs: int = 240) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw runs over a wide range of N and D with 0.5 % of noise."""
    rng = np.random.default_rng(0)
    n = np.exp(rng.uniform(np.log(5e7), np.log(1.6e10), n_runs))
    # log-uniform, and independent of N: both terms of the law are identified
    d = np.exp(rng.uniform(np.log(3e8), np.log(1e12), n_runs))
    loss = 1.82 + 480 / n**0.347 + 2140 / d**0.367
    return n, d, loss * np.exp(0.005 * rng.standard_normal(n_runs))


def minimise_from_grid(n: np.ndarray, d: np.ndarray, loss: np.ndarray, starts: int) -> tuple[float, float]:
    """Return (lowest objective, CPU seconds) of scipy's L-BFGS-B with exact gradient from `starts` points."""
    x, y, z = np.log(n), np.log(d), np.log(loss)

    def huber_sum(theta: np.ndarray) -> tuple[float, np.ndarray]:
        a, b, e, alpha, beta = theta
        # [3, n]: logs of the three terms of L; logsumexp stays finite where a line search steps far away
        terms = np.stack([a - alpha * x, b - beta * y, np.full_like(x, e)])
        # log L = logsumexp(a - alpha log N, b - beta log D, e), with A = exp(a), B = exp(b), E = exp(e)
        fitted = logsumexp(terms, axis=0)
        share = np.exp(terms - fitted)  # d log L / d term, [3, n]
        r = z - fitted
        # Huber: r^2 / 2 below DELTA, DELTA (|r| - DELTA / 2) above it
        inside = np.minimum(np.abs(r), DELTA)
        slope = -np.clip(r, -DELTA, DELTA)
        # chain rule: d log L / d alpha = -log N share_A, and d log L / d a = share_A, with a = log A
        of_a, of_b = slope * share[0], slope * share[1]
        gradient = [of_a.sum(), of_b.sum(), (slope * share[2]).sum(), -(of_a * x).sum(), -(of_b * y).sum()]
        return float((inside * (np.abs(r) - inside / 2)).sum()), np.array(gradient)

    # evenly spaced in the product, so that fewer starts still cover the whole grid
    every = list(itertools.product(*GRID))
    chosen = [every[i] for i in np.linspace(0, len(every) - 1, starts).astype(int)]
    begin = time.process_time()
    best = min(minimize(huber_sum, start, jac=True, method="L-BFGS-B").fun for start in chosen)
    return best, time.process_time() - begin


def time_fit(**options: Any) -> float:
    """Return the CPU seconds of one fit_law. Wall time would include the load of other processes."""
    begin = time.process_time()
    fit_law(**options)
    return time.process_time() - begin


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument("table", type=Path, nargs="?", metavar="TABLE.csv", help="default: synthetic runs")
    add = parser.add_argument_group("runs").add_argument
    columns = ["n_params", "train_tokens", "loss"]
    add("--columns", nargs=3, default=columns, metavar=("N", "D", "L"), help="columns of the table")
    add("--starts", type=positive_int, default=N_STARTS, metavar="N", help="starts of the other side")
    add_options(parser, repeat=9)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Time both sides, and print the ratio."""
    args = build_parser().parse_args(argv)
    if args.table is None:
        n, d, loss = draw_runs()
    else:
        runs = pd.read_csv(args.table)
        n, d, loss = (runs[name].to_numpy(float) for name in args.columns)
    runs_of = dict(zip("NDL", (n, d, loss), strict=True))
    law = fit_law(n, d, loss, n_bootstrap=0)
    ours_s = statistics.median(time_fit(n_bootstrap=0, **runs_of) for _ in range(args.repeat))
    bootstrap_s = statistics.median(time_fit(n_bootstrap=1000, **runs_of) for _ in range(3)) - ours_s
    print(f"ours       {len(n)} runs: {ours_s * 1e3:.1f} ms, objective {law.objective:.12g}")
    print(f"           1,000 bootstrap replicates: {bootstrap_s:.2f} s")
    results = {"fit": ours_s, "1,000 replicates": bootstrap_s}
    objective, starts_s = minimise_from_grid(n, d, loss, args.starts)
    # a sample of the starts: the time is in proportion to their number
    whole_s = starts_s * N_STARTS / args.starts
    note = "" if args.starts == N_STARTS else f" ({args.starts} starts took {starts_s:.1f} s)"
    print(f"L-BFGS     {N_STARTS} starts: {whole_s:.1f} s{note}, objective {objective:.12g}")
    print(f"ratio      {whole_s / ours_s:.0f} times the time, objective {objective / law.objective - 1:+.1e}")
    write_results(args.json, results | {"L-BFGS": whole_s})
    return 0


if __name__ == "__main__":
    run_main(main)
