"""From which compute on one objective beats another on the same unique text, from their two laws.

python tools/find_crossover.py law_autoregressive.json law_masked_diffusion.json --unique 1e8 1e9 1e10
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megatron.command import command, failed, run
from megatron.scaling.crossover import crossover
from megatron.scaling.law import Law


def build_parser() -> argparse.ArgumentParser:
    """Command-line words."""
    parser = command(__doc__)
    parser.add_argument("first", type=Path, metavar="FIRST.json", help="law of the better at little compute")
    parser.add_argument("second", type=Path, metavar="SECOND.json", help="law of the other")
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
    """Find the crossings and print a line each."""
    args = build_parser().parse_args(argv)
    try:
        wrong = [one for one in args.unique if not 0 < one < math.inf]
        if wrong:
            raise ValueError(f"--unique {wrong[0]}: wanted tokens above 0")
        laws = [Law.load(args.first), Law.load(args.second)]
        found = crossover(*laws, args.unique, n_replicates=args.replicates)
    except (OSError, ValueError) as error:
        return failed(error)
    for i, (u, c) in enumerate(zip(found.U, found.C, strict=True)):
        ends = (
            ""
            if found.ends is None
            else f"  95 % confidence [{found.ends[0][i]:.3g}, {found.ends[1][i]:.3g}]"
        )
        print(f"U {u:.3g} tokens: " + (f"C_crit {c:.4g} FLOPs{ends}" if math.isfinite(c) else "no crossover"))
    print(found.words)
    return 0


if __name__ == "__main__":
    run(main)
