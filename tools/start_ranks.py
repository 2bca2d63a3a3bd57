"""Start a command once for each rank on this machine, and return the exit status of the ranks.

    python tools/start_ranks.py 2 tools/pretrain.py examples_scaling/training/small.yaml \\
        dataset.path_train=synthetic model.n_tokens=1000

If a rank fails, the others are ended and its status is returned. torchrun --standalone sets the same
variables, but returns 1 where this command returns 75 (stopped).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.cli import SUBCOMMANDS, create_parser, positive_int, run_main


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    parser = create_parser(__doc__, may_stop=True)
    parser.add_argument("n_ranks", type=positive_int, metavar="N", help="processes to start, 1 or more")
    parser.add_argument("script", metavar="SCRIPT", help="Python file or sub-command that each rank runs")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks and return their status."""
    args = build_parser().parse_args(argv)
    # imported after parsing, so that --help does not load torch
    from megatron.train.local_ranks import run_ranks

    program = [args.script]
    if args.script in SUBCOMMANDS and not Path(args.script).exists():
        program = ["-m", "megatron.cli", args.script]
    return run_ranks([sys.executable, *program, *args.words], args.n_ranks)


if __name__ == "__main__":
    run_main(main)
