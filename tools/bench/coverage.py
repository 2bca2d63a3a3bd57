"""Measure how often the intervals of a fitted law contain the truth, and their width relative to an oracle's.

    OMP_NUM_THREADS=1 python tools/bench/coverage.py --json coverage.json
    OMP_NUM_THREADS=1 python tools/bench/coverage.py --simulations 100 --designs 40 trunks

Each simulation draws the runs of a design from a known law and fits them. It checks whether the 95 %
intervals of E, alpha, beta, the exponent a of N* ~ C^a and the mean loss at ten times the largest compute
contain the truth, and whether the predictive intervals of a new run, within the range and at ten times the
compute, contain that run.

Wide intervals would have a high coverage. So the tool also prints the score of an interval [l, u] for x at
level 1 - q, (u - l) + 2/q (l - x)+ + 2/q (x - u)+ (Gneiting and Raftery 2007, eq. 43), divided by an
oracle's: generalized least squares, linearized at the truth, with the exact covariance of the noise. 1.00 is
as good.

Of 500 replicates the outermost 12 are cut, and the interval ends are where 0.2 % more would be cut on
average: coverage is lower by that amount.
"""

import argparse
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import write_results

from megatron.cli import create_parser, positive_int, run_main
from megatron.laws.fit import fit_law
from megatron.laws.forms import chinchilla
from megatron.laws.frontier import optimal_frontier
from megatron.laws.law import Law

LEVEL = 0.95
# 97.5 % quantile of the normal distribution: 95 % are within Z standard errors
Z = 1.959964
TRUTH = {"E": 1.82, "A": 482.0, "B": 2085.0, "alpha": 0.348, "beta": 0.366}
# E = 0 is at the boundary, where the error of an estimate is one-sided: hard for an interval
NO_FLOOR = {"E": 0.0, "A": 12.0, "B": 40.0, "alpha": 0.12, "beta": 0.19}
LARGEST = 1e20  # FLOPs of the largest runs of every design
# from a fifth of the usual 20 tokens per parameter to five times as many
RATIOS = (4.0, 100.0)  # D/N of the runs
BEYOND = 10.0
QUANTITIES = ("E", "alpha", "beta", "a", "L at 10x", "new run", "new at 10x")


@dataclass(frozen=True)
class Design:
    """N, D [n], the noise of log L by its covariance [n, n], and the truth."""

    name: str
    N: np.ndarray
    D: np.ndarray
    covariance: np.ndarray
    truth: dict[str, float]
    new_sigma: Callable[[float], float]  # noise of a new run as a function of its compute
    groups: np.ndarray | None = None


def build_grid(n_runs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return N and D for budgets over a factor of 100 in compute, with five D/N each."""
    # rounded up: 12 runs have 3 budgets, the last with 2 of its 5 ratios
    n_budgets = -(-n_runs // 5)
    compute = np.repeat(np.geomspace(LARGEST / 100, LARGEST, n_budgets), 5)[:n_runs]
    ratio = np.tile(np.geomspace(*RATIOS, 5), n_budgets)[:n_runs]
    n = np.sqrt(compute / 6 / ratio)  # C = 6 N D and D = ratio N
    return n, n * ratio


def plain_design(n_runs: int, sigma: float, truth: dict[str, float] = TRUTH, name: str = "") -> Design:
    """Build a design of independent runs with equal noise."""
    n, d = build_grid(n_runs)
    name = name or f"{n_runs} runs, {100 * sigma:g} %"
    return Design(name, n, d, sigma**2 * np.eye(n_runs), truth, lambda compute: sigma)


def heteroscedastic_design() -> Design:
    """Build a design of 40 runs whose noise falls from 1 % to 0.2 % as compute grows a hundredfold."""
    n, d = build_grid(40)

    def sigma_at(compute: np.ndarray | float) -> np.ndarray:
        # share of the way from the smallest to the largest budget in log C; the noise is geometric in it
        share = np.clip(np.log(np.asarray(compute) / (LARGEST / 100)) / np.log(100), 0, 1)
        return 0.01 ** (1 - share) * 0.002**share

    return Design(
        "40, 1 to 0.2 %", n, d, np.diag(sigma_at(6 * n * d) ** 2), TRUTH, lambda c: float(sigma_at(c))
    )


def trunk_design() -> Design:
    """Build a design of 20 models with 10 checkpoints: 0.3 % shared noise per model, 0.1 % per checkpoint."""
    n = np.repeat(np.geomspace(1e7, 1e9, 20), 10)
    d = n * np.tile(np.geomspace(*RATIOS, 10), 20)
    groups = np.repeat(np.arange(20), 10)
    # covariance [200, 200]: block diagonal, checkpoints of one model share 0.3 % of noise
    shared = 0.003**2 * (groups[:, None] == groups)
    # a new run has both parts: (0.3 %)^2 + (0.1 %)^2
    sigma = float(np.hypot(0.003, 0.001))
    return Design("20 x 10 trunks", n, d, shared + 0.001**2 * np.eye(200), TRUTH, lambda c: sigma, groups)


def build_designs() -> dict[str, Design]:
    """Build all designs by their short names."""
    by_name = {
        f"{n}{tail}": plain_design(n, s) for n in (15, 20, 40, 80) for tail, s in (("", 0.003), ("-1%", 0.01))
    }
    by_name |= {"heteroscedastic": heteroscedastic_design(), "trunks": trunk_design()}
    return by_name | {f"E=0-{n}": plain_design(n, 0.003, NO_FLOOR, f"{n} runs, E = 0") for n in (15, 40)}


def score_interval(low: float, high: float, x: float) -> tuple[bool, float, float]:
    """Return (contains x, width, interval score) of one interval."""
    q = 1 - LEVEL
    # each unit by which x is outside costs 2 / q, so neither a wide nor an overconfident interval wins
    score = high - low + 2 / q * (max(low - x, 0.0) + max(x - high, 0.0))
    return low <= x <= high, high - low, score


def evaluate_functionals(
    params: dict[str, float], point: tuple[float, float], ahead: tuple[float, float]
) -> np.ndarray:
    """Return the values [7] in the order of QUANTITIES; losses in logs, at `point` and `ahead` (N, D)."""
    log_loss = [float(np.log(chinchilla(params, *at))) for at in (ahead, point, ahead)]
    # N* ~ C^a minimizes A N^-alpha + B D^-beta at C = 6 N D
    a = params["beta"] / (params["alpha"] + params["beta"])
    return np.array([params["E"], params["alpha"], params["beta"], a, *log_loss])


def differentiate_numerically(
    function: Callable[[dict[str, float]], np.ndarray], truth: dict[str, float]
) -> np.ndarray:
    """Return derivatives [k, p] by the law's constants: central differences, one-sided at a constant of 0."""
    columns = []
    for name, value in truth.items():
        # relative to the constant, as A = 482 and alpha = 0.348
        # differ by a factor of 1000; E = 0 has no left side
        step = 1e-5 * (value or 1.0)
        ends = [function({**truth, name: value + sign * step}) for sign in ((1, -1) if value else (1, 0))]
        columns.append((ends[0] - ends[1]) / (2 * step if value else step))
    return np.array(columns).T


def simulate_design(design: Design, seed: int, n_bootstrap: int) -> np.ndarray:
    """Simulate one study; return (inside, width, score) of ours and of the oracle by quantity [7, 2, 3]."""
    # depends on the seed and the size alone, so simulations may run in any order and process
    rng = np.random.default_rng([seed, len(design.N)])
    truth = design.truth
    # L z with covariance L L' has the covariance of the design: [n]
    noise = np.linalg.cholesky(design.covariance) @ rng.standard_normal(len(design.N))
    loss = chinchilla(truth, design.N, design.D) * np.exp(noise)
    # a new run within the range: log-uniform in compute and in D/N; N = (C / 6r)^(1/2), D = (C r / 6)^(1/2)
    compute = float(np.exp(rng.uniform(np.log(LARGEST / 100), np.log(LARGEST))))
    ratio = float(np.exp(rng.uniform(*np.log(RATIOS))))
    point = (np.sqrt(compute / 6 / ratio), np.sqrt(compute / 6 * ratio))
    true_law = Law(form="chinchilla", params=truth, objective=0.0, huber_delta=1e-3, n_runs=0)
    best = optimal_frontier(true_law, BEYOND * LARGEST)
    ahead = (float(best.N[0]), float(best.D[0]))
    exact = evaluate_functionals(truth, point, ahead)
    sigmas = np.array([0, 0, 0, 0, 0, design.new_sigma(compute), design.new_sigma(BEYOND * LARGEST)])
    # only the two new runs have noise of their own; the other quantities are exact
    exact = exact + sigmas * rng.standard_normal(7)

    law = fit_law(design.N, design.D, loss, n_bootstrap=n_bootstrap, seed=seed, groups=design.groups)
    intervals = [law.interval["params"][name] for name in ("E", "alpha", "beta")]
    intervals.append(law.interval["derived"]["a_exponent"])
    # in the order of QUANTITIES, as intervals of log L
    for at, kind in ((ahead, "confidence"), (point, "predictive"), (ahead, "predictive")):
        intervals.append([float(np.log(end)) for end in law.predict(*at, level=LEVEL, kind=kind)[1:]])

    # oracle: with design matrix X (slopes) and covariance V, the constants move by
    # (X' V^-1 X)^-1 X' V^-1 noise, and their covariance is (X' V^-1 X)^-1
    # shapes: slopes [n, 5], weighted = V^-1 X [n, 5], spread [5, 5], towards [7, 5]
    slopes = differentiate_numerically(lambda params: np.log(chinchilla(params, design.N, design.D)), truth)
    weighted = np.linalg.solve(design.covariance, slopes)
    spread = np.linalg.inv(slopes.T @ weighted)
    towards = differentiate_numerically(lambda params: evaluate_functionals(params, point, ahead), truth)
    moved = towards @ spread @ weighted.T @ noise
    centre = evaluate_functionals(truth, point, ahead) + moved
    # variance of quantity k: t_k' (X' V^-1 X)^-1 t_k, plus the noise of a new run
    half = Z * np.sqrt(np.einsum("kp,pq,kq->k", towards, spread, towards) + sigmas**2)
    low, high = centre - half, centre + half
    low[0] = max(low[0], 0.0)  # the oracle also uses E >= 0
    high[0] = max(high[0], low[0])
    return np.array(
        [
            [score_interval(*ours, x), score_interval(lo, hi, x)]
            for ours, lo, hi, x in zip(intervals, low, high, exact, strict=True)
        ]
    )


def measure_coverage(
    name: str, seeds: range, n_bootstrap: int, n_workers: int
) -> list[list[list[list[float]]]]:
    """Simulate one design [simulations, 7, 2, 3]."""
    arguments = ([name] * len(seeds), seeds, [n_bootstrap] * len(seeds))
    with ProcessPoolExecutor(n_workers) as pool:
        # about four chunks per worker: few messages, and the last chunks are short
        chunk = max(1, len(seeds) // (4 * n_workers))
        return [simulation.tolist() for simulation in pool.map(_simulate_named, *arguments, chunksize=chunk)]


def _simulate_named(name: str, seed: int, n_bootstrap: int) -> np.ndarray:
    return simulate_design(build_designs()[name], seed, n_bootstrap)


def summarise_results(results: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return coverage, median width, score over the oracle's, and the oracle's coverage, by quantity."""
    # [simulations, 7 quantities, ours or oracle, (inside, width, score)]
    scores = np.array(results)
    ours, oracle = scores[:, :, 0], scores[:, :, 1]
    return {
        quantity: {
            "coverage": float(ours[:, i, 0].mean()),
            "median_width": float(np.median(ours[:, i, 1])),
            "width_ratio": float(np.median(ours[:, i, 1]) / np.median(oracle[:, i, 1])),
            "score_ratio": float(ours[:, i, 2].mean() / oracle[:, i, 2].mean()),
            "oracle_coverage": float(oracle[:, i, 0].mean()),
        }
        for i, quantity in enumerate(QUANTITIES)
    }


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    add = parser.add_argument_group("simulations").add_argument
    names = list(build_designs())
    shown = ", ".join(names).replace("%", "%%")
    add("--designs", nargs="+", choices=names, metavar="NAME", help=f"designs: {shown}; default: all")
    add("--simulations", type=positive_int, default=500, metavar="N", help="simulations of each design")
    add("--n-bootstrap", type=positive_int, default=500, metavar="R", help="bootstrap replicates of each fit")
    add("--workers", type=positive_int, default=1, metavar="N", help="worker processes")
    add("--json", type=Path, metavar="FILE", help="also write the table to this file")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate the designs, and print one row for each."""
    args = build_parser().parse_args(argv)
    results = {}
    print(f"{args.simulations} simulations of each design, {args.n_bootstrap} replicates; nominal 95 %")
    print("a cell: coverage, median width, interval score over the oracle's")
    print(f"{'':<16}" + "".join(f"{name:>22}" for name in QUANTITIES))
    for name in args.designs or build_designs():
        rows = measure_coverage(name, range(args.simulations), args.n_bootstrap, args.workers)
        results[name] = summarise_results(rows)
        cells = [
            f"{summary['coverage']:.3f} {summary['median_width']:8.3g} {summary['score_ratio']:5.2f}"
            for summary in results[name].values()
        ]
        print(f"{build_designs()[name].name:<16}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_main(main)
