"""Find the compute above which one objective beats another on the same unique text, from their two laws.

python tools/find_crossover.py law_autoregressive.json law_masked_diffusion.json --unique 1e8 1e9 1e10
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megatron.command import create_parser, report_error, run_main
from megatron.laws.crossover import crossover
from megatron.laws.law import Law


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__)
    parser.add_argument(
        "first", type=Path, metavar="FIRST.json", help="law of the objective that is better at low compute"
    )
    parser.add_argument("second", type=Path, metavar="SECOND.json", help="law of the other objective")
    parser.add_argument(
        "--unique", type=float, nargs="+", default=[1e7, 1e8, 1e9, 1e10], metavar="TOKENS",
        help="amounts of unique text",
    )  # fmt: skip
    parser.add_argument(
        "--replicates",
        type=int,
        metavar="N",
        default=50,
        help="pairs of bootstrap replicates for the interval",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Find the crossovers and print one line for each amount of unique text."""
    args = build_parser().parse_args(argv)
    try:
        wrong = [n_tokens for n_tokens in args.unique if not 0 < n_tokens < math.inf]
        if wrong:
            raise ValueError(f"--unique: got {wrong[0]}, expected a number of tokens above 0")
        laws = [Law.load(args.first), Law.load(args.second)]
        result = crossover(*laws, args.unique, n_replicates=args.replicates)
    except (OSError, ValueError) as error:
        return report_error(error)
    for i, (u, c) in enumerate(zip(result.U, result.C, strict=True)):
        ends = (
            ""
            if result.ends is None
            else f"  95 % confidence [{result.ends[0][i]:.3g}, {result.ends[1][i]:.3g}]"
        )
        print(f"U {u:.3g} tokens: " + (f"C_crit {c:.4g} FLOPs{ends}" if math.isfinite(c) else "no crossover"))
    print(result.words)
    return 0


if __name__ == "__main__":
    run_main(main)
